"""Communication overlaps with backward: verified by the order of events, reported in log lines."""

from unittest.mock import patch

import pytest
import torch
from torch import nn

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.launch_sequence import LaunchSequence
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.training.callbacks import StepReport
from megatron.training.meters.overlap import OverlapMeter
from tests.harness import run_on_ranks

LAYERS, WIDTH = 6, 192


def report(iteration):
    zeros = dict.fromkeys(("num_zeros", "global_batch_size", "consumed_samples", "tokens"), 0)
    rates = dict.fromkeys(("grad_norm", "learning_rate", "loss_scale", "seconds"), 1.0)
    return StepReport(iteration=iteration, losses={}, skipped=False, nan=False, **zeros, **rates)


def overlaps(steps, settings):
    """Returns the reports of the overlap meter, which measures every third step."""
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
    settings = DistributedDataParallelConfig(bucket_size=WIDTH * WIDTH, **settings)
    ddp = DistributedDataParallel(ModelParallelConfig(), settings, model)
    meter = OverlapMeter([ddp], 3, device=torch.device("cpu"))
    found = []
    for step in range(1, steps + 1):
        ddp.zero_grad_buffer()
        ddp(torch.randn(64, WIDTH)).square().sum().backward()
        ddp.finish_grad_sync()
        if settings.use_distributed_optimizer:
            ddp.mark_params_stale()
        found.append(meter.measure(report(step)))
    return found


@pytest.mark.parametrize("sharded", [False, True], ids=["all-reduce", "reduce-scatter"])
def test_a_bucket_is_under_way_before_the_next_is_complete(sharded):
    """TRAPS B26: each bucket is launched before the next bucket is complete."""
    settings = {"overlap_grad_reduce": True, "use_distributed_optimizer": sharded, "overlap_param_gather": sharded}
    for reports in run_on_ranks(overlaps, 3, 6, settings):
        noted = [(one.iteration, one.overlap) for one in reports if one.overlap is not None]
        assert [iteration for iteration, _ in noted] == [3, 6]
        for _, overlap in noted:
            kinds = [one["traffic"] for one in overlap["transfers"]]
            assert kinds == [*["gather"] * LAYERS * sharded, *["reduce"] * LAYERS, "agree"]
            assert overlap["launched_early"] == overlap["could_be_early"] == LAYERS - 1
            for one in overlap["transfers"]:
                assert one["ready_ms"] <= one["launched_ms"] <= one["done_ms"] and one["waits_ms"]
        # The share depends on the machine; test_event_log checks shares computed from fixed times.
        assert any(0 < overlap["hidden_share"] <= 1 for _, overlap in noted)
        assert "hidden under backward" in reports[2].notes[0]


def overlaps_of_late_launches():
    with patch.object(LaunchSequence, "mark_ready", lambda self, group: []):
        return overlaps(3, {"overlap_grad_reduce": True})


def test_launches_at_the_end_hide_nothing_and_one_bucket_has_nothing_to_hide():
    for *_, late in run_on_ranks(overlaps_of_late_launches, 2):
        assert late.overlap["hidden_share"] == 0.0 and late.overlap["launched_early"] == 0
    *_, alone = overlaps(3, {})
    assert alone.overlap["hidden_share"] is None and "nothing to overlap" in alone.notes[0]
