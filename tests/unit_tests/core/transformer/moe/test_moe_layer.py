"""The expert layer compared with an fp64 loop over tokens, for every implementation and for skewed routing."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.unit_tests.core.transformer.moe.small_experts import (
    EXPERTS,
    GPT_OSS,
    copy_weights,
    expert_matrices,
    lopsided,
    moe_layer,
)

TOKENS = 12


def naive_moe(layer: MoELayer, x: Tensor, matrices: dict[str, Tensor]) -> Tensor:
    """Computes the layer one token and one expert at a time. x: [T, H], fp64 -> [T, H]."""
    zeros, config = torch.zeros(()).double(), layer.config
    logits = x @ matrices["router.weight"].t() + matrices.get("router.bias", zeros)
    gate, up, down = (
        (matrices[name], matrices.get(name.replace("weight", "bias"), zeros.expand(EXPERTS)))
        for name in ("linear_fc1.weight.gate", "linear_fc1.weight.up", "linear_fc2.weight")
    )
    limit = config.activation_func_clamp_value or float("inf")
    rows = []
    for token, scores in zip(x, logits, strict=True):
        best = scores.argsort(descending=True)[: layer.router.topk]
        weights = scores[best].exp() / scores[best].exp().sum()
        parts = []
        for weight, expert in zip(weights, best, strict=True):
            opened = config.activation_func((gate[0][expert] @ token + gate[1][expert]).clamp(max=limit))
            other = (up[0][expert] @ token + up[1][expert]).clamp(min=-limit, max=limit) + config.glu_linear_offset
            parts.append(weight * (down[0][expert] @ (opened * other) + down[1][expert]))
        rows.append(torch.stack(parts).sum(dim=0))
    return torch.stack(rows)


KINDS: dict[str, dict[str, Any]] = {
    "grouped": {"grouped": True},
    "sequential": {"grouped": False},
    "grouped, gpt-oss": {"grouped": True, **GPT_OSS},
    "sequential, gpt-oss": {"grouped": False, **GPT_OSS},
    "static, gpt-oss": {"grouped": True, "moe_expert_rank_capacity_factor": 4.0, **GPT_OSS},
}


@pytest.mark.parametrize("routing", ["balanced", "one", "starved"])
@pytest.mark.parametrize("topk", [1, 2, 4])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_layer_agrees_with_a_loop_over_tokens(dtype: torch.dtype, kind: str, topk: int, routing: str) -> None:
    torch.manual_seed(topk)
    layer = moe_layer(moe_router_topk=topk, params_dtype=dtype, **KINDS[kind])
    for name, parameter in layer.named_parameters():
        if "bias" in name:
            torch.nn.init.normal_(parameter, std=0.5)
    lopsided(layer, routing)
    # Positive inputs, so that the skewed router rows decide for every token.
    x = torch.rand(TOKENS // 2, 2, 32, dtype=torch.float64).to(dtype).requires_grad_()
    exact = x.detach().double().requires_grad_()
    matrices = {name: value.requires_grad_() for name, value in expert_matrices(layer).items()}
    output, bias = layer(x)
    expected = naive_moe(layer, exact.view(TOKENS, 32), matrices).view_as(exact)
    assert bias is None and output.dtype == dtype
    tolerance = {"atol": 1e-10, "rtol": 1e-10} if dtype == torch.float64 else {"atol": 1e-4, "rtol": 1e-4}
    torch.testing.assert_close(output.double(), expected, **tolerance)
    upstream = torch.randn(expected.shape, dtype=torch.float64)
    output.backward(upstream.to(dtype))
    expected.backward(upstream.to(dtype).double())
    torch.testing.assert_close(x.grad.double(), exact.grad, **tolerance)
    for parameter in layer.parameters():
        assert parameter.grad is not None
        parameter.data.copy_(parameter.grad)  # so that expert_matrices below returns gradients
    for name, grads in expert_matrices(layer).items():
        torch.testing.assert_close(grads, matrices[name].grad, **tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_grouped_and_sequential_experts_agree(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    grouped, sequential = (
        moe_layer(grouped=flag, params_dtype=dtype, gated_linear_unit=True, add_bias_linear=True)
        for flag in (True, False)
    )
    for parameter in (grouped.experts.bias1, grouped.experts.bias2):
        torch.nn.init.normal_(parameter, std=0.1)
    copy_weights(grouped, sequential)
    outputs = []
    for layer in (grouped, sequential):
        x = torch.randn(6, 2, 32, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
        output, _ = layer(x)
        output.float().square().sum().backward()
        outputs.append((output, x.grad))
    tolerance = 1e-5 if dtype == torch.float32 else 0.05
    for ours, theirs in zip(*outputs, strict=True):
        assert (ours.float() - theirs.float()).norm() <= tolerance * theirs.float().norm()


@pytest.mark.parametrize("activation", [F.gelu, F.silu], ids=["gelu", "silu"])
@pytest.mark.parametrize("gated", [False, True])
def test_other_activations_work_in_both_implementations(activation: Any, gated: bool) -> None:
    torch.manual_seed(0)
    fields = {"activation_func": activation, "gated_linear_unit": gated}
    grouped, sequential = (moe_layer(grouped=flag, **fields) for flag in (True, False))
    copy_weights(grouped, sequential)
    x = torch.randn(6, 2, 32)
    torch.testing.assert_close(grouped(x)[0], sequential(x)[0], atol=1e-5, rtol=1e-5)


def test_sequential_experts_weigh_their_biases() -> None:
    torch.manual_seed(0)
    layer = moe_layer(grouped=False, add_bias_linear=True, moe_router_topk=1)
    for expert in layer.experts.local_experts:
        expert.linear_fc2.weight.data.zero_()
        expert.linear_fc2.bias.data.fill_(2.0)
    torch.testing.assert_close(layer(torch.randn(3, 2, 32))[0], torch.full((3, 2, 32), 2.0))


@pytest.mark.parametrize("grouped", [True, False])
def test_frozen_experts_and_inputs_without_gradient_work(grouped: bool) -> None:
    layer = moe_layer(grouped=grouped)
    layer.experts.requires_grad_(False)
    x = torch.randn(3, 2, 32, requires_grad=True)
    layer(x)[0].sum().backward()
    assert x.grad is not None and layer.router.weight.grad is not None
    layer.experts.requires_grad_(True)
    layer.router.requires_grad_(False)
    layer(x.detach())[0].sum().backward()
    assert all(parameter.grad is not None for parameter in layer.experts.parameters())
    with torch.no_grad():
        assert not layer(x)[0].requires_grad


@pytest.mark.parametrize(
    "fields",
    [
        {"moe_aux_loss_coeff": 0.01, "moe_z_loss_coeff": 0.001},
        {"moe_router_load_balancing_type": ["seq_aux_loss", "global_aux_loss"], "moe_aux_loss_coeff": [0.1, 0.2]},
        {
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_router_num_groups": 2,
            "moe_router_group_topk": 1,
            "moe_router_dtype": "fp64",
        },
        {"moe_router_load_balancing_type": "sinkhorn", "moe_input_jitter_eps": 0.1},
        {"moe_router_force_load_balancing": True, "moe_token_dispatcher_type": "alltoall"},
        GPT_OSS,
    ],
)
def test_grouped_layer_reads_nothing_on_the_host(fields: dict[str, Any]) -> None:
    """Fake tensors have no values, so a host read or a shape that depends on values would raise."""
    with FakeTensorMode():
        # bf16 is the only dtype that torch 2.13 supports in grouped GEMMs of fake tensors.
        x = torch.randn(3, 2, 32, dtype=torch.bfloat16, requires_grad=True)
        layer = moe_layer(grouped=True, params_dtype=torch.bfloat16, **fields)
        layer(x)[0].sum().backward()
        layer.router.aux_losses.finalize_step(None)
        with pytest.raises(DataDependentOutputException):
            moe_layer(grouped=False, params_dtype=torch.bfloat16)(x)


def test_an_overlapped_shared_expert_needs_its_size() -> None:
    fields = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "num_moe_experts": 2}
    with pytest.raises(ValueError, match="moe_shared_expert_overlap is True: requires moe_shared_expert_intermediate"):
        TransformerConfig(**fields, moe_shared_expert_overlap=True, moe_token_dispatcher_type="alltoall")
