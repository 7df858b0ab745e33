"""Runs that load a checkpoint train with the arguments that their log names."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.functional_tests.case import Flags, command_line, read_bases
from tests.functional_tests.launch import run_program

BASE: Flags = {**read_bases()["moe"], "train-iters": 1, "lr-warmup-iters": 0, "lr-decay-iters": 8, "eval-iters": 0}
LINE = re.compile(r"note: --use-checkpoint-args: (\S+) is .* \(the command line\), .* in the checkpoint: (.*) used")
TAKEN = re.compile(r"note: --use-checkpoint-args: (\S+) is not given: (.*) is used, as in the checkpoint")
# Flags of the second run, and the values with which it must train.
CASES: dict[str, tuple[Flags, dict[str, Any]]] = {
    "model": (
        {"rotary-base": 500000, "norm-epsilon": 1e-6, "moe-router-topk": 1, "window-size": "15,0"},
        {"rotary_base": 10000, "layernorm_epsilon": 1e-5, "moe_router_topk": 2, "window_size": None},
    ),
    "shape": ({"hidden-size": 64, "num-layers": 3}, {"hidden_size": 32, "num_layers": 2}),
    "length": ({"seq-length": 16, "max-position-embeddings": 48}, {"seq_length": 16, "max_position_embeddings": 48}),
    "dropout": ({"hidden-dropout": 0.25}, {"hidden_dropout": 0.25, "attention_dropout": 0.125}),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("first")
    flags = {**BASE, "hidden-dropout": 0.125, "attention-dropout": 0.125, "save": folder / "saved"}
    run = run_program(command_line(flags), 1, folder=folder)
    assert run.exit_codes == [0], run.written()
    return folder / "saved"


def _arguments(folder: Path, iteration: int) -> dict[str, Any]:
    return json.loads((folder / f"iter_{iteration:07d}" / "common.json").read_text())["args"]


@pytest.mark.parametrize("case", CASES)
def test_arguments_of_the_checkpoint_are_used_as_the_log_says(saved: Path, case: str, tmp_path: Path) -> None:
    given, expected = CASES[case]
    names = ("mock-data", "tokenizer-type", "vocab-size", "micro-batch-size", "global-batch-size", "lr", "train-iters")
    run_flags = {name: BASE[name] for name in (*names, "eval-iters", "deterministic-mode")}
    more = {"use-checkpoint-args": True, "finetune": True, "load": saved, "save": tmp_path / "saved"}
    run = run_program(command_line({**run_flags, **more, **given}), 1, folder=tmp_path)
    assert run.exit_codes == [0], run.written()
    used = _arguments(tmp_path / "saved", 1)
    assert {name: used[name] for name in expected} == expected
    text = run.written()
    claims = dict(LINE.findall(text))
    assert claims.keys() == {f"--{name}" for name in given}
    for claim in claims.values():
        assert claim == "the checkpoint's value is" or case in ("length", "dropout")
    for flag, value in TAKEN.findall(text):
        assert str(used[flag.strip("-").replace("-", "_")]) == value


def test_a_resumed_run_names_each_setting_that_changes_its_results(saved: Path, tmp_path: Path) -> None:
    changed: Flags = {
        "seed": 5, "hidden-dropout": 0.25, "moe-aux-loss-coeff": 0.5, "rotary-base": 20000, "clip-grad": 0.5,
        "global-batch-size": 2, "log-interval": 2, "use-distributed-optimizer": True, "train-iters": 2,
    }  # fmt: skip
    flags = {**BASE, "attention-dropout": 0.125, **changed, "load": saved, "save": tmp_path / "saved"}
    run = run_program(command_line({**flags, "override-opt-param-scheduler": True}), 1, folder=tmp_path)
    assert run.exit_codes == [0], run.written()
    [line] = re.findall(r"note: this run has other settings than the checkpoint's run: (.*)", run.written())
    before, after = _arguments(saved, 1), _arguments(tmp_path / "saved", 2)
    silent = {"log-interval", "use-distributed-optimizer"}
    for name in changed.keys():
        dest = name.replace("-", "_")
        entry = f"--{name} is {after[dest]} here, {before[dest]} in the checkpoint"
        assert (entry in line) == (name not in silent), (name, line)
    assert line.count(" in the checkpoint") == len(changed) - len(silent)
