"""The shortfall of experts in a discarded step, and the message about it. expert_memory.py decides what grows."""

from collections.abc import Sequence
from typing import NamedTuple


class Lack(NamedTuple):
    """Required and available size in a rank's step: capacity factors, or numbers of pages.

    pages_for: the tensors that lacked pages, in words; None for a capacity factor.
    """

    needed: float
    given: float
    pages_for: str | None = None


def lacking_words(ranks: Sequence[Lack | None]) -> str:
    """Describes the shortfalls: one clause for each kind, with its ranks and the largest need.

    ranks: shortfall of each rank, in the order of ranks; None if it had none.
    """
    clauses = []
    for pages_for in dict.fromkeys(lack.pages_for for lack in ranks if lack is not None):
        found = {rank: lack for rank, lack in enumerate(ranks) if lack is not None and lack.pages_for == pages_for}
        needed, given, _ = max(found.values(), key=lambda lack: lack.needed / max(1, lack.given))
        who = f"{'rank' if len(found) == 1 else 'ranks'} {', '.join(map(str, found))}"
        up_to = "" if len(found) == 1 else "up to "
        if pages_for is None:
            clauses.append(f"{who}: experts needed a capacity factor of {up_to}{needed:.3f}, not {given:.3f}")
        else:
            pages = f"{up_to}{needed} are needed at once, of {given} in the pool"
            clauses.append(f"{who}: no pages for {pages_for}: {pages}")
    return "; ".join(clauses)
