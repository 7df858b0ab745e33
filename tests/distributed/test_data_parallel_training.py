"""Tests that replicas train like one process, stay equal to each other, and raise the same errors."""

import math
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    LaunchOrder,
    NonFiniteGradientError,
    check_weights_agree,
    finalize_model_grads,
)
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.process_groups_config import ProcessGroupCollection
from tests.counts import long_count, soak_only
from tests.harness import run_on_ranks
from tests.unit_tests.core.optimizer.reference import microbatches, our_step, tiny_model, wrap, wrap_and_build


def train(ranks, steps, settings):
    """Trains each rank on its rows of each step's batch. Returns parameters and gradient norms."""
    torch.set_num_threads(1)
    dtype = torch.bfloat16 if settings.get("bf16") else torch.float32
    model = tiny_model(dtype)
    wrapped, optimizer = wrap_and_build(model, group=dist.group.WORLD if ranks > 1 else None, **settings)
    rank = dist.get_rank() if ranks > 1 else 0
    norms = []
    for step in range(steps):
        (batch,) = microbatches(step, dtype=dtype)
        norms.append(our_step(wrapped, optimizer, [batch.chunk(ranks)[rank]])[1])
    return [p.detach().clone() for p in model.parameters()], norms


@pytest.mark.parametrize("ranks", [3, soak_only(2)])
@pytest.mark.parametrize(
    "settings", [{"optimizer": "sgd"}, {"optimizer": "sgd", "deterministic_mode": True}, {"bf16": True}]
)
def test_ranks_together_train_as_one_process_does(ranks, settings):
    steps = long_count(5, soak=20)
    alone, norms = train(1, steps, settings)
    per_rank = run_on_ranks(train, ranks, ranks, steps, settings)
    tolerance = {"rtol": 0.05, "atol": 0.02} if settings.get("bf16") else {"rtol": 5e-5, "atol": 1e-6}
    for params, rank_norms in per_rank:
        assert all(torch.equal(p, q) for p, q in zip(params, per_rank[0][0])) and rank_norms == per_rank[0][1]
        for p, q in zip(params, alone):
            torch.testing.assert_close(p, q, **tolerance)
        assert rank_norms == pytest.approx(norms, rel=0.05 if settings.get("bf16") else 5e-5)


class Branches(nn.Module):
    """Two layers; a forward uses only the layers that it is given."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 2, bias=False) for _ in range(2)])

    def forward(self, x, used):
        return sum((self.layers[i](x) for i in used), x * 0.0)


def gradients_of_branches(plan):
    """Returns the gradient sums of both layers after each step. plan: for each step and rank, the layers used."""
    model = wrap(Branches(), dist.group.WORLD)
    seen = []
    for step in plan:
        model.zero_grad_buffer()
        used = step[dist.get_rank()]
        loss = model(torch.ones(1, 2, requires_grad=True), used).sum()
        loss.backward()
        finalize_model_grads([model])
        seen.append([float(grad.sum()) for _, grad in model.named_main_grads()])
    return seen


def test_unused_parameters_count_as_zero_on_whichever_rank():
    everywhere, one_rank, alternating = [(0,), (0,), (0,)], [(0, 1), (0,), (0,)], [(1,), (0,), (1,)]
    results = run_on_ranks(gradients_of_branches, 3, [everywhere, one_rank, alternating, everywhere])
    expected = [[4.0, 0.0], [4.0, 4 / 3], [4 / 3, 8 / 3], [4.0, 0.0]]
    for rank in results:
        assert rank == [pytest.approx(sums) for sums in expected]


def overflow_on_one_rank(settings):
    wrapped, optimizer = wrap_and_build(tiny_model(torch.float16), group=dist.group.WORLD, fp16=True, **settings)
    outcomes = []
    for step in range(4):
        (x,) = microbatches(step, dtype=torch.float16)
        bad = step == 1 and dist.get_rank() == 2
        updated, _, _ = our_step(wrapped, optimizer, [x * math.inf if bad else x])
        outcomes.append((updated, float(optimizer.get_loss_scale()), optimizer.state_dict()["step"]))
    check_weights_agree(wrapped, dist.group.WORLD)
    return outcomes


def test_overflow_on_one_rank_skips_the_step_on_all():
    results = run_on_ranks(overflow_on_one_rank, 3, {"initial_loss_scale": 64.0, "hysteresis": 1})
    assert results == [[(True, 64.0, 1), (False, 32.0, 1), (True, 32.0, 2), (True, 32.0, 3)]] * 3


def nan_on_one_rank():
    """Returns the error that a NaN on rank 1 raises on this rank, and the number of all-reduces.

    Each rank is a pipeline stage with two chunks. Rank 2's are frozen, as a stage may be.
    """
    groups, order = ProcessGroupCollection(pp=dist.group.WORLD), LaunchOrder(pp_group=dist.group.WORLD)
    parts = [tiny_model().requires_grad_(dist.get_rank() != 2) for _ in range(2)]
    config, settings = ModelParallelConfig(), DistributedDataParallelConfig(check_for_nan_in_grad=True)
    chunks = [
        DistributedDataParallel(config, settings, part, pg_collection=groups, launch_order=order) for part in parts
    ]
    for step in range(2):
        for chunk in chunks:
            chunk.zero_grad_buffer()
        for chunk in chunks if dist.get_rank() != 2 else []:
            chunk(torch.ones(2, 5)).sum().backward()
        if step == 1 and dist.get_rank() == 1:
            dict(chunks[1].named_main_grads())["2.weight"][3, 1] = math.nan
        try:
            with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as all_reduce:
                finalize_model_grads(chunks)
        except NonFiniteGradientError as error:
            return str(error), all_reduce.call_count


def test_a_nan_is_reported_on_all_ranks_with_its_rank_and_parameter():
    outcomes = run_on_ranks(nan_on_one_rank, 3)
    assert outcomes[0] is not None and len(set(outcomes)) == 1
    message, exchanges = outcomes[0]
    assert "not finite on rank 1: 2.weight." in message
    assert "rank 0" not in message and "rank 2" not in message
    # One all-reduce for all chunks together.
    assert exchanges == 1


def test_a_frozen_module_takes_part_on_its_own_device():
    assert wrap(nn.Linear(1, 1, device="meta").requires_grad_(False)).device.type == "meta"


def different_weights():
    model = tiny_model(torch.bfloat16)
    check_weights_agree(model, dist.group.WORLD)
    if dist.get_rank() == 2:
        model[2].bias.data[0] += 1.0
    try:
        check_weights_agree(model, dist.group.WORLD)
    except ValueError as error:
        model[4].bias.requires_grad_(False)
        wrap(model, dist.group.WORLD).broadcast_params()
        check_weights_agree(model, dist.group.WORLD)
        model[4].requires_grad_(dist.get_rank() != 1)
        with pytest.raises(ValueError, match=r"parameter 4.weight differs .* and ranks \[1\]: .* train the same"):
            check_weights_agree(model, dist.group.WORLD)
        return str(error)


def test_different_weights_are_found_before_the_first_step_and_a_broadcast_mends_them():
    for message in run_on_ranks(different_weights, 3):
        assert "parameter 2.bias differs between data-parallel rank 0 and ranks [2]" in message


def per_token_gradient():
    model = wrap(nn.Linear(2, 1, bias=False), dist.group.WORLD, calculate_per_token_loss=True)
    tokens = [1, 0, 7][dist.get_rank()]
    (model(torch.ones(tokens, 2)).sum() * (1.0 + dist.get_rank())).backward()
    num_tokens = torch.tensor(tokens)
    finalize_model_grads([model], num_tokens)
    assert num_tokens == tokens
    with pytest.raises(ValueError, match="calculate_per_token_loss is True"):
        finalize_model_grads([model])
    return dict(model.named_main_grads())["weight"].tolist()


def test_uneven_tokens_give_the_mean_over_all_tokens():
    # Rank 0 adds 1 x 1, rank 2 adds 7 x 3; 8 tokens in total.
    assert run_on_ranks(per_token_gradient, 3) == [[[22 / 8, 22 / 8]]] * 3


def test_finalize_asks_for_the_wrapper():
    with pytest.raises(ValueError, match="Linear: must be wrapped"):
        finalize_model_grads([nn.Linear(1, 1)])
