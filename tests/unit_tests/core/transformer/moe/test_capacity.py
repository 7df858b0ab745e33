"""Experts with limited capacity and the shared expert, compared with fp64 loops over tokens."""

import math
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import Qwen2MoeConfig
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock

from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.permutation import (
    build_row_order,
    get_capacity,
    permute_tokens,
    unpermute_tokens,
)
from megatron.core.transformer.moe_config import CapacityConfig
from tests.counts import long_count
from tests.unit_tests.core.transformer.moe.small_experts import expert_matrices, moe_layer

LOOSE = {"atol": 1e-4, "rtol": 1e-4}


def naive_kept(weights: Tensor, indices: Tensor, *, capacity: int, policy: str) -> Tensor:
    """Returns the kept slots: each expert's first `capacity` slots, sorted by weight or by position."""
    kept = torch.zeros_like(indices, dtype=torch.bool)
    for expert in indices.unique().tolist():
        slots = [(t, k) for t in range(indices.shape[0]) for k in range(indices.shape[1]) if indices[t, k] == expert]
        if policy == "probs":
            slots.sort(key=lambda slot: -float(weights[slot].detach()))
        for slot in slots[:capacity]:
            kept[slot] = True
    return kept


def random_routing(generator: torch.Generator) -> tuple[Tensor, Tensor, int]:
    """Returns weights and indices [T, K], and E. Weights have few distinct values, so that ties occur."""
    tokens, experts = (int(torch.randint(1, high, (), generator=generator)) for high in (13, 9))
    topk = int(torch.randint(1, experts + 1, (), generator=generator))
    indices = torch.rand(tokens, experts, generator=generator).topk(topk).indices
    return torch.randint(1, 8, (tokens, topk), generator=generator).double() / 8, indices, experts


@pytest.mark.parametrize("padded", [False, True], ids=["dropped", "padded"])
@pytest.mark.parametrize("policy", ["probs", "position"])
def test_rows_agree_with_a_loop_on_random_routings(policy: str, padded: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    for number in range(long_count(100, soak=10_000)):
        weights, indices, experts = random_routing(generator)
        factor = float(torch.rand((), generator=generator)) * 2 + 0.05 if number else float(experts)
        config = CapacityConfig(
            # Capacity for all tokens, even if the factor exceeds every integer type.
            moe_expert_capacity_factor=factor if number else 1e308,
            moe_token_drop_policy=policy,
            moe_pad_expert_input_to_capacity=padded,
        )
        capacity = min(get_capacity(indices.numel(), experts, factor), len(indices))
        kept = naive_kept(weights, indices, capacity=capacity, policy=policy)
        permutation, counts = build_row_order(config, experts)(weights, indices)
        assert torch.equal(permutation.kept, kept)
        used = torch.bincount(indices[kept], minlength=experts)
        assert torch.equal(counts, torch.full_like(used, capacity) if padded else used)
        # A round trip through the rows returns each token once per kept slot, weighted.
        tokens = torch.randn(len(indices), 3, dtype=torch.float64, generator=generator).requires_grad_()
        probs = weights.clone().requires_grad_()
        rows, scale = permute_tokens(tokens, probs, permutation)
        owners = indices.reshape(-1)[permutation.slot_of_row]
        live = scale > 0
        assert torch.equal(owners[live], torch.arange(experts).repeat_interleave(counts)[live])
        out = unpermute_tokens(rows * scale.unsqueeze(1), permutation)
        expected = tokens * (probs * kept).sum(dim=1, keepdim=True)
        torch.testing.assert_close(out, expected)
        grads = [torch.autograd.grad(y.square().sum(), (tokens, probs), retain_graph=True) for y in (out, expected)]
        torch.testing.assert_close(*grads)


@pytest.mark.parametrize("padded", [False, True], ids=["dropped", "padded"])
def test_layer_computes_only_what_experts_have_room_for(padded: bool) -> None:
    torch.manual_seed(3)
    fields = {"moe_expert_capacity_factor": 0.6, "moe_pad_expert_input_to_capacity": padded}
    layer = moe_layer(grouped=True, params_dtype=torch.float64, **fields)
    x = torch.randn(12, 1, 32, dtype=torch.float64, requires_grad=True)
    scores, indices = (x[:, 0] @ layer.router.weight.t()).topk(2)
    weights, matrices = scores.softmax(dim=-1), expert_matrices(layer)
    kept = naive_kept(weights, indices, capacity=get_capacity(24, 4, 0.6), policy="probs")
    assert 0 < int(kept.sum()) < kept.numel()
    expected = torch.zeros_like(x)
    for t, k in kept.nonzero().tolist():
        gate, up = (matrices[f"linear_fc1.weight.{name}"][indices[t, k]] @ x[t, 0] for name in ("gate", "up"))
        expected[t, 0] += weights[t, k] * (matrices["linear_fc2.weight"][indices[t, k]] @ (F.silu(gate) * up))
    output, _ = layer(x)
    torch.testing.assert_close(output, expected)
    output.sum().backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in layer.parameters())


def test_padded_rows_need_no_value_on_the_host() -> None:
    config = CapacityConfig(moe_expert_capacity_factor=1.0, moe_pad_expert_input_to_capacity=True)
    with FakeTensorMode():
        probs, indices = torch.rand(8, 2), torch.zeros(8, 2, dtype=torch.int64)
        permutation, counts = build_row_order(config, 4)(probs, indices)
        rows, weights = permute_tokens(torch.rand(8, 16), probs, permutation)
        assert rows.shape == (16, 16) and weights.shape == (16,) and counts.shape == (4,)
        assert unpermute_tokens(rows, permutation).shape == (8, 16)


def qwen_block(shared_width: int) -> Qwen2MoeSparseMoeBlock:
    """Builds Hugging Face's layer with a gated shared expert and normalized routing weights, in fp32."""
    config = Qwen2MoeConfig(
        hidden_size=32,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=shared_width,
        norm_topk_prob=True,
    )
    block = Qwen2MoeSparseMoeBlock(config)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return block


def load_qwen(layer: MoELayer, state: dict[str, Tensor]) -> None:
    """Copies Hugging Face's weights into a layer of grouped experts."""
    shared = layer.shared_experts
    gate, up, down = (state[f"shared_expert.{name}_proj.weight"] for name in ("gate", "up", "down"))
    with torch.no_grad():
        layer.router.weight.copy_(state["gate.weight"])
        layer.experts.weight1.view(4, 32, 64).copy_(state["experts.gate_up_proj"].transpose(1, 2))
        layer.experts.weight2.view(4, 32, 32).copy_(state["experts.down_proj"].transpose(1, 2))
        shared.linear_fc1.weight.copy_(torch.cat([gate, up]))
        shared.linear_fc2.weight.copy_(down)
        shared.gate_weight.copy_(state["shared_expert_gate.weight"])


def test_shared_expert_agrees_with_hugging_face() -> None:
    torch.manual_seed(0)
    theirs = qwen_block(48)
    ours = moe_layer(
        grouped=True,
        moe_ffn_hidden_size=32,
        moe_shared_expert_intermediate_size=48,
        moe_shared_expert_gate=True,
    )
    load_qwen(ours, theirs.state_dict())
    x = torch.randn(3, 4, 32)
    mine, yours = x.clone().requires_grad_(), x.clone().requires_grad_()
    output, _ = ours(mine)
    expected = theirs(yours)
    expected = expected[0] if isinstance(expected, tuple) else expected
    torch.testing.assert_close(output, expected, **LOOSE)
    for result in (output, expected):
        result.square().sum().backward()
    torch.testing.assert_close(mine.grad, yours.grad, **LOOSE)
    torch.testing.assert_close(ours.shared_experts.gate_weight.grad, theirs.shared_expert_gate.weight.grad, **LOOSE)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"moe_expert_capacity_factor": 0.0}, "moe_expert_capacity_factor is 0.0: must be a number above 0"),
        ({"moe_expert_capacity_factor": float("inf")}, "moe_expert_capacity_factor is inf"),
        ({"moe_pad_expert_input_to_capacity": True}, "requires a moe_expert_capacity_factor"),
        ({"moe_shared_expert_gate": True}, "requires moe_shared_expert_intermediate_size"),
        ({"moe_token_drop_policy": "random"}, "moe_token_drop_policy"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        moe_layer(grouped=True, **fields)


MASKS = {
    "left": [3, 6],
    "right": [-3, -6],
    "one sequence": [0, 8],
    "few": [1, 0],
    "most": [-7, 7],
    "all": [8, 8],
}


def _mask(kind: str) -> Tensor:
    """Padding of two sequences of 8: [B, S], bool. Positive lengths pad on the left, negative ones on the right."""
    mask = torch.zeros(2, 8, dtype=torch.bool)
    for row, length in zip(mask, MASKS[kind], strict=True):
        row[:length] = True
        if length < 0:
            row[:] = False
            row[length:] = True
    return mask


ROUTERS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "sigmoid, bias": {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True},
    "sqrtsoftplus": {"moe_router_score_function": "sqrtsoftplus"},
    "groups": {"moe_router_num_groups": 2, "moe_router_group_topk": 1, "moe_router_score_function": "sigmoid"},
    "softmax before the choice": {"moe_router_pre_softmax": True},
    "sinkhorn": {"moe_router_load_balancing_type": "sinkhorn", "moe_aux_loss_coeff": 0.0},
    "one expert": {"moe_router_topk": 1, "moe_router_score_function": "sigmoid"},
    "all experts": {"moe_router_topk": 4},
}
GATHERED, SENT = {"moe_token_dispatcher_type": "allgather"}, {"moe_token_dispatcher_type": "alltoall"}
CASES: list[tuple[str, str, bool, dict[str, Any]]] = [
    *((*given, GATHERED) for given in product(MASKS, ("probs", "position"), (False, True))),
    *(("left", "probs", False, {**SENT, **fields}) for fields in ROUTERS.values()),
    *(("most", "position", True, {**SENT, **fields}) for fields in ROUTERS.values()),
    *(("right", "position", False, {**GATHERED, **fields}) for fields in ROUTERS.values()),
]


@pytest.mark.parametrize(("kind", "policy", "padded", "fields"), CASES)
def test_padding_takes_no_place_in_a_capacity(kind: str, policy: str, padded: bool, fields: dict[str, Any]) -> None:
    """The kept choices of real tokens are those of a loop over these alone, whatever padding contains."""
    fields = {**fields, "moe_expert_capacity_factor": 0.75, "moe_token_drop_policy": policy}
    layer = moe_layer(grouped=True, **fields, moe_pad_expert_input_to_capacity=padded, params_dtype=torch.float64)
    if layer.router.expert_bias is not None:
        layer.router.expert_bias.copy_(torch.tensor([0.1, -0.2, 0.05, 0.0]))
    generator, mask = torch.Generator().manual_seed(2), _mask(kind)
    hidden = torch.randn(8, 2, layer.config.hidden_size, dtype=torch.float64, generator=generator)
    outputs, gradients = [], []
    for scale in (0.0, 1.0, 100.0):  # padding that experts would like to different degrees
        given = torch.where(mask.t().unsqueeze(2), scale * hidden.flip(0), hidden).requires_grad_()
        outputs.append(layer(given, padding_mask=mask)[0])
        layer.zero_grad()
        outputs[-1][~mask.t()].square().sum().backward()
        gradients.append([param.grad for param in layer.parameters()])
    weights, indices, _ = layer._run_router(hidden, mask.t())
    real = ~mask.t().reshape(-1)
    capacity = math.ceil(0.75 * indices[real].numel() / layer.config.num_moe_experts)
    kept = naive_kept(weights[real], indices[real], capacity=capacity, policy=policy)
    matrices = expert_matrices(layer)
    tokens = hidden.reshape(-1, hidden.shape[-1])[real]
    expected = torch.zeros_like(tokens)
    for token, slot in kept.nonzero().tolist():
        expert = int(indices[real][token, slot])
        gate, up = (matrices[f"linear_fc1.weight.{name}"][expert] @ tokens[token] for name in ("gate", "up"))
        expected[token] += weights[real][token, slot] * (matrices["linear_fc2.weight"][expert] @ (F.silu(gate) * up))
    for output, grads in zip(outputs, gradients, strict=True):
        torch.testing.assert_close(output[~mask.t()], expected.view(-1, output.shape[-1]))
        assert not output[mask.t()].any()
        for grad, first in zip(grads, gradients[0], strict=True):
            torch.testing.assert_close(grad, first)
