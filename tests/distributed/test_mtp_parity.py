"""Multi-token prediction agrees with one process in fp64 under every layout: losses, norms, gradients, weights."""

from functools import cache

import pytest

from tests.counts import slow, soak_only
from tests.distributed.parity import WholeRun, assert_same_run, layout, run_layout
from tests.functional_tests.case import Flags

MODELS: dict[str, Flags] = {
    # Tied embeddings with learned positions: the last stage has copies of both tables.
    "dense": {"num-layers": 2, "mtp-num-layers": 1, "mtp-loss-scaling-factor": 0.5},
    "moe": {
        "num-layers": 2,
        "num-query-groups": 4,
        "mtp-num-layers": 2,
        "moe-layer-freq": "[0,1]",
        "moe-router-load-balancing-type": "aux_loss",
        "moe-aux-loss-coeff": 0.1,
        "moe-per-layer-logging": True,
    },
}
LAYOUTS: dict[str, tuple[int, Flags]] = {
    "tp2": (2, layout(2)),
    "cp2": (2, layout(cp=2)),
    "pp2": (2, layout(pp=2)),
    "pp2 x vpp2, layout": (2, layout(pp=2, pipeline_model_parallel_layout="Et||t|mL")),
    "pp2 x dp2, per token": (4, layout(pp=2, calculate_per_token_loss=True)),
    "tp2 x ep2, pp2": (4, layout(2, pp=2, ep=2)),
    "cp2 x ep2": (4, layout(cp=2, ep=2, moe_token_dispatcher_type="alltoall")),
    "dp2, recomputed": (2, layout(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)),
    "parts recomputed": (1, layout(recompute_granularity="selective", recompute_modules=["core_attn", "layernorm"])),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("base", "kind"),
    [
        ("dense", "tp2"),
        slow("moe", "cp2"),
        slow("dense", "pp2 x vpp2, layout"),
        slow("dense", "pp2 x dp2, per token"),
        slow("moe", "tp2 x ep2, pp2"),
        slow("moe", "dp2, recomputed"),
        slow("moe", "parts recomputed"),
        # Other pairs of the models and layouts above; the cases above cover each model and each layout.
        soak_only("dense", "pp2"),
        soak_only("moe", "cp2 x ep2"),
        soak_only("moe", "tp2"),
        soak_only("moe", "pp2"),
    ],
)
def test_training_agrees_with_one_process(base: str, kind: str) -> None:
    ranks, flags = LAYOUTS[kind]
    per_token = "calculate-per-token-loss" in flags
    assert_same_run(run_layout(base, ranks, {**MODELS[base], **flags}), _reference(base, per_token=per_token))


@cache
def _reference(base: str, *, per_token: bool) -> WholeRun:
    return run_layout(base, 1, {**MODELS[base], "calculate-per-token-loss": per_token})
