"""Writes the stored runs with the code of an earlier commit, and what they load to. See README.md.

PYTHONPATH=TREE python -P tests/stored_runs/write_fixtures.py runs TREE       TREE: a checkout of the commit
PYTHONPATH=. python -P tests/stored_runs/write_fixtures.py arguments          the code in PYTHONPATH loads the runs
"""

import argparse
import json
import runpy
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.training.arguments import parse_args, validate_args
from megatron.training.checkpointing.run_values import load_args_from_checkpoint

FIXTURES = Path(__file__).with_name("fixtures")
SETTINGS = runpy.run_path(str(Path(__file__).with_name("settings.py")))
# Arguments that hold a path of the writer's machine.
PATHS = ("load", "save", "config")


def write_runs(tree: Path, folder: Path) -> None:
    """Writes an archive per run, losses.json with its next steps, flags.yaml and plan.json."""
    steps = SETTINGS["STEPS"]
    losses: dict[str, Any] = {}
    for name in SETTINGS["MODELS"]:
        saved = folder / name
        run(tree, "pretrain_gpt.py", [*SETTINGS["run_words"](name, steps=steps), "--save", str(saved)])
        pack(saved)
        further = SETTINGS["run_words"](name, steps=steps + SETTINGS["FURTHER"])
        run(tree, "pretrain_gpt.py", [*further, "--load", str(saved), "--save", str(saved)])
        losses[name] = steps_of(saved, after=steps)
    legacy = folder / SETTINGS["LEGACY"]
    converted = ["--from", "torch_dist", "--to", "torch", "--load", str(folder / "dense"), "--save", str(legacy)]
    run(tree, "tools/checkpoint.py", ["convert", *converted])
    pack(legacy)
    words = SETTINGS["run_words"]("experts", steps=steps)
    (FIXTURES / "flags.yaml").write_text(run(tree, "pretrain_gpt.py", [*words, "--print-config"]), encoding="utf-8")
    run(tree, "pretrain_gpt.py", [*words, "--dry-run", "--tensorboard-dir", str(folder)])
    shutil.copy(folder / "plan.json", FIXTURES)
    write_json("losses", losses)


def write_arguments(folder: Path) -> None:
    """Writes arguments.json: the arguments of runs that load an archive, and of one that reads flags.yaml."""
    found = {}
    for name in (*SETTINGS["MODELS"], SETTINGS["LEGACY"]):
        with tarfile.open(FIXTURES / f"{name}.tar.xz") as archive:
            archive.extractall(folder, filter="data")
        words = SETTINGS["adopting_words"](name, load=str(folder / name))
        found[name] = values(validate_args(load_args_from_checkpoint(parse_args(argv=words))))
    args = parse_args(argv=["--config", str(FIXTURES / "flags.yaml")])
    found["file"] = values(args)
    found["file, validated"] = values(validate_args(args))
    write_json("arguments", found)


def run(tree: Path, program: str, words: Sequence[str]) -> str:
    """Runs a program of the tree and returns its standard output. Raises CalledProcessError if it fails."""
    command = [sys.executable, str(tree / program), *words]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def pack(folder: Path) -> None:
    """Writes a checkpoint folder as an archive, which is a fifth of its size."""
    with tarfile.open(FIXTURES / f"{folder.name}.tar.xz", "w:xz") as archive:
        archive.add(folder, arcname=folder.name)


def values(args: argparse.Namespace) -> dict[str, Any]:
    """Returns arguments as JSON values. Values of other types become text."""
    found: dict[str, Any] = json.loads(json.dumps(vars(args), default=str))
    return {name: value for name, value in found.items() if name not in PATHS}


def steps_of(folder: Path, *, after: int) -> dict[str, list[float]]:
    """Returns loss and gradient norm of the logged steps after an iteration."""
    lines = [json.loads(line) for line in (folder / "steps.jsonl").read_text(encoding="utf-8").splitlines()]
    return {str(one["iteration"]): [one["lm_loss"], one["grad_norm"]] for one in lines if one["iteration"] > after}


def write_json(name: str, content: Any) -> None:
    """Writes a file of expected values."""
    text = json.dumps(content, indent=1, sort_keys=True)
    (FIXTURES / f"{name}.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        if sys.argv[1] == "runs":
            write_runs(Path(sys.argv[2]).resolve(), Path(place))
        else:
            write_arguments(Path(place))
