"""If max_rows equals another size too, results remain correct, or an error describes the ambiguity."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from megatron.core.transformer.moe.experts import ExpertAdapter, GroupedMLP, GroupedMLPSubmodules
from megatron.core.transformer.moe.paged_stash import (
    PagedStash,
    RowTensors,
    add_expert_bias,
    add_low_rank,
    gated_activation,
    grouped_gemm,
)
from megatron.core.transformer.moe.static_rows import order_by_expert
from tests.unit_tests.core.models.small_models import small_config
from tests.unit_tests.core.transformer.moe.paged_stash.expert_models import assert_same, is_empty_sync, make_stash

C, LIVE, LAYERS = 16, 6, 3
Weight = Callable[[], Tensor]


def run_layers(
    layer: Callable[[Tensor, int, Any], Tensor], stash: PagedStash | None, *, takes: RowTensors = RowTensors.GUESSED
) -> list[Tensor]:
    """Returns the gradient of the live rows of a [C, C] input through the layers, each in a separate context."""
    x = torch.randn(C, C, generator=torch.Generator().manual_seed(1)).requires_grad_()
    hidden = x * 1.0
    for number in range(LAYERS):
        if stash is None:
            hidden = layer(hidden, number, None)
            continue
        with stash.context(f"layer {number}", LIVE, max_rows=C, takes=takes) as group:
            hidden = layer(hidden, number, group)
    hidden[:LIVE].square().sum().backward()
    assert x.grad is not None
    return [x.grad[:LIVE]]


@pytest.mark.parametrize("ffn", [8, 16, 24])
@pytest.mark.parametrize("rank", [4, 16])
@pytest.mark.parametrize("has_weight_mask", [False, True])
def test_products_of_ours_know_their_rows_where_all_sizes_coincide(ffn: int, rank: int, has_weight_mask: bool) -> None:
    offsets = torch.cat([torch.zeros(C - LIVE), torch.arange(1, LIVE + 1)]).int()  # as many experts as rows

    def run(stash: PagedStash | None) -> list[Tensor]:
        torch.manual_seed(3)
        sizes = [(C, C, 2 * ffn), (C, ffn, C), (C, C, rank), (C, rank, 2 * ffn), (C, 2 * ffn), (C, C)]
        parameters = [[nn.Parameter(torch.randn(size) * 0.2) for size in sizes] for _ in range(LAYERS)]
        mask, x = (torch.rand(C, C, 2 * ffn) > 0.3).float(), torch.randn(C, C)  # x without grad
        scale = torch.rand(C, requires_grad=True)
        hidden, num_rows = x, offsets[-1:].long()

        def forward(hidden: Tensor, fc1: Tensor, fc2: Tensor, *others: Tensor) -> Tensor:
            lora_a, lora_b, bias1, bias2 = others
            gate_up = add_expert_bias(grouped_gemm(hidden, fc1, offsets=offsets), bias1, offsets=offsets)
            low = grouped_gemm(hidden, lora_a, offsets=offsets)
            gate_up = add_low_rank(gate_up, low, weight=lora_b, offsets=offsets, scale=2.0)
            act = gated_activation(gate_up, scale * 1.0, num_rows=num_rows)
            product = grouped_gemm(act, fc2, offsets=offsets)
            return add_expert_bias(product, bias2, offsets=offsets, scale=scale * 1.0)

        for number, (fc1, *others) in enumerate(parameters):
            used = fc1 * mask if has_weight_mask else fc1
            with nullcontext() if stash is None else stash.context(str(number), num_rows, max_rows=C):
                hidden = forward(hidden, used, *others)
        hidden[:LIVE].square().sum().backward()
        assert scale.grad is not None
        return [scale.grad[:LIVE], *[one.grad for layer in parameters for one in layer if one.grad is not None]]

    stash = make_stash(4000)
    assert_same(run(stash), run(None))
    assert is_empty_sync(stash)


@pytest.mark.parametrize("experts", [2, C])
@pytest.mark.parametrize("ffn", [8, 16])
@pytest.mark.parametrize("rank", [4, 16])
# With 110 pages some tensors are recomputed. By hooks, gate_up is stored like x.
@pytest.mark.parametrize("pages, by_hooks", [(110, False), (4000, False), (4000, True)])
def test_static_experts_take_their_rows_alone_where_all_sizes_coincide(
    experts: int, ffn: int, rank: int, pages: int, by_hooks: bool
) -> None:
    last = torch.arange(experts) - experts + 1 + LIVE
    counts = last.clamp(min=0).diff(prepend=torch.zeros(1, dtype=torch.int64))
    chosen = torch.arange(experts).repeat_interleave(counts)
    # Tokens that are sorted by expert already; the last ones have none.
    order = order_by_expert(F.pad(chosen, (0, C - LIVE), value=experts).view(-1, 1), experts, capacity=C)
    config = small_config(
        hidden_size=C,
        num_moe_experts=experts,
        moe_router_topk=1,
        moe_ffn_hidden_size=ffn,
        moe_grouped_gemm=True,
        moe_expert_rank_capacity_factor=1.0,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=True,
        lora_rank=rank,
        lora_alpha=2 * rank,
        lora_target_modules=["linear_fc1", "linear_fc2"],
    )

    def run(stash: PagedStash | None) -> list[Tensor]:
        torch.manual_seed(3)
        adapted = GroupedMLPSubmodules(linear_fc1=ExpertAdapter, linear_fc2=ExpertAdapter)
        layers = [GroupedMLP(experts, config, submodules=adapted) for _ in range(LAYERS)]
        for parameter in (one for layer in layers for one in layer.parameters()):
            torch.nn.init.normal_(parameter, std=0.2)
        hidden, weights = torch.randn(C, C), torch.rand(C, requires_grad=True)
        for number, layer in enumerate(layers):
            name, scale = str(number), (weights * 1.0).view(-1, 1)
            if stash is None:
                hidden = layer(hidden, order.rows_per_group, scale, order=order)[0]
            elif by_hooks:
                with stash.context(name, order.num_rows, max_rows=C, takes=RowTensors.DECLARED):
                    hidden = layer(hidden, order.rows_per_group, scale, order=order)[0]
            else:
                with stash.begin(name, order.num_rows, max_rows=C) as stashed:
                    hidden = layer(hidden, order.rows_per_group, scale, order=order, stashed=stashed)[0]
        hidden[:LIVE].square().sum().backward()
        assert weights.grad is not None
        grads = [one.grad for layer in layers for one in layer.parameters() if one.grad is not None]
        assert len(grads) == 8 * LAYERS
        return [weights.grad[:LIVE], *grads]

    stash = make_stash(pages)
    assert_same(run(stash), run(None))
    assert is_empty_sync(stash) and not stash.is_void_sync()


def test_offsets_of_torchs_product_with_as_many_experts_as_rows_are_named_or_kept() -> None:
    torch.manual_seed(3)
    weights = [nn.Parameter(torch.randn(C, C, C) * 0.3) for _ in range(LAYERS)]
    offsets = torch.cat([torch.zeros(C - LIVE), torch.arange(1, LIVE + 1)]).int()

    def layer(hidden: Tensor, number: int, _group: Any) -> Tensor:
        return F.grouped_mm(hidden, weights[number], offs=offsets).tanh()

    def kept(hidden: Tensor, number: int, group: Any) -> Tensor:
        if group is not None:
            group.keep(offsets)
        return layer(hidden, number, group)

    with pytest.raises(ValueError, match=r"\[16\], torch.int32.*max_rows \(16\).*group\.keep"):
        run_layers(layer, make_stash())
    assert_same(run_layers(kept, make_stash()), run_layers(layer, None))


def _masked() -> Weight:
    weight, mask = nn.Parameter(torch.randn(C, C)), torch.rand(C, C)
    return lambda: weight * mask


def _low_rank() -> Weight:
    weight = nn.Parameter(torch.randn(C, C), requires_grad=False)
    b, a = nn.Parameter(torch.randn(C, 2)), nn.Parameter(torch.randn(2, C))
    return lambda: weight + b @ a


def _kron() -> Weight:
    weight = nn.Parameter(torch.randn(C, C), requires_grad=False)
    b, a = nn.Parameter(torch.randn(4, 2)), nn.Parameter(torch.randn(4, 8))
    return lambda: weight + torch.kron(b, a)


def _straight_through() -> Weight:
    weight = nn.Parameter(torch.randn(C, C))
    return lambda: weight + (weight.round() - weight).detach()


def _spectral() -> Weight:
    layer = parametrizations.spectral_norm(nn.Linear(C, C))
    return lambda: layer.weight


def _stacked(count: int = C) -> Weight:
    parts, mask = [nn.Parameter(torch.randn(C)) for _ in range(count)], torch.rand(C)
    return lambda: torch.stack([part * mask for part in parts])


def _buffer() -> Weight:
    weight = torch.randn(C, C)
    return lambda: weight


@pytest.mark.parametrize("make", [_masked, _low_rank, _kron, _straight_through, _spectral, _stacked, _buffer])
@pytest.mark.parametrize("is_made_inside", [True, False])
def test_weights_computed_from_parameters_and_constants_are_refused_until_kept(
    make: Callable[[], Weight], is_made_inside: bool
) -> None:
    torch.manual_seed(3)
    weight = make()

    def run(stash: PagedStash | None, takes: RowTensors = RowTensors.GUESSED) -> list[Tensor]:
        made = weight()

        def layer(hidden: Tensor, _number: int, group: Any) -> Tensor:
            if takes is RowTensors.DECLARED:
                group.rows(hidden)
            return (hidden @ (weight() if is_made_inside else made)).tanh()

        return run_layers(layer, stash, takes=takes)

    with pytest.raises(ValueError, match=r"outermost size is max_rows \(16\).*group\.keep\(tensor\)"):
        run(make_stash())
    if make is not _spectral:  # each use of _spectral computes a different estimate
        assert_same(run(make_stash(), RowTensors.DECLARED), run(None))


@pytest.mark.parametrize("count", [16, 33, 64, 200])
def test_stacks_of_any_number_of_parameters_are_weights(count: int) -> None:
    torch.manual_seed(3)
    parts = [nn.Parameter(torch.randn(8, 8) * 0.3) for _ in range(count)]
    offsets = torch.cat([torch.zeros(count - LIVE), torch.arange(1, LIVE + 1)]).int()
    x = torch.randn(count, 8)

    def run(stash: PagedStash | None) -> list[Tensor]:
        hidden = leaf = x.clone().requires_grad_()
        for number in range(LAYERS):
            if stash is None:
                hidden = F.grouped_mm(hidden, torch.stack(parts), offs=offsets).tanh()
                continue
            with stash.context(str(number), LIVE, max_rows=count) as group:
                group.keep(offsets)
                hidden = F.grouped_mm(hidden, torch.stack(parts), offs=offsets).tanh()
        hidden[:LIVE].square().sum().backward()
        assert leaf.grad is not None
        return [leaf.grad[:LIVE]]

    assert_same(run(make_stash()), run(None))
