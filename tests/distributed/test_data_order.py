"""Runs that resume with other lengths, batches, layouts, seeds and data read what plain_order.py says, or say so.

The samples are recorded at the iterators of whole runs.
"""

import io
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import pretrain_gpt
from megatron.core.group_collectives import RemoteRankError
from megatron.training.callbacks import CallbackList
from megatron.training.data_order import build_datasets
from megatron.training.setup import setup_data
from megatron.training.training import train
from tests.distributed.tiny_runs import started_run
from tests.functional_tests.case import Flags, command_line, read_bases
from tests.harness import run_on_ranks
from tests.unit_tests.core.datasets.plain_order import SEED, PlainRun, S, plain_source, write

FLAGS: Flags = {
    **read_bases()["llama"],
    "mock-data": None,
    "vocab-size": 2000,
    "seq-length": S,
    "max-position-embeddings": S,
    "lr-decay-style": "constant",
    "lr-warmup-iters": None,
    "eval-iters": 0,
    "seed": SEED,
}
AB = {"a": 0.3, "b": 0.7}


class _Recorder(Iterator[Any]):
    """Passes on batches, and records the first token of each sample."""

    def __init__(self, batches: Iterator[Any], firsts: list[list[int]]) -> None:
        self._batches, self._firsts = batches, firsts

    def __next__(self) -> Any:
        batch = next(self._batches)
        self._firsts.append(batch["tokens"][:, 0].tolist())
        return batch


Leg = tuple[list[list[int]], list[list[int]], str]


def _train(legs: Sequence[Sequence[str]], *, forgets_order: bool = False) -> list[Leg]:
    """Returns, for each process of a run, this rank's micro-batches of train and validation data, and its log."""
    found = []
    for argv in legs:
        trained: list[list[int]] = []
        evaluated: list[list[int]] = []
        log = io.StringIO()
        with redirect_stdout(log), started_run(argv) as run:
            assert run.train_iterator is not None
            run.train_iterator = _Recorder(run.train_iterator, trained)
            run.valid_sets = [
                replace(one, iterator=_Recorder(one.iterator, evaluated) if one.iterator else None)
                for one in run.valid_sets
            ]
            if forgets_order:
                run.state.data_order = None
            run.callbacks = CallbackList([])
            train(run)
        found.append((trained, evaluated, log.getvalue()))
    return found


def _in_run_order(parts: Sequence[list[list[int]]]) -> list[int]:
    """Joins the micro-batches of data-parallel ranks in the order of the run's samples."""
    return [token for round_of_ranks in zip(*parts, strict=True) for batch in round_of_ranks for token in batch]


def _data(folder: Path, blend: dict[str, float]) -> list[str]:
    return [word for name, weight in blend.items() for word in (str(weight), str(folder / name))]


def test_a_run_of_three_lengths_layouts_and_batch_sizes_reads_one_order(tmp_path: Path) -> None:
    write(tmp_path)
    folder = str(tmp_path / "run")
    data: Flags = {"train-data-path": _data(tmp_path, AB), "valid-data-path": str(tmp_path / "c"), "eval-iters": 1}
    base: Flags = {**FLAGS, **data, "save": folder, "load": folder, "train-iters": 6, "exit-interval": 3}
    wider: Flags = {"train-iters": 20, "exit-interval": 6, "micro-batch-size": 3, "global-batch-size": 6, "seed": 99}
    ramp: Flags = {"train-iters": 12, "global-batch-size": 16, "rampup-batch-size": [4, 4, 90], "exit-interval": None}
    legs = [{"micro-batch-size": 1}, {**wider, "tensor-model-parallel-size": 2}, {**ramp, "micro-batch-size": 1}]
    first, second = run_on_ranks(_train, 2, [command_line({**base, **leg}) for leg in legs])
    # Replicas of the second process read the same batches; the others are two data-parallel ranks.
    assert first[1][:2] == second[1][:2]
    trained = _in_run_order([first[0][0], second[0][0]]) + _in_run_order([first[1][0]])
    trained += _in_run_order([first[2][0], second[2][0]])
    # 3 steps of 4, 3 steps of 6, and a ramp-up from there.
    sizes = []
    while len(sizes) < 6:
        sizes.append(4 + 4 * min((30 + sum(sizes)) // 30, 3))
    assert trained == PlainRun(AB, planned=24).read(0, 30 + sum(sizes))
    # Evaluations after steps 3, 6, 9 and 12, planned for three of 4 samples.
    evaluated = _in_run_order([first[0][1], second[0][1]]) + _in_run_order([first[1][1]])
    evaluated += _in_run_order([first[2][1], second[2][1]])
    assert evaluated == plain_source("c", 12, 4 + 6 + 16 + 16)
    assert "data order" not in first[0][2]
    assert "planned for train 24 samples (now 120), valid 12 samples (now 42)" in first[1][2]
    assert f"the data order continues with the checkpoint's seed {SEED}, not --seed 99" in first[1][2]
    assert "WARNING" not in first[1][2] + first[2][2]


def test_other_data_are_named_and_shared_sets_continue(tmp_path: Path) -> None:
    write(tmp_path)
    folder = str(tmp_path / "run")
    base: Flags = {**FLAGS, "save": folder, "load": folder, "train-iters": 8, "exit-interval": 2, "split": "1,0,0"}
    legs: list[Flags] = [
        {"data-path": _data(tmp_path, AB)},
        {"data-path": _data(tmp_path, {"b": 0.5, "c": 0.5}), "exit-interval": 4},
    ]
    first, second = run_on_ranks(_train, 2, [command_line({**base, "micro-batch-size": 1, **leg}) for leg in legs])
    log = first[1][2]
    assert "WARNING: the train data differ from the checkpoint's: the documents of a are missing or changed" in log
    assert "the share of b is 0.5 here, 0.7 in the checkpoint; the documents of c are new. " in log
    assert "A new data order starts at sample 8; b continue after the samples that were read" in log
    before = _in_run_order([first[0][0], second[0][0]])
    read = sum(200 <= token < 400 for token in before)
    planned = sum(200 <= token < 400 for token in PlainRun(AB, 32).read(0, 32))
    later = PlainRun({"b": 0.5, "c": 0.5}, 24, start=8, offsets={"b": read}, planned_of={"b": planned})
    assert _in_run_order([first[1][0], second[1][0]]) == later.read(8, 16)


@pytest.mark.parametrize("split, how", [("1,0,0", "follows from its arguments"), ("1,1,0", "is the one of a new run")])
def test_a_checkpoint_without_an_order_continues_that_of_its_arguments(tmp_path: Path, split: str, how: str) -> None:
    write(tmp_path)
    folder = str(tmp_path / "run")
    base: Flags = {**FLAGS, "data-path": str(tmp_path / "a"), "save": folder, "load": folder, "train-iters": 5}
    legs: list[Flags] = [{"split": "1,0,0", "exit-interval": 2}, {"split": split, "train-iters": 30, "seed": 9}]
    words = [command_line({**base, "micro-batch-size": 1, **leg}) for leg in legs]
    parts = run_on_ranks(_forget_and_resume, 2, words)
    assert f"note: the checkpoint does not store the order of its data, which {how}" in parts[0][1][2]
    firsts = [_in_run_order([one[leg][0] for one in parts]) for leg in range(2)]
    if split == "1,0,0":
        assert firsts[0] + firsts[1] == plain_source("a", 20, 120)


def _forget_and_resume(words: Sequence[Sequence[str]]) -> list[Leg]:
    return _train(words[:1], forgets_order=True) + _train(words[1:])


class _Numbers(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """A dataset of a script, without a stored order."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"tokens": torch.full((S,), index)}


def _resume_script(argv: Sequence[str], cyclic: bool) -> tuple[list[str], list[list[int]]]:
    """Reads a script's datasets of several sizes in one run. Returns the log lines and indices of each."""
    logs, indices = [], []
    with started_run(argv) as run:
        run.config.values["dataloader_type"] = "cyclic" if cyclic else "single"
        for size, consumed in ((10, 0), (10, 4), (14, 8), (7, 16)):
            run.state.consumed_train_samples = consumed
            log = io.StringIO()
            with redirect_stdout(log):
                setup_data(run, lambda _, size=size: (_Numbers(size), None, None), num_workers=0)
            assert run.train_iterator is not None
            logs.append(log.getvalue())
            indices.append([int(next(run.train_iterator)["tokens"][0, 0]) for _ in range(2)])
            if not consumed:
                # The run read more samples than the dataset has, and repeats it.
                run.state.iteration = 1
    return logs, indices


@pytest.mark.parametrize("cyclic", [False, True])
def test_datasets_of_a_script_keep_the_size_that_they_repeat(tmp_path: Path, cyclic: bool) -> None:
    write(tmp_path)
    flags: Flags = {**FLAGS, "data-path": str(tmp_path / "a"), "split": "1,0,0", "micro-batch-size": 1}
    (logs, first), (_, second) = run_on_ranks(_resume_script, 2, command_line(flags), cyclic)
    read = [number for ranks in zip(first, second) for pair in zip(*ranks) for number in pair]
    assert logs[1] == ""
    if cyclic:
        order = [number for epoch in range(2) for number in _cyclic(epoch, 10)]
        assert read[:12] == order[:12] and logs[2] == ""
    else:
        assert read[:12] == [*range(12)]
        assert "the dataset has 14 samples here, 10 in the checkpoint" in logs[2]
    assert "WARNING: the order of the train data differs from the checkpoint's: the dataset has 7 samples" in logs[3]


def _cyclic(epoch: int, size: int) -> list[int]:
    return np.random.RandomState([SEED, epoch]).permutation(size).tolist()


def _ignore_sizes(argv: Sequence[str]) -> str:
    with started_run(argv) as run:
        run.state.iteration, run.training.train_iters = 2, 30
        run.datasets_provider = lambda sizes: pretrain_gpt.train_valid_test_datasets_provider([*sizes])
        with redirect_stdout(log := io.StringIO()):
            build_datasets(run)
    return log.getvalue()


def test_a_script_that_makes_a_list_of_its_own_is_named(tmp_path: Path) -> None:
    write(tmp_path)
    flags: Flags = {**FLAGS, "data-path": str(tmp_path / "a"), "split": "1,0,0", "micro-batch-size": 1}
    for rank, log in enumerate(run_on_ranks(_ignore_sizes, 2, command_line(flags))):
        assert ("does not pass on the list of sizes that it receives" in log) == (rank == 0)


def _build_again(first: Sequence[str], second: Sequence[str]) -> list[str]:
    """Returns the logs of building datasets that differ from the checkpoint's, and of building more of them later."""
    logs = []
    with started_run(first) as run:
        run.callbacks = CallbackList([])
        train(run)
    with redirect_stdout(log := io.StringIO()), started_run(second) as run:
        logs.append(log.getvalue())
        run.training.train_iters = 90
        with redirect_stdout(log := io.StringIO()):
            build_datasets(run)
        logs.append(log.getvalue())
    return logs


def test_differences_are_named_once(tmp_path: Path) -> None:
    write(tmp_path)
    folder = str(tmp_path / "run")
    base: Flags = {**FLAGS, "save": folder, "load": folder, "train-iters": 8, "split": "1,0,0", "micro-batch-size": 1}
    legs: list[Flags] = [
        {"data-path": str(tmp_path / "a"), "exit-interval": 1},
        {"data-path": _data(tmp_path, AB)},
    ]
    [(first, second)] = run_on_ranks(_build_again, 1, *(command_line({**base, **leg}) for leg in legs))
    assert first.count("WARNING: the train data differ from the checkpoint's") == 1
    assert "WARNING" not in second


def _read_other_files(argv: Sequence[str], folder: str) -> str:
    with started_run(argv) as run:

        def provider(sizes: list[Any]) -> Any:
            run.config.values["data_path"] = [f"{folder}/{'ab'[dist.get_rank()]}"]
            return pretrain_gpt.train_valid_test_datasets_provider(sizes)

        with pytest.raises((ValueError, RemoteRankError)) as caught:
            setup_data(run, provider, num_workers=0)
    return str(caught.value)


def test_ranks_with_other_files_are_an_error_on_every_rank(tmp_path: Path) -> None:
    write(tmp_path)
    flags: Flags = {**FLAGS, "data-path": str(tmp_path / "a"), "split": "1,0,0", "micro-batch-size": 1}
    for message in run_on_ranks(_read_other_files, 2, command_line(flags), str(tmp_path)):
        assert "rank 1 reads other train data than the ranks before it" in message
