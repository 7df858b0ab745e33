"""Manages the --save and --load folders: one folder per iteration, and a tracker file that names the latest.

saving.py defines the content of a checkpoint, and core/dist_checkpointing writes it.
"""

import enum
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from megatron.core.dist_checkpointing import disk, load_common
from megatron.core.dist_checkpointing import folder as folders
from megatron.core.dist_checkpointing.manifest import MANIFEST_FILE, read_manifest, verify_size
from megatron.core.group_collectives import all_ranks_agree

TRACKER_FILE = "latest_checkpointed_iteration.txt"
# Tracker text for initial weights, used instead of a number.
RELEASE = "release"
# Companion files of a checkpoint: files of the model in a different format, kept for the conversion back
# (tools/hugging_face).
COMPANION_FOLDER = "hugging_face"
# This file names the format of a checkpoint written by Megatron-Core.
MEGATRON_CORE_FILE = "metadata.json"
# The file of one rank in Megatron's older format, and the pattern of all such files in a checkpoint's folder.
LEGACY_FILE = "model_optim_rng.pt"
LEGACY_FILES = f"mp_rank_*/{LEGACY_FILE}"
# Seven digits, or more after ten million steps, up to the largest 64-bit number.
_ITERATION = r"iter_([0-9]{7,18})"


class CheckpointFormat(enum.Enum):
    """Checkpoint formats that a run can load, with their names in messages.

    MEGATRON_CORE: Megatron-Core's torch_dist. LEGACY: Megatron-LM's `torch`, with one file for each rank.
    """

    OURS = "this project's format"
    MEGATRON_CORE = "Megatron-Core's torch_dist format"
    LEGACY = "Megatron's older format (--ckpt-format torch)"


@dataclass(frozen=True)
class FoundCheckpoint:
    """A checkpoint to load. iteration: 0 for a release, which provides initial weights."""

    path: Path
    iteration: int
    is_release: bool = False
    notice: str | None = None
    format: CheckpointFormat = CheckpointFormat.OURS


def get_checkpoint_tracker_filename(checkpoints_path: str) -> str:
    """Returns the path of the tracker file, which holds the latest iteration in digits, or "release"."""
    return os.path.join(checkpoints_path, TRACKER_FILE)


def iteration_folder(checkpoints_path: str | Path, iteration: int) -> Path:
    """Returns the folder of the checkpoint of an iteration."""
    return Path(checkpoints_path) / f"iter_{iteration:07d}"


def read_tracker(root: Path) -> str | None:
    """Returns the text of the tracker in the folder `root`, which may be invalid, or None without a tracker."""
    tracker = root / TRACKER_FILE
    return tracker.read_text(encoding="utf-8", errors="replace").strip() if tracker.is_file() else None


def iteration_of_text(text: str) -> int | None:
    """Parses a tracker's text. Returns the iteration that it names, or None for any other text."""
    # Not isdecimal, because it accepts non-ASCII digits. The length is limited to the digits of a 64-bit number.
    return int(text) if re.fullmatch(r"[0-9]{1,18}", text) else None


def check_save_folder(path: str, group: dist.ProcessGroup | None = None, *, flag: str = "--save") -> None:
    """Creates the folder given with `flag` and tests that it is writable, so that a run fails before its first step.

    Collective over `group` (None: all ranks); raises ValueError on every rank.
    """
    with all_ranks_agree(group):
        # Every rank tests, because every rank will write. If this process is killed, the next save removes the file.
        probe = Path(path) / f"probe.incomplete-{folders.new_id()}"
        if probe.parent.exists() and not probe.parent.is_dir():
            raise ValueError(f"{flag} {path} cannot be written: it is a file and must be a folder")
        try:
            probe.parent.mkdir(parents=True, exist_ok=True)
            disk.write_file(probe, b"can be written")
            probe.unlink()
        except OSError as error:
            raise ValueError(f"{flag} {path} cannot be written: {error}") from error


def refuse_checkpoints_of_another_run(
    save: str, *, continued_from: str | None, group: dist.ProcessGroup | None = None
) -> None:
    """Raises ValueError on every rank if a new run would overwrite checkpoints in its --save folder.

    continued_from: the --load folder of a resumed run, which may overwrite its own checkpoints.
    """
    if is_same_folder(continued_from, save):
        return
    with all_ranks_agree(group):
        iterations = complete_iterations(Path(save))
        if iterations:
            raise ValueError(
                f"--save {save} holds checkpoints of another run, up to iteration {iterations[-1]}: continue it "
                f"with --load {save}, or choose another folder"
            )


def clean_save_folder(path: str) -> None:
    """Removes leftovers of interrupted saves from a --save folder."""
    if Path(path).is_dir():
        folders.remove_incomplete(
            Path(path), name=rf"{_ITERATION}|{RELEASE}|{COMPANION_FOLDER}|probe|{re.escape(TRACKER_FILE)}"
        )


def prune(path: str, *, latest: int, interval: int | None) -> None:
    """Deletes complete checkpoints before `latest`, except at iterations that are multiples of `interval`.

    latest: iteration of a complete checkpoint. interval: None deletes nothing.
    """
    for iteration in complete_iterations(Path(path)):
        if interval is not None and iteration < latest and iteration % interval:
            folders.remove(iteration_folder(path, iteration))


def write_tracker(path: str, iteration: int) -> None:
    """Writes `iteration` to the tracker as the latest. Call it after the checkpoint is complete."""
    folders.replace_text(Path(get_checkpoint_tracker_filename(path)), str(iteration))


def write_release_tracker(path: str) -> None:
    """Writes "release" to the tracker, for initial weights. Call it after the checkpoint is complete."""
    folders.replace_text(Path(get_checkpoint_tracker_filename(path)), RELEASE)


def carry_companions(load: str, save: str) -> None:
    """Copies the companion files of the checkpoints in `load` to `save`, unless `save` already contains some."""
    source, target = Path(load) / COMPANION_FOLDER, Path(save) / COMPANION_FOLDER
    if source.is_dir() and not target.exists():
        with folders.atomic_folder(target) as temporary:
            shutil.copytree(source, temporary, dirs_exist_ok=True)


def is_same_folder(path: str | None, other: str | None) -> bool:
    """Returns whether both paths are given and refer to the same folder."""
    return path is not None and other is not None and os.path.realpath(path) == os.path.realpath(other)


def find_checkpoint(
    load: str, *, step: int | None = None, damaged: Mapping[int, str] | None = None, flag: str = "--load"
) -> FoundCheckpoint | None:
    """Finds the checkpoint to load: the one at `step`, else the tracker's, else the newest complete one.

    step: value of --ckpt-step. damaged: maps iterations known to be damaged, which are skipped, to the reasons. flag:
    the flag that names the folder, for errors. Returns None if the folder contains no checkpoint. Raises ValueError if
    the checkpoint at `step` is incomplete, or if checkpoints exist but none is complete.
    """
    root, problems = _root(load, flag), dict(damaged or {})
    theirs = _of_megatron(root, step)
    if theirs is not None:
        return theirs
    if step is not None:
        return _requested(root, f"--ckpt-step is {step}", iteration=step)
    # A copied iteration folder has no tracker. Neither does the folder of a run that was killed during its first save.
    tracker, text = root / TRACKER_FILE, read_tracker(root)
    if text == RELEASE:
        return FoundCheckpoint(folders.find_checkpoint(root / RELEASE), 0, is_release=True)
    wanted = None if text is None else iteration_of_text(text)
    if wanted is not None and wanted not in problems:
        problem = _problem(root, wanted)
        if problem is None:
            return FoundCheckpoint(folders.find_checkpoint(iteration_folder(root, wanted)), wanted)
        problems[wanted] = problem
    if text is None:
        why = f"{root} has no {TRACKER_FILE}"
    elif wanted is None:
        why = f"{tracker} holds {text[:40]!r}: must be an iteration number or {RELEASE!r}"
    else:
        why = f"{tracker} names iteration {wanted}: {problems[wanted]}"
    # Newest first. The tracker may have been set back on purpose, so later iterations are the last resort.
    by_preference = sorted(complete_iterations(root), key=lambda one: (wanted is not None and one > wanted, -one))
    return _fallback(root, why, candidates=by_preference, problems=problems)


def format_of(folder: Path) -> CheckpointFormat:
    """Detects the format of the checkpoint in a folder from its files. Returns OURS if nothing else matches."""
    if (folder / MANIFEST_FILE).is_file():
        return CheckpointFormat.OURS
    if (folder / MEGATRON_CORE_FILE).is_file():
        return CheckpointFormat.MEGATRON_CORE
    return CheckpointFormat.LEGACY if any(folder.glob(LEGACY_FILES)) else CheckpointFormat.OURS


def _of_megatron(root: Path, step: int | None) -> FoundCheckpoint | None:
    """Finds the checkpoint at `step`, or the one in the tracker. Returns None if it has this project's format."""
    text = read_tracker(root) if step is None else None
    if text == RELEASE:
        found, iteration = root / RELEASE, 0
    else:
        iteration = step if step is not None else iteration_of_text(text or "") or 0
        found = iteration_folder(root, iteration)
    kind = format_of(found)
    if kind is CheckpointFormat.OURS:
        return None
    return FoundCheckpoint(found, iteration, is_release=text == RELEASE, format=kind)


def _root(load: str, flag: str) -> Path:
    root = Path(load)
    if root.exists() and not root.is_dir():
        raise ValueError(f"{flag} {load} is a file: give the folder that --save wrote")
    # The user named a folder one level too deep. Starting from scratch without an error would be costly.
    if (root / MANIFEST_FILE).is_file() or format_of(root) is not CheckpointFormat.OURS:
        raise ValueError(
            f"{flag} {load} is a single checkpoint: give its parent folder, and choose the checkpoint with --ckpt-step"
        )
    return root


def _fallback(root: Path, why: str, *, candidates: list[int], problems: dict[int, str]) -> FoundCheckpoint | None:
    """Returns the first complete candidate, with a notice that lists the problems of skipped candidates."""
    for iteration in candidates:
        if iteration not in problems:
            problem = _problem(root, iteration)
            if problem is None:
                return FoundCheckpoint(
                    folders.find_checkpoint(iteration_folder(root, iteration)),
                    iteration,
                    notice=f"{why}: loading iteration {iteration} instead, the newest complete checkpoint",
                )
            problems[iteration] = problem
        if problems[iteration] not in why:
            why = f"{why}; {problems[iteration]}"
    for iteration in sorted(_iterations(root), reverse=True):
        kind = format_of(iteration_folder(root, iteration))
        if kind is not CheckpointFormat.OURS:
            raise ValueError(
                f"{why}; {iteration_folder(root, iteration)} is in {kind.value}: choose it with --ckpt-step {iteration}"
            )
    # A run must not silently start from scratch in a folder that contained checkpoints.
    if candidates or problems or TRACKER_FILE in {entry.name for entry in _entries(root)}:
        raise ValueError(f"{why}; complete iterations: none")
    return None


def _problem(root: Path, iteration: int) -> str | None:
    """Checks a checkpoint without reading its tensors. Returns a description of the first defect, or None."""
    try:
        folder = folders.find_checkpoint(iteration_folder(root, iteration))
        files = read_manifest(folder)
        for name, entry in files.items():
            verify_size(folder, name, expected=entry)
        load_common(folder)
    except (ValueError, OSError) as error:
        return str(error)
    return None


def complete_iterations(root: Path) -> list[int]:
    """Returns the iterations of complete checkpoints, in ascending order."""
    # Excludes folders with extra leading zeros, which iteration_folder would not find.
    return sorted(one for one in _iterations(root) if folders.is_complete(iteration_folder(root, one)))


def _iterations(root: Path) -> set[int]:
    """Returns the iterations of all folders with the name of a checkpoint."""
    matches = [re.fullmatch(_ITERATION, folders.name_of(entry)) for entry in _entries(root)]
    return {int(match[1]) for match in matches if match is not None}


def _requested(root: Path, source: str, *, iteration: int) -> FoundCheckpoint:
    try:
        return FoundCheckpoint(folders.find_checkpoint(iteration_folder(root, iteration)), iteration)
    except ValueError as error:
        others = ", ".join(map(str, complete_iterations(root))) or "none"
        raise ValueError(f"{source}: {error}; complete iterations: {others}") from error


def _entries(root: Path) -> list[Path]:
    return list(root.iterdir()) if root.is_dir() else []
