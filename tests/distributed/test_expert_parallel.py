"""Tests experts split over ranks against the same layer in one process with all ranks' tokens, in fp64."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core import parallel_state
from megatron.core.logical_tensors import model_logical_pieces
from megatron.core.transformer.moe.dispatch_alltoall import RowExchange
from megatron.core.transformer.moe.moe_layer import MoELayer
from tests.counts import soak_only
from tests.distributed.expert_layers import ALLTOALL, DISPATCHERS, KINDS, build_layer, rank_inputs, run_layer
from tests.harness import run_on_ranks
from tests.unit_tests.core.transformer.moe.small_experts import window_of

LAYOUTS = {"ep2": (2, 1), "ep4": (4, 1), "etp2": (1, 2), "ep2_etp2": (2, 2)}


def bend(layer: MoELayer, routing: str) -> None:
    """Routes all tokens to expert 1, or only to experts 0 and 1.

    The inputs are positive, so the largest row of router weights wins.
    """
    chosen = {"one_expert": [1], "idle_rank": [0, 1]}.get(routing, [])
    with torch.no_grad():
        for expert in chosen:
            layer.router.weight[expert] = layer.router.weight[expert].abs() + 5


def own_boxes(layer: MoELayer, grads: dict[str, Tensor]) -> list[tuple[str, tuple[int, ...], Any, Tensor]]:
    """Returns key, stored shape, window and gradient of each part of the experts that this rank stores."""
    return [
        (
            piece.key,
            piece.global_shape,
            window_of(piece),
            piece.view_of(grads[name]).clone(),
        )
        for name, pieces in model_logical_pieces(layer).items()
        if name.startswith("experts.")
        for piece in pieces
    ]


def _inputs(rank: int, routing: str) -> tuple[torch.Tensor, torch.Tensor]:
    return rank_inputs(rank, is_empty=routing == "rank_without_tokens" and rank == 0)


def on_rank(layout: tuple[int, int], cases: list[tuple[str, dict[str, Any]]]) -> list[Any]:
    """Returns for each case this rank's output, input gradient, and the boxes of its experts' gradients."""
    parallel_state.initialize_model_parallel(
        expert_model_parallel_size=layout[0], expert_tensor_parallel_size=layout[1]
    )
    results = []
    for routing, fields in cases:
        layer = build_layer(parallel_state.get_process_groups(), **fields)
        bend(layer, routing)
        output, x_grad, grads = run_layer(layer, *_inputs(dist.get_rank(), routing))
        dense = {name: grad for name, grad in grads.items() if not name.startswith("experts.")}
        results.append((output, x_grad, own_boxes(layer, grads), dense))
    return results


# "ep2_etp2" splits across experts and within them; "ep4" and "etp2" do only one of these.
@pytest.mark.slow
@pytest.mark.parametrize("layout", ["ep2", "ep2_etp2", soak_only("ep4"), soak_only("etp2")])
def test_layer_over_ranks_is_the_layer_in_one_process(layout: str) -> None:
    cases = [("even", {**fields, **dispatcher}) for fields in KINDS.values() for dispatcher in DISPATCHERS]
    cases.append(("even", {**cases[-1][1], "moe_shared_expert_overlap": True}))
    compare(LAYOUTS[layout], cases)


# "ep2_etp2" splits across experts and within them; each of the others does only one of these.
@pytest.mark.slow
@pytest.mark.parametrize("layout", ["ep2_etp2", soak_only("ep2"), soak_only("ep4"), soak_only("etp2")])
def test_b31_experts_and_ranks_without_tokens_work_in_every_dispatcher(layout: str) -> None:
    """TRAPS B31: with any routing, all ranks reach the same collectives without hanging, and all gradients exist."""
    cases = [
        (routing, {**KINDS[kind], **dispatcher, "moe_router_topk": 1 + (routing != "one_expert")})
        for routing in ("one_expert", "idle_rank", "rank_without_tokens")
        for kind in ("grouped", "biases", "static", "static biases")
        for dispatcher in DISPATCHERS
        # All-gather dispatch and fixed-size buffers need the same number of tokens from each rank.
        if routing != "rank_without_tokens" or (dispatcher == ALLTOALL and not kind.startswith("static"))
    ]
    compare(LAYOUTS[layout], cases)


def compare(layout: tuple[int, int], cases: list[tuple[str, dict[str, Any]]]) -> None:
    per_rank = run_on_ranks(on_rank, layout[0] * layout[1], layout, cases)
    for index, case in enumerate(cases):
        agrees_with_one_process([results[index] for results in per_rank], *case)


def agrees_with_one_process(per_rank: list[Any], routing: str, fields: dict[str, Any]) -> None:
    """Asserts that the ranks' results equal the layer in one process. per_rank: results of on_rank for this case."""
    layer = build_layer(**fields)
    bend(layer, routing)
    inputs = [_inputs(rank, routing) for rank in range(len(per_rank))]
    sizes = [len(tokens) for tokens, _ in inputs]
    output, x_grad, grads = run_layer(layer, *(torch.cat(parts) for parts in zip(*inputs, strict=True)))
    close = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-12)
    close([out for out, _, _, _ in per_rank], list(output.split(sizes)))
    close([grad for _, grad, _, _ in per_rank], list(x_grad.split(sizes)))
    whole = {key: torch.zeros(shape, dtype=torch.float64) for key, shape, _, _ in own_boxes(layer, grads)}
    for key, _, window, box in own_boxes(layer, grads):
        whole[key][window] = box
    for key, _, window, box in (entry for _, _, boxes, _ in per_rank for entry in boxes):
        close(box, whole[key][window])
    for name in per_rank[0][3]:
        close(sum(dense[name] for _, _, _, dense in per_rank), grads[name])


def _own_experts() -> list[int]:
    parallel_state.initialize_model_parallel(expert_model_parallel_size=2, expert_tensor_parallel_size=2)
    indices = build_layer(parallel_state.get_process_groups(), **KINDS["grouped"]).local_expert_indices
    dist.barrier()  # no rank exits while another still connects to it
    return indices


def test_ranks_that_split_experts_among_them_have_the_same_experts() -> None:
    assert run_on_ranks(_own_experts, 4) == [[0, 1], [0, 1], [2, 3], [2, 3]]


def test_the_shared_expert_computes_while_rows_are_on_their_way() -> None:
    # Rows and their weights are sent together. The last exchange of forward, and the first of backward, belong to
    # combine.
    forward = ["send", "shared", "arrive", "send", "arrive"]
    backward = ["send", "arrive", "send", "shared", "arrive"]
    assert run_on_ranks(_order_of_launches, 2) == [forward + backward] * 2


def _order_of_launches() -> list[str]:
    parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
    fields = {**KINDS["shared"], **ALLTOALL, "moe_shared_expert_overlap": True}
    layer, order = build_layer(parallel_state.get_process_groups(), **fields), []
    layer.shared_experts.register_forward_hook(lambda *_: order.append("shared"))
    layer.shared_experts.linear_fc2.weight.register_hook(lambda grad: order.append("shared"))
    for name, word in (("launch", "send"), ("finish", "arrive")):
        original = getattr(RowExchange, name)
        patched = lambda self, *args, o=original, w=word, **kw: (order.append(w), o(self, *args, **kw))[1]  # noqa: E731
        setattr(RowExchange, name, patched)
    run_layer(layer, *rank_inputs(dist.get_rank()))
    return order
