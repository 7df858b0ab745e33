"""What a case may expect, by name: each function runs what it needs and asserts. How a case is written: case.py."""

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
    """Runs one case and its variants in `folder`; `{tmp}` in a flag's value is that folder, `{tests}` this one."""

    case: Case
    folder: Path
    program: str = PROGRAM

    def run(self, name: str, flags: Flags | None = None, *, processes: int | None = None) -> Run:
        """A run with the case's flags and `flags` over them, logging to the folder `name`."""
        words = command_line({**self.case.flags, **(flags or {})})
        words = [word.replace("{tmp}", str(self.folder)).replace("{tests}", str(FOLDER)) for word in words]
        return run_program(
            words,
            processes or self.case.processes,
            folder=self.folder / name,
            program=self.program,
            env=self.case.env,
        )

    def finished_run(self, name: str, flags: Flags | None = None, *, processes: int | None = None) -> Run:
        """As `run`; fails unless every rank ended well after at least one step."""
        run = self.run(name, flags, processes=processes)
        assert run.exit_codes == [0] * len(run.outcomes), run.written()
        assert run.log, f"nothing in steps.jsonl\n{run.written()}"
        return run

    @cached_property
    def plain(self) -> Run:
        """The case's own run, made once for all that the case expects; it saves if others are to go on from there."""
        if "resume_at" not in self.case.expect:
            return self.finished_run("plain")
        interval = self.case.flags.get("save-interval", self.resume_steps[0])
        return self.finished_run("plain", {"save": "{tmp}/plain/saved", "save-interval": interval})

    @property
    def resume_steps(self) -> list[int]:
        """The steps of resume_at, in turn."""
        steps = self.case.expect["resume_at"]
        return sorted(steps) if isinstance(steps, list) else [steps]

    def check(self) -> None:
        """Asserts everything that the case expects."""
        write_corpora(self.folder, self.case.corpora)
        for name, value in self.case.expect.items():
            EXPECTATIONS[name](self, value)


def _failure(runner: Runner, wanted: dict[str, Any]) -> None:
    """{exit_code: 1, error: regex}: every rank ends with this code, and says this on stderr in one line."""
    _assert_failure(runner.run("failing"), wanted)


def _refused_load(runner: Runner, wanted: dict[str, Any]) -> None:
    """{saved_with: {flags}, exit_code: 1, error: regex}: the case cannot load what a run with these flags saved.

    The case finds it in {tmp}/saved, and leaves that folder as it is.
    """
    saved = runner.folder / "saved"
    runner.finished_run(
        "saving", {**dict.fromkeys(runner.case.flags.keys() & _LOADING), **_SAVING, **wanted["saved_with"]}
    )
    before = contents(saved)
    _assert_failure(runner.run("failing"), wanted)
    assert contents(saved) == before


def _loads(runner: Runner, wanted: dict[str, Any]) -> None:
    """{saved_with: {flags}, steps: [4, 5, 6]}: the case loads what a run of three steps with these flags saved.

    It then logs these steps and ends well. The checkpoint is in {tmp}/saved.
    """
    loading = dict.fromkeys(runner.case.flags.keys() & _LOADING)
    runner.finished_run("saving", {**loading, **_SAVING, **wanted["saved_with"]})
    run = runner.run("loading")
    assert run.exit_codes == [0] * len(run.outcomes), run.written()
    assert sorted(run.steps) == wanted["steps"], run.written()
    assert "successfully loaded checkpoint" in run.outcomes[0].stdout, run.written()


def _assert_failure(run: Run, wanted: dict[str, Any]) -> None:
    assert run.exit_codes == [wanted["exit_code"]] * len(run.outcomes), run.written()
    for outcome in run.outcomes:
        lines = [line for line in outcome.stderr.splitlines() if re.search(wanted["error"], line)]
        assert len(lines) == 1, f"no line matches {wanted['error']!r}\n{run.written()}"
        assert "Traceback" not in outcome.stderr, run.written()


def _resume_at(runner: Runner, _: int | list[int]) -> None:
    """Going on from what the run saved after the first of these steps gives what it gave itself, bit for bit.

    At each later one of these steps the run that goes on stops, saves, and goes on once more.
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
    """{flags: {...}, processes: N}: a run with these differences logs the same numbers, bit for bit."""
    assert_same_steps(_variant(runner, variant), runner.plain)


def _close_to(runner: Runner, variant: dict[str, Any]) -> None:
    """As same_as within `rtol`, for losses and gradient norms."""
    other, rtol = _variant(runner, variant), variant["rtol"]
    assert other.steps.keys() == runner.plain.steps.keys()
    for iteration, step in runner.plain.steps.items():
        for name in ("lm_loss", "grad_norm"):
            assert other.steps[iteration][name] == pytest.approx(step[name], rel=rtol), f"{name} of step {iteration}"


def _differs_from(runner: Runner, variant: dict[str, Any]) -> None:
    """As same_as, but the last step's loss is another one: a flag that changes nothing would pass all else."""
    other, last = _variant(runner, variant), max(runner.plain.steps)
    assert other.steps[last]["lm_loss"] != runner.plain.steps[last]["lm_loss"]


def _loss_below(runner: Runner, bound: float) -> None:
    """The mean loss of the last three steps."""
    losses = [step["lm_loss"] for _, step in sorted(runner.plain.steps.items())][-3:]
    assert sum(losses) / len(losses) < bound, f"last losses {losses}"


def _validation_loss_below(runner: Runner, bound: float) -> None:
    losses = runner.plain.validation_losses
    assert losses and losses[max(losses)][-1] < bound, f"validation losses {losses}"


def _steps(runner: Runner, count: int) -> None:
    """The run made this many steps, each logged once."""
    logged = sorted(runner.plain.steps)
    assert logged == list(range(1, count + 1)), f"steps logged: {logged}"


def _quiet(runner: Runner, _: bool) -> None:
    """The run, and one that goes on from its checkpoint, print log lines and nothing else."""
    saved = {"save": "{tmp}/quiet/saved", "load": "{tmp}/quiet/saved", "save-interval": 3}
    for flags in ({"exit-interval": 3}, {}):
        run = runner.finished_run("quiet", {**saved, **flags})
        printed = [line for one in run.outcomes for line in (one.stdout + one.stderr).splitlines()]
        unexpected = [line for line in printed if not re.match("|".join(_LOG_LINES), line)]
        assert not unexpected, unexpected
        assert not any(one.stdout for one in run.outcomes[1:]), run.written()


def _logs(runner: Runner, names: list[str]) -> None:
    """Each step's line has these fields, with something in them."""
    for iteration, step in runner.plain.steps.items():
        assert all(step.get(name) for name in names), f"step {iteration} has {sorted(step)}"


def _output(runner: Runner, pattern: str) -> None:
    """Rank 0 printed something that matches."""
    assert re.search(pattern, runner.plain.outcomes[0].stdout), runner.plain.written()


def _prints(runner: Runner, pattern: str) -> None:
    """The program ends well without a step, and has printed something that matches."""
    run = runner.run("printing")
    assert run.exit_codes == [0] * len(run.outcomes) and not run.log, run.written()
    assert re.search(pattern, run.outcomes[0].stdout), run.written()


# What _refused_load and _loads leave out of and add to the flags of the run that saves.
_LOADING = {
    "load",
    "use-checkpoint-args",
    "ckpt-step",
    "finetune",
    "exit-on-missing-checkpoint",
    "no-load-optim",
    "no-load-rng",
}
_SAVING: Flags = {"save": "{tmp}/saved", "train-iters": 3}
_LOG_LINES = (
    r" \[[-0-9]+ [:0-9]+\] iteration +\d+/ +\d+ \| consumed samples: .* \| lm loss: ",
    r"[ -]*validation loss at iteration \d+ ",
    r"-+$",
    r"\[Rank 0\] \(after \d+ iterations\) memory \(MB\) \|",
    r"\[Rank 0\] kept from step to step \(MB\) \|",
    r"  successfully saved checkpoint from iteration +\d+$",
    r"  exiting at iteration \d+: ",
    r"  successfully loaded checkpoint from .* at iteration \d+",
    r"There is no checkpoint in .*: starting from scratch\.$",
)


def _checkpoints(runner: Runner, iterations: list[int]) -> None:
    """After the case's own run its --save folder {tmp}/saved holds complete checkpoints of these, and nothing half."""
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
    """Relative path to content, of every file in the folder."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def assert_same_steps(run: Run, reference: Run, *, after: int = 0) -> None:
    """Every number of every step is equal, except times. after: `run` has only the steps after this one."""
    expected = {iteration: step for iteration, step in reference.steps.items() if iteration > after}
    assert run.steps.keys() == expected.keys()
    for iteration in sorted(expected):
        assert run.steps[iteration] == expected[iteration], f"step {iteration}"


def assert_same_checkpoint(folder: Path, reference: Path) -> None:
    """Two checkpoint folders hold the same tensors, bit for bit."""
    tensors, expected = _load_all(folder), _load_all(reference)
    assert tensors.keys() == expected.keys()
    different = [key for key in expected if not torch.equal(_bytes(tensors[key]), _bytes(expected[key]))]
    assert not different, f"tensors differ: {different}"


def _load_all(folder: Path) -> dict[str, torch.Tensor]:
    listed = dist_checkpointing.list_tensors(folder)
    tensors = {key: torch.empty(shape, dtype=dtype) for key, (shape, dtype) in listed.items()}
    wanted = [dist_checkpointing.ShardedTensor.whole(key, tensor) for key, tensor in tensors.items()]
    dist_checkpointing.load(wanted, folder)
    return tensors


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Bytes compare as equal where NaN, which stands for absent numbers, does not."""
    return tensor.reshape(-1).view(torch.uint8)


def _variant(runner: Runner, variant: dict[str, Any]) -> Run:
    return runner.finished_run("variant", variant.get("flags"), processes=variant.get("processes"))
