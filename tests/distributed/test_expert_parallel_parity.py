"""Training with experts split over ranks agrees with one process in fp64: losses, norms, gradients, weights."""

from functools import cache

import pytest

from tests.distributed.parity import WholeRun, assert_same_run, run_layout
from tests.functional_tests.case import Flags

# By what the router does: all losses and a shared expert; a bias that follows the tokens of all ranks.
MODELS: dict[str, Flags] = {
    "losses": {
        "moe-router-load-balancing-type": ["aux_loss", "seq_aux_loss"],
        "moe-aux-loss-coeff": [0.05, 0.03],
        "moe-z-loss-coeff": 0.01,
        "moe-shared-expert-intermediate-size": 16,
        "moe-shared-expert-gate": True,
    },
    "bias": {
        "moe-router-load-balancing-type": "none",
        "moe-aux-loss-coeff": 0.0,
        "moe-router-score-function": "sigmoid",
        "moe-router-enable-expert-bias": True,
        "moe-router-bias-update-rate": 0.05,
        "moe-router-num-groups": 2,
        "moe-router-group-topk": 1,
        "calculate-per-token-loss": True,
    },
}
ALLTOALL: Flags = {"moe-token-dispatcher-type": "alltoall"}
LAYOUTS: dict[str, tuple[int, Flags]] = {
    "ep2": (2, {"expert-model-parallel-size": 2}),
    "ep2_overlapped": (2, {"expert-model-parallel-size": 2, **ALLTOALL, "moe-shared-expert-overlap": True}),
    "ep4": (4, {"expert-model-parallel-size": 4, **ALLTOALL}),
    "etp2_ep2": (4, {"expert-model-parallel-size": 2, "expert-tensor-parallel-size": 2, **ALLTOALL}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_agrees_with_one_process(layout: str) -> None:
    ranks, flags = LAYOUTS[layout]
    model = "bias" if layout == "ep4" else "losses"
    assert_same_run(run_layout("moe", ranks, {**MODELS[model], **flags}), _reference(model))


@cache
def _reference(model: str) -> WholeRun:
    return run_layout("moe", 1, MODELS[model])
