"""Training with experts split over ranks agrees with one process in fp64: losses, norms, gradients, weights."""

from functools import cache

import pytest

from tests.counts import slow
from tests.distributed.parity import WholeRun, assert_same_run, run_layout
from tests.functional_tests.case import Flags

SHARED: Flags = {"moe-shared-expert-intermediate-size": 16, "moe-shared-expert-gate": True}
# By what the router does. A capacity counts each rank's tokens, so one process must have the same parts of them.
MODELS: dict[str, Flags] = {
    "losses": {
        **SHARED,
        "moe-router-load-balancing-type": ["aux_loss", "seq_aux_loss"],
        "moe-aux-loss-coeff": [0.05, 0.03],
        "moe-z-loss-coeff": 0.01,
    },
    # What was counted so far is the same where there is one replica.
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


def layout(tp: int = 1, cp: int = 1, *, ep: int = 1, etp: int = 1) -> Flags:
    """The flags of these sizes."""
    flags: Flags = {"expert-model-parallel-size": ep, "expert-tensor-parallel-size": etp, "context-parallel-size": cp}
    return {**flags, "tensor-model-parallel-size": tp, "sequence-parallel": tp > 1}


@pytest.mark.parametrize(
    ("model", "ranks", "flags"),
    [
        ("losses", 2, layout(ep=2)),
        ("bias", 4, {**layout(ep=4), **ALLTOALL}),
        ("losses", 4, {**layout(ep=2, etp=2), **OVERLAPPED}),
        ("global", 2, {**layout(tp=2, ep=2), **ALLTOALL}),
        ("global", 2, layout(cp=2, ep=2)),
        ("sequential", 4, layout(tp=2, ep=2, etp=2)),
        ("gpt-oss", 4, layout(tp=2, ep=2, etp=2)),
        slow("gpt-oss", 4, {**layout(cp=2, ep=2), "pipeline-model-parallel-size": 2, **ALLTOALL}),
        slow("bias", 4, {**layout(tp=2, etp=2), **ALLTOALL}),
        slow("losses", 4, {**layout(cp=2, ep=4), **ALLTOALL}),
        slow("bias", 4, layout(tp=2, ep=4)),
        # The second forward of a microbatch comes after the first of later ones.
        slow("global", 4, {**layout(cp=2, ep=2), "pipeline-model-parallel-size": 2, **RECOMPUTED}),
        *(slow(model, 2, {**layout(ep=2), **kind}) for model in ("dropped", "padded") for kind in ({}, ALLTOALL)),
    ],
)
def test_training_agrees_with_one_process(model: str, ranks: int, flags: Flags) -> None:
    assert_same_run(run_layout("moe", ranks, {**MODELS[model], **flags}), _reference(model))


@cache
def _reference(model: str) -> WholeRun:
    return run_layout("moe", 1, MODELS[model])
