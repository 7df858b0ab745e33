"""Tests of meters: norms compared with fp64, FLOPs per second, memory, and the slowest rank."""

import argparse
from dataclasses import replace

import pytest
import torch

from megatron.core.datasets.padding import PaddingCount
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.timers import Timers
from megatron.training.command_line.config_builder import run_config_of
from megatron.training.compute.flops import num_floating_point_operations
from megatron.training.meters.memory import HeldMemoryMeter, MemoryMeter, memory_line
from megatron.training.meters.meters import ParamsNormMeter, ThroughputMeter, TimerMeter, rank_times
from tests.unit_tests.training.flag_models import model_of_flags
from tests.unit_tests.training.small_reports import STEP
from tests.unit_tests.training.small_run import SmallRun


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("frozen", [(), ("0.weight", "2.bias")])
def test_params_norm_is_that_of_the_masters_and_of_frozen_weights(dtype: torch.dtype, frozen: tuple[str, ...]) -> None:
    run = SmallRun(dtype=dtype, frozen=frozen)
    meter = ParamsNormMeter(run.optimizer, [run.model])
    run.train(4)
    held = [param.double() for param in run.model.parameters() if not param.requires_grad]
    held += [flat.double() for name, flat in run.optimizer_tensors().items() if "fp32_param" in name]
    if dtype == torch.float32:
        held = [param.double() for param in run.model.parameters()]
    expected = torch.cat([tensor.flatten() for tensor in held]).norm().item()
    assert meter.measure(STEP).params_norm == pytest.approx(expected, rel=1e-7)


@pytest.mark.parametrize(("device", "peak"), [("cpu (2 threads)", None), ("NVIDIA H100 80GB HBM3", 989.4)])
def test_throughput_is_that_of_one_device_and_mfu_of_known_ones(device: str, peak: float | None) -> None:
    args: argparse.Namespace = model_of_flags("")[0]
    report = ThroughputMeter(run_config_of(args), device, world_size=2).measure(STEP)
    # 8 samples in half a second on two devices.
    tflops = num_floating_point_operations(args, 8) / 0.5 / 2 / 1e12
    assert report.tflops == pytest.approx(tflops)
    assert report.mfu == (None if peak is None else pytest.approx(tflops / peak))


def test_throughput_leaves_padding_out() -> None:
    args: argparse.Namespace = model_of_flags("")[0]
    # Four of eight samples consist of padding.
    half = PaddingCount(4 * args.seq_length, 4 * args.seq_length**2)
    whole, padded = (
        ThroughputMeter(run_config_of(args), "cpu", world_size=2).measure(replace(STEP, padding=padding)).tflops
        for padding in (PaddingCount(), half)
    )
    assert padded == pytest.approx(whole / 2)


def test_memory_is_measured_at_log_lines_and_told_once() -> None:
    meter = MemoryMeter(torch.device("cpu"), 3)
    reports = [meter.measure(STEP), meter.measure(STEP)]
    assert all(report.memory is not None and report.memory["peak_rss"] > 2**20 for report in reports)
    assert [len(report.notes) for report in reports] == [1, 0]
    gpu = {
        "allocated": 2**20,
        "max_allocated": 2**21,
        "reserved": 2**22,
        "max_reserved": 2**23,
        "rss": 1,
        "peak_rss": 1,
    }
    assert memory_line(gpu, 3, on_gpu=True) == (
        "[Rank 0] (after 3 iterations) memory (MB) | allocated: 1.0 | max allocated: 2.0 | "
        "reserved: 4.0 | max reserved: 8.0"
    )


def test_held_memory_is_told_after_the_first_step_at_log_lines_and_after_the_last() -> None:
    run, groups = SmallRun(dtype=torch.bfloat16), ProcessGroupCollection()
    device = torch.device("cpu")
    meter = HeldMemoryMeter([run.model], run.optimizer, memory=None, groups=groups, device=device, interval=5)
    reports = [meter.measure(replace(STEP, iteration=step, is_last=step == 7)) for step in range(3, 8)]
    assert [report.iteration for report in reports if report.held is not None] == [3, 5, 7]
    held = reports[0].held
    assert held is not None and held["rank_0"].keys() == held["max"].keys() == held["stages"][0].keys()
    size = sum(param.numel() for param in run.model.parameters())
    assert held["max"]["parameters"] >= 2 * size and held["max"]["masters"] >= 4 * size and held["max"]["pages"] == 0
    assert held["rank_0"]["peak_rss"] > 2**20


def test_timers_are_means_over_the_steps_of_an_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(100))
    monkeypatch.setattr("time.perf_counter", lambda: float(next(clock)))
    timers = Timers(log_level=1)
    meter = TimerMeter(timers, interval=3)
    for iteration in (1, 2, 3):
        with timers("forward-backward", log_level=1):
            pass
        report = meter.measure(STEP if iteration == 3 else argparse.Namespace(iteration=iteration))
    assert report.timers == {"forward-backward": 1000.0}
    assert "forward-backward" in report.notes[0]


def test_the_slowest_rank_is_found_over_all_its_work() -> None:
    times = rank_times([[10.0, 30.0, 20.0], [5.0, 1.0, 40.0]])
    assert vars(times) == {"min_ms": 15.0, "min_rank": 0, "max_ms": 60.0, "max_rank": 2}
