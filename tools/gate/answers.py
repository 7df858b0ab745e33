"""Answers questions about flags, configurations and small programs with the code of one tree.

questions.py writes the questions. same_answers.py starts this program with the tree in PYTHONPATH, so that it imports
the project's code only from that tree, and only by names that scripts use. Answers are JSON: texts, or texts by name.
"""

import argparse
import contextlib
import copy
import dataclasses
import gc
import importlib
import io
import json
import multiprocessing
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

import megatron
import pretrain_gpt
from megatron.core.enums import ModelType
from megatron.core.num_microbatches_calculator import get_current_global_batch_size, get_num_microbatches
from megatron.core.utils import get_model_config
from megatron.training import get_args, initialize_megatron
from megatron.training.arguments import core_transformer_config_from_args, parse_args, validate_args
from megatron.training.training import setup_model_and_optimizer

Question = Mapping[str, Any]
Answer = Any  # JSON

# Classes that programs build themselves, with values of the fields that have no default.
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "megatron.core.model_parallel_config.ModelParallelConfig": {},
    "megatron.core.transformer.transformer_config.TransformerConfig": {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
    },
    "megatron.core.transformer.transformer_config.MLATransformerConfig": {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
    },
    "megatron.core.distributed.DistributedDataParallelConfig": {},
    "megatron.core.distributed.TorchFullyShardedDataParallelConfig": {},
    "megatron.core.optimizer.OptimizerConfig": {},
    "megatron.core.datasets.blended_megatron_dataset_config.BlendedMegatronDatasetConfig": {
        "random_seed": 1,
        "sequence_length": 8,
    },
    "megatron.core.datasets.gpt_dataset.GPTDatasetConfig": {
        "random_seed": 1,
        "sequence_length": 8,
        "reset_position_ids": False,
        "reset_attention_mask": False,
        "eod_mask_loss": False,
    },
}
TRANSFORMER = "megatron.core.transformer.transformer_config.TransformerConfig"
OPTIMIZER = "megatron.core.optimizer.OptimizerConfig"
# What differs between two runs of the same code: in the JSON files of a run, and in what it prints. plan.json does not.
_VARYING_KEYS = re.compile(
    r"second|^time|time$|timers|tflops|mfu|memory|^held$|host|pid|commit|date|started|crc32|overlap|straggler"
)
_PLAN_FILE = "plan.json"
_VARYING_TEXT = (
    (re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"), "DATE"),
    (re.compile(r"\(ms\): [\d.]+"), "(ms): N"),
    (re.compile(r"\b[\d.]+ (m?s|seconds)\b"), r"N \1"),
)
_ADDRESS = re.compile(r"\b0x[0-9a-f]{6,}")
_LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


def main(tree: Path, target: Path, source: Path | None = None) -> None:
    """Writes the answers to the questions in `source` to `target`, or the catalog of the tree if there are none."""
    for module in (megatron, pretrain_gpt):
        assert Path(str(module.__file__)).is_relative_to(tree), f"{module.__file__} is not in {tree}"
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    content: Any = catalog()
    if source is not None:
        asked = json.loads(source.read_text(encoding="utf-8"))
        folder = target.with_suffix("")
        folder.mkdir()
        os.chdir(folder)
        answering = _Answering(tree, folder, asked["catalog"])
        content = {name: answering.answer(question) for name, question in asked["questions"].items()}
    target.write_text(json.dumps(content), encoding="utf-8")


def catalog() -> dict[str, Any]:
    """Returns the flags, the fields of CONFIGURATIONS and the model presets of this tree."""
    found: list[argparse.ArgumentParser] = []
    args = parse_args(extra_args_provider=lambda parser: found.append(parser), argv=[])
    flags = [
        {
            "flags": action.option_strings,
            "dest": action.dest,
            "takes_words": action.nargs != 0,
            "is_refused": action.default is argparse.SUPPRESS,
            "default": _plain(getattr(args, action.dest, None)),
            "choices": _choices(action),
            "placeholder": str(action.metavar),
        }
        for action in found[0]._actions
        if not isinstance(action, argparse._HelpAction) and action.dest != "version"
    ]
    fields = {}
    for path, needed in CONFIGURATIONS.items():
        config = _class_of(path)(**needed)
        fields[path] = {one.name: _plain(getattr(config, one.name)) for one in dataclasses.fields(config) if one.init}
    models = sorted(path.stem for path in (Path(pretrain_gpt.__file__).parent / "configs").glob("*.yaml"))
    return {"flags": flags, "fields": fields, "models": [name for name in models if name not in ("devices", "index")]}


def _choices(action: argparse.Action) -> list[str]:
    listed = re.fullmatch(r"{(.*)}", str(action.metavar))
    return listed[1].split(",") if listed else []


def _plain(value: Any) -> Any:
    """Returns a JSON value as it is, an enum as its name, and anything else as None."""
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    name = getattr(value, "name", None)
    return value if isinstance(value, (bool, int, float, str)) else name if isinstance(name, str) else None


def _class_of(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


class _Answering:
    """Answers one question after the other. folder: for the files of programs; its path is not part of an answer."""

    def __init__(self, tree: Path, folder: Path, known: Mapping[str, Any]) -> None:
        self._tree, self._folder, self._fields = tree, folder, known["fields"]
        self._dests = sorted({flag["dest"] for flag in known["flags"]})
        self._plain_args = dict(vars(parse_args(argv=[])))
        self._plain_configs = {path: self._read(_class_of(path)(**CONFIGURATIONS[path]), path) for path in self._fields}
        self._num_programs = 0

    def answer(self, question: Question) -> Answer:
        """Answers a question by the method that it names, with all that was printed, or with the error."""
        method: Callable[..., Answer] = getattr(self, f"ask_{question['ask']}")
        arguments = {name: value for name, value in question.items() if name not in ("ask", "ranks")}
        printed = io.StringIO()
        answer: dict[str, Any] = {}
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed), _ranks(question.get("ranks")):
            try:
                answer["is"] = method(**arguments)
            except (Exception, SystemExit) as error:
                kinds = [kind.__name__ for kind in type(error).__mro__ if kind in _PUBLIC_ERRORS]
                answer["error"] = self._text(f"{kinds[0]}: {error}")
        if printed.getvalue():
            answer["printed"] = self._text(printed.getvalue())
        return answer

    # Section: flags.

    def ask_parse(self, argv: list[str], yaml: str | None = None) -> Answer:
        """Which arguments differ from their defaults after parsing `argv`, and a configuration file of this text."""
        return self._changed(parse_args(argv=self._words(argv, yaml)))

    def ask_read(self) -> Answer:
        """Names of all arguments, and their values by attribute, which includes those of refused flags."""
        args = parse_args(argv=[])
        values = {dest: self._text(getattr(args, dest, "absent")) for dest in self._dests}
        return {"names": sorted(vars(args)), "values": values}

    def ask_validate(self, argv: list[str], defaults: dict[str, Any] | None = None, twice: bool = False) -> Answer:
        """All derived arguments, and the transformer's configuration."""
        args = validate_args(parse_args(argv=self._words(argv)), defaults or {})
        return self._after(validate_args(args) if twice else args)

    def ask_write(self, argv: list[str], name: str, value: Any, when: str) -> Answer:
        """Returns the settings after a script has set an argument. when: before or after validation."""
        args = parse_args(argv=argv)
        if when == "before":
            setattr(args, name, value)
        args = validate_args(args)
        if when == "after":
            setattr(args, name, value)
        return self._after(args)

    def ask_provide(
        self, argv: list[str], provider: str, ignore_unknown: bool = False, yaml: str | None = None
    ) -> Answer:
        """Arguments with flags that a script adds."""
        words = self._words(argv, yaml)
        return self._changed(parse_args(PROVIDERS[provider], ignore_unknown, argv=words))

    def _words(self, argv: list[str], yaml: str | None = None) -> list[str]:
        argv = [word.replace("{tree}", str(self._tree)) for word in argv]
        if yaml is None:
            return argv
        file = self._folder / "flags.yaml"
        file.write_text(yaml, encoding="utf-8")
        return [*argv, "--config", str(file)]

    def _after(self, args: argparse.Namespace) -> Answer:
        config = core_transformer_config_from_args(args)
        return {"arguments": self._changed(args), "transformer": self._changed_fields(config, TRANSFORMER)}

    def _changed(self, args: argparse.Namespace) -> dict[str, str]:
        values, plain = vars(args), self._plain_args
        absent = dict.fromkeys(plain.keys() - values.keys(), "absent")
        changed = {name: one for name, one in values.items() if name not in plain or not _is_same(one, plain[name])}
        return absent | {name: self._text(one) for name, one in changed.items()}

    # Section: fields.

    def ask_field(self, path: str, name: str, value: Any) -> Answer:
        """Builds a configuration with this value: which fields differ from a configuration without it."""
        kind = _class_of(path)
        known = getattr(kind(**CONFIGURATIONS[path]), name)
        if isinstance(value, str) and hasattr(type(known), "__members__"):
            value = type(known).__members__.get(value, value)
        config = kind(**{**CONFIGURATIONS[path], name: value})
        again = dataclasses.replace(copy.deepcopy(config), **{name: value})
        changed = self._changed_fields(config, path)
        assert changed == self._changed_fields(again, path), "a copy with the same value differs"
        return changed

    def _read(self, config: Any, path: str) -> dict[str, str]:
        return {name: self._text(getattr(config, name, "absent")) for name in self._fields[path]}

    def _changed_fields(self, config: Any, path: str) -> dict[str, str]:
        plain = self._plain_configs[path]
        return {name: text for name, text in self._read(config, path).items() if text != plain[name]}

    # Section: programs. Each runs in a process of its own, forked from this one.

    def ask_translate(self, text: str, words: list[str]) -> Answer:
        """The translation of a launch script, and the exit status."""
        script = self._folder / "launch.sh"
        script.write_text(text.replace("{tree}", str(self._tree)), encoding="utf-8")
        return importlib.import_module("megatron.tools.translate_flags").main([str(script), *words])

    def ask_program(self, argv: list[str]) -> Answer:
        """Returns the output of pretrain_gpt.py, and the JSON files that it writes to {folder}."""
        return self._forked(lambda words: pretrain_gpt.main(words), argv)

    def ask_script(
        self, argv: list[str], provided: dict[str, Any], written: dict[str, Any], defaults: dict[str, Any]
    ) -> Answer:
        """Returns the settings of a script that sets arguments. provided: defaults set by its extra_args_provider."""

        def provide(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
            parser.set_defaults(**provided)
            return parser

        def run(words: list[str]) -> None:
            sys.argv[1:] = words
            initialize_megatron(extra_args_provider=provide, args_defaults=defaults)
            args = get_args()
            for name, value in written.items():
                setattr(args, name, value)
            model, optimizer, scheduler = setup_model_and_optimizer(ModelType.encoder_or_decoder)
            built = {
                "arguments": self._changed(args),
                "model": self._changed_fields(get_model_config(model[0]), TRANSFORMER),
                "optimizer": self._changed_fields(optimizer.config, OPTIMIZER),
                "groups": [
                    {name: str(value) for name, value in group.items() if name != "params"}
                    for group in optimizer.param_groups
                ],
                "schedule": {name: str(value) for name, value in scheduler.state_dict().items()},
                "parameters": {name: list(one.shape) for name, one in model[0].named_parameters()},
                "batches": [get_num_microbatches(), get_current_global_batch_size()],
            }
            Path(words[-1], "built.json").write_text(json.dumps(built), encoding="utf-8")

        return self._forked(run, [*argv, "--save", "{folder}"])

    def _forked(self, run: Callable[[list[str]], None], argv: list[str]) -> Answer:
        self._num_programs += 1
        place = self._folder / f"program{self._num_programs}"
        place.mkdir()
        words = [word.replace("{folder}", str(place)) for word in argv]
        process = multiprocessing.get_context("fork").Process(target=_run, args=(run, words, place))
        process.start()
        process.join()
        written = {
            str(path.relative_to(place)): self._contents(path)
            for path in sorted(place.rglob("*"))
            if path.suffix in (".json", ".jsonl", ".txt")
        }
        return {"exit code": process.exitcode, "written": written}

    def _contents(self, path: Path) -> Any:
        text = self._text(path.read_text(encoding="utf-8"))
        if path.name == _PLAN_FILE:
            return json.loads(text)
        if path.suffix == ".json":
            return _without_varying(json.loads(text))
        if path.suffix == ".jsonl":
            return [_without_varying(json.loads(line)) for line in text.splitlines()]
        for varying, name in _VARYING_TEXT:
            text = varying.sub(name, text)
        return text

    def _text(self, value: Any) -> str:
        """Returns a value as text, without paths and addresses that vary between two answers."""
        text = value if isinstance(value, str) else repr(value)
        text = text.replace(str(self._folder), "{here}").replace(str(self._tree), "{tree}")
        return _ADDRESS.sub("0x", text)


def _is_same(value: Any, other: Any) -> bool:
    return value is other or (type(value) is type(other) and repr(value) == repr(other))


def _run(run: Callable[[list[str]], None], words: list[str], place: Path) -> None:
    os.chdir(place)
    output = os.open(place / "printed.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    # The buffer of the parent's redirection is not written by this process.
    sys.stdout, sys.stderr = (open(number, "w", encoding="utf-8", closefd=False) for number in (1, 2))
    sys.argv = ["program.py", *words]
    try:
        run(words)
    except SystemExit:
        raise
    except Exception as error:
        # Without the trace, which names lines of code.
        print("".join(traceback.format_exception_only(error)))
        sys.exit(1)


def _without_varying(data: Any) -> Any:
    if isinstance(data, dict):
        return {name: _without_varying(value) for name, value in data.items() if not _VARYING_KEYS.search(name)}
    return [_without_varying(value) for value in data] if isinstance(data, list) else data


@contextlib.contextmanager
def _ranks(count: int | None) -> Iterator[None]:
    """Sets a launcher's environment of rank 0 of `count` in its body; no launcher if it is None."""
    before = dict(os.environ)
    for name in _LAUNCHER:
        os.environ.pop(name, None)
    if count is not None:
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE=str(count), LOCAL_WORLD_SIZE=str(min(count, 8)))
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


# Errors are compared by the nearest of these classes, so that a private subclass may be renamed.
_PUBLIC_ERRORS = (
    SystemExit,
    argparse.ArgumentError,
    ValueError,
    TypeError,
    AttributeError,
    KeyError,
    OSError,
    RuntimeError,
    AssertionError,
    Exception,
)


# Section: flags that scripts add.


def _adds(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    group = parser.add_argument_group("script")
    group.add_argument("--my-rate", type=float, default=0.5)
    group.add_argument("--my-words", nargs="+")
    group.add_argument("--my-switch", action="store_true")
    return parser


def _adds_without_return(parser: argparse.ArgumentParser) -> None:
    _adds(parser)


def _redefines_unsupported(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser.add_argument("--rl-profile", type=int, default=3)
    parser.add_argument("--img-h", type=int, default=4)
    return parser


def _redefines_working(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser.add_argument("--num-layers", type=int, default=3)
    return parser


def _changes_defaults(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser.set_defaults(num_layers=5, lr=0.25, tokenizer_type="NullTokenizer", bf16=True)
    return parser


PROVIDERS: dict[str, Callable[[argparse.ArgumentParser], argparse.ArgumentParser | None]] = {
    "adds": _adds,
    "adds_without_return": _adds_without_return,
    "redefines_unsupported": _redefines_unsupported,
    "redefines_working": _redefines_working,
    "changes_defaults": _changes_defaults,
}


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
