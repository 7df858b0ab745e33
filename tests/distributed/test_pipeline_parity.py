"""Training over pipeline stages agrees with one process in fp64: losses, norms, gradients, weights."""

from functools import cache

import pytest

from tests.counts import slow, soak_only
from tests.distributed.parity import WholeRun, assert_same_run, run_layout
from tests.functional_tests.case import Flags

LAYOUTS: dict[str, tuple[int, Flags]] = {
    "pp2": (2, {"pipeline-model-parallel-size": 2}),
    "pp4, fewer microbatches than stages": (4, {"pipeline-model-parallel-size": 4, "micro-batch-size": 4}),
    "pp2 x vpp2": (2, {"pipeline-model-parallel-size": 2, "num-virtual-stages-per-pipeline-rank": 2}),
    "pp2, uneven": (2, {"pipeline-model-parallel-size": 2, "decoder-first-pipeline-num-layers": 1}),
    "pp2 x vpp2, layout": (
        2,
        {"pipeline-model-parallel-size": 2, "pipeline-model-parallel-layout": "E|tt|t*2|L", "micro-batch-size": 8},
    ),
    "pp2 x dp2, no overlap": (4, {"pipeline-model-parallel-size": 2, "no-overlap-p2p-communication": True}),
    "pp2 x tp2 sp": (
        4,
        {"pipeline-model-parallel-size": 2, "tensor-model-parallel-size": 2, "sequence-parallel": True},
    ),
}
MODELS: dict[str, Flags] = {
    "dense": {"num-layers": 4, "add-qkv-bias": True},
    "llama": {"num-layers": 4, "num-query-groups": 4, "qk-layernorm": True},
    "moe": {
        "num-layers": 4,
        "num-query-groups": 4,
        "moe-layer-freq": "[0,1,1,1]",
        "moe-router-load-balancing-type": "aux_loss",
        "moe-aux-loss-coeff": 0.1,
        "moe-z-loss-coeff": 0.01,
        "moe-per-layer-logging": True,
    },
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("base", "layout"),
    [
        slow("dense", "pp4, fewer microbatches than stages"),
        ("moe", "pp2 x vpp2"),
        slow("dense", "pp2, uneven"),
        slow("dense", "pp2 x vpp2, layout"),
        slow("llama", "pp2 x dp2, no overlap"),
        # The cases above cover each schedule; test_whole_model_parity.py::test_four_ranks_train_as_one covers stages
        # with tensor parallelism.
        soak_only("dense", "pp2"),
        soak_only("llama", "pp2 x vpp2"),
        soak_only("dense", "pp2 x tp2 sp"),
    ],
)
def test_training_agrees_with_one_process(base: str, layout: str) -> None:
    ranks, flags = LAYOUTS[layout]
    microbatch = {name: value for name, value in flags.items() if name == "micro-batch-size"}
    assert_same_run(run_layout(base, ranks, {**MODELS[base], **flags}), _reference(base, *microbatch.values()))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("numbers", "memory"),
    [
        (
            {"reset-position-ids": True, "reset-attention-mask": True, "calculate-per-token-loss": True},
            {"recompute-granularity": "full", "recompute-method": "uniform", "recompute-num-layers": 2},
        ),
        (
            {"untie-embeddings-and-output-weights": True},
            {
                "fine-grained-activation-offloading": True,
                "offload-modules": ["qkv_linear", "core_attn"],
                "min-offloaded-tensor-size": 1,
                "recompute-granularity": "selective",
                "recompute-modules": ["mlp"],
                # Nothing is offloaded in the first chunk.
                "num-virtual-stages-per-pipeline-rank": None,
                "pipeline-model-parallel-layout": "Et|ttt|tt|ttL",
            },
        ),
    ],
)
def test_borders_recompute_and_offloading_work_inside_stages(numbers: Flags, memory: Flags) -> None:
    layout: Flags = {"pipeline-model-parallel-size": 2, "num-virtual-stages-per-pipeline-rank": 2}
    # Chunks of two layers; two microbatches.
    flags = {**MODELS["dense"], **numbers, "num-layers": 8, "global-batch-size": 4}
    reference = run_layout("dense", 1, flags)
    assert_same_run(run_layout("dense", 2, {**flags, **layout, **memory}), reference)


@cache
def _reference(base: str, microbatch: int = 2) -> WholeRun:
    return run_layout(base, 1, {**MODELS[base], "micro-batch-size": microbatch})
