"""Checks that latent attention agrees with one process in fp64: losses, norms, gradients and weights in each layout."""

import pytest

from tests.distributed.parity import assert_layouts_agree, layout
from tests.distributed.whole_references import references
from tests.functional_tests.case import Flags

# Documents end within samples, so parts of sequences have unequal numbers of tokens that count in the loss.
PACKED: Flags = {
    "reset-position-ids": True,
    "reset-attention-mask": True,
    "no-create-attention-mask-in-dataloader": True,
    "eod-mask-loss": True,
}
SHARED: Flags = {
    "seq-length": 32,
    "micro-batch-size": 1,
    "global-batch-size": 4,
    "rotary-scaling-factor": 4.0,
    "yarn-original-max-position-embeddings": 16,
    "mscale-all-dim": 0.7,
    **PACKED,
}
MODELS: dict[str, tuple[str, Flags]] = {
    "dense": ("latent", SHARED),
    "no query rank, no norms, window": (
        "latent",
        {**SHARED, "q-lora-rank": None, "qk-layernorm": None, "window-size": "9,0"},
    ),
    "moe": ("latent_moe", {**SHARED, "num-layers": 4, "moe-layer-freq": "[0,1,1,1]", "mtp-num-layers": 1}),
}
UP_AGAIN: Flags = {"recompute-granularity": "selective", "recompute-modules": ["mla_up_proj", "layernorm"]}
# Each kind of parallelism on two ranks, and combinations of two on four ranks.
LAYOUTS: dict[str, list[tuple[int, Flags]]] = {
    "dense": [
        (2, layout(2, sequence_parallel=False)),
        (4, layout(2, cp=2, **UP_AGAIN)),
        (4, layout(cp=4, cp_comm_type="a2a+p2p", hierarchical_context_parallel_sizes=[2, 2])),
    ],
    "no query rank, no norms, window": [(2, layout(2, **UP_AGAIN)), (2, layout(cp=2, cp_comm_type="all_gather"))],
    "moe": [(4, layout(2, cp=2, ep=2, etp=2, cp_comm_type="a2a")), (2, layout(pp=2, vpp=2))],
}
FURTHER: dict[str, list[tuple[int, Flags]]] = {
    "dense": [(4, layout(4)), (4, layout(cp=4, cp_comm_type="all_gather"))],
    "no query rank, no norms, window": [
        (4, layout(2, sequence_parallel=False, **UP_AGAIN)),
        (4, layout(2, cp=2, cp_comm_type=["a2a", "all_gather"])),
        (4, layout(2, cp=2)),
        (4, layout(pp=2, cp=2)),
    ],
    "moe": [(4, layout(2, pp=2, vpp=2, ep=2)), (4, layout(ep=4, moe_token_dispatcher_type="alltoall"))],
}


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_ranks_train_as_one(model: str) -> None:
    _check(model, LAYOUTS[model])


@pytest.mark.soak
@pytest.mark.parametrize("model", MODELS)
def test_further_layouts_train_as_one(model: str) -> None:
    """Repeats test_ranks_train_as_one with other sizes and combinations."""
    _check(model, FURTHER[model])


def _check(model: str, layouts: list[tuple[int, Flags]]) -> None:
    base, flags = MODELS[model]
    for ranks in (2, 4):
        some = [sizes for number, sizes in layouts if number == ranks]
        assert_layouts_agree(base, flags, ranks, some, reference=_reference(model))


_reference = references(MODELS)
