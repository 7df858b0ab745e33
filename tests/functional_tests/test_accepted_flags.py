"""Flags that are accepted without effect leave a run bit-identical. All are given at once, and bisected on failure."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from megatron.training.command_line.flags import Flag, FlagState, flag_table
from tests.functional_tests.case import command_line, read_bases
from tests.functional_tests.expectations import assert_same_steps
from tests.functional_tests.launch import Run, run_program

VALUES = {"int": "3", "float": "0.3"}


def _words(flag: Flag) -> list[str]:
    """Returns the flag, followed by a value other than its default if it takes one."""
    if flag.constant is not None:
        return [flag.flags[0]]
    others = [str(choice) for choice in flag.choices or () if choice != flag.default]
    value = others[-1] if others else VALUES.get(flag.type_name, "some")
    return [flag.flags[0], *[value] * (flag.nargs if isinstance(flag.nargs, int) else 1)]


def _runs(base: str, folder: Path) -> "_Runs":
    return _Runs(command_line(read_bases()[base]), folder)


class _Runs:
    """Compares runs with some of the flags to a run without them."""

    def __init__(self, words: Sequence[str], folder: Path) -> None:
        self._words, self._folder, self._number = words, folder, 0
        self._plain = self._run([])

    def changed_by(self, flags: Sequence[Flag]) -> Iterator[str]:
        """Yields each flag that, given alone, makes a run fail or log different values."""
        if self._is_same(flags):
            return
        if len(flags) == 1:
            yield flags[0].flags[0]
            return
        half = len(flags) // 2
        yield from self.changed_by(flags[:half])
        yield from self.changed_by(flags[half:])

    def _is_same(self, flags: Sequence[Flag]) -> bool:
        run = self._run(flags)
        if run.exit_codes != [0]:
            return False
        try:
            assert_same_steps(run, self._plain)
        except AssertionError:
            return False
        return True

    def _run(self, flags: Sequence[Flag]) -> Run:
        given = [word for flag in flags for word in _words(flag)]
        self._number += 1
        folder = self._folder / str(self._number)
        return run_program([*self._words, "--save", str(folder / "saved"), *given], 1, folder=folder)


@pytest.mark.parametrize("base", ["dense", "moe"])
def test_flags_without_effect_change_no_bit(base: str, tmp_path: Path) -> None:
    flags = flag_table().in_state(FlagState.NO_EFFECT)
    changed = list(_runs(base, tmp_path).changed_by(flags))
    assert not changed, f"{changed} change the log of a run: reject them, or document their effect"


def test_a_flag_that_changes_a_run_is_found_among_others(tmp_path: Path) -> None:
    flags = flag_table().in_state(FlagState.NO_EFFECT)[:3]
    seed = next(flag for flag in flag_table().flags if flag.flags[0] == "--seed")
    assert list(_runs("dense", tmp_path).changed_by([*flags, seed])) == ["--seed"]
