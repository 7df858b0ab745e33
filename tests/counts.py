"""How often a test repeats: briefly as a rule, long under `make soak`. No test here."""

import os


def long_count(usual: int, *, soak: int) -> int:
    """`usual` repetitions in an ordinary run, `soak` under `make soak`."""
    return soak if os.environ.get("SOAK") else usual
