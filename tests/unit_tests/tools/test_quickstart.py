"""Choices and output of `make train`: shares of documents, source of tokens, plan and prompt."""

import json
import os
import shlex
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.datasets.utils import split_documents
from megatron.core.num_microbatches_calculator import BatchSchedule
from megatron.core.optimizer_param_scheduler import OptimizerParamSchedulerConfig, get_optimizer_param_scheduler
from megatron.tools import preprocess_data, train_tokenizer
from megatron.tools.quickstart import (
    FIRST_RATE,
    LAST_RATE,
    MODEL,
    NEXT_RATE,
    SAMPLE_TOKENS,
    SCHEDULE,
    Workspace,
    check_source,
    document_lengths,
    held_out_passage,
    indented,
    make_workspace,
    outcome_words,
    parse_options,
    plan_words,
    prepare,
    rate_flags,
    split_of,
)
from megatron.training.arguments import parse_args
from megatron.training.command_line.config_builder import config_from_args

REPOSITORY = Path(__file__).resolve().parents[3]


def tokens_by_part(split: str, lengths: list[int]) -> list[int]:
    return [sum(lengths[document] for document in part or ()) for part in split_documents(split, len(lengths))]


def has_any_split(lengths: list[int]) -> bool:
    """Cuts off the shortest test and validation parts, so that training has as much as possible."""
    rest = list(lengths)
    for _ in range(2):
        taken = 0
        while rest and taken < SAMPLE_TOKENS:
            taken += rest.pop()
        if taken < SAMPLE_TOKENS:
            return False
    return sum(rest) >= SAMPLE_TOKENS


@given(
    st.one_of(
        st.lists(st.one_of(st.integers(0, 600), st.integers(0, 200_000)), max_size=40),
        st.tuples(st.integers(1, 2000), st.integers(1, 3000)).map(lambda pair: [pair[1]] * pair[0]),
    )
)
@settings(max_examples=500, deadline=None)
def test_every_part_has_a_sample_whenever_documents_allow_it(lengths: list[int]) -> None:
    if not has_any_split(lengths):
        with pytest.raises(SystemExit, match=f"DATA has {sum(lengths):,} tokens in {len(lengths):,} documents"):
            split_of(lengths)
        return
    parts = tokens_by_part(split_of(lengths), lengths)
    assert sum(parts) == sum(lengths) and min(parts) >= SAMPLE_TOKENS


@pytest.mark.parametrize(("num_documents", "length"), [(30, 3000), (100, 202), (1172, 4953), (100_000, 200)])
def test_most_tokens_are_for_training(num_documents: int, length: int) -> None:
    training, validation, test = tokens_by_part(split_of([length] * num_documents), [length] * num_documents)
    total = num_documents * length
    assert training >= 0.92 * total and validation <= 0.03 * total + length
    assert test <= max(0.01 * total, SAMPLE_TOKENS + length)
    # A long document before short ones stays in training.
    assert split_of([300, 80_000, 300, 257]) == "2,1,1"


def write_text(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def trained(workspace: Workspace) -> None:
    write_text(workspace.checkpoints / "latest_checkpointed_iteration.txt", "100")


def test_another_text_replaces_tokens_but_never_a_trained_run(tmp_path: Path) -> None:
    text = write_text(tmp_path / "text.txt", "one")
    folder = tmp_path / "run"
    folder.mkdir()
    workspace = Workspace(folder, (text,))
    made = [workspace.tokenizer, folder / "tokens_text_document.idx", folder / "tokens_content_document.bin"]
    check_source(workspace)
    # Equal sizes and times: only the contents differ.
    for content, kept in (("one", True), ("two", False)):
        stat = text.stat()
        for path in made:
            path.touch()
        os.utime(write_text(text, content), ns=(stat.st_atime_ns, stat.st_mtime_ns))
        check_source(workspace)
        assert [path.exists() for path in made] == [kept] * len(made)
    made[0].touch()
    trained(workspace)
    check_source(workspace)
    check_source(Workspace(folder, (write_text(tmp_path / "moved" / "text.txt", "two"),)))
    for other in (
        Workspace(folder, (text,), key="content"),
        Workspace(folder, (write_text(tmp_path / "other" / "text.txt", "six"),)),
        Workspace(folder, (text, text)),
    ):
        with pytest.raises(SystemExit, match=r"run has a run on .*text.txt.*: move that folder away") as error:
            check_source(other)
        assert "\n" not in str(error.value) and made[0].exists()
    made[0].unlink()
    with pytest.raises(SystemExit, match="run does not contain the tokenizer of its run"):
        check_source(workspace)


def test_the_text_of_python_and_a_file_of_that_name_are_never_mixed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_text(tmp_path / "python.txt", "my own text")
    default, own = make_workspace(None), make_workspace("python.txt")
    assert default.folder == own.folder
    write_text(default.texts[0], '{"text": "pass"}')
    for first, second in ((default, own), (own, default)):
        check_source(first)
        first.tokenizer.touch()
        trained(first)
        with pytest.raises(SystemExit, match="error: runs/python has a run on "):
            check_source(second)
        shutil.rmtree(first.checkpoints)
        # Without a trained model the other text replaces tokens.
        check_source(second)
        assert not first.tokenizer.exists()
    # A run of an unknown text, for example of an older version.
    (default.folder / "source.json").unlink()
    trained(default)
    with pytest.raises(SystemExit, match="has a run on text that is not recorded"):
        check_source(default)


def test_the_key_of_the_text_may_be_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    texts = [f"document {number} of some text" for number in range(20)]
    pyarrow.parquet.write_table(pyarrow.table({"id": [*range(20)], "a.b": texts}), "rows.parquet")
    write_text(tmp_path / "rows.jsonl", "".join(json.dumps({"a.b": text}) + "\n" for text in texts))
    for name, problem in (
        ("rows.parquet", "no column 'text'; its columns: 'id', 'a.b'. Choose with KEY= "),
        ("rows.jsonl", "no key 'text'; found 'a.b'. Choose the key of the text with KEY= "),
    ):
        with pytest.raises(SystemExit, match=problem) as error:
            make_workspace(name)
        assert "\n" not in str(error.value)
        workspace = make_workspace(name, key="a.b")
        prepare(workspace)
        assert workspace.has_tokens and workspace.tokens.name == "tokens_a.b_document"
        assert len(document_lengths(workspace)) == len(texts)
        # The existing results are used.
        capsys.readouterr()
        prepare(workspace)
        assert capsys.readouterr().out == ""


def test_make_passes_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["quickstart", "--json-key", "content"])
    assert parse_options().json_key == "content"
    words = ["make", "--dry-run", "--assume-old=env", "train", "DATA=rows.parquet", "KEY=my content"]
    commands = subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    assert '--data "rows.parquet" --json-key "my content"' in commands


def rates(trained_steps: int, *, steps: int) -> list[float]:
    """Returns the learning rate of each new step."""
    words = [*shlex.split(MODEL + SCHEDULE), *map(str, rate_flags(trained_steps, steps=steps))]
    args = parse_args(argv=[*words, "--mock-data", "--train-iters", str(trained_steps + steps)])
    optimizer = SimpleNamespace(param_groups=[{}])
    scheduler = get_optimizer_param_scheduler(
        optimizer,
        config_from_args(OptimizerParamSchedulerConfig, args),
        max_lr=args.lr,
        min_lr=args.min_lr,
        weight_decay=args.weight_decay,
        train_iters=args.train_iters,
        train_samples=None,
        batches=BatchSchedule((0,), (8,)),
    )
    scheduler.step(8 * trained_steps)
    found = []
    for _ in range(steps):
        scheduler.step(8)
        found.append(optimizer.param_groups[0]["lr"])
    return found


def test_a_continued_run_decays_from_the_announced_rate() -> None:
    first, second = rates(0, steps=200), rates(90, steps=200)
    assert max(first) == pytest.approx(FIRST_RATE) and first[-1] == pytest.approx(LAST_RATE)
    # A busy machine may stop the first run at step 90: its rate does not rise.
    assert first[89] > second[0] == pytest.approx(NEXT_RATE, rel=1e-3)
    assert second == sorted(second, reverse=True) and second[-1] == pytest.approx(LAST_RATE)


def test_a_run_that_time_stopped_is_told(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path, ())
    trained(workspace)
    assert outcome_words(workspace, steps=100, minutes=4) == "complete; run the same command to continue"
    assert outcome_words(workspace, steps=200, minutes=4) == (
        "stopped by time (4 min) at step 100 of 200; run the same command to continue"
    )


@pytest.mark.parametrize("separator", [" ", "\n"])
def test_the_prompt_is_a_passage_of_a_test_document(tmp_path: Path, separator: str) -> None:
    texts = [
        f"Document {number} tells of {name}.{separator}" * 60 for number, name in enumerate(("rivers", "hills", "seas"))
    ]
    source = tmp_path / "text.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    workspace = Workspace(tmp_path, (source,))
    files = ["--input", str(source), "--output"]
    assert train_tokenizer.main([*files, str(workspace.tokenizer), "--vocab-size", "300"]) == 0
    flags = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(workspace.tokenizer), "--append-eod"]
    assert preprocess_data.main(["--input", str(source), "--output-prefix", str(tmp_path / "tokens"), *flags]) == 0
    found = held_out_passage(workspace, split="1,1,1")
    assert found in texts[2] and 20 < len(found) < len(texts[2]) / 2
    # If there are lines, the passage begins with a whole line.
    assert separator == " " or found.startswith("Document 2 tells of seas.\n")


def test_generated_lines_are_marked() -> None:
    assert indented("one\ntwo\nthree\nfour\n", prompt="one\ntwo\n") == "    one\n    two\n  | three\n  | four"
    assert indented("one two three\nfour", prompt="one two") == "    one two\n  |  three\n  | four"


def test_the_line_of_the_plan_is_for_this_machine() -> None:
    stages = [{"peak": 2**30}, {"peak": 3 * 2**29}]
    plan = {"stages": stages, "world_size": 2, "step": {"seconds": 0.4321}}
    cpu = {"name": "cpu", "memory_gib": 23.54}
    assert plan_words({**plan, "device": cpu}) == (
        "each of 2 processes needs 1.50 GiB of the machine's 23.5, about 0.43 s per step"
    )
    gpu = {"name": "H100", "memory_gib": 79.6}
    assert plan_words({**plan, "device": gpu}) == (
        "each of 2 processes needs 1.50 GiB of H100's 79.6, about 0.43 s per step"
    )


def test_data_may_be_whatever_the_preprocessor_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a.txt", "b.jsonl"):
        (tmp_path / "texts").mkdir(exist_ok=True)
        (tmp_path / "texts" / name).write_text('{"text": "some"}')
    workspace = make_workspace("texts")
    assert workspace.folder == tmp_path / "runs" / "texts" and not workspace.is_own
    assert [text.name for text in workspace.texts] == ["a.txt", "b.jsonl"]
    assert [text.name for text in make_workspace("texts/*.txt").texts] == ["a.txt"]
    assert make_workspace(None).is_own
    with pytest.raises(SystemExit, match="error: DATA is none.txt: .*none.txt"):
        make_workspace("none.txt")
    write_text(tmp_path / "empty.txt", "")
    with pytest.raises(SystemExit, match="error: DATA is empty.txt: no text in"):
        make_workspace("empty.txt")
