"""Latent attention in every kind of layout agrees with one process in fp64: losses, norms, gradients, weights."""

from functools import cache

import pytest

from tests.counts import long_count
from tests.distributed.parity import WholeRun, assert_same_run, layout, run_layout, run_layouts
from tests.functional_tests.case import Flags

RANKS = 4
# Documents end within samples: parts of sequences have unequal numbers of learned tokens.
PACKED: Flags = {
    "reset-position-ids": True,
    "reset-attention-mask": True,
    "no-create-attention-mask-in-dataloader": True,
    "eod-mask-loss": True,
}
SHARED: Flags = {
    "seq-length": 32,
    "micro-batch-size": 1,
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
# The first of each are always run.
FIRST = long_count(2, soak=10)
LAYOUTS: dict[str, list[Flags]] = {
    "dense": [
        layout(2, sequence_parallel=False),
        layout(2, cp=2, **UP_AGAIN),
        layout(4),
        layout(cp=4, cp_comm_type="all_gather"),
    ],
    "no query rank, no norms, window": [
        layout(2, sequence_parallel=False, **UP_AGAIN),
        layout(2, cp=2, cp_comm_type=["a2a", "all_gather"]),
        layout(2, cp=2),
        layout(pp=2, cp=2),
    ],
    "moe": [
        layout(2, pp=2, vpp=2, ep=2),
        layout(2, cp=2, ep=2, etp=2, cp_comm_type="a2a"),
        layout(ep=4, moe_token_dispatcher_type="alltoall"),
    ],
}


@pytest.mark.parametrize("model", MODELS)
def test_ranks_train_as_one(model: str) -> None:
    base, flags = MODELS[model]
    layouts = LAYOUTS[model][:FIRST]
    for sizes, run in zip(layouts, run_layouts(base, RANKS, [{**flags, **sizes} for sizes in layouts])):
        try:
            assert_same_run(run, _reference(model))
        except AssertionError as error:
            error.add_note(f"of {sizes}")
            raise


@cache
def _reference(model: str) -> WholeRun:
    base, flags = MODELS[model]
    return run_layout(base, 1, flags)
