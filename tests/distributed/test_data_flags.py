"""Tests data flags, each against a run or a loop that is written without them.

They cover skipped iterations, whole and multiple validation sets, data iterators of a script, and pretrained weights.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import pretrain_gpt
from megatron.core.datasets.indexed_dataset import DataError
from megatron.core.process_groups_config import group_rank, group_size
from megatron.training import get_args
from megatron.training.callbacks import Callback, CallbackList, EvaluationReport
from megatron.training.run import TrainingRun
from megatron.training.setup import setup_data
from megatron.training.training import evaluate_test, evaluate_validation, train
from tests.distributed.tiny_runs import TrainedRun, comparable, parameters, started_run, train_steps
from tests.functional_tests.case import Flags, command_line, read_bases
from tests.functional_tests.corpora import write_corpora
from tests.harness import run_on_ranks

FLAGS: Flags = {**read_bases()["moe"], **read_bases()["dropout"], "eval-iters": 0, "eval-interval": None}
LAYOUTS: dict[str, Flags] = {
    "data parallel": {"micro-batch-size": 1},
    "pipeline": {"pipeline-model-parallel-size": 2},
    "virtual stages": {
        "pipeline-model-parallel-size": 2,
        "num-layers": 4,
        "num-virtual-stages-per-pipeline-rank": 2,
        "micro-batch-size": 1,
    },
    "experts": {"expert-model-parallel-size": 2, "use-distributed-optimizer": True},
}


class _Reports(Callback):
    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []
        self.evaluations: list[EvaluationReport] = []

    def on_step_end(self, report: Any) -> None:
        self.steps.append(comparable(report))

    def on_evaluation_end(self, report: EvaluationReport) -> None:
        self.evaluations.append(report)


# Skipped iterations.


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_that_skips_iterations_is_the_run_that_never_sees_their_batches(layout: str) -> None:
    for skipping, plain in run_on_ranks(_skip, 2, command_line({**FLAGS, **LAYOUTS[layout]})):
        assert skipping == plain


def _skip(argv: Sequence[str]) -> tuple[Any, Any]:
    """Returns the reports and weights of a run that skips iterations 2, 3 and 6, and of a run without their batches."""
    with started_run([*argv, "--iterations-to-skip", "1", "2", "5"]) as run:
        reports = _Reports()
        run.callbacks = CallbackList([reports])
        train(run)
        counters = run.state.iteration, run.state.consumed_train_samples, run.state.skipped_iterations
        assert counters == (6, 24, 0)
        assert [step["iteration"] for step in reports.steps] == [1, 4, 5]
        assert [step["consumed_samples"] for step in reports.steps] == [4, 16, 20]
        skipping = [_numbers(step) for step in reports.steps], _texts(run)
    with started_run(argv) as run:
        assert run.train_iterator is not None
        run.train_iterator = _without(run.train_iterator, run.num_microbatches, leave_out={1, 2, 5})
        plain = [_numbers(step) for step in train_steps(run, 3)], _texts(run)
    return skipping, plain


def _numbers(step: dict[str, Any]) -> dict[str, Any]:
    """Returns a report as text without the counters, in which the two runs differ.

    Text, because per-layer statistics may be NaN.
    """
    return {
        name: repr(value) for name, value in step.items() if name not in ("iteration", "consumed_samples", "is_last")
    }


def _texts(run: TrainingRun) -> dict[str, list[float]]:
    return {name: value.flatten().tolist() for name, value in parameters(*run.model).items()}


def _without(source: Iterator[Any], count: int, *, leave_out: set[int]) -> Iterator[Any]:
    for number, batch in enumerate(source):
        if number // count not in leave_out:
            yield batch


# Whole validation sets, and multiple sets.


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_full_validation_is_the_mean_over_every_sample(tmp_path: Path, layout: str) -> None:
    write_corpora(tmp_path, {"a": {"learned": "half", "documents": 80}})
    data: Flags = {"mock-data": None, "data-path": str(tmp_path / "a"), "split": "3,1,0", "eval-iters": 1}
    evaluation: Flags = {"full-validation": True, "hidden-dropout": 0.0, "attention-dropout": 0.0}
    argv = command_line({**FLAGS, **LAYOUTS[layout], **data, **evaluation})
    plain = command_line({**FLAGS, "num-layers": LAYOUTS[layout].get("num-layers", 2), **data, **evaluation})
    for losses, expected in run_on_ranks(_evaluate_fully, 2, argv, plain):
        assert losses[0] == losses[1] == losses[2], "each evaluation must read the whole set"
        assert losses[0] == pytest.approx(expected, rel=1e-6)


def _evaluate_fully(argv: Sequence[str], plain: Sequence[str]) -> tuple[list[float], float]:
    with started_run(argv) as run:
        reports = _Reports()
        run.callbacks = CallbackList([reports])
        for _ in range(3):
            assert evaluate_validation(run)
        assert run.state.consumed_valid_samples == 0 and not any(one.set_name for one in reports.evaluations)
        dataset = run.datasets[1]
        # The last round and the last global batch are then both padded.
        assert len(dataset) % 4 == 1
    # The whole model on each rank, with the weights that every layout starts from.
    with started_run(plain) as run:
        totals = torch.zeros(2, dtype=torch.float64)
        for sample in dataset:
            batch = {name: torch.as_tensor(value)[None] for name, value in sample.items()}
            for chunk in run.model:
                chunk.eval()
            with torch.no_grad():
                output, loss_func = pretrain_gpt.forward_step(iter([batch]), run.model[0])
                totals += loss_func(output)[2]["lm loss"].double()
    return [one.losses["lm loss"] for one in reports.evaluations], float(totals[0] / totals[1])


@pytest.mark.parametrize("is_full", [False, True])
def test_each_validation_set_is_evaluated_as_in_a_run_with_that_set_alone(tmp_path: Path, is_full: bool) -> None:
    write_corpora(tmp_path, {"a": {}, "b": {"longest": 30}})
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    base: Flags = {**FLAGS, "mock-data": None, "train-data-path": a, "eval-iters": 2, "eval-interval": 3}
    base |= {"full-validation": True} if is_full else {}
    several = {"valid-data-path": [0.3, a, 0.7, b], "multiple-validation-sets": True}
    flags: list[Flags] = [several, {"valid-data-path": a}, {"valid-data-path": b}]
    for both, *alone in run_on_ranks(_evaluations, 2, [command_line({**base, **one}) for one in flags]):
        assert [one.set_name for one in both] == ["a", "b"] * 2
        assert [one.iteration for one in both] == [3, 3, 6, 6]
        for name, expected in zip("ab", alone):
            assert [replace(one, set_name=None) for one in both if one.set_name == name] == expected
        assert both[0].losses != both[1].losses


def test_a_large_evaluation_batch_is_several_small_ones_and_early_evaluations_are_left_out() -> None:
    base: Flags = {**FLAGS, "micro-batch-size": 1, "eval-interval": 1}
    small, large = {"eval-iters": 3}, {"eval-iters": 1, "eval-global-batch-size": 12}
    flags: list[Flags] = [{**base, **one} for one in (small, large, {**large, "start-eval-at-iter": 4})]
    for plain, joined, late in run_on_ranks(_evaluations, 2, list(map(command_line, flags))):
        assert joined == plain
        assert [one.iteration for one in joined] == [1, 2, 3, 4, 5, 6]
        assert [one.iteration for one in late] == [4, 5, 6]
        assert late[0].losses != joined[3].losses, "the first evaluation must read the first samples"


def _evaluations(argvs: Sequence[Sequence[str]]) -> list[list[EvaluationReport]]:
    found = []
    for argv in argvs:
        record = TrainedRun()
        with started_run(argv) as run:
            record.train(run)
        found.append(record.evaluations)
    return found


# Data iterators of a script.


def _own_batches(dataset: Any, *, begin: int) -> Iterator[Any]:
    """Yields micro-batches of 1 from sample `begin` on, distributed over ranks, as a script's loader would."""
    groups = _groups()
    for number in range(begin + group_rank(groups), len(dataset), group_size(groups)):
        yield {name: torch.as_tensor(value)[None] for name, value in dataset[number].items()}


def _groups() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def _external_provider(sizes: list[Any]) -> list[Any]:
    train, valid, test = pretrain_gpt.train_valid_test_datasets_provider(sizes)
    args = get_args()
    positions = args.consumed_train_samples, args.consumed_valid_samples, 0
    return [_own_batches(one, begin=begin) for one, begin in zip((train, valid, test), positions)]


@contextmanager
def _external_run(argv: Sequence[str]) -> Iterator[tuple[TrainingRun, _Reports]]:
    with started_run(argv) as run:
        run.config.values["dataloader_type"] = "external"
        setup_data(run, _external_provider, num_workers=0)
        reports = _Reports()
        run.callbacks = CallbackList([reports])
        yield run, reports


def test_iterators_of_a_script_train_as_its_datasets_do_and_resume(tmp_path: Path) -> None:
    flags = {**FLAGS, "micro-batch-size": 1, "eval-iters": 1, "eval-interval": 3, "save": str(tmp_path), "lr": 0.01}
    for plain, external, resumed in run_on_ranks(_compare_external, 2, flags):
        assert external == plain
        assert resumed == (plain[0][3:], plain[1][1:])


def _compare_external(flags: Flags) -> list[tuple[list[Any], list[Any]]]:
    found = []
    with started_run(command_line({**flags, "save": None})) as run:
        reports = _Reports()
        run.callbacks = CallbackList([reports])
        train(run)
        evaluate_test(run)
        found.append((reports.steps, reports.evaluations))
    for more in ({"save-interval": 3}, {"load": flags["save"], "ckpt-step": 3, "save": None}):
        with _external_run(command_line({**flags, **more})) as (run, reports):
            train(run)
            evaluate_test(run)
            found.append((reports.steps, reports.evaluations))
    return found


def test_a_script_may_give_validation_data_only_to_ranks_that_read_it() -> None:
    for counts in run_on_ranks(_evaluate_some, 2, command_line({**FLAGS, "eval-iters": 1})):
        assert counts == (["books", "1"], True)


def _evaluate_some(argv: Sequence[str]) -> tuple[list[str | None], bool]:
    with started_run([*argv, "--multiple-validation-sets", "--pipeline-model-parallel-size", "2"]) as run:
        run.config.values["dataloader_type"] = "external"
        # Both stages may read batches, the last one for its labels. Here only the last one gets data.
        own = group_rank(run.groups.pp) == 1
        run.config.values["validation_set_names"] = ["books", "1"] if own else None
        setup_data(
            run, lambda sizes: (None, [iter(()), iter(())] if own else None, iter(()) if own else None), num_workers=0
        )
        return [one.name for one in run.valid_sets], run.test_set is not None


def test_the_end_of_a_scripts_iterator_is_an_error_that_says_so() -> None:
    with pytest.raises(DataError, match="the data ended within a step of 1 micro-batches"):
        run_on_ranks(_run_dry, 1, command_line({**FLAGS, "micro-batch-size": 4}))


def _run_dry(argv: Sequence[str]) -> None:
    with started_run(argv) as run:
        assert run.train_iterator is not None
        run.train_iterator = islice(run.train_iterator, 2)
        assert len(train_steps(run, 2)) == 2
        train_steps(run, 1)


# Weights of another checkpoint.


def test_pretrained_weights_start_a_run_as_finetune_does_and_yield_to_its_own_checkpoint(tmp_path: Path) -> None:
    for results in run_on_ranks(_start_from_others, 2, str(tmp_path)):
        assert results["pretrained"] == results["finetune"] != results["scratch"]
        assert results["resumed"] == results["pretrained"][3:]


def _start_from_others(folder: str) -> dict[str, list[Any]]:
    others, own = f"{folder}/others", f"{folder}/own"
    first = command_line({**FLAGS, "seed": 7, "train-iters": 3, "save": others})
    with started_run(first) as run:
        run.callbacks = CallbackList()
        train(run)
    results = {}
    runs: dict[str, Flags] = {
        "scratch": {},
        "finetune": {"load": others, "finetune": True},
        "pretrained": {"load": own, "pretrained-checkpoint": others, "save": own, "save-interval": 3},
        "resumed": {"load": own, "pretrained-checkpoint": others, "ckpt-step": 3},
    }
    for name, flags in runs.items():
        with started_run(command_line({**FLAGS, **flags})) as run:
            reports = _Reports()
            run.callbacks = CallbackList([reports])
            train(run)
            results[name] = [repr(step) for step in reports.steps]
    return results
