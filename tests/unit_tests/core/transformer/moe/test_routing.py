"""Routing, permutation and auxiliary losses: index maps, formulas, router gradients and recorded losses."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.core.tensor_parallel.random import checkpoint
from megatron.core.transformer.moe.aux_losses import (
    AuxLossRecorder,
    count_tokens,
    switch_load_balancing_loss_func,
    z_loss_func,
)
from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function
from megatron.core.transformer.moe.permutation import (
    Routing,
    permute_tokens,
    sort_by_expert,
    unpermute_tokens,
)
from megatron.core.transformer.moe.router import TopKRouter
from tests.unit_tests.core.models.small_models import LLAMA_LIKE, loss_of, small_config, small_model

EXPERTS = 5
SLOTS = st.lists(st.lists(st.integers(0, EXPERTS - 1), min_size=2, max_size=2), min_size=1, max_size=20)


@given(SLOTS)
def test_rows_are_sorted_stably_and_nothing_is_lost(slots: list[list[int]]) -> None:
    indices = torch.tensor(slots)
    permutation, counts = sort_by_expert(indices, EXPERTS)
    experts = indices.flatten()[permutation.slot_of_row]
    assert torch.equal(experts, indices.flatten().sort(stable=True).values)
    assert torch.equal(counts, torch.bincount(indices.flatten(), minlength=EXPERTS))
    assert torch.equal(counts, count_tokens(indices, EXPERTS))
    assert torch.equal(permutation.slot_of_row[permutation.row_of_slot.flatten()], torch.arange(indices.numel()))
    for expert in range(EXPERTS):
        slots_of_expert = permutation.slot_of_row[experts == expert]
        assert torch.equal(slots_of_expert, slots_of_expert.sort().values)


@given(SLOTS)
def test_unpermuting_sums_the_copies_of_each_token(slots: list[list[int]]) -> None:
    permutation, _ = sort_by_expert(torch.tensor(slots), EXPERTS)
    tokens = torch.randn(len(slots), 3, dtype=torch.float64)
    probs = torch.rand(len(slots), 2, dtype=torch.float64)
    rows, weights = permute_tokens(tokens, probs, permutation)
    torch.testing.assert_close(
        unpermute_tokens(rows * weights.unsqueeze(-1), permutation), tokens * probs.sum(dim=1, keepdim=True)
    )


def test_permutations_have_right_gradients() -> None:
    permutation, _ = sort_by_expert(torch.tensor([[3, 0], [0, 1], [3, 4], [1, 0]]), EXPERTS)
    tokens = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    rows = torch.randn(8, 3, dtype=torch.float64, requires_grad=True)
    probs = torch.rand(4, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda *both: permute_tokens(*both, permutation), (tokens, probs))
    assert torch.autograd.gradcheck(lambda x: unpermute_tokens(x, permutation), (rows,))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_rows_are_summed_in_fp32(dtype: torch.dtype) -> None:
    permutation, _ = sort_by_expert(torch.randint(0, EXPERTS, (50, 4)), EXPERTS)
    rows = torch.randn(200, 16).to(dtype)
    expected = rows.double()[permutation.row_of_slot].sum(dim=1)
    found = unpermute_tokens(rows, permutation)
    # Ties may round either way. Half-precision sums would be wrong for every third value.
    assert (found == expected.to(dtype)).double().mean() > 0.9
    torch.testing.assert_close(found.double(), expected, atol=0.0, rtol=torch.finfo(dtype).eps)


@pytest.mark.parametrize("topk", [1, 2, EXPERTS])
def test_dense_routing_tables_hold_a_softmax_over_the_chosen(topk: int) -> None:
    logits = torch.randn(20, EXPERTS, dtype=torch.float64)
    weights, chosen = topk_routing_with_score_function(logits, topk)
    threshold = logits.sort(dim=-1, descending=True).values[:, topk - 1 : topk]
    expected = logits.masked_fill(logits < threshold, float("-inf")).softmax(dim=-1)
    torch.testing.assert_close(weights, expected)
    assert torch.equal(chosen, logits >= threshold)


def test_losses_follow_their_formulas() -> None:
    logits = torch.randn(7, 4, dtype=torch.float64)
    probs, counts = logits.softmax(dim=-1), torch.tensor([5, 0, 6, 3])
    loss = switch_load_balancing_loss_func(probs, counts, 7, 2, 4, 0.1)
    expected = 0.1 * 4 * sum(counts[e] / 14 * probs[:, e].mean() for e in range(4))
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(z_loss_func(logits, 0.5), 0.5 * logits.exp().sum(-1).log().pow(2).mean())
    even = switch_load_balancing_loss_func(torch.full((8, 4), 0.25), torch.full((4,), 4), 8, 2, 4, 0.3)
    assert even.item() == pytest.approx(0.3)


def test_auxiliary_gradients_are_those_of_the_summed_loss_times_the_scale() -> None:
    fields = {"num_moe_experts": 4, "moe_grouped_gemm": True, "params_dtype": torch.float64, **LLAMA_LIKE}
    with_losses = small_config(**fields, moe_aux_loss_coeff=0.05, moe_z_loss_coeff=0.02)
    plain, model = small_model(small_config(**fields)), small_model(with_losses)
    main = loss_of(model)
    model.aux_losses.set_backward_scale(torch.tensor([3.0]))  # schedules may set it after forward
    main.backward()
    recorded: list[torch.Tensor] = []
    for layer in plain.decoder.layers:
        layer.mlp.router.routing = _recording(layer.mlp.router, recorded)
    expected = loss_of(plain)
    torch.testing.assert_close(main, expected)
    (expected + 3.0 * torch.stack(recorded).sum()).backward()
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, msg=lambda text, name=name: f"{name}: {text}")
    totals = model.aux_losses.take_totals()
    for name, losses, coeff in (("load_balancing_loss", recorded[0::2], 0.05), ("z_loss", recorded[1::2], 0.02)):
        assert totals[name].tolist() == pytest.approx([torch.stack(losses).sum().item() / coeff, len(losses)])


def _recording(router: TopKRouter, losses: list[torch.Tensor]):  # type: ignore[no-untyped-def]
    routing = router.routing

    def with_losses(logits: torch.Tensor) -> Routing:
        chosen = routing(logits)
        logits = logits.flatten(0, -2)
        counts = count_tokens(chosen.indices, 4)
        losses.append(switch_load_balancing_loss_func(logits.softmax(-1), counts, len(logits), 2, 4, 0.05))
        losses.append(z_loss_func(logits, 0.02))
        return chosen

    return with_losses


def test_per_token_loss_multiplies_auxiliary_losses_by_the_tokens() -> None:
    fields = {**LLAMA_LIKE, "num_moe_experts": 4, "moe_aux_loss_coeff": 0.05}
    grads = []
    for per_token in (False, True):
        config = small_config(**fields, calculate_per_token_loss=per_token)
        router = TopKRouter(config)
        router.weight.data.copy_(torch.linspace(-1, 1, 128).view(4, 32).sin())
        weights, _ = router(torch.linspace(-1, 1, 192).view(6, 32).cos())
        (weights * 0).sum().backward()
        grads.append(router.weight.grad)
    torch.testing.assert_close(grads[1], 6 * grads[0])


def totals_of(recorder: AuxLossRecorder) -> dict[str, list[float]]:
    """Returns the sum and count of each recorded loss."""
    return {name: total.tolist() for name, total in recorder.take_totals().items() if total[1] > 0}


def test_records_are_summed_over_layers_and_microbatches_and_taken_once() -> None:
    recorder = AuxLossRecorder(num_layers=3, device=torch.device("cpu"))
    assert totals_of(recorder) == {}
    for value, layer in ((1.0, 1), (3.0, 1), (4.0, 3)):

        def recorded(x: torch.Tensor, value: float = value, layer: int = layer) -> torch.Tensor:
            recorder.record("z_loss", torch.tensor(value), layer_number=layer)
            return x.exp()

        # Backward runs the function a second time.
        checkpoint(recorded, False, torch.ones(1, requires_grad=True)).sum().backward()
    assert totals_of(recorder) == {"z_loss": [8.0, 3.0]}
    assert totals_of(recorder) == {}


def test_evaluation_records_nothing() -> None:
    fields = {**LLAMA_LIKE, "num_moe_experts": 4, "moe_aux_loss_coeff": 0.05}
    model = small_model(small_config(**fields)).eval()
    loss_of(model)
    model.train()
    with torch.no_grad():
        loss_of(model)
    assert totals_of(model.aux_losses) == {}
    loss_of(model)
    assert totals_of(model.aux_losses).keys() == {"load_balancing_loss"}
    assert "aux_losses.sums" not in model.state_dict()
