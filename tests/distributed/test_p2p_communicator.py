"""Combined transfers of P2PCommunicator, as a custom schedule calls them, on two and three stages."""

import pytest
import torch
import torch.distributed as dist

from megatron.core import parallel_state
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from tests.harness import run_on_ranks

SHAPE = (2, 3)


def _exchange() -> dict[str, list[float | None]]:
    """Returns the first element of each received tensor: outputs are 10 + stage, gradients 20 + stage."""
    size = dist.get_world_size()
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=size)
    own = P2PCommunicator(parallel_state.get_pipeline_model_parallel_group(), ModelParallelConfig())
    output, gradient = (torch.full(SHAPE, start + float(own.current_stage)) for start in (10, 20))
    is_first, is_last = own.is_pp_first_stage, own.is_pp_last_stage
    assert own.total_stages == size and (is_first, is_last) == (dist.get_rank() == 0, dist.get_rank() == size - 1)
    found = {
        "ring": [own.send_forward_recv_forward(output, True, SHAPE)],
        "line": [own.send_forward_recv_forward(None if is_last else output, not is_first, SHAPE)],
        "back": [own.send_backward_recv_backward(None if is_first else gradient, not is_last, SHAPE)],
        "both": [*own.send_forward_backward_recv_forward_backward(output, gradient, True, True, SHAPE)],
    }
    later, works = own.send_backward_recv_backward(gradient, True, SHAPE, overlap_p2p_comm=True)
    for work in works:
        work.wait()
    found["later"] = [later]
    assert all(one is None or (one.shape == SHAPE and one.requires_grad) for kind in found.values() for one in kind)
    return {name: [None if one is None else one[0, 0].item() for one in kind] for name, kind in found.items()}


@pytest.mark.parametrize("stages", [2, 3])
def test_neighbours_exchange_outputs_and_gradients(stages: int) -> None:
    for stage, found in enumerate(run_on_ranks(_exchange, stages)):
        before, after = 10 + (stage - 1) % stages, 20 + (stage + 1) % stages
        assert found == {
            "ring": [before],
            "line": [None if stage == 0 else before],
            "back": [None if stage == stages - 1 else after],
            "both": [before, after],
            "later": [after],
        }
