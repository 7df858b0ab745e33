"""Tests that training on parts of sequences agrees with one process in fp64: losses, norms, gradients, weights."""

from functools import cache

import pytest

from tests.counts import slow, soak_only
from tests.distributed.parity import WholeRun, assert_same_run, run_layout
from tests.functional_tests.case import Flags

# Documents of a few tokens, whose end tokens are masked, so that parts of sequences have unequal loss token counts.
BORDERS: Flags = {
    "seq-length": 32,
    "reset-position-ids": True,
    "reset-attention-mask": True,
    "no-create-attention-mask-in-dataloader": True,
    "eod-mask-loss": True,
}
# Models differ in position embeddings and in attention features.
MODELS: dict[str, Flags] = {
    "dense": {"position-embedding-type": "learned_absolute", "window-size": "5,0", "softmax-type": "off-by-one"},
    "llama": {"num-query-groups": 4, "calculate-per-token-loss": True, "softmax-type": "learnable", **BORDERS},
    "packed": {"num-query-groups": 4, **BORDERS},
}
RECOMPUTE: Flags = {"recompute-granularity": "selective", "recompute-modules": ["core_attn"]}
LEVELS: Flags = {"hierarchical-context-parallel-sizes": [2, 2]}
OFFLOAD: Flags = {
    "fine-grained-activation-offloading": True,
    "min-offloaded-tensor-size": 1,
    "offload-modules": ["core_attn", "attn_proj"],
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "ranks", "size", "kind", "flags"),
    [
        ("dense", 2, 2, "p2p", {}),
        ("packed", 2, 2, "all_gather", OFFLOAD),
        slow("packed", 4, 4, "p2p", RECOMPUTE),
        slow("llama", 2, 2, ["a2a", "p2p"], {}),
        slow("llama", 4, 2, "a2a", {}),
        slow("llama", 4, 4, "a2a+p2p", LEVELS),
        slow("packed", 4, 4, ["p2p", "a2a+p2p"], {**LEVELS, **RECOMPUTE}),
        # The cases above cover each exchange; combinations with other kinds of parallelism are in
        # test_parity_matrix.py::test_b18_b21_eight_ranks_train_as_one.
        soak_only("dense", 2, 2, "all_gather", RECOMPUTE),
        soak_only("llama", 4, 2, "p2p", {}),
        soak_only("llama", 4, 4, "a2a", {}),
        soak_only("dense", 4, 4, "a2a+p2p", {**LEVELS, **OFFLOAD}),
        soak_only("llama", 8, 4, "a2a+p2p", {**LEVELS, "tensor-model-parallel-size": 2, "sequence-parallel": True}),
        soak_only("packed", 8, 4, "a2a+p2p", {**LEVELS, "pipeline-model-parallel-size": 2}),
        soak_only("llama", 4, 2, "p2p", {"pipeline-model-parallel-size": 2}),
        soak_only("packed", 4, 2, "a2a", {"tensor-model-parallel-size": 2, "sequence-parallel": True}),
    ],
)
def test_training_agrees_with_one_process(
    model: str, ranks: int, size: int, kind: str | list[str], flags: Flags
) -> None:
    layout: Flags = {"context-parallel-size": size, "cp-comm-type": kind, **flags}
    assert_same_run(_run(model, ranks, layout), _reference(model))


@cache
def _reference(model: str) -> WholeRun:
    return _run(model, 1, {})


def _run(model: str, ranks: int, layout: Flags) -> WholeRun:
    # At most two microbatches for each of two data-parallel ranks.
    flags: Flags = {**MODELS[model], "micro-batch-size": 1, "global-batch-size": 4, **layout}
    return run_layout("dense" if model == "dense" else "llama", ranks, flags)
