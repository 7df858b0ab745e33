"""Clipping of attention scores agrees with one process in fp64 in several layouts: losses, norms, weights."""

import pytest

from tests.distributed.parity import assert_layouts_agree, layout
from tests.distributed.whole_references import references
from tests.functional_tests.case import Flags

CLIPPED: Flags = {
    "qk-clip": True,
    "qk-clip-threshold": 0.05,
    "qk-clip-alpha": 0.3,
    "log-max-attention-logit": True,
    "init-method-std": 0.2,
    "seq-length": 32,
    "micro-batch-size": 1,
    "global-batch-size": 4,
}
MODELS: dict[str, tuple[str, Flags]] = {
    "grouped": ("llama", CLIPPED),
    "latent": ("latent", CLIPPED),
}
RECOMPUTED: Flags = {"recompute-granularity": "selective", "recompute-modules": ["core_attn"]}
LAYOUTS: list[Flags] = [
    layout(2),
    layout(pp=2),
    {**layout(), **RECOMPUTED},
    layout(cp=2),
    layout(cp=2, cp_comm_type="a2a"),
]


# The ranks of a head's ring together find its largest score.
LEVELS: list[Flags] = [layout(cp=4, cp_comm_type="a2a+p2p", hierarchical_context_parallel_sizes=[2, 2])]


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_ranks_clip_as_one(model: str) -> None:
    base, flags = MODELS[model]
    assert_layouts_agree(base, flags, 2, LAYOUTS, reference=_reference(model))


@pytest.mark.slow
def test_two_levels_of_ranks_clip_as_one() -> None:
    assert_layouts_agree(*MODELS["grouped"], 4, LEVELS, reference=_reference("grouped"))


_reference = references(MODELS)
