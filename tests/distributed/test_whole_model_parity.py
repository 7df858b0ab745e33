"""Small models with all features of gpt-oss, DeepSeek-V3 and DeepSeek-V2 train on several ranks as in one process.

Compares losses, norms, gradients and weights in fp64. The other test_*_parity.py cover single features.
"""

import pytest
import torch

from tests.counts import slow
from tests.distributed.parity import TOLERANCE, assert_layouts_agree, layout, run_layouts
from tests.distributed.stash_runs import stash
from tests.distributed.whole_references import references
from tests.functional_tests.case import Flags

FP32 = 5e-5
ALLTOALL: Flags = {"moe-token-dispatcher-type": "alltoall"}
STATIC: Flags = {"moe-expert-rank-capacity-factor": 8}
YARN: Flags = {"seq-length": 32, "rotary-scaling-factor": 4.0, "yarn-original-max-position-embeddings": 8}
DEEPSEEK: Flags = {
    **YARN,
    "num-layers": 4,
    # Groups of three experts; a token takes two experts of each group that it may use.
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
            # Chosen so that a frequency lies between the unchanged and the stretched frequencies.
            "kv-channels": 8,
            "rotary-base": 100,
            "yarn-beta-fast": 4.0,
            "yarn-beta-slow": 0.25,
            # Biases of all linear layers, including the router and the experts.
            "disable-bias-linear": None,
            "swiglu": None,
            "quick-geglu": True,
            # Small enough that many values are clamped.
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
# Experts with tensor parallelism require sequence parallelism.
ON_TWO: dict[str, Flags] = {
    "tp": layout(2),
    "etp": layout(2, etp=2),
    "cp": layout(cp=2),
    "pp": layout(pp=2),
    "vpp": layout(pp=2, vpp=2),
    "ep": layout(ep=2, **ALLTOALL),
    # Pages for some of the rows; activations that find no page are recomputed.
    "stash": {**layout(ep=2), **STATIC, **stash(1.2)},
}
ON_FOUR: dict[str, Flags] = {
    "tp, ep, etp": {**layout(2, ep=2, etp=2, **ALLTOALL), **STATIC},
    "tp, pp, ep, stash": {**layout(2, pp=2, ep=2), **STATIC, **stash()},
    "cp, vpp, ep": {**layout(cp=2, pp=2, vpp=2, ep=2), **STATIC},
}
# Every layout with some model, and every model with the layouts that split its specific parts: sinks and biases of
# experts; latent attention and multi-token prediction layers; groups of experts by their largest score.
TWO_OF: dict[str, tuple[str, ...]] = {
    "gpt-oss": ("etp", "cp", "stash"),
    "deepseek-v3": ("tp", "vpp"),
    "deepseek-v2": ("pp", "ep"),
}
FOUR_OF = {"gpt-oss": "tp, pp, ep, stash", "deepseek-v3": "cp, vpp, ep", "deepseek-v2": "tp, ep, etp"}
FP32_OF = {"gpt-oss": "stash", "deepseek-v3": "tp", "deepseek-v2": "ep"}
# Each entry leaves out one part of a model.
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


@pytest.mark.slow
@pytest.mark.parametrize("model", [slow("gpt-oss"), slow("deepseek-v3"), "deepseek-v2"])
def test_two_ranks_train_as_one(model: str) -> None:
    _check(model, 2, [ON_TWO[name] for name in TWO_OF[model]])


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_four_ranks_train_as_one(model: str) -> None:
    _check(model, 4, [ON_FOUR[FOUR_OF[model]]])


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_fp32_training_agrees_with_one_process_in_fp64(model: str) -> None:
    _check(model, 2, [ON_TWO[FP32_OF[model]]], dtype=torch.float32, tolerance=FP32)


@pytest.mark.soak
@pytest.mark.parametrize("model", MODELS)
def test_every_model_trains_as_one_process_in_every_layout(model: str) -> None:
    """Repeats the three tests above with all pairs of model and layout."""
    _check(model, 2, list(ON_TWO.values()))
    _check(model, 4, list(ON_FOUR.values()))
    _check(model, 2, list(ON_TWO.values()), dtype=torch.float32, tolerance=FP32)


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_every_part_of_a_model_changes_its_losses(model: str) -> None:
    base, flags = MODELS[model]
    # One microbatch per step, since nothing is split here.
    flags = {**flags, "global-batch-size": 2}
    whole, *runs = run_layouts(base, 1, [{**flags, **without} for without in ({}, *WITHOUT[model])])
    expected = [report.losses for report in whole.reports]
    for without, run in zip(WITHOUT[model], runs, strict=True):
        assert [report.losses for report in run.reports] != expected, without


def _check(
    model: str, ranks: int, layouts: list[Flags], *, dtype: torch.dtype = torch.float64, tolerance: float = TOLERANCE
) -> None:
    base, flags = MODELS[model]
    reference = _reference(model)
    assert_layouts_agree(base, flags, ranks, layouts, reference=reference, dtype=dtype, tolerance=tolerance)


_reference = references(MODELS)
