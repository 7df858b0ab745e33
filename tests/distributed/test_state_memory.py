"""Persistent memory of a rank between steps, per tensor, against the formula."""

import pytest
import torch
from torch import nn

from megatron.core.optimizer.state_memory import state_bytes_of
from tests.counts import soak_only
from tests.distributed.optimizer_runs import PRECISE, Run
from tests.harness import run_on_ranks

NUM_PARAMS = 5 * 512 + 512 + 512 * 500 + 500 + 1
# Bytes per parameter of the buffers, and of the optimizer state before sharding.
CASES = [
    (torch.float32, {}, 8, 8),
    (torch.bfloat16, {}, 6, 12),
    (torch.bfloat16, {**PRECISE, "grad_reduce_in_fp32": False, "main_grads_dtype": "bf16"}, 4, 6),
    (torch.float32, {"optimizer": "sgd"}, 8, 4),
    (torch.float32, {"optimizer": "muon"}, 8, 4),
]


def held_and_planned(zero1):
    """Returns for each case the bytes that persist after a step on this rank, and the bytes that the formula gives."""
    found = []
    for dtype, settings, *_ in CASES:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 512), nn.Linear(512, 500, bias=False), nn.Linear(500, 1)).to(dtype)
        run = Run(model, zero1=zero1, overlap="grads", bucket_size=100_000, **settings)
        run.step(0)
        flats = [flat for buffer in run.model.all_buffers for flat in (buffer.param_data, buffer.grad_data)]
        memory = {flat.untyped_storage().data_ptr(): flat.untyped_storage().nbytes() for flat in flats}
        views = [tensor for param in run.model.parameters() for tensor in (param, param.main_grad)]
        assert {view.untyped_storage().data_ptr() for view in views} == set(memory)
        states = sum(run.optimizer.state_bytes.values())
        found.append((sum(memory.values()), states, state_bytes_of([run.model], run.optimizer.config)))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("zero1", "ranks"), [(False, 2), (True, 3), soak_only(True, 2), soak_only(True, 4)])
def test_a_rank_holds_what_the_formula_says(zero1, ranks):
    for found in run_on_ranks(held_and_planned, ranks, zero1):
        for (*_, of_buffers, of_states), (buffers, states, planned) in zip(CASES, found, strict=True):
            assert planned.parameters + planned.gradients == of_buffers * NUM_PARAMS
            assert buffers == pytest.approx(of_buffers * NUM_PARAMS, rel=0.01)
            assert states == pytest.approx(of_states * NUM_PARAMS / (ranks if zero1 else 1), rel=0.01)
            assert planned.masters + planned.moments == pytest.approx(states, rel=0.01)
