"""Files that an earlier commit wrote load to the values that were stored with them. See tests/stored_runs/README.md."""

import argparse
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from megatron.tools.report_sections import read_plan
from megatron.tools.run_log import read_run
from megatron.training.arguments import parse_args, validate_args
from megatron.training.checkpointing.run_values import load_args_from_checkpoint, load_run_values
from tests.functional_tests.launch import run_program
from tests.stored_runs.settings import FURTHER, LEGACY, MODELS, STEPS, adopting_words, run_words

FIXTURES = Path(__file__).parents[1] / "stored_runs" / "fixtures"


def _expected(name: str) -> dict[str, Any]:
    return json.loads((FIXTURES / f"{name}.json").read_text(encoding="utf-8"))


def _unpacked(name: str, folder: Path) -> Path:
    """Extracts a stored checkpoint and returns its folder, for --load."""
    with tarfile.open(FIXTURES / f"{name}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder / name


def _assert_same(args: argparse.Namespace, expected: dict[str, Any]) -> None:
    """Compares arguments with stored ones. Arguments that are newer than the fixtures are not compared."""
    values = {name: getattr(args, name) for name in expected}
    assert json.loads(json.dumps(values, default=str)) == expected


@pytest.mark.parametrize("name", [*MODELS, LEGACY])
def test_a_run_that_takes_its_model_from_the_checkpoint_has_the_stored_arguments(name: str, tmp_path: Path) -> None:
    words = adopting_words(name, load=str(_unpacked(name, tmp_path)))
    args = validate_args(load_args_from_checkpoint(parse_args(argv=words)))
    assert (args.num_layers, args.layernorm_epsilon) == (2, 1e-6)  # not the given values
    _assert_same(args, _expected("arguments")[name])


@pytest.mark.parametrize("name", MODELS)
def test_a_stored_run_continues_as_it_did_and_keeps_its_record(name: str, tmp_path: Path) -> None:
    saved = _unpacked(name, tmp_path)
    before = json.loads((saved / "run.json").read_text(encoding="utf-8"))
    checkpoint = saved / f"iter_{STEPS:07d}"
    assert load_run_values(checkpoint) == json.loads((checkpoint / "common.json").read_text(encoding="utf-8"))
    words = [*run_words(name, steps=STEPS + FURTHER), "--load", str(saved), "--save", str(saved)]
    run = run_program(words, 1, folder=saved)
    assert run.exit_codes == [0], run.written()
    further = {
        str(step): [run.steps[step]["lm_loss"], run.steps[step]["grad_norm"]] for step in list(run.steps)[STEPS:]
    }
    expected = _expected("losses")[name]
    assert further.keys() == expected.keys()
    for step, numbers in expected.items():
        assert further[step] == pytest.approx(numbers, rel=1e-6)
    after = json.loads((saved / "run.json").read_text(encoding="utf-8"))
    assert [start["iteration"] for start in after["starts"]] == [0, STEPS]
    assert after["starts"][0] == before["starts"][0]
    assert after["model"] == before["model"]
    different = {flag for flag, value in before["flags"].items() if after["flags"][flag] != value}
    assert different == {"train_iters", "load", "save", "tensorboard_dir"}


def test_a_stored_configuration_file_has_the_stored_arguments() -> None:
    args = parse_args(argv=["--config", str(FIXTURES / "flags.yaml")])
    _assert_same(args, _expected("arguments")["file"])
    _assert_same(validate_args(args), _expected("arguments")["file, validated"])


def test_the_stored_plan_is_one_of_the_stored_run(tmp_path: Path) -> None:
    run = read_run(_unpacked("experts", tmp_path))
    assert list(run.steps) == [1, 2]
    # Compares parameters, processes and stages with run.json.
    plan = read_plan(FIXTURES / "plan.json", run)
    assert plan["parameters"]["all"] == run.record["model"]["parameters"]
