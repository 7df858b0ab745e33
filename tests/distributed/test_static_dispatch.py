"""Fixed-size buffers between ranks: rows that a routing requires, against counts of all ranks' choices."""

import math
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core import parallel_state
from megatron.core.device import default_device
from megatron.core.transformer.moe.dispatch import RowDemand
from megatron.core.transformer.moe.dispatch_static import (
    MoEStaticAllGatherTokenDispatcher,
    MoEStaticAlltoAllTokenDispatcher,
    MoEStaticTokenDispatcher,
    padded_rank_rows,
    rank_row_layout,
)
from tests.counts import soak_only
from tests.distributed.expert_choices import EXPERTS, ROUTINGS, TOKENS, TOPK, chosen_experts
from tests.distributed.expert_layers import DISPATCHERS as DISPATCHER_FIELDS
from tests.distributed.expert_layers import KINDS, build_layer, rank_inputs, run_layer
from tests.harness import run_on_ranks
from tests.unit_tests.core.models.small_models import small_config

# Expert-parallel ranks, and ranks that share an expert.
LAYOUTS = [(1, 1), (2, 1), (3, 1), (4, 1), (2, 2)]


def on_rank(layout: tuple[int, int], alignments: list[int]) -> dict[tuple[str, str, int], list[float]]:
    """Returns the results of `demands` on this rank by dispatcher, routing and alignment."""
    parallel_state.initialize_model_parallel(
        expert_model_parallel_size=layout[0], expert_tensor_parallel_size=layout[1]
    )
    config = small_config(
        num_moe_experts=EXPERTS,
        moe_router_topk=TOPK,
        moe_grouped_gemm=True,
        add_bias_linear=False,
        moe_expert_rank_capacity_factor=1.0,
        expert_model_parallel_size=layout[0],
        expert_tensor_parallel_size=layout[1],
    )
    share = EXPERTS // layout[0]
    local, results = range(EXPERTS)[dist.get_rank() // layout[1] * share :][:share], {}
    for kind in (MoEStaticAllGatherTokenDispatcher, MoEStaticAlltoAllTokenDispatcher):
        for alignment in alignments:
            dispatcher = kind(
                share, local, config=config, pg_collection=parallel_state.get_process_groups(), row_alignment=alignment
            )
            for routing in ROUTINGS:
                key = kind.__name__, routing, alignment
                results[key] = demands(dispatcher, chosen_experts(dist.get_rank(), routing))
    return results


def demands(dispatcher: MoEStaticTokenDispatcher, indices: Tensor) -> list[float]:
    """Returns the factor this rank needs, and its missing rows with factor 1 and with the largest needed factor."""

    def dispatch(expert_indices: Tensor) -> RowDemand:
        ready = dispatcher.dispatch_preprocess(torch.ones(TOKENS, 3), expert_indices, torch.rand(TOKENS, TOPK))
        dispatcher.dispatch_postprocess(*dispatcher.token_dispatch(*ready))
        return dispatcher.take_demand()

    dispatcher.set_capacity_factor(1.0)
    before = dispatch(indices)
    largest = before.factor_needed.clone()
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    dispatcher.set_capacity_factor(largest.item())
    after = dispatch(indices)
    return [number.item() for number in (before.factor_needed, before.rows_missing, after.rows_missing)]


# Two expert ranks, with and without shared experts, and three expert ranks cover every branch of four expert ranks.
@pytest.mark.parametrize("layout", [*LAYOUTS[:3], soak_only(LAYOUTS[3]), LAYOUTS[4]])
def test_a_dispatch_says_with_which_factor_nothing_would_be_lost(layout: tuple[int, int]) -> None:
    ranks, shards = layout[0] * layout[1], layout[1]
    alignments = [1, 16, 32, 128] if layout == (1, 1) else [1, 16]
    balanced = TOKENS * TOPK * shards
    per_rank = run_on_ranks(on_rank, ranks, layout, alignments)
    for kind, routing, alignment in per_rank[0]:
        # Rows that each rank sends to each expert of an expert rank.
        counts = [chosen_experts(rank, routing).flatten().bincount(minlength=EXPERTS) for rank in range(ranks)]
        wanted = torch.stack(counts).view(ranks, layout[0], -1).repeat_interleave(shards, dim=1)
        of_rank = ((wanted.sum(0) + alignment - 1) // alignment * alignment).sum(1)
        of_pair = wanted.sum(2).amax(1) if "AlltoAll" in kind else torch.full((ranks,), -math.inf)
        # The buffer has room for the rows of the factor and for the padding of every expert.
        padding = EXPERTS // layout[0] * (alignment - 1)
        room = (balanced + padding) // alignment * alignment
        for rank, found in enumerate(result[kind, routing, alignment] for result in per_rank):
            needed = max((of_rank[rank].item() - padding) / balanced, of_pair[rank].item() / (balanced / ranks))
            missing = max(0, of_rank[rank].item() - room, of_pair[rank].item() - -(-balanced // ranks))
            assert found == [pytest.approx(needed), missing, 0], (kind, routing, alignment)
            # No padding displaces a row: rows are missing only if they would be missing without padding.
            assert wanted.sum((0, 2))[rank] > balanced or of_pair[rank] * ranks > balanced or missing == 0


@pytest.mark.parametrize("alignment", [1, 16])
def test_no_row_behind_the_live_ones_counts_whatever_lies_there(alignment: int) -> None:
    """TRAPS part 2, 5: forward and all gradients of the grouped GEMMs ignore rows after the live ones, even if NaN."""
    for results in run_on_ranks(_with_and_without_poison, 2, alignment):
        for dispatcher, (plain, *others) in results.items():
            assert plain[0].isfinite().all() and len(plain) == 5, dispatcher
            for other in others:
                assert all(torch.equal(one, same) for one, same in zip(plain, other, strict=True)), dispatcher


def _with_and_without_poison(alignment: int) -> dict[str, list[list[Tensor]]]:
    """Returns each dispatcher's output and gradients: without poison, with poison, and with poison and padded rows."""
    parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
    fields = {**KINDS["static"], "moe_expert_rank_capacity_factor": 2.0}
    results: dict[str, list[list[Tensor]]] = {}
    for dispatcher in DISPATCHER_FIELDS:
        layer = build_layer(parallel_state.get_process_groups(), **fields, **dispatcher).float()
        layer.token_dispatcher.budget = replace(layer.token_dispatcher.budget, alignment=alignment)
        layer.expert_step.begin()
        found = results.setdefault(str(dispatcher), [])
        own = rank_row_layout(default_device())
        for is_poisoned, layout in ((False, own), (True, own), (True, padded_rank_rows)):
            # Makes torch fill uninitialized memory with NaN.
            torch.use_deterministic_algorithms(is_poisoned, warn_only=True)
            if isinstance(layer.token_dispatcher, MoEStaticAlltoAllTokenDispatcher):
                layer.token_dispatcher.layout = layout
            output, x_grad, grads = run_layer(layer, *(one.float() for one in rank_inputs(dist.get_rank())))
            found.append([output, x_grad, *grads.values()])
        torch.use_deterministic_algorithms(False)
    return results
