"""The optimizer's step in a CUDA graph is bitwise equal to eager steps. Skipped without a GPU."""

import pytest
import torch

from megatron.core.device import default_device, prepare_device
from tests.unit_tests.core.optimizer.grouped_run import (
    FP16,
    PRECISE,
    STEPS,
    assert_same_state,
    build,
    prepare_gradients,
    state_of,
)

pytestmark = pytest.mark.gpu

CAPTURED_AT, VOIDS = 2, {1, 2, 4, 6}


@pytest.mark.parametrize("settings", [{}, {"optimizer": "sgd"}, {"bf16": True}, PRECISE, FP16], ids=str)
@pytest.mark.parametrize("clip_grad", [0.0, 0.05])
def test_a_step_that_was_captured_once_follows_gradients_rates_scales_and_voids(settings, clip_grad):
    prepare_device(device := default_device())
    settings = {**settings, "clip_grad": clip_grad, "log_num_zeros_in_grad": True}
    host, graphed = build(settings, device), build(settings, device)
    optimizer, discard, graph = graphed[1], torch.zeros(1, dtype=torch.int32, device=device), torch.cuda.CUDAGraph()
    loss, captured = torch.zeros((), device=device), None

    def scale_and_step():
        return optimizer.scale_loss(loss), optimizer.step_on_device(discard)

    for step in range(STEPS):
        for run in (host, graphed):
            prepare_gradients(*run, step)
        for is_discarded in (1, 0) if step in VOIDS else (0,):
            discard.fill_(is_discarded)
            loss.fill_(step)
            before = state_of(*graphed)
            expected = host[1].scale_loss(loss)
            optimizer.prepare_device_step()
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
            try:
                if step == CAPTURED_AT and captured is None:
                    with torch.cuda.graph(graph):
                        captured = scale_and_step()
                if captured is not None:
                    graph.replay()
                scaled, done = captured or scale_and_step()
            finally:
                torch.cuda.set_sync_debug_mode("default")
            report = optimizer.settle_step_sync(done)
            assert torch.equal(scaled, expected)
            if is_discarded:
                assert not report[0] and all(map(torch.equal, before, state_of(*graphed)))
        assert repr(report) == repr(host[1].step())
        assert_same_state(graphed, host)
