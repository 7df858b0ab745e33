"""Properties of padding: what it contains, and whether it exists, changes nothing that is computed from real tokens."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.moe.permutation import build_row_order
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe_config import CapacityConfig
from tests.counts import long_count
from tests.unit_tests.core.models.small_models import LLAMA_LIKE, VOCAB, gradients, small_config, small_model
from tests.unit_tests.core.transformer.moe import naive_router as naive

EXPERTS, TOPK = 4, 2
LOSSES: dict[str, Any] = {
    "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss", "global_aux_loss"],
    "moe_aux_loss_coeff": [0.3, 0.5, 0.7],
    "moe_z_loss_coeff": 0.2,
}
SIGMOID: dict[str, Any] = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
ROUTERS: dict[str, dict[str, Any]] = {
    "losses": LOSSES,
    "losses per token": {**LOSSES, "calculate_per_token_loss": True},
    "bias": {**SIGMOID, **LOSSES, "moe_router_bias_update_rate": 0.5},
    "groups": {**LOSSES, "moe_router_num_groups": 2, "moe_router_group_topk": 1},
    "sinkhorn": {"moe_router_load_balancing_type": "sinkhorn", "moe_z_loss_coeff": 0.2},
    "sinkhorn, one expert": {"moe_router_load_balancing_type": "sinkhorn", "moe_router_topk": 1},
    "capacity": {**LOSSES, "moe_expert_capacity_factor": 0.7},
    "capacity by position": {"moe_expert_capacity_factor": 0.6, "moe_token_drop_policy": "position"},
    "padded capacity": {"moe_expert_capacity_factor": 0.8, "moe_pad_expert_input_to_capacity": True},
    "further tokens": {**LOSSES, "mtp_num_layers": 2},
}


def _model(kind: str) -> GPTModel:
    fields = {"num_moe_experts": EXPERTS, "moe_grouped_gemm": True, "params_dtype": torch.float64}
    return small_model(small_config(**{**LLAMA_LIKE, **fields, **ROUTERS[kind]}), max_sequence_length=64)


def _trained(kind: str, tokens: Tensor, labels: Tensor, mask: Tensor, *, lengths: Sequence[int]) -> dict[str, Tensor]:
    """Runs a step and returns all of its results for the first positions of each sequence, the real ones.

    tokens, labels: [B, S]. mask: [B, S], padding; without padding no mask is passed. lengths: of the segments of each
    sequence.
    """
    model = _model(kind)
    batch, length = tokens.shape
    ends = [row * length + end for row in range(batch) for end in torch.tensor(lengths).cumsum(0).tolist()]
    borders = sorted({0, *ends, *range(0, batch * length + 1, length)})
    weights = (~mask).double()
    losses = model(
        tokens,
        torch.arange(length).expand(batch, -1),
        None,
        labels=labels,
        loss_mask=weights.float(),
        packed_seq_params=PackedSeqParams(cu_seqlens_q=torch.tensor(borders, dtype=torch.int32)),
        **({"padding_mask": mask} if mask.any() else {}),
    )
    ((losses * weights).sum() / (1 if model.config.calculate_per_token_loss else weights.sum())).backward()
    found = {"losses": losses[~mask], **gradients(model)}
    found |= {f"logged {name}": total for name, total in model.aux_losses.layer_losses().items()}
    found["loads"] = model.aux_losses.layer_totals().tokens_per_expert
    model.finalize_step(None)
    found |= {
        f"bias {n}": m.expert_bias for n, m in model.named_modules() if getattr(m, "expert_bias", None) is not None
    }
    return found


@pytest.mark.parametrize("kind", ROUTERS)
@settings(max_examples=long_count(3, soak=100))
@given(data=st.data())
def test_padding_appended_or_removed_changes_nothing(kind: str, data: st.DataObject) -> None:
    """Sequences of packed segments with any padding after them are trained as without it, in fp64."""
    batch = data.draw(st.integers(1, 3), label="sequences")
    lengths = data.draw(st.lists(st.integers(3, 7), min_size=1, max_size=3), label="segments")
    added = data.draw(st.integers(1, 20), label="padding")
    seed = data.draw(st.integers(0, 2**31), label="seed")
    generator, real = torch.Generator().manual_seed(seed), sum(lengths)
    text = torch.randint(0, VOCAB, (batch, real + 1), generator=generator)

    def trained(filling: Tensor) -> dict[str, Tensor]:
        mask = (torch.arange(real + filling.shape[1]) >= real).expand(batch, -1)
        tokens, labels = torch.cat([text[:, :-1], filling], 1), torch.cat([text[:, 1:], filling], 1)
        return _trained(kind, tokens, labels, mask, lengths=lengths)

    # Layers that predict further tokens count tokens before the end of a sequence, but not before padding.
    least = ROUTERS[kind].get("mtp_num_layers", 0)
    expected = trained(torch.full((batch, least), 1))
    for filling in (
        torch.full((batch, least + added), 3),
        torch.randint(0, VOCAB, (batch, least + added), generator=generator),
    ):
        found = trained(filling)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-7, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")


def _router(kind: str) -> TopKRouter:
    router = _model(kind).decoder.layers[0].mlp.router
    assert isinstance(router, TopKRouter)
    return router


@pytest.mark.parametrize("kind", ["losses", "bias", "sinkhorn", "sinkhorn, one expert"])
@settings(max_examples=long_count(15, soak=500))
@given(data=st.data())
def test_routers_count_what_plain_loops_over_real_tokens_count(kind: str, data: st.DataObject) -> None:
    router = _router(kind)
    config, length, batch = router.config, data.draw(st.integers(1, 8)), data.draw(st.integers(1, 3))
    bits = st.lists(st.booleans(), min_size=length * batch, max_size=length * batch)
    mask = torch.tensor(data.draw(bits)).view(length, batch)
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    logits = torch.randn(length, batch, EXPERTS, dtype=torch.float64, generator=generator)
    routing = router.routing(logits, mask)
    real = logits[~mask]
    loads = router.aux_losses.layer_totals().tokens_per_expert[0].tolist()
    if config.uses_sinkhorn:
        if len(real) <= EXPERTS:
            return  # few tokens have equal shares of all experts, so the choice depends on rounding
        choices = naive.route_sinkhorn(real, config.moe_router_topk) if len(real) else []
        found = routing.indices[~mask.flatten()].tolist()
        assert [sorted(one) for one in found] == [sorted(chosen) for _, chosen in choices]
        chosen = [expert for _, experts in choices for expert in experts]
        assert loads == [chosen.count(expert) for expert in range(EXPERTS)]
        return
    probs, counts = naive.shares(real, config)
    assert loads == counts
    totals = {name: total[0].item() for name, total in router.aux_losses.take_totals().items()}
    expected = naive.balancing_loss(probs, counts, config).item() if len(real) else 0.0
    assert totals["load_balancing_loss"] == pytest.approx(expected, rel=1e-6)
    assert totals["global_load_balancing_loss"] == pytest.approx(expected, rel=1e-6)
    sequences = [logits[~mask[:, b], b] for b in range(batch) if not mask[:, b].all()]
    by_sequence = [naive.balancing_loss(*naive.shares(one, config), config).item() for one in sequences]
    assert totals["seq_load_balancing_loss"] == pytest.approx(sum(by_sequence) / max(1, len(by_sequence)), rel=1e-6)
    z_loss = real.logsumexp(1).square().mean().item() if len(real) else 0.0
    assert totals["z_loss"] == pytest.approx(z_loss, rel=1e-6)


# Padding of 12 tokens, capacity factor, and the capacity of each of 4 experts, from tokens x 2 / 4 x factor.
CAPACITIES = [
    ("000000000000", 1.0, 6),
    ("000000001111", 1.0, 4),
    ("000000000001", 1.0, 6),
    ("000000000011", 1.0, 5),
    ("101010101010", 1.0, 3),
    ("111111111110", 1.0, 1),
    ("111111111111", 1.0, 0),
    ("000000111111", 0.5, 2),
    ("000000011111", 0.3, 2),
    ("000000111111", 1.5, 5),
]


@pytest.mark.parametrize(("padding", "factor", "capacity"), CAPACITIES)
@pytest.mark.parametrize("padded", [False, True])
def test_the_capacity_is_a_share_of_real_tokens(padding: str, factor: float, capacity: int, padded: bool) -> None:
    """All tokens choose experts 0 and 1, so each of these keeps as many as its capacity allows."""
    config = CapacityConfig(moe_expert_capacity_factor=factor, moe_pad_expert_input_to_capacity=padded)
    is_padding = torch.tensor([bit == "1" for bit in padding]).unsqueeze(1)
    indices = torch.tensor([[0, 1]] * 12).masked_fill(is_padding, EXPERTS)
    weights = torch.rand(12, 2, generator=torch.Generator().manual_seed(1)).masked_fill(is_padding, 0)
    permutation, _ = build_row_order(config, EXPERTS)(weights, indices, indices < EXPERTS)
    real = padding.count("0")
    assert capacity == math.ceil(real * TOPK / EXPERTS * factor)
    assert permutation.kept is not None and not permutation.kept[is_padding.squeeze(1)].any()
    assert permutation.kept.sum(dim=0).tolist() == [min(capacity, real)] * 2


def test_a_trace_has_padding_because_experts_compute_it_unless_they_have_a_capacity() -> None:
    logits = torch.randn(6, 1, EXPERTS, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    mask = torch.tensor([False, False, True, False, True, True]).unsqueeze(1)
    for kind, num_traced in (("losses", 6), ("capacity", 3)):
        router = _router(kind)
        router.keep_passes()
        router.routing(logits, mask)
        [counts] = router.aux_losses.take_passes()[router.layer_number]
        assert int(counts.sum()) == num_traced * TOPK
        assert int(router.aux_losses.layer_totals().tokens_per_expert.sum()) == 3 * TOPK
