"""Tests that training with experts split over ranks agrees with one process in fp64, up to the final weights."""

from functools import cache

import pytest

from tests.counts import slow, soak_only
from tests.distributed.parity import WholeRun, assert_same_run, layout, run_layout
from tests.functional_tests.case import Flags

SHARED: Flags = {"moe-shared-expert-intermediate-size": 16, "moe-shared-expert-gate": True}
# Models differ in their routers and experts. Capacity applies to each rank's tokens; one process has the same groups.
MODELS: dict[str, Flags] = {
    "losses": {
        **SHARED,
        "moe-router-load-balancing-type": ["aux_loss", "seq_aux_loss"],
        "moe-aux-loss-coeff": [0.05, 0.03],
        "moe-z-loss-coeff": 0.01,
    },
    # Token counts accumulated so far are equal only with one replica.
    "global": {
        **SHARED,
        "moe-router-load-balancing-type": ["global_aux_loss", "seq_aux_loss"],
        "moe-aux-loss-coeff": [0.05, 0.03],
        "moe-z-loss-coeff": 0.01,
        "moe-router-score-function": "sigmoid",
        "moe-router-enable-expert-bias": True,
    },
    "bias": {
        "moe-router-load-balancing-type": ["aux_loss"],
        "moe-aux-loss-coeff": 0.05,
        "moe-router-score-function": "sigmoid",
        "moe-router-enable-expert-bias": True,
        "moe-router-bias-update-rate": 0.05,
        "moe-router-num-groups": 2,
        "moe-router-group-topk": 1,
        "calculate-per-token-loss": True,
    },
    "sequential": {"moe-grouped-gemm": None, "disable-bias-linear": None, "moe-router-dtype": "fp64"},
    "gpt-oss": {
        "disable-bias-linear": None,
        "swiglu": None,
        "quick-geglu": True,
        "activation-func-clamp-value": 0.5,
        "glu-linear-offset": 1.0,
        "softmax-type": "learnable",
        "window-size": "5,0",
        "window-attn-skip-freq": 2,
    },
    "dropped": {"moe-expert-capacity-factor": 0.8},
    "padded": {"moe-expert-capacity-factor": 0.8, "moe-pad-expert-input-to-capacity": True},
}
ALLTOALL: Flags = {"moe-token-dispatcher-type": "alltoall"}
RECOMPUTED: Flags = {
    "recompute-granularity": "full",
    "recompute-method": "uniform",
    "recompute-num-layers": 1,
}
OVERLAPPED: Flags = {**ALLTOALL, "moe-shared-expert-overlap": True}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "ranks", "flags"),
    [
        ("losses", 2, layout(ep=2)),
        slow("bias", 4, {**layout(ep=4), **ALLTOALL}),
        slow("losses", 2, {**layout(etp=2), **OVERLAPPED}),
        slow("global", 2, {**layout(2, ep=2), **ALLTOALL}),
        slow("sequential", 4, layout(2, ep=2, etp=2)),
        slow("gpt-oss", 2, layout(2, etp=2)),
        # The recomputed forward of a microbatch runs after the first forward of later ones.
        slow("global", 4, {**layout(cp=2, pp=2, ep=2), **RECOMPUTED}),
        slow("dropped", 2, layout(ep=2)),
        slow("padded", 2, {**layout(ep=2), **ALLTOALL}),
        # Other pairs of the models and layouts above. Experts with every kind of parallelism are in
        # test_parity_matrix.py::test_b18_b21_eight_ranks_train_as_one.
        soak_only("losses", 4, {**layout(ep=2, etp=2), **OVERLAPPED}),
        soak_only("global", 2, layout(cp=2, ep=2)),
        soak_only("gpt-oss", 4, layout(2, ep=2, etp=2)),
        soak_only("gpt-oss", 4, {**layout(cp=2, pp=2, ep=2), **ALLTOALL}),
        soak_only("bias", 4, {**layout(2, etp=2), **ALLTOALL}),
        soak_only("losses", 4, {**layout(cp=2, ep=4), **ALLTOALL}),
        soak_only("bias", 4, layout(2, ep=4)),
        soak_only("dropped", 2, {**layout(ep=2), **ALLTOALL}),
        soak_only("padded", 2, layout(ep=2)),
    ],
)
def test_training_agrees_with_one_process(model: str, ranks: int, flags: Flags) -> None:
    assert_same_run(run_layout("moe", ranks, {**MODELS[model], **flags}), _reference(model))


@cache
def _reference(model: str) -> WholeRun:
    return run_layout("moe", 1, MODELS[model])
