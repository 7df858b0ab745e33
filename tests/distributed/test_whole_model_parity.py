"""Small models with all that gpt-oss, DeepSeek-V3 and DeepSeek-V2 have agree, in every kind of layout, with one process
in fp64: losses, norms, gradients, weights. Features on their own are in the other test_*_parity.py.
"""

from functools import cache

import pytest
import torch

from tests.counts import slow
from tests.distributed.parity import WholeRun, assert_same_run, layout, run_layout, run_layouts
from tests.distributed.stash_runs import stash
from tests.functional_tests.case import Flags

FP32 = 5e-5
ALLTOALL: Flags = {"moe-token-dispatcher-type": "alltoall"}
STATIC: Flags = {"moe-expert-rank-capacity-factor": 8}
YARN: Flags = {"seq-length": 32, "rotary-scaling-factor": 4.0, "yarn-original-max-position-embeddings": 8}
DEEPSEEK: Flags = {
    **YARN,
    "num-layers": 4,
    # Groups of three: of each that it may use a token takes two.
    "num-experts": 12,
    "moe-layer-freq": "[0,1,1,1]",
    "moe-shared-expert-intermediate-size": 16,
    "moe-router-topk": 4,
    "moe-router-num-groups": 4,
    "moe-router-group-topk": 2,
    "moe-router-topk-scaling-factor": 2.5,
    "mscale-all-dim": 0.7,
}
MODELS: dict[str, tuple[str, Flags]] = {
    "gpt-oss": (
        "moe",
        {
            **YARN,
            "num-layers": 4,
            "num-query-groups": 4,
            "rope-type": "yarn",
            "no-yarn-correction-range-round-to-int": True,
            # So that a frequency lies between those that stay and those that are stretched.
            "kv-channels": 8,
            "rotary-base": 100,
            "yarn-beta-fast": 4.0,
            "yarn-beta-slow": 0.25,
            # Biases of all linear layers, the router's and the experts' among them.
            "disable-bias-linear": None,
            "swiglu": None,
            "quick-geglu": True,
            # Many values are beyond it.
            "activation-func-clamp-value": 0.5,
            "glu-linear-offset": 1.0,
            "softmax-type": "learnable",
            "window-size": "9,0",
            "window-attn-skip-freq": "([1,0])*2",
            "moe-router-topk": 3,
        },
    ),
    "deepseek-v3": (
        "latent_moe",
        {
            **DEEPSEEK,
            "mtp-num-layers": 1,
            "moe-router-score-function": "sigmoid",
            "moe-router-enable-expert-bias": True,
            "moe-router-bias-update-rate": 0.05,
            "moe-router-load-balancing-type": "seq_aux_loss",
        },
    ),
    "deepseek-v2": (
        "latent_moe",
        {**DEEPSEEK, "q-lora-rank": None, "moe-router-pre-softmax": True, "moe-router-group-score": "max"},
    ),
}
# Of two ranks. Experts cannot be beside tensor parallelism without sequence parallelism.
LAYOUTS: list[Flags] = [
    layout(2),
    layout(2, etp=2),
    layout(cp=2),
    layout(pp=2),
    layout(pp=2, vpp=2),
    layout(ep=2, **ALLTOALL),
    # Pages for some rows: what finds none is computed again.
    {**layout(ep=2), **STATIC, **stash(1.2)},
]
# Of four.
TOGETHER: list[Flags] = [
    {**layout(2, ep=2, etp=2, **ALLTOALL), **STATIC},
    {**layout(2, pp=2, ep=2), **STATIC, **stash()},
    {**layout(cp=2, pp=2, vpp=2, ep=2), **STATIC},
]
# One part of a model at a time that is there no more.
WITHOUT: dict[str, list[Flags]] = {
    "gpt-oss": [
        {"softmax-type": None},
        {"window-size": None, "window-attn-skip-freq": None},
        {"window-attn-skip-freq": None},
        {"activation-func-clamp-value": None},
        {"glu-linear-offset": None},
        {"quick-geglu": None, "swiglu": True, "glu-linear-offset": None},
        {"rotary-scaling-factor": 1.0},
        {"no-yarn-correction-range-round-to-int": None},
    ],
    "deepseek-v3": [
        {"rotary-scaling-factor": 1.0},
        {"mscale-all-dim": None},
        {"mtp-num-layers": None},
        {"moe-router-num-groups": None, "moe-router-group-topk": None},
        {"moe-router-bias-update-rate": 0.0},
        {"moe-router-topk-scaling-factor": None},
        {"moe-shared-expert-intermediate-size": None},
        {"moe-router-score-function": "sqrtsoftplus"},
    ],
    "deepseek-v2": [{"moe-router-group-score": "sum"}, {"moe-router-pre-softmax": None}],
}


@pytest.mark.parametrize("model", ["gpt-oss", "deepseek-v3", slow("deepseek-v2")])
def test_two_ranks_train_as_one(model: str) -> None:
    _check(model, 2, LAYOUTS)


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_four_ranks_train_as_one(model: str) -> None:
    _check(model, 4, TOGETHER)


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_fp32_training_agrees_with_one_process_in_fp64(model: str) -> None:
    _check(model, 2, LAYOUTS, dtype=torch.float32, tolerance=FP32)


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_every_part_of_a_model_changes_its_losses(model: str) -> None:
    base, flags = MODELS[model]
    expected = [report.losses for report in _reference(model).reports]
    runs = run_layouts(base, 1, [{**flags, **without} for without in WITHOUT[model]])
    for without, run in zip(WITHOUT[model], runs, strict=True):
        assert [report.losses for report in run.reports] != expected, without


def _check(
    model: str, ranks: int, layouts: list[Flags], *, dtype: torch.dtype = torch.float64, tolerance: float = 1e-10
) -> None:
    base, flags = MODELS[model]
    for sizes, run in zip(layouts, run_layouts(base, ranks, [{**flags, **sizes} for sizes in layouts], dtype=dtype)):
        try:
            assert_same_run(run, _reference(model), tolerance=tolerance)
        except AssertionError as error:
            error.add_note(f"of {sizes}")
            raise


@cache
def _reference(model: str) -> WholeRun:
    base, flags = MODELS[model]
    return run_layout(base, 1, flags)
