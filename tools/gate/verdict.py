"""Compares the runs of a case in two trees: exit codes, every logged value and the final checkpoint.

Values are equal if their JSON texts are equal, so floats are compared bitwise. jobs.py runs the cases.
"""

import hashlib
import json
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron.tools.gate.cases import CHECKPOINTS, RESULT

LOG = "steps.jsonl"
Renames = tuple[tuple[str, str], ...]
# (name in the base, name in the head) of a field or a saved entry. A name that ends with a slash renames all names that
# begin with it. They describe the difference from the current base branch. Remove an entry once the base contains the
# change.
RENAMES: Renames = ()
CHECKPOINT_RENAMES: Renames = ()
# Fields that only the head may log, and entries that only the head may save. Remove a name, like one of RENAMES, once
# the base contains the change.
NEW_FIELDS: frozenset[str] = frozenset()
NEW_ENTRIES: frozenset[str] = frozenset({"common/train_state/learned_sizes/row_bytes"})
# Logged fields that may differ between two equivalent runs, with the reasons.
EXCLUDED: dict[str, str] = {
    "seconds": "time",
    "tokens_per_second": "time",
    "tflops": "time",
    "mfu": "time",
    "timers/": "time",
    "rank_times/": "time",
    "overlap/": "time",
    "memory/": "memory of the process, including libraries",
    "held/": "memory: a refactor may free a buffer earlier",
}
# Checkpoint entries that may differ between two equivalent runs.
EXCLUDED_OF_CHECKPOINTS: dict[str, str] = {"common/args/": "the flags given by the case, and paths"}
MOST_NAMES = 6  # in a message

# (iteration, JSON text) of each line that has a field, in the order of the log.
Series = list[tuple[int, str]]
Log = dict[str, Series]  # by field


@dataclass(frozen=True)
class Verdict:
    """The result of comparing a case, with its text for the table. is_failure: a run ended with an error."""

    is_same: bool
    text: str
    is_failure: bool = False


@dataclass(frozen=True)
class Left:
    """The log and final checkpoint of a run.

    digests: digests of the checkpoint's entries by key; empty without a checkpoint.
    """

    log: Log = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)

    @property
    def num_steps(self) -> int:
        """Number of iterations in the log."""
        return len({iteration for series in self.log.values() for iteration, _ in series})


def judge_new(base: Path, head: Path) -> Verdict:
    """Judges a case of NEW_CASES, which the head must run and the base must not."""
    error = failure_of(head)
    if error is not None:
        return Verdict(False, f"new in head, and fails: {error}", is_failure=True)
    if failure_of(base) is None:
        return Verdict(False, "the base can also run it: remove it from NEW_CASES so that it is compared")
    return Verdict(True, f"new in head, runs: {read_left(head).num_steps} steps, not compared")


def judge(base: Path, head: Path) -> Verdict:
    """Judges a case by the folders of its runs with base and head."""
    failures = {name: failure_of(folder) for name, folder in (("base", base), ("head", head))}
    texts = [f"fails in {name}: {_with_hint(name, error)}" for name, error in failures.items() if error is not None]
    if texts:
        return Verdict(False, "; ".join(texts), is_failure=True)
    return compare(read_left(base), read_left(head))


def _with_hint(name: str, error: str) -> str:
    if name == "base" and re.search(r"unknown flag|not supported|unrecognized arguments", error):
        return f"{error} (the base does not know these flags: if the head does, name the case in NEW_CASES)"
    return error


def failure_of(folder: Path) -> str | None:
    """Returns the error of the first failed run in one line, or None if no run failed."""
    path = folder / RESULT
    if not path.exists():
        return "it did not run"
    codes = json.loads(path.read_text(encoding="utf-8"))["exit_codes"]
    for run in codes:
        failed = [rank for rank, code in enumerate(run) if code]
        if failed:
            return _error_line(folder, failed)
    return None


def _error_line(folder: Path, failed: list[int]) -> str:
    """Returns the last error line of a failed rank, preferring ranks that do not merely report another failure."""
    found = []
    for rank in failed:
        path = folder / f"rank{rank}.txt"
        lines = path.read_text(encoding="utf-8", errors="replace").strip().splitlines() if path.exists() else []
        errors = [line.strip() for line in lines if "error" in line.lower() and not line.startswith(" ")]
        found.append(f"rank {rank}: {errors[-1] if errors else lines[-1] if lines else 'ended without output'}")
    own = [line for line in found if "RemoteRankError" not in line and "Connection" not in line]
    return (own or found)[0][:300]


def compare(base: Left, head: Left) -> Verdict:
    """Compares the logs and final checkpoints of two runs."""
    if not base.num_steps or not head.num_steps:
        return Verdict(False, f"no steps logged: {base.num_steps} in base, {head.num_steps} in head")
    before = _renamed(base.log, RENAMES)
    if {value for _, value in before.get("skipped", [])} == {"true"}:
        return Verdict(False, "all steps are skipped in base, so no update is compared")
    if base.num_steps != head.num_steps:
        return Verdict(False, f"different number of steps: {base.num_steps} in base, {head.num_steps} in head")
    known = set(head.log) - (NEW_FIELDS - set(before))
    text = _missing(set(before), known, verb="logged") or _first_difference(before, head.log)
    text = text or _compare_digests(_renamed(base.digests, CHECKPOINT_RENAMES), head.digests)
    if text:
        return Verdict(False, text)
    return Verdict(True, f"same: {base.num_steps} steps, {len(before)} fields, {len(base.digests)} saved entries")


def _missing(before: set[str], after: set[str], *, verb: str) -> str:
    lost, added = sorted(before - after), sorted(after - before)
    parts = [f"{verb} only in base: {_some(lost)}"] * bool(lost)
    parts += [f"{verb} only in head: {_some(added)}"] * bool(added)
    return "; ".join(parts)


def _first_difference(before: Log, after: Log) -> str:
    found = {name: _difference(series, after[name]) for name, series in before.items() if series != after[name]}
    if not found:
        return ""
    step = min(iteration for iteration, _ in found.values())
    names = [name for name, (iteration, _) in found.items() if iteration == step]
    return f"differs from iteration {step}: {_some(names)} ({names[0]}: {found[names[0]][1]})"


def _difference(series: Series, other: Series) -> tuple[int, str]:
    """Returns the first iteration at which two series differ, and a description of the difference."""
    if [step for step, _ in series] != [step for step, _ in other]:
        steps = {step for step, _ in series} ^ {step for step, _ in other}
        return min(steps, default=series[0][0]), "logged at other iterations"
    step, was, now = next((step, was, now) for (step, was), (_, now) in zip(series, other) if was != now)
    return step, f"{was} -> {now}"


def _compare_digests(before: Mapping[str, str], after: Mapping[str, str]) -> str:
    missing = _missing(set(before), set(after) - (NEW_ENTRIES - set(before)), verb="saved")
    if missing:
        return missing
    changed = sorted(name for name, digest in before.items() if after[name] != digest)
    return f"the final checkpoint differs: {_some(changed)}" if changed else ""


def _some(names: list[str]) -> str:
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more


def _renamed(named: Mapping[str, Any], renames: Renames) -> dict[str, Any]:
    """Applies the renames to the keys.

    Raises ValueError if the base also contains the new name, because one of the two entries would be lost.
    """
    renamed: dict[str, Any] = {}
    for name, value in named.items():
        new = _new_name(name, renames)
        if new in renamed or (new != name and new in named):
            raise ValueError(f"the base has both {name} and {new}, to which the rename map renames it")
        renamed[new] = value
    return renamed


def _new_name(name: str, renames: Renames) -> str:
    for old, new in renames:
        if name == old:
            return new
        if old.endswith("/") and name.startswith(old):
            return new + name.removeprefix(old)
    return name


# Section: reading the folder of a run.


def read_left(folder: Path) -> Left:
    """Reads the log of a run and, if there is one, its final checkpoint."""
    checkpoints = sorted((folder / CHECKPOINTS).glob("iter_*"))
    return Left(read_log(folder / LOG), digests_of(checkpoints[-1]) if checkpoints else {})


def read_log(path: Path) -> Log:
    """Returns the values of all fields that are not excluded, by field name. Nested fields are named outer/inner."""
    log: Log = {}
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    for line in lines:
        record = json.loads(line)
        iteration = record.pop("iteration")
        for name, value in _flat(record):
            if not _is_excluded(name, EXCLUDED):
                log.setdefault(name, []).append((iteration, json.dumps(value)))
    return log


def _flat(record: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the values of a record and of nested records. A list counts as one value."""
    for name, value in record.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{name}/")
        else:
            yield f"{prefix}{name}", value


def _is_excluded(name: str, excluded: Mapping[str, str]) -> bool:
    return any(name == one or (one.endswith("/") and name.startswith(one)) for one in excluded)


def digests_of(checkpoint: Path) -> dict[str, str]:
    """Returns digests of a checkpoint's tensors, of its other entries, and of the values in its common.json.

    torch reads the checkpoint without this project's code. Only whole tensors are compared, because shards and files
    may differ.
    """
    reader = dcp.FileSystemReader(checkpoint)
    entries = reader.read_metadata().state_dict_metadata
    tensors = {
        key: torch.zeros(entry.size, dtype=entry.properties.dtype)
        for key, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    objects: dict[str, Any] = dict.fromkeys(entries.keys() - tensors.keys())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that this is a single process
        dcp.load(dict(tensors), storage_reader=reader, no_dist=True)
        dcp.load(objects, storage_reader=reader, no_dist=True)
    digests = {key: _digest(tensor) for key, tensor in tensors.items()}
    digests |= {key: f"object {value!r}" for key, value in objects.items()}
    common = checkpoint / "common.json"
    if common.exists():
        for name, value in _flat(json.loads(common.read_text(encoding="utf-8")), "common/"):
            digests[name] = json.dumps(value)
    return {key: digest for key, digest in digests.items() if not _is_excluded(key, EXCLUDED_OF_CHECKPOINTS)}


def _digest(tensor: torch.Tensor) -> str:
    """Returns the dtype, the shape and a hash of the bytes of a tensor, any shape and dtype."""
    data = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return f"{tensor.dtype} {list(tensor.shape)} {hashlib.blake2b(data, digest_size=16).hexdigest()}"
