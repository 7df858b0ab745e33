"""Damaged data and checkpoints end every rank with one line that names the file, and are not modified."""

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest

from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from tests.counts import slow
from tests.functional_tests.case import Flags, command_line, read_bases
from tests.functional_tests.expectations import contents
from tests.functional_tests.launch import Run, run_program

DENSE: Flags = read_bases()["dense"]
DATA: Flags = {**DENSE, "mock-data": None, "split": "8,1,1"}
STEPS = DENSE["train-iters"]
ITERATION = f"iter_{STEPS:07d}"
TRACKER = "latest_checkpointed_iteration.txt"


def write_data(prefix: Path, *, documents: int = 60, wrong: int | None = None) -> None:
    """Writes documents of 50 tokens. All tokens of a document are its number, or 60000 in document `wrong`."""
    builder = IndexedDatasetBuilder(f"{prefix}.bin", numpy.uint16)
    for number in range(documents):
        builder.add_document(numpy.full(50, 60000 if number == wrong else number), [50])
    builder.finalize(f"{prefix}.idx")


def cut(path: Path, num_bytes: int) -> None:
    path.write_bytes(path.read_bytes()[:num_bytes])


def assert_one_line_on_every_rank(run: Run, message: str) -> None:
    assert set(run.exit_codes) == {1}, run.written()
    for outcome in run.outcomes:
        assert re.fullmatch(rf"\[rank {outcome.rank}\] error: .*{message}.*\n", outcome.stderr), run.written()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: cut(folder / "data.idx", 20), "data.idx has 20 bytes: .*truncated"),
        (lambda folder: cut(folder / "data.idx", 200), "data.idx has 200 bytes: 60 sequences"),
        (lambda folder: cut(folder / "data.bin", 99), "data.bin has 99 bytes; the .bin file is truncated"),
        (lambda folder: (folder / "data.bin").unlink(), "data.bin does not exist"),
        (lambda folder: (folder / "data.idx").write_bytes(b"text " * 99), "data.idx starts with b'text text'"),
        (lambda folder: write_data(folder / "data", documents=0), "data.idx has no documents: must have at least one"),
        (lambda folder: write_data(folder / "data", documents=2), "--split 8,1,1 leaves no document for"),
        (lambda folder: write_data(folder / "data", documents=160), r"data \(\w+\) contains token \d+: NullTokenizer"),
    ],
    ids=["idx header", "idx cut", "bin cut", "no bin", "no idx", "empty", "too little", "other tokenizer"],
)
def test_damaged_data_is_refused_by_name(damage: Callable[[Path], object], message: str, tmp_path: Path) -> None:
    write_data(tmp_path / "data")
    damage(tmp_path)
    run = run_program(command_line({**DATA, "data-path": tmp_path / "data"}), 2, folder=tmp_path / "run")
    assert_one_line_on_every_rank(run, message)


@pytest.mark.slow
def test_a_token_that_only_training_finds_ends_every_rank(tmp_path: Path) -> None:
    # With this many documents, start-up checks only every second one.
    write_data(tmp_path / "data", documents=128, wrong=1)
    flags = {**DATA, "vocab-size": 128, "data-path": tmp_path / "data", "split": "1,0,0", "num-workers": 1}
    # A few steps read all documents.
    flags |= {"micro-batch-size": 16, "global-batch-size": 32, "train-iters": 20}
    run = run_program(command_line(flags), 2, folder=tmp_path / "run")
    assert_one_line_on_every_rank(
        run, r"(data \(train\) contains token 60000: |the connection to another rank was lost: )"
    )
    assert any("contains token" in outcome.stderr for outcome in run.outcomes), run.written()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the --save folder of a finished run on two ranks."""
    folder = tmp_path_factory.mktemp("saving")
    run = run_program(command_line({**DENSE, "save": folder / "saved", "save-interval": 3}), 2, folder=folder)
    assert run.exit_codes == [0, 0], run.written()
    return folder / "saved"


DAMAGES = [
    slow(lambda folder: cut(folder / ITERATION / "__0_0.distcp", 99), "__0_0.distcp is truncated or changed"),
    slow(lambda folder: (folder / ITERATION / "__1_0.distcp").unlink(), "__1_0.distcp is missing"),
    (lambda folder: flip_last_byte(folder / ITERATION / "__1_0.distcp"), r"__1_0.distcp is corrupt: \w+.*"),
    slow(lambda folder: (folder / ITERATION / "common.json").unlink(), "common.json is missing"),
    slow(lambda folder: (folder / ITERATION / ".metadata").unlink(), ".metadata is missing"),
    (lambda folder: (folder / ITERATION / "manifest.json").unlink(), "it has no manifest.json"),
    slow(lambda folder: cut(folder / ITERATION / "manifest.json", 9), "manifest.json is corrupt"),
    slow(lambda folder: shutil.rmtree(folder / ITERATION), "names iteration 6: .* does not exist"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("damage", "message"), DAMAGES)
def test_from_a_damaged_checkpoint_a_run_goes_back_to_the_one_before_and_says_so(
    damage: Callable[[Path], object], message: str, saved: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "saved"
    shutil.copytree(saved, folder)
    damage(folder)
    argv = command_line({**DENSE, "load": folder, "save": folder})
    run = run_program(argv, 2, folder=tmp_path / "run")
    assert run.exit_codes == [0, 0], run.written()
    notice = rf"{message}.*: loading iteration 3 instead, the newest complete checkpoint"
    assert len(re.findall(notice, run.written())) == 1, run.written()
    assert sorted(run.steps) == [4, 5, 6]
    # The damaged checkpoint has been replaced.
    assert (folder / TRACKER).read_text() == "6"
    assert contents(folder / ITERATION).keys() == contents(saved / ITERATION).keys()


@pytest.mark.slow
def test_a_named_step_and_the_last_undamaged_checkpoint_are_refused_by_name_and_kept(
    saved: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "saved"
    shutil.copytree(saved, folder)
    flip_last_byte(folder / ITERATION / "__1_0.distcp")
    before = contents(folder)
    flags: Flags = {**DENSE, "load": folder, "save": folder}
    run = run_program(command_line({**flags, "ckpt-step": STEPS}), 2, folder=tmp_path / "step")
    assert_one_line_on_every_rank(run, "__1_0.distcp is corrupt: ")
    assert contents(folder) == before
    flip_last_byte(folder / "iter_0000003" / "__0_0.distcp")
    run = run_program(command_line(flags), 2, folder=tmp_path / "none")
    assert_one_line_on_every_rank(
        run, "names iteration 6: .*__1_0.distcp is corrupt: .*__0_0.distcp .*iterations: none"
    )


def flip_last_byte(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([byte ^ 1]))
