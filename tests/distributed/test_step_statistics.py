"""Values that ranks exchange once per step: mean losses, requests to stop, and where a loss was not finite."""

import argparse
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron.core.transformer.moe.aux_losses import AuxLossRecorder
from megatron.training.step.exit_conditions import ExitReason
from megatron.training.step.statistics import (
    NonFiniteLossError,
    Overflow,
    StatisticsExchange,
    StepStatistics,
    raise_non_finite_loss,
    total_reports,
)
from tests.harness import run_on_ranks

gather = dist.all_gather_object


def statistics_of_uneven_ranks() -> StepStatistics:
    """Exchanges r tokens of loss r from rank r, twice; rank 1 is out of time, and rank 2 received a signal."""
    rank = dist.get_rank()
    report = {
        "lm loss": torch.tensor([float(rank * rank), float(rank)]),
        "mean": torch.tensor(float(rank)),
        "nobody's": torch.zeros(2),
        "masked": torch.zeros(2),
    }
    totals = total_reports([report, report])
    reasons = [rank == 2, rank == 1]
    return StatisticsExchange(dist.group.WORLD).reduce_sync(totals, optional=["nobody's"], exit_reasons=reasons)


def report_nan_on_one_rank() -> None:
    """Reports NaN as a loss of microbatch 1 on rank 2."""
    values = [1.0, float("nan") if dist.get_rank() == 2 else 1.0]
    raise_non_finite_loss([{"lm loss": torch.tensor([v, 1.0])} for v in values], dist.group.WORLD, iteration=7)


def test_losses_are_weighted_by_tokens_and_a_signal_outranks_the_clock() -> None:
    results = run_on_ranks(statistics_of_uneven_ranks, 3)
    assert results[0] == results[1] == results[2]
    assert results[0].losses == {"lm loss": pytest.approx(5 / 3), "mean": 1.0, "masked": 0.0}
    assert results[0].exit_reason is ExitReason.SIGNAL
    assert not results[0].nan


def test_error_names_rank_and_microbatch_on_every_rank() -> None:
    with pytest.raises(NonFiniteLossError) as caught:
        run_on_ranks(report_nan_on_one_rank, 3)
    assert "iteration 7: rank 2: microbatch 1 (lm loss is nan)" in str(caught.value)


def statistics_of_layers() -> StepStatistics:
    """Exchanges losses and loads of layers 1 and 3 of 3, which have experts.

    Rank r counts r more tokens at expert 1, and a loss of r in one microbatch. Rank 1 had rows over budget; ranks 1 and
    2 ran out of pages.
    """
    recorder, rank = AuxLossRecorder(3, torch.device("cpu"), num_experts=2), dist.get_rank()
    for layer in (1, 3):
        recorder.record("z_loss", torch.tensor(float(rank * layer)), layer_number=layer)
        recorder.record_tokens(torch.tensor([layer, layer + rank]), layer_number=layer)
    layers, totals = recorder.layer_totals(), recorder.take_totals()
    flags = torch.tensor([rank == 1, rank > 0], dtype=torch.float64)
    exchange = StatisticsExchange(dist.group.WORLD)
    return exchange.reduce_sync(
        totals, optional=totals, exit_reasons=[False, True], layers=layers, overflow_flags=flags
    )


def test_layers_are_told_apart_and_exit_reasons_stay_what_they_are() -> None:
    results = run_on_ranks(statistics_of_layers, 3)
    assert results[0] == results[1] == results[2]
    assert results[0].per_layer == {"z_loss": {1: 1.0, 3: 3.0}} and results[0].losses == {"z_loss": 2.0}
    assert results[0].expert_load == {1: [3, 6], 3: [9, 12]}
    assert results[0].exit_reason is ExitReason.DURATION
    assert results[0].overflow == Overflow(expert=1, stash=2) and results[0].overflow.occurred


class _Recording(nn.Module):
    """Two layers with two experts each, whose losses are not logged per layer."""

    def __init__(self) -> None:
        super().__init__()
        self.aux_losses = AuxLossRecorder(2, torch.device("cpu"), num_experts=2)
        self.config = argparse.Namespace(moe_per_layer_logging=False, num_moe_experts=2)


def test_loads_are_those_of_the_step_and_travel_when_they_are_asked_for() -> None:
    model, exchange = _Recording(), StatisticsExchange(None)
    found = []
    for step, with_load in enumerate((False, True, True), 1):
        model.aux_losses.record_tokens(torch.tensor([step, 3]), layer_number=2)
        statistics = exchange.reduce_step_sync([], [model], exit_reasons=[False, False], with_load=with_load)
        found.append((statistics.expert_load, statistics.per_layer))
        model.aux_losses.finalize_step(None)
    assert found == [(None, None), ({2: [2, 3]}, None), ({2: [3, 3]}, None)]


def statistics_of_stages() -> list[StepStatistics]:
    """Exchanges two steps and an evaluation. Ranks 2 and 3, the last stage, know the losses; rank 1 must stop."""
    rank, exchange, gathered = dist.get_rank(), StatisticsExchange(dist.group.WORLD), []
    with patch.object(dist, "all_gather_object", lambda *args, **kwargs: gathered.append(gather(*args, **kwargs))):
        totals = {"z_loss": torch.tensor([1.0 + rank, 1.0], dtype=torch.float64)}
        loss = {"lm loss": torch.tensor([6.0 * rank, 3.0], dtype=torch.float64)} if rank > 1 else {}
        steps = [
            exchange.reduce_sync({**loss, **totals}, optional=["z_loss"], exit_reasons=[rank == 1, False])
            for _ in range(2)
        ]
        evaluation = {"other": torch.ones(2), "masked": torch.zeros(2), **loss} if rank > 1 else {}
        steps.append(exchange.reduce_sync({name: total.double() for name, total in evaluation.items()}))
    assert len(gathered) == 2, "names must be exchanged only if they are new"
    return steps


def test_every_stage_knows_the_losses_of_the_last_and_of_all_layers() -> None:
    results = run_on_ranks(statistics_of_stages, 4)
    assert all(result == results[0] for result in results)
    first, second, evaluation = results[0]
    assert first == second == StepStatistics({"lm loss": 5.0, "z_loss": 2.5}, ExitReason.SIGNAL)
    assert [*first.losses][0] == "lm loss"
    assert evaluation.losses == {"lm loss": 5.0, "other": 1.0, "masked": 0.0}


def test_one_process_alone_needs_no_group() -> None:
    statistics = StatisticsExchange(None).reduce_sync(total_reports([{"a": torch.tensor(v)} for v in (2.0, 4.0)]))
    assert statistics == StepStatistics({"a": 3.0}, None)
    assert StepStatistics({"a": float("inf")}, None).nan


def test_a_report_may_be_a_number_or_a_pair_in_any_form() -> None:
    pairs = (torch.tensor([6.0, 2.0]), (torch.tensor(6.0), torch.tensor([2])), (6.0, 2), [torch.tensor([6.0]), 2.0])
    for pair in pairs:
        assert total_reports([{"a": pair}, {"a": pair}])["a"].tolist() == [12.0, 4.0]
    for number in (torch.tensor(3.0), torch.tensor([3.0]), 3.0):
        assert total_reports([{"a": number}, {"a": number}])["a"].tolist() == [6.0, 2.0]
