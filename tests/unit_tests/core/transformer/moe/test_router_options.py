"""Every router option compared with fp64 routing token by token: weights, choices, losses and gradients."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Config, DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Config, DeepseekV3TopkRouter
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeConfig, Glm4MoeTopkRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssConfig, GptOssTopKRouter
from transformers.models.mixtral.modeling_mixtral import MixtralConfig, MixtralTopKRouter
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeConfig, Qwen2MoeTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeConfig, Qwen3MoeTopKRouter

from megatron.core.transformer.moe.aux_losses import get_updated_expert_bias
from megatron.core.transformer.moe.moe_utils import permute, sinkhorn, topk_routing_with_score_function, unpermute
from megatron.core.transformer.moe.router import TopKRouter
from tests.counts import long_count, slow
from tests.unit_tests.core.models.small_models import LLAMA_LIKE, small_config
from tests.unit_tests.core.transformer.moe import naive_router as naive

INPUTS, INPUTS_PER_SHAPE = long_count(200, soak=1000), long_count(10, soak=50)
LOSSES = ("aux_loss", "seq_aux_loss", "global_aux_loss")
# Experts, top-k, groups, groups per token and scaling factor: 20 shapes.
SHAPES = [
    (experts, topk, groups, group_topk, factor)
    for experts, topk in ((4, 1), (6, 2), (8, 4), (12, 3))
    for groups, group_topk, factor in (
        (None, None, None),
        (None, None, 2.5),
        (2, 1, None),
        (4 if experts == 8 else 2, min(2, topk), 0.7),
        (experts if topk == 1 else 2, 1, None),
    )
]
KINDS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "pre_softmax": {"moe_router_pre_softmax": True},
    "pre_softmax_max": {"moe_router_pre_softmax": True, "moe_router_group_score": "max"},
    "sigmoid": {"moe_router_score_function": "sigmoid"},
    "sqrtsoftplus": {"moe_router_score_function": "sqrtsoftplus"},
    "biased": {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True},
    "biased_sqrtsoftplus": {"moe_router_score_function": "sqrtsoftplus", "moe_router_enable_expert_bias": True},
}


def router_of(experts: int, **fields: Any) -> TopKRouter:
    """Builds a router in fp64."""
    return TopKRouter(
        small_config(**{**LLAMA_LIKE, "num_moe_experts": experts, "params_dtype": torch.float64, **fields})
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["softmax", *map(slow, list(KINDS)[1:-1]), "biased_sqrtsoftplus"])
def test_router_agrees_with_a_loop_over_tokens(kind: str) -> None:
    generator = torch.Generator().manual_seed(1)
    for number, (experts, topk, groups, group_topk, factor) in enumerate(SHAPES):
        if KINDS[kind].get("moe_router_group_score") == "max" and groups is None:
            continue
        router = router_of(
            experts,
            moe_router_topk=topk,
            moe_router_num_groups=groups,
            moe_router_group_topk=group_topk,
            moe_router_topk_scaling_factor=factor,
            moe_router_load_balancing_type=list(LOSSES),
            moe_aux_loss_coeff=[0.3, 0.5, 0.7],
            moe_z_loss_coeff=0.2,
            **KINDS[kind],
        )
        seen: list[list[int]] = []
        for index in range(INPUTS_PER_SHAPE):
            if router.expert_bias is not None:
                router.expert_bias.normal_(0, 0.2, generator=generator)
            logits = torch.randn(1 + number % 3, 2, experts, dtype=torch.float64, generator=generator).requires_grad_()
            routing = router.routing(logits)
            weights, indices = routing.weights, routing.indices
            # Autograd over scalars is slow.
            with torch.set_grad_enabled(index % 5 == 0):
                _assert_same(router, logits, (weights, indices), seen)


def _assert_same(router: TopKRouter, logits: Tensor, found: tuple[Tensor, Tensor], seen: list[list[int]]) -> None:
    config, flat, (weights, indices) = router.config, logits.flatten(0, 1), found
    choices = [naive.route_token(row, config, router.expert_bias) for row in flat]
    assert indices.tolist() == [chosen for _, chosen in choices]
    expected = torch.stack([torch.stack(values) for values, _ in choices])
    torch.testing.assert_close(weights, expected)

    probs, counts = naive.shares(flat, config)
    seen.append(counts)
    sequences = [naive.balancing_loss(*naive.shares(logits[:, b], config), config) for b in range(2)]
    losses = {
        "load_balancing_loss": (0.3, naive.balancing_loss(probs, counts, config)),
        "seq_load_balancing_loss": (0.5, sum(sequences) / 2),
        "global_load_balancing_loss": (0.7, naive.balancing_loss(probs, [sum(c) for c in zip(*seen)], config)),
        "z_loss": (0.2, sum(row.exp().sum().log() ** 2 for row in flat) / len(flat)),
    }
    for name, (total, _) in router.aux_losses.take_totals().items():
        assert total.item() == pytest.approx(losses[name][1].item(), rel=1e-5), name
    if not torch.is_grad_enabled():
        return
    upstream = torch.linspace(-1, 1, weights.numel(), dtype=torch.float64).view_as(weights)
    ours = torch.autograd.grad((weights * upstream).sum(), logits)[0]
    total = (expected * upstream).sum() + sum(coefficient * loss for coefficient, loss in losses.values())
    torch.testing.assert_close(ours, torch.autograd.grad(total, logits)[0])


@pytest.mark.slow
@pytest.mark.parametrize("topk", [slow(1), 2])
def test_sinkhorn_agrees_with_a_loop_over_tokens(topk: int) -> None:
    router = router_of(4, moe_router_topk=topk, moe_router_load_balancing_type="sinkhorn")
    generator = torch.Generator().manual_seed(2)
    for number in range(INPUTS):
        logits = torch.randn(2 + number % 9, 4, dtype=torch.float64, generator=generator).mul_(1.5).requires_grad_()
        routing = router.routing(logits)
        weights, indices = routing.weights, routing.indices
        choices = naive.route_sinkhorn(logits, topk)
        assert indices.tolist() == [chosen for _, chosen in choices]
        expected = torch.stack([torch.stack(values) for values, _ in choices])
        torch.testing.assert_close(weights, expected)
        if number % 5:
            continue
        both = [torch.autograd.grad(w.square().sum(), logits, retain_graph=True)[0] for w in (weights, expected)]
        torch.testing.assert_close(*both)
    loads = sinkhorn(logits.detach()).sum(dim=0)
    torch.testing.assert_close(loads, torch.full((4,), 0.25, dtype=torch.float64), atol=1e-3, rtol=0)
    router.eval()
    assert torch.equal(router.routing(logits).indices, logits.topk(topk).indices)
    # exp would overflow for these logits, but the result must remain finite.
    assert torch.isfinite(sinkhorn(torch.tensor([[900.0, 0.0], [901.0, -900.0]]))).all()


def test_bias_moves_by_the_sign_of_what_is_missing() -> None:
    generator = torch.Generator().manual_seed(3)
    for _ in range(INPUTS):
        counts = torch.randint(0, 4, (2, 3), generator=generator)
        bias = torch.randn(2, 3, generator=generator)
        mean = counts.double().mean(dim=1).tolist()
        step = [[0.1 * ((c < m) - (c > m)) for c in row] for row, m in zip(counts.tolist(), mean, strict=True)]
        torch.testing.assert_close(get_updated_expert_bias(counts, bias, 0.1), bias + torch.tensor(step))


@pytest.mark.parametrize("dtype, name", [(torch.bfloat16, "fp32"), (torch.float32, "fp64"), (torch.float16, "fp64")])
def test_gating_multiplies_in_the_dtype_that_is_asked_for(dtype: torch.dtype, name: str) -> None:
    generator, exact = torch.Generator().manual_seed(4), {"fp32": torch.float32, "fp64": torch.float64}[name]
    router = router_of(4, params_dtype=dtype, moe_router_dtype=name, add_bias_linear=True)
    assert router.bias is not None
    parameters = (router.weight, router.bias)
    for _ in range(INPUTS):
        for parameter in parameters:
            parameter.data.normal_(generator=generator)
        x = torch.randn(3, 32, generator=generator).to(dtype).requires_grad_()
        logits, expected = router.gating(x), F.linear(x.to(exact), *(p.to(exact) for p in parameters))
        assert logits.dtype == exact and torch.equal(logits, expected)
        ours, theirs = (torch.autograd.grad(y.square().sum(), (x, *parameters)) for y in (logits, expected))
        torch.testing.assert_close(ours, theirs)
    assert router(x)[0].dtype == torch.float32


@pytest.mark.slow
def test_jitter_scales_the_input_in_training_alone() -> None:
    router = router_of(4, moe_input_jitter_eps=0.1, moe_router_topk=4)
    for seed in range(INPUTS):
        x = torch.randn(2, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        torch.manual_seed(seed)
        table, routing_map = router(x)
        assert routing_map.all(), "all four experts are chosen"
        torch.manual_seed(seed)
        noisy = (x * torch.empty_like(x).uniform_(0.9, 1.1)) @ router.weight.t()
        torch.testing.assert_close(table, noisy.softmax(dim=-1))
    router.eval()
    torch.testing.assert_close(router(x)[0].sort().values, (x @ router.weight.t()).softmax(dim=-1).sort().values)


def test_forced_balance_loads_experts_alike_and_draws_nothing() -> None:
    router = router_of(8, moe_router_force_load_balancing=True, moe_per_layer_logging=True)
    state = torch.get_rng_state()
    skewed = torch.arange(8.0, dtype=torch.float64).repeat(4096, 1).requires_grad_()
    routing = router.routing(skewed)
    weights, indices = routing.weights, routing.indices
    assert torch.equal(state, torch.get_rng_state())
    loads = router.aux_losses.layer_totals().tokens_per_expert[0]
    assert loads.sum() == 8192 and (loads - 1024).abs().max() < 120
    assert torch.equal(indices, router.routing(skewed).indices)
    weights.square().sum().backward()
    assert skewed.grad is not None and skewed.grad.abs().sum() > 0


PRE_SOFTMAX: dict[str, Any] = {"moe_router_pre_softmax": True}
SIGMOID: dict[str, Any] = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
GROUPS: dict[str, Any] = {"moe_router_num_groups": 4, "moe_router_group_topk": 2}
# The other library's module and configuration class, its settings, and our fields.
ROUTERS: dict[str, tuple[Any, Any, dict[str, Any], dict[str, Any]]] = {
    "mixtral": (MixtralTopKRouter, MixtralConfig, {}, {}),
    "gpt-oss": (GptOssTopKRouter, GptOssConfig, {}, {"add_bias_linear": True}),
    "qwen2-moe": (Qwen2MoeTopKRouter, Qwen2MoeConfig, {"norm_topk_prob": False}, PRE_SOFTMAX),
    "qwen3-moe": (Qwen3MoeTopKRouter, Qwen3MoeConfig, {"norm_topk_prob": True}, {}),
    "deepseek-v2-lite": (DeepseekV2TopkRouter, DeepseekV2Config, {"topk_method": "greedy"}, PRE_SOFTMAX),
    "deepseek-v2": (
        DeepseekV2TopkRouter,
        DeepseekV2Config,
        {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "routed_scaling_factor": 16.0},
        {**PRE_SOFTMAX, **GROUPS, "moe_router_group_score": "max", "moe_router_topk_scaling_factor": 16.0},
    ),
    "deepseek-v3": (
        DeepseekV3TopkRouter,
        DeepseekV3Config,
        {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "norm_topk_prob": True},
        {**SIGMOID, **GROUPS, "moe_router_topk_scaling_factor": 2.5},
    ),
    "glm-4.5": (
        Glm4MoeTopkRouter,
        Glm4MoeConfig,
        {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.5, "norm_topk_prob": True},
        {**SIGMOID, "moe_router_topk_scaling_factor": 2.5},
    ),
}


@pytest.mark.parametrize("family", ROUTERS)
def test_published_routers_are_those_of_their_flags(family: str) -> None:
    module, config, settings, fields = ROUTERS[family]
    shape = {"hidden_size": 32, **dict.fromkeys(("n_routed_experts", "num_local_experts", "num_experts"), 16)}
    theirs = module(config(**shape, num_experts_per_tok=4, **settings))
    generator = torch.Generator().manual_seed(6)
    stored = {
        name.replace("e_score_correction_bias", "expert_bias"): value.data.normal_(0, 0.3, generator=generator)
        for name, value in theirs.state_dict().items()
    }
    ours = router_of(16, moe_router_topk=4, params_dtype=torch.float32, **fields)
    ours.load_state_dict(stored)
    x, upstream = torch.randn(200, 32, generator=generator), torch.randn(200, 16, generator=generator)
    found = []
    weights, indices = theirs(x)[1:]
    for router, table in ((ours, ours(x)[0]), (theirs, torch.zeros(200, 16).scatter(1, indices, weights))):
        found.append((table, torch.autograd.grad((table * upstream).sum(), list(router.parameters()))))
    torch.testing.assert_close(*found, atol=1e-4, rtol=1e-5)


@pytest.mark.slow
def test_tables_rows_and_back_hold_what_the_map_says() -> None:
    generator = torch.Generator().manual_seed(5)
    for number in range(INPUTS):
        logits = torch.randn(1 + number % 5, 6, dtype=torch.float64, generator=generator)
        probs, chosen = topk_routing_with_score_function(logits, 2, score_function="sigmoid", scaling_factor=3.0)
        assert torch.equal(probs > 0, chosen) and torch.allclose(probs.sum(dim=1), torch.tensor(3.0).double())
        tokens = torch.randn(len(logits), 3, dtype=torch.float64, generator=generator)
        known = 2 * len(logits) if number % 2 else None
        rows, weights, tokens_of_rows = permute(tokens, chosen, probs, known)
        pairs = [(e, t) for e in range(6) for t in range(len(logits)) if chosen[t, e]]
        assert tokens_of_rows.tolist() == [t for _, t in pairs]
        assert torch.equal(rows, tokens[tokens_of_rows])
        assert weights is not None and weights.tolist() == [probs[t, e].item() for e, t in pairs]
        torch.testing.assert_close(unpermute(rows, tokens_of_rows, tokens.shape), 2 * tokens)
        torch.testing.assert_close(unpermute(rows, tokens_of_rows, tokens.shape, probs, chosen), 3 * tokens)
    halves = unpermute(rows.half(), tokens_of_rows, tokens.shape, probs.float(), chosen)
    torch.testing.assert_close(halves, 3 * tokens.half(), atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((2, False, None, None, None, "softmax", torch.zeros(6)), "moe_router_score_function sigmoid"),
        ((7,), "moe_router_topk is 7"),
        ((2, False, None, None, None, "relu"), "moe_router_score_function is 'relu'"),
        ((2, False, 4, 1), "moe_router_num_groups is 4"),
        ((1, False, 2, 2), "moe_router_group_topk is 2"),
        ((4, False, 2, 1), "moe_router_topk is 4"),
    ],
)
def test_tables_of_a_routing_that_cannot_be_are_refused(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        topk_routing_with_score_function(torch.zeros(3, 6), *arguments)


@pytest.mark.parametrize("num_real", [0, 2, 3, 5, 11, 12])
@pytest.mark.parametrize("topk", [1, 2])
def test_sinkhorn_shares_real_tokens_whatever_padding_contains(topk: int, num_real: int) -> None:
    router = router_of(4, moe_router_topk=topk, moe_router_load_balancing_type="sinkhorn")
    generator = torch.Generator().manual_seed(num_real)
    logits = torch.randn(12, 4, dtype=torch.float64, generator=generator)
    real = torch.rand(12, generator=generator).argsort() < num_real
    expected = naive.route_sinkhorn(logits[real], topk) if num_real else []
    for padding in (0.0, 3.0, 1000.0):
        given = torch.where(real.unsqueeze(1), logits, padding * logits.flip(1))
        routing = router.routing(given, ~real)
        assert routing.indices[real].tolist() == [chosen for _, chosen in expected]
        assert routing.weights.isfinite().all()
        scaled = sinkhorn(given, valid=real)
        assert not scaled[~real].any() and scaled.sum().item() == pytest.approx(float(num_real > 0))
