"""Fuzzed checkpoints in Megatron's older, pickled format: converted with unchanged weights, or rejected."""

import argparse
import collections
import os
import pickle
import shutil
import zipfile
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron.core.dist_checkpointing import load_items, model_sharded_tensors
from megatron.tools import checkpoint as checkpoint_tool
from megatron.training.checkpointing.folder import TRACKER_FILE
from tests.fuzz.checkpoint_damage import Harm
from tests.fuzz.judging import Verdict, judged, note_of
from tests.fuzz.values import ODD_INTS, ODD_WORDS, Choices, odd_json
from tests.unit_tests.tools.rank_files import ITERATION, SHAPE, whole_model, write_files

_FOLDER = f"iter_{ITERATION:07d}"


@dataclass
class Files:
    """A description of the damage to the files of a run on 2 x 2 x 2 ranks. is_whole: the model is undamaged."""

    words: list[str]
    notes: list[str] = field(default_factory=list)
    is_whole: bool = True


class LegacyFuzzer:
    """Damages the files of a small mixture of experts and converts them with tools/checkpoint.py."""

    def __init__(self, shared: Path) -> None:
        self._shared, self._model = shared, whole_model(SHAPE)
        for style in ("local", "engine", "grouped"):
            if not (shared / style).exists():
                write_files(self._model, shared / style, style)

    def draw(self, choices: Choices, folder: Path) -> Files:
        shutil.copytree(self._shared / choices.one(["local", "engine", "grouped"]), folder / "files")
        case = Files(choices.one([[], [], [], ["--vocab-size", "3"], ["--vocab-size", "-1"], ["--ckpt-step", "7"]]))
        for _ in range(choices.one([0, 1, 1, 1, 2])):
            path = choices.one(sorted((folder / "files" / _FOLDER).glob("*/*.pt")))
            damage = choices.one([_content, _content, _content, _content, _bytes, _hostile, _places])
            note = note_of(partial(damage, choices, path, case), earlier=case.notes)
            case.notes.append(f"{path.parent.name}: {note}")
        return case

    def check(self, case: Files, folder: Path) -> Verdict:
        verdict = judged(partial(self._convert, case, folder), folder)
        assert not (folder / "harm").exists(), "code in the files was executed"
        return verdict

    def _convert(self, case: Files, folder: Path) -> None:
        words = ["--load", str(folder / "files"), "--save", str(folder / "ours"), *case.words]
        assert checkpoint_tool.main(["convert", "--from", "torch", "--to", "torch_dist", *words]) == 0
        if case.is_whole and not case.words:
            loaded = whole_model(SHAPE)
            load_items(model_sharded_tensors(loaded), folder / "ours" / _FOLDER)
            expected = self._model.state_dict()
            assert all(torch.equal(value, expected[name]) for name, value in loaded.state_dict().items())


def _content(choices: Choices, path: Path, case: Files) -> str:
    """Changes values of the arguments, counters or weights in a file."""
    try:
        # The file is trusted: this process has just written it, unless other damage came first.
        content = torch.load(path, weights_only=False)
    except (RuntimeError, pickle.UnpicklingError, EOFError, OSError, ValueError):
        return "gone"
    if not isinstance(content, dict) or not isinstance(content.get("model"), dict) or not content["model"]:
        return "gone"
    case.is_whole = False
    match what := choices.one(["argument", "argument", "argument", "top", "tensor", "tensor", "name", "more"]):
        case "argument" if isinstance(content.get("args"), argparse.Namespace):
            name = choices.one(list(vars(content["args"])))
            vars(content["args"])[name] = _odd(choices)
            what += f" {name} {vars(content['args'])[name]!r:.60}"
        case "top":
            name = choices.one(list(content))
            content[name] = _odd(choices)
            what += f" {name} {content[name]!r:.60}"
        case "name":
            name = choices.one(list(content["model"]))
            content["model"][choices.one(["x", "decoder.layers.99.mlp.x", name + "0", 1, ""])] = content["model"].pop(
                name
            )
        case "more":
            content["model1"] = choices.one([content["model"], {}, None, [], {"language_model": {}}])
        case _:
            name = choices.one(list(content["model"]))
            content["model"][name] = _odd_tensor(choices, content["model"][name])
            what += f" {name}"
    torch.save(content, path)
    return what


def _odd(choices: Choices) -> Any:
    others = [argparse.Namespace(x=1), torch.ones(2), torch.tensor(3), collections.deque([1]), (1, 2), b"x"]
    match choices.one(["json", "json", "int", "other"]):
        case "json":
            return odd_json(choices)
        case "int":
            return choices.one(ODD_INTS)
        case _:
            return choices.one(others)


def _odd_tensor(choices: Choices, tensor: torch.Tensor) -> Any:
    odd = [tensor[:0], tensor.flatten(), tensor[None], tensor.half(), tensor.int(), torch.ones(1), torch.tensor(1.0)]
    odd += [None, 1, "x", tensor.to_sparse(), tensor.expand(2, *tensor.shape), torch.empty(3, device="meta")]
    return choices.one(
        [*odd, torch.full_like(tensor, float("nan")), tensor.t() if tensor.ndim == 2 else tensor, [tensor]]
    )


def _bytes(choices: Choices, path: Path, case: Files) -> str:
    if not path.is_file() or not path.stat().st_size:
        return "gone"
    content = path.read_bytes()
    place = choices.below(len(content))
    flipped = content[:place] + bytes([content[place] ^ 1 << choices.below(8)]) + content[place + 1 :]
    match what := choices.one(["flip", "flip", "cut", "longer", "empty", "gone", "folder"]):
        case "gone" | "folder":
            path.unlink()
            if what == "folder":
                path.mkdir()
        case _:
            path.write_bytes({"flip": flipped, "cut": content[:place], "longer": content + b"x", "empty": b""}[what])
    # This format has no checksums, so a flipped bit of a weight is not detected.
    case.is_whole = False
    return f"{what} at {place}"


def _hostile(choices: Choices, path: Path, case: Files) -> str:
    """Replaces a file by a malicious pickle, or an archive of one, that runs code or exhausts memory when loaded."""
    case.is_whole = False
    if path.is_dir():
        path.rmdir()
    what = choices.one(["harm", "inside", "protocol 0", "archive", "global", "deep", "build", "bomb"])
    pickles = {
        "global": b"cos\nsystem\n(S'mkdir harm'\ntR.",
        "deep": b"\x80\x02" + b"]" * 50_000 + b"a" * 49_999 + b".",
        "build": b"\x80\x02cargparse\nNamespace\n)\x81}(X\x09\x00\x00\x00__class__cos\nsystem\nub.",
        "bomb": b"\x80\x02X\xff\xff\xff\x7fx.",
    }
    if what in ("harm", "inside"):
        torch.save(Harm() if what == "harm" else {"args": argparse.Namespace(x=Harm()), "iteration": 1}, path)
    elif what == "protocol 0":
        path.write_bytes(pickle.dumps(Harm(), protocol=choices.one([0, 1, 4])))
    elif what == "archive":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("archive/data.pkl", choices.one(list(pickles.values())))
            archive.writestr("archive/version", choices.one(["3", "x", "9" * 30]))
    else:
        path.write_bytes(pickles[what])
    return what


def _places(choices: Choices, path: Path, case: Files) -> str:
    """Renames or adds folders, or changes the tracker."""
    root = path.parents[2]
    match what := choices.one(["tracker", "tracker", "rank", "folder", "link"]):
        case "tracker":
            words = ["release", "9" * 5000, "-1", str(ITERATION + 1), "\u0667", f" {ITERATION}\n", *ODD_WORDS]
            (root / TRACKER_FILE).write_text(what := choices.one(words), encoding="utf-8", errors="surrogateescape")
        case "rank":
            path.parent.rename(
                path.parent.with_name(choices.one(["mp_rank_07", "mp_rank_00_000_002", "mp_rank_0", "x"]))
            )
        case "folder":
            (path.parents[1] / "mp_rank_99").mkdir(exist_ok=True)
        case _:
            os.symlink(path.parent, path.parents[1] / "mp_rank_05_000_000")
    return what[:50]
