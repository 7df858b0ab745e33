"""Batches are equal after a resume and for any number of workers, and workers do not disturb the training process."""

import os
import pickle
import select
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron.core.datasets.data_config import DataConfig
from megatron.core.datasets.data_iterators import (
    BatchPlan,
    DataIterator,
    build_data_iterators,
    build_train_valid_test_datasets,
)
from megatron.core.datasets.indexed_dataset import DataError
from tests.harness import run_on_ranks
from tests.unit_tests.core.datasets.corpora import VOCABULARY, write_corpus

ROOT = Path(__file__).resolve().parents[4]


def datasets(folder: Path):
    """Builds datasets of about 50, 12 and 12 samples."""
    write_corpus(folder / "a")
    config = DataConfig(seq_length=8, data_path=[str(folder / "a")], split="4,1,1")
    return build_train_valid_test_datasets(config, VOCABULARY, sizes=[24, 12, 6], seed=7)


def take(iterator: DataIterator | None, count: int) -> list[list[list[int]]]:
    assert iterator is not None
    batches = [next(iterator)["tokens"].tolist() for _ in range(count)]
    iterator.close()
    return batches


def test_batches_have_the_documented_shapes(tmp_path: Path) -> None:
    parts = datasets(tmp_path)
    train, valid, test = build_data_iterators(parts, BatchPlan(micro_batch_size=3))
    for iterator in (train, *valid, test):
        batch = next(iterator)
        assert {key: (tuple(value.shape), value.dtype) for key, value in batch.items()} == {
            "tokens": ((3, 8), torch.int64),
            "labels": ((3, 8), torch.int64),
            "loss_mask": ((3, 8), torch.float32),
            "position_ids": ((3, 8), torch.int64),
        }
        assert torch.equal(batch["tokens"][:, 1:], batch["labels"][:, :-1])


def test_a_run_resumed_at_any_step_reads_what_the_whole_run_read(tmp_path: Path) -> None:
    parts = datasets(tmp_path)
    assert parts[0] is not None
    count = len(parts[0]) + 3  # more than two epochs: reading continues from the start after the last sample
    whole = take(build_data_iterators(parts, BatchPlan(micro_batch_size=2))[0], count)
    for step in range(count - 3):
        plan = BatchPlan(micro_batch_size=2, consumed_train_samples=2 * step, consumed_valid_samples=2 * step)
        train, _, test = build_data_iterators(parts, plan)
        assert take(train, 3) == whole[step : step + 3]
        assert take(test, 1) == take(build_data_iterators(parts, BatchPlan(micro_batch_size=2))[2], 1)


def test_validation_continues_at_its_own_count(tmp_path: Path) -> None:
    parts = datasets(tmp_path)
    whole = take(build_data_iterators(parts, BatchPlan(micro_batch_size=2))[1][0], 6)
    plan = BatchPlan(micro_batch_size=2, consumed_train_samples=10, consumed_valid_samples=4)
    assert take(build_data_iterators(parts, plan)[1][0], 4) == whole[2:]


@pytest.mark.parametrize("num_workers", [1, 2])
def test_workers_change_nothing(tmp_path: Path, num_workers: int, monkeypatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(4)))
    parts = datasets(tmp_path)
    plain = take(build_data_iterators(parts, BatchPlan(micro_batch_size=2))[0], 9)
    assert take(build_data_iterators(parts, BatchPlan(micro_batch_size=2, num_workers=num_workers))[0], 9) == plain


@pytest.mark.parametrize("num_workers", [0, 1])
def test_reading_leaves_the_global_generator_alone(tmp_path: Path, num_workers: int) -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    iterator = build_data_iterators(datasets(tmp_path), BatchPlan(micro_batch_size=2, num_workers=num_workers))[0]
    take(iterator, 2)
    assert torch.equal(before, torch.get_rng_state())


def test_parts_without_data_have_no_iterator() -> None:
    assert build_data_iterators([None, None, None], BatchPlan(micro_batch_size=1)) == (None, [], None)


@pytest.mark.parametrize(
    "flags, message", [({"mock_data": True}, "--seq-length is missing"), ({"seq_length": 4}, "there is no data")]
)
def test_missing_flags_are_asked_for(flags: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_train_valid_test_datasets(DataConfig(**flags), VOCABULARY, sizes=[1, 1, 1], seed=1)


def test_datasets_travel_to_spawned_processes(tmp_path: Path) -> None:
    train = datasets(tmp_path)[0]
    assert torch.equal(pickle.loads(pickle.dumps(train))[5]["tokens"], train[5]["tokens"])


def test_an_error_in_a_worker_reaches_the_trainer_with_its_text() -> None:
    dataset = _Failing()
    iterator = DataIterator(dataset, BatchPlan(micro_batch_size=2, num_workers=1))
    with pytest.raises(ValueError, match="sample 0 is broken"):
        next(iterator)
    iterator.close()


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_error_about_the_data_is_the_same_from_a_worker(num_workers: int) -> None:
    iterator = DataIterator(_Failing(DataError), BatchPlan(micro_batch_size=2, num_workers=num_workers))
    with pytest.raises(DataError, match="^sample 0 is broken$"):
        next(iterator)
    iterator.close()


class _Failing(torch.utils.data.Dataset):
    def __init__(self, error: type[Exception] = ValueError) -> None:
        self.error = error

    def __len__(self) -> int:
        return 4

    def __getitem__(self, idx: int):
        raise self.error(f"sample {idx} is broken")


def read_between_collectives(folder: str) -> list[float]:
    config = DataConfig(seq_length=8, data_path=[folder], split="8,1,1")
    parts = build_train_valid_test_datasets(config, VOCABULARY, sizes=[24, 4, 4], seed=7)
    plan = BatchPlan(micro_batch_size=2, dp_rank=dist.get_rank(), dp_size=3, num_workers=1)
    train, (valid,), _ = build_data_iterators(parts, plan)
    sums = []
    for iterator in (train, valid, train, train):
        total = next(iterator)["tokens"].sum().double()
        dist.all_reduce(total)
        sums.append(total.item())
    train.close()
    dist.barrier()
    return sums


def test_workers_do_not_disturb_collectives(tmp_path: Path) -> None:
    write_corpus(tmp_path / "a")
    first, second, third = run_on_ranks(read_between_collectives, 3, str(tmp_path / "a"))
    config = DataConfig(seq_length=8, data_path=[str(tmp_path / "a")], split="8,1,1")
    parts = build_train_valid_test_datasets(config, VOCABULARY, sizes=[24, 4, 4], seed=7)
    train = build_data_iterators(parts, BatchPlan(micro_batch_size=6))[0]
    sums = [next(train)["tokens"].sum().item() for _ in range(3)]
    assert first == second == third and [first[0], *first[2:]] == sums


SCRIPT = """
import os, signal, sys
from megatron.core.datasets.data_config import DataConfig
from megatron.core.datasets.data_iterators import *
from megatron.core.tokenizers.tokenizer import NullTokenizer
signal.signal(signal.SIGTERM, lambda *_: None)  # a trainer that finishes its step first
config = DataConfig(mock_data=True, seq_length=64)
parts = build_train_valid_test_datasets(config, NullTokenizer(99), sizes=[9, 0, 0], seed=1)
train = build_data_iterators(parts, BatchPlan(micro_batch_size=2, num_workers=1))[0]
next(train)
workers = [process.pid for process in __import__("multiprocessing").active_children()]
assert len(workers) == 1
print(*workers, flush=True)
"""


def start(body: str) -> tuple[subprocess.Popen, int]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT + textwrap.dedent(body)],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    return process, int(process.stdout.readline())


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.slow
def test_workers_outlive_signals_to_the_job_and_end_with_the_trainer() -> None:
    process, worker = start("sys.stdin.readline(); [next(train) for _ in range(50)]; print('read', flush=True)")
    os.kill(process.pid, signal.SIGTERM)
    os.kill(worker, signal.SIGTERM)
    os.kill(worker, signal.SIGINT)
    out, err = process.communicate("go\n", timeout=60)
    assert (process.returncode, out, err) == (0, "read\n", "")
    assert not is_running(worker)


@pytest.mark.slow
def test_a_trainer_that_fails_does_not_hang_on_its_workers() -> None:
    process, worker = start("raise RuntimeError('crashed')")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1 and "crashed" in err
    assert not is_running(worker)


@pytest.mark.slow
def test_workers_end_when_the_trainer_is_killed() -> None:
    process, worker = start("sys.stdin.readline()")
    # Becomes readable when the worker exits.
    ended = os.pidfd_open(worker)
    try:
        process.kill()
        process.communicate(timeout=60)
        # Shorter than the five seconds between DataLoader's own checks.
        assert select.select([ended], [], [], 4)[0]
    finally:
        os.close(ended)


class _Numbered(torch.utils.data.Dataset):
    def __init__(self, size: int, *, with_mask: bool = True) -> None:
        self.size, self.with_mask = size, with_mask

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, idx: int):
        sample = {"tokens": torch.full((2,), idx)}
        return {**sample, "loss_mask": torch.tensor([1.0, 0.5])} if self.with_mask else sample


@pytest.mark.parametrize("size", range(1, 14))
@pytest.mark.parametrize("micro, ranks", [(1, 1), (2, 1), (1, 3), (2, 3)])
@pytest.mark.parametrize("dataloader_type", ["single", "cyclic"])
def test_full_passes_have_every_sample_once_and_masked_padding(
    size: int, micro: int, ranks: int, dataloader_type: str
) -> None:
    seen: list[list[tuple[int, float]]] = [[], []]
    for rank in range(ranks):
        plan = BatchPlan(
            micro_batch_size=micro,
            dp_rank=rank,
            dp_size=ranks,
            consumed_valid_samples=5,
            dataloader_type=dataloader_type,
            full_validation=True,
        )
        dataset = _Numbered(size)
        (iterator,) = build_data_iterators([None, dataset, None], plan)[1]
        assert iterator is not None
        for evaluation in seen:
            for _ in range(plan.full_rounds(dataset)):
                batch = next(iterator)
                assert len(batch["tokens"]) == micro
                evaluation += [(int(t[0]), float(m.sum())) for t, m in zip(batch["tokens"], batch["loss_mask"])]
    for evaluation in seen:
        assert sorted(sample for sample, learned in evaluation if learned) == list(range(size))
        assert len(evaluation) == -(-size // (micro * ranks)) * micro * ranks


def test_padding_without_a_loss_mask_is_refused() -> None:
    plan = BatchPlan(micro_batch_size=2, full_validation=True)
    for size, is_refused in ((4, False), (3, True)):
        (iterator,) = build_data_iterators([None, _Numbered(size, with_mask=False), None], plan)[1]
        assert iterator is not None
        next(iterator)
        if is_refused:
            with pytest.raises(DataError, match="--full-validation pads a validation set of 3 samples .* no loss_mask"):
                next(iterator)
        else:
            next(iterator)


def test_external_iterators_are_used_as_they_are() -> None:
    plan = BatchPlan(micro_batch_size=2, dataloader_type="external")
    train, loader, test = iter([1]), torch.utils.data.DataLoader(_Numbered(2), batch_size=1), iter([3])
    found = build_data_iterators([train, [loader, None], test], plan)
    assert found[0] is train and found[2] is test and found[1][1] is None
    assert found[1][0] is not None and next(found[1][0])["tokens"].tolist() == [[0, 0]]
    for wrong in (_Numbered(2), 7):
        with pytest.raises(ValueError, match=f"returned {type(wrong).__name__}: must be an iterator"):
            build_data_iterators([wrong, None, None], plan)
