"""The expectations of functional cases. Each function makes and checks the runs it needs. case.py has the format."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.core import dist_checkpointing
from tests.functional_tests.case import FOLDER, Case, Flags, command_line
from tests.functional_tests.corpora import write_corpora
from tests.functional_tests.launch import PROGRAM, Run, run_program


@dataclass
class Runner:
    """Runs a case and its variants in `folder`. In flags, {tmp} stands for `folder`, {tests} for this file's folder."""

    case: Case
    folder: Path
    program: str = PROGRAM

    def run(self, name: str, flags: Flags | None = None, *, processes: int | None = None) -> Run:
        """Runs the case's flags, updated by `flags`, and logs to the folder `name`."""
        words = command_line({**self.case.flags, **(flags or {})})
        words = [word.replace("{tmp}", str(self.folder)).replace("{tests}", str(FOLDER)) for word in words]
        return run_program(words, processes or self.case.processes, folder=self.folder / name, program=self.program)

    def finished_run(self, name: str, flags: Flags | None = None, *, processes: int | None = None) -> Run:
        """Calls `run`, and asserts that every rank ended with status 0 and that a step was logged."""
        run = self.run(name, flags, processes=processes)
        assert run.exit_codes == [0] * len(run.outcomes), run.written()
        assert run.log, f"nothing in steps.jsonl\n{run.written()}"
        return run

    @cached_property
    def plain(self) -> Run:
        """The case's unchanged run, shared by all its expectations. It saves checkpoints if the case has resume_at."""
        if "resume_at" not in self.case.expect:
            return self.finished_run("plain")
        interval = self.case.flags.get("save-interval", self.resume_steps[0])
        return self.finished_run("plain", {"save": "{tmp}/plain/saved", "save-interval": interval})

    @property
    def resume_steps(self) -> list[int]:
        """The steps of resume_at, in ascending order."""
        steps = self.case.expect["resume_at"]
        return sorted(steps) if isinstance(steps, list) else [steps]

    def check(self) -> None:
        """Checks all expectations of the case."""
        write_corpora(self.folder, self.case.corpora)
        for name, value in self.case.expect.items():
            EXPECTATIONS[name](self, value)


def _failure(runner: Runner, wanted: dict[str, Any]) -> None:
    """Checks `{exit_code: 1, error: regex}`: every rank ends with this code, and one line of its stderr matches."""
    _assert_failure(runner.run("failing"), wanted)


# Flags that the saving run of _refused_load and _loads removes, and flags that it adds.
_LOADING = {
    "load",
    "pretrained-checkpoint",
    "use-checkpoint-args",
    "ckpt-step",
    "finetune",
    "exit-on-missing-checkpoint",
    "no-load-optim",
    "no-load-rng",
}
_SAVING: Flags = {"save": "{tmp}/saved", "train-iters": 3}


def _save_with(runner: Runner, flags: Flags) -> None:
    """Trains three steps with the case's flags, except those for loading, updated by `flags`. Saves to {tmp}/saved."""
    dropped = dict.fromkeys(runner.case.flags.keys() & _LOADING)
    runner.finished_run("saving", {**dropped, **_SAVING, **flags})


def _refused_load(runner: Runner, wanted: dict[str, Any]) -> None:
    """Checks `{saved_with: {flags}, exit_code: 1, error: regex}`: a checkpoint saved with these flags is rejected.

    The case loads the checkpoint from {tmp}/saved, which must not change.
    """
    saved = runner.folder / "saved"
    _save_with(runner, wanted["saved_with"])
    before = contents(saved)
    _assert_failure(runner.run("failing"), wanted)
    assert contents(saved) == before


def _loads(runner: Runner, wanted: dict[str, Any]) -> None:
    """Checks `{saved_with: {flags}, steps: [4, 5, 6]}`: the case loads a checkpoint of three steps with these flags.

    The run then logs the given steps and ends with status 0. The checkpoint is in {tmp}/saved.
    """
    _save_with(runner, wanted["saved_with"])
    run = runner.run("loading")
    assert run.exit_codes == [0] * len(run.outcomes), run.written()
    assert sorted(run.steps) == wanted["steps"], run.written()
    assert "successfully loaded checkpoint" in run.outcomes[0].stdout, run.written()


def _assert_failure(run: Run, wanted: dict[str, Any]) -> None:
    assert run.exit_codes == [wanted["exit_code"]] * len(run.outcomes), run.written()
    for outcome in run.outcomes:
        lines = [line for line in outcome.stderr.splitlines() if re.search(wanted["error"], line)]
        assert len(lines) == 1, f"{len(lines)} lines match {wanted['error']!r}, expected 1\n{run.written()}"
        assert "Traceback" not in outcome.stderr, run.written()


def _resume_at(runner: Runner, _: int | list[int]) -> None:
    """Checks that a run resumed at the first of these steps is bit-identical to the uninterrupted run.

    At each later step, the resumed run stops, saves, and is resumed from the checkpoint that it saved.
    """
    whole, (first, *stops) = runner.plain, runner.resume_steps
    saved = "{tmp}/resumed/saved"
    loads: Flags = {"load": "{tmp}/plain/saved", "ckpt-step": first}
    for step in stops:
        part = runner.finished_run("resumed", {"save": saved, "exit-interval": step, **loads})
        assert max(part.steps) == step, f"the run did not stop at step {step}: {sorted(part.steps)}"
        loads = {"load": saved}
    last = runner.finished_run("resumed", {"save": saved, **loads})
    assert_same_steps(last, whole, after=first)
    for iteration, losses in whole.validation_losses.items():
        if iteration > first:
            assert last.validation_losses[iteration][: len(losses)] == losses, f"validation at step {iteration}"
    folders = [runner.folder / one / "saved" / f"iter_{max(whole.steps):07d}" for one in ("resumed", "plain")]
    assert_same_checkpoint(*folders)


def _same_as(runner: Runner, variant: dict[str, Any]) -> None:
    """Checks `{flags: {...}, processes: N}`: a run with these changes logs bit-identical values."""
    assert_same_steps(_variant(runner, variant), runner.plain)


def _close_to(runner: Runner, variant: dict[str, Any]) -> None:
    """Checks `{flags: {...}, processes: N, rtol: X}`: losses and gradient norms of such a run agree within rtol."""
    other, rtol = _variant(runner, variant), variant["rtol"]
    assert other.steps.keys() == runner.plain.steps.keys()
    for iteration, step in runner.plain.steps.items():
        for name in ("lm_loss", "grad_norm"):
            assert other.steps[iteration][name] == pytest.approx(step[name], rel=rtol), f"{name} of step {iteration}"


def _differs_from(runner: Runner, variant: dict[str, Any]) -> None:
    """Checks `{flags: {...}, processes: N}`: the last loss of a run with these changes differs, so the flags matter."""
    other, last = _variant(runner, variant), max(runner.plain.steps)
    assert other.steps[last]["lm_loss"] != runner.plain.steps[last]["lm_loss"]


def _loss_below(runner: Runner, bound: float) -> None:
    """Checks that the mean loss of the last three steps is below the bound."""
    losses = [step["lm_loss"] for _, step in sorted(runner.plain.steps.items())][-3:]
    assert sum(losses) / len(losses) < bound, f"last losses {losses}"


def _validation_loss_below(runner: Runner, bound: float) -> None:
    losses = runner.plain.validation_losses
    assert losses and losses[max(losses)][-1] < bound, f"validation losses {losses}"


def _steps(runner: Runner, count: int) -> None:
    """Checks that the run logs the steps 1 to `count`, each of them once."""
    logged = sorted(runner.plain.steps)
    assert logged == list(range(1, count + 1)), f"steps logged: {logged}"


def _quiet(runner: Runner, _: bool) -> None:
    """Checks that a run that stops after step 3, and its resumption, print only log lines (_LOG_LINES)."""
    saved = {"save": "{tmp}/quiet/saved", "load": "{tmp}/quiet/saved", "save-interval": 3}
    for flags in ({"exit-interval": 3}, {}):
        run = runner.finished_run("quiet", {**saved, **flags})
        printed = [line for one in run.outcomes for line in (one.stdout + one.stderr).splitlines()]
        unexpected = [line for line in printed if not re.match("|".join(_LOG_LINES), line)]
        assert not unexpected, unexpected
        assert not any(one.stdout for one in run.outcomes[1:]), run.written()


def _logs(runner: Runner, names: list[str]) -> None:
    """Checks that each step's log line contains these fields, with values that are not zero, null or empty."""
    for iteration, step in runner.plain.steps.items():
        assert all(step.get(name) for name in names), f"step {iteration} has {sorted(step)}"


def _output(runner: Runner, pattern: str) -> None:
    """Checks that the output of rank 0 matches the pattern."""
    assert re.search(pattern, runner.plain.outcomes[0].stdout), runner.plain.written()


def _prints(runner: Runner, pattern: str) -> None:
    """Checks that the program ends with status 0 without training a step, and that its output matches the pattern."""
    run = runner.run("printing")
    assert run.exit_codes == [0] * len(run.outcomes) and not run.log, run.written()
    assert re.search(pattern, run.outcomes[0].stdout), run.written()


_LOG_LINES = (
    r"  fits this machine: [\d.]+ of [\d.]+ GiB per rank for weights, gradients and optimizer states, without ",
    r" \[[-0-9]+ [:0-9]+\] iteration +\d+/ +\d+ \| consumed samples: .* \| lm loss: ",
    r"[ -]*validation loss at iteration \d+ ",
    r"-+$",
    r"\[Rank 0\] \(after \d+ iterations\) memory \(MB\) \|",
    r"\[Rank 0\] persistent memory \(MB\) \|",
    r"  successfully saved checkpoint from iteration +\d+$",
    r"  exiting at iteration \d+: ",
    r"  successfully loaded checkpoint from .* at iteration \d+",
    r"No checkpoint found in .*: starting from scratch\.$",
)


def _checkpoints(runner: Runner, iterations: list[int]) -> None:
    """Checks that the --save folder {tmp}/saved contains complete checkpoints of exactly these steps after the run."""
    assert runner.plain.steps
    names = sorted(entry.name for entry in (runner.folder / "saved").iterdir() if entry.is_dir())
    assert names == [f"iter_{iteration:07d}" for iteration in iterations]
    assert all((runner.folder / "saved" / name / "manifest.json").is_file() for name in names)


EXPECTATIONS: dict[str, Callable[[Runner, Any], None]] = {
    "failure": _failure,
    "refused_load": _refused_load,
    "loads": _loads,
    "resume_at": _resume_at,
    "same_as": _same_as,
    "close_to": _close_to,
    "differs_from": _differs_from,
    "loss_below": _loss_below,
    "validation_loss_below": _validation_loss_below,
    "steps": _steps,
    "checkpoints": _checkpoints,
    "logs": _logs,
    "output": _output,
    "prints": _prints,
    "quiet": _quiet,
}


def contents(folder: Path) -> dict[str, bytes]:
    """Maps the relative path of every file in the folder to its content."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def assert_same_steps(run: Run, reference: Run, *, after: int = 0) -> None:
    """Asserts that all fields except UNCOMPARED_FIELDS are equal. after: `run` has only the steps after this one."""
    expected = {iteration: step for iteration, step in reference.steps.items() if iteration > after}
    assert run.steps.keys() == expected.keys()
    for iteration in sorted(expected):
        assert run.steps[iteration] == expected[iteration], f"step {iteration}"


def assert_same_checkpoint(folder: Path, reference: Path) -> None:
    """Asserts that two checkpoint folders contain bit-identical tensors."""
    tensors, expected = _load_all(folder), _load_all(reference)
    assert tensors.keys() == expected.keys()
    different = [key for key in expected if not torch.equal(_bytes(tensors[key]), _bytes(expected[key]))]
    assert not different, f"tensors differ: {different}"


def _load_all(folder: Path) -> dict[str, torch.Tensor]:
    listed = dist_checkpointing.list_tensors(folder)
    tensors = {key: torch.empty(shape, dtype=dtype) for key, (shape, dtype) in listed.items()}
    wanted = [dist_checkpointing.ShardedTensor.whole(key, tensor) for key, tensor in tensors.items()]
    dist_checkpointing.load_items(wanted, folder)
    return tensors


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Views a tensor as bytes, so that identical NaNs, which stand for missing values, compare as equal."""
    return tensor.reshape(-1).view(torch.uint8)


def _variant(runner: Runner, variant: dict[str, Any]) -> Run:
    return runner.finished_run("variant", variant.get("flags"), processes=variant.get("processes"))
