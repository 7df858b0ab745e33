"""On a GPU, each replay of a captured graph draws new numbers, equal to those of eager steps with the same seed."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.tensor_parallel import get_cuda_rng_tracker, model_parallel_cuda_manual_seed
from tests.counts import long_count

pytestmark = pytest.mark.gpu

STEPS = long_count(4, soak=100)


def draw(ones: Tensor) -> Tensor:
    """Draws from the default random stream, from two other streams, and from the default stream again."""
    default = F.dropout(ones, 0.5)
    with get_cuda_rng_tracker().fork():
        own = F.dropout(ones, 0.25)
    with get_cuda_rng_tracker().fork("expert-parallel-rng"):
        own = own + torch.rand_like(ones)
    return torch.stack([default, own, F.dropout(ones, 0.5)])


def test_replays_draw_what_eager_steps_draw() -> None:
    ones = torch.ones(1 << 14, device="cuda")
    model_parallel_cuda_manual_seed(7)
    eager = [draw(ones) for _ in range(STEPS)]
    assert all((one != other).any(dim=1).all() for one, other in zip(eager, eager[1:]))
    model_parallel_cuda_manual_seed(7)
    tracker, graph = get_cuda_rng_tracker(), torch.cuda.CUDAGraph()
    for generator in tracker.generators():
        graph.register_generator_state(generator)
    with torch.cuda.graph(graph):
        drawn = draw(ones)
    begin = torch.cuda.get_rng_state(), tracker.get_states()
    for _ in range(2):
        for step, expected in enumerate(eager):
            if step % 3 == 2:  # eager steps between replays advance the same random streams
                assert torch.equal(draw(ones), expected)
            else:
                graph.replay()
                assert torch.equal(drawn, expected)
        # Restores the states, as for a retried step or a resumed run.
        torch.cuda.set_rng_state(begin[0])
        tracker.set_states(begin[1])
