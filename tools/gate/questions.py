"""Writes the questions that same_answers.py asks two trees: about flags, fields, complete command lines, and scripts.

They follow from the reference tree: from the catalog of answers.py, and from the tree's functional cases and launch
scripts. answers.py answers them.
"""

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

LINES_FILE = Path(__file__).with_name("command_lines.txt")
Question = dict[str, Any]
Catalog = Mapping[str, Any]

# Words that are tried as the value of a flag, by the placeholder of its help, and values that are tried in a file.
_WORDS: dict[str, tuple[tuple[str, ...], ...]] = {
    "N": ((), ("7",), ("0.25",), ("-1",), ("7", "8")),
    "X": ((), ("0.25",), ("some",), ("-1",), ("7", "8")),
    "TEXT": ((), ("some",), ("7", "8"), ("",)),
}
_REFUSED_WORDS: tuple[tuple[str, ...], ...] = ((), ("some", "x"))
_VALUES: tuple[Any, ...] = (True, None, 7, 0.25, "some", [7, 8])
_SWITCH_VALUES: tuple[Any, ...] = (True, False, None, 7)
# Values that are tried for every field of a configuration.
_FIELD_VALUES: tuple[Any, ...] = (None, True, False, 0, 4, -1, 0.5, "some", [1, 2])

_SMALL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16 "
    "--micro-batch-size 2 --global-batch-size 4 --train-iters 3 --lr 0.01 --mock-data --tokenizer-type NullTokenizer "
    "--vocab-size 100 --hidden-dropout 0 --attention-dropout 0 --num-workers 0"
)
_EXPERTS = (
    f"{_SMALL} --num-experts 4 --moe-router-topk 2 --moe-grouped-gemm --disable-bias-linear --swiglu "
    "--normalization RMSNorm --position-embedding-type rope"
)
_STAGES = "--num-layers 4 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"
_ZERO = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
_PLAN = "--dry-run --tensorboard-dir {folder}"
_PROGRAMS = {
    "help": "--help",
    "list of models": "--list-models",
    "configuration of defaults": "--print-config",
    "configuration of a model": "--model mixtral-8x7b --lr 0.1 --print-config",
    "configuration of a small run": f"{_EXPERTS} --print-config",
    "plan: dense": f"{_SMALL} {_PLAN} --world-size 2",
    "plan: pipeline": f"{_SMALL} {_STAGES} {_PLAN} --world-size 2",
    "plan: experts": f"{_EXPERTS} --expert-model-parallel-size 2 --bf16 {_ZERO} {_PLAN} --world-size 2",
    "plan: tensor ranks": f"{_EXPERTS} --tensor-model-parallel-size 2 --sequence-parallel {_PLAN} --world-size 4",
    "plan: sharded parameters": f"{_SMALL} --use-torch-fsdp2 --bf16 {_PLAN} --world-size 2",
    "run: dense": f"{_SMALL} --save {{folder}} --eval-iters 1 --eval-interval 2",
    "run: experts": f"{_EXPERTS} --bf16 --use-distributed-optimizer --save {{folder}} --eval-iters 0",
    "run: fused Adam": f"{_SMALL} --optimizer distributed_fused_adam --bf16 --save {{folder}} --eval-iters 0",
    "run: without a learning rate": _SMALL.replace("--lr 0.01", "") + " --save {folder}",
}
# What scripts write: defaults in extra_args_provider, args_defaults, or get_args() after initialize_megatron.
_WRITES: tuple[dict[str, Any], ...] = (
    {},
    {"lr": 0.5, "weight_decay": 0.25},
    {"clip_grad": 0.25, "adam_beta1": 0.5},
    {"num_layers": 3},
    {"hidden_dropout": 0.25},
    {"micro_batch_size": 1},
    {"global_batch_size": 8},
    {"optimizer": "sgd"},
    {"seed": 7, "init_method_std": 0.5},
    {"swiglu": True, "add_bias_linear": False},
    {"no_such_argument": 1},
)


def questions_of(kind: str, catalog: Catalog, *, tree: Path, megatron_flags: Path | None) -> dict[str, Question]:
    """Returns the questions of a kind by name. tree: folder of the reference.

    megatron_flags: JSON file of Megatron-LM's flags, for choices that only Megatron-LM has.
    """
    functions = {"flags": _of_flags, "lines": _of_lines, "fields": _of_fields, "scripts": _of_scripts}
    upstream = {} if megatron_flags is None else _choices_upstream(megatron_flags)
    return dict(functions[kind](catalog, tree, upstream))


KINDS = ("flags", "lines", "fields", "scripts")


def _choices_upstream(file: Path) -> dict[str, list[str]]:
    groups = json.loads(file.read_text(encoding="utf-8"))["groups"]
    return {
        flag["dest"]: [str(choice).rpartition(".")[2] for choice in flag["choices"] or ()]
        for group in groups.values()
        for flag in group
    }


def _of_flags(catalog: Catalog, tree: Path, upstream: Mapping[str, list[str]]) -> Iterator[tuple[str, Question]]:
    yield "all arguments", {"ask": "read"}
    for flag in catalog["flags"]:
        first, dest = flag["flags"][0], flag["dest"]
        choices = dict.fromkeys([*flag["choices"], *upstream.get(dest, ())])
        for words in _words_of(flag, list(choices)):
            yield _parse([first, *words])
        for other in flag["flags"][1:]:
            yield _parse([other])
            yield _parse([other, "7"])
        values: tuple[Any, ...] = _VALUES if flag["takes_words"] else _SWITCH_VALUES
        values = (7,) if flag["is_refused"] else (*values, flag["default"], *list(choices)[:1])
        for value in values:
            yield _parse([], yaml.safe_dump({dest: value}))
        for other in flag["flags"]:
            name = other.strip("-").replace("-", "_")
            if name != dest:
                yield _parse([], yaml.safe_dump({name: 7}))
    for line in (
        "--num-layer 3",
        "books",
        "--num_layers 3",
        "-x",
        "--num-layers=3",
        "--lr=--",
        "--bf16=1",
        "--lr 1 --lr 2",
    ):
        yield _parse(line.split())
    for text in ("", "3", "a: {b: 1}", "model: llama3-8b", "num_layers: 2\nnum-layers: 3", "num_layer: 3", "a: [1"):
        yield _parse([], text)


def _words_of(flag: Mapping[str, Any], choices: Sequence[str]) -> list[tuple[str, ...]]:
    default = flag["default"] if isinstance(flag["default"], list) else [flag["default"]]
    same = tuple(str(value) for value in default if value is not None)
    if flag["is_refused"]:
        return list(dict.fromkeys((*_REFUSED_WORDS, same)))
    if not flag["takes_words"]:
        return [(), ("some",)]
    words = _WORDS.get(flag["placeholder"], _WORDS["TEXT"])
    return list(dict.fromkeys((*words, same, *((choice,) for choice in choices))))


def _parse(argv: list[str], text: str | None = None) -> tuple[str, Question]:
    name = shlex.join(argv) if text is None else f"file with {text.strip()!r}"
    return name, {"ask": "parse", "argv": argv, "yaml": text}


def _of_lines(catalog: Catalog, tree: Path, upstream: Mapping[str, list[str]]) -> Iterator[tuple[str, Question]]:
    for given in _lines():
        ranks, words = 1, shlex.split(given)
        if words[0].startswith("ranks="):
            ranks = int(words.pop(0).removeprefix("ranks="))
        yield given, {"ask": "validate", "argv": words, "ranks": ranks}
    for name, ranks, words in _lines_of_cases(tree / "tests" / "functional_tests"):
        yield name, {"ask": "validate", "argv": words, "ranks": ranks}
    for model in catalog["models"]:
        line = ["--model", model, "--mock-data", "--micro-batch-size", "1", "--train-iters", "2", "--lr", "1e-3"]
        for scale in ([], ["--model-scale", "tiny"]):
            words = [*line, "--seq-length", "64", "--tokenizer-type", "NullTokenizer", *scale]
            yield shlex.join(words), {"ask": "validate", "argv": words, "twice": True}


def _lines() -> Iterator[str]:
    """Yields the command lines of LINES_FILE, with each @name replaced by its definition."""
    names: dict[str, str] = {}
    lines = LINES_FILE.read_text(encoding="utf-8").splitlines()
    for line in (line for line in lines if line and not line.startswith("#")):
        text = re.sub(r"@\w+\b(?! =)", lambda match: names[match[0]], line)
        name, is_definition, words = text.partition(" = ")
        if is_definition and name.startswith("@"):
            names[name] = words
        else:
            yield text


def _lines_of_cases(folder: Path) -> Iterator[tuple[str, int, list[str]]]:
    """Yields name, number of ranks and words of the functional cases in a folder, as its case.py documents them."""
    bases = yaml.safe_load((folder / "bases.yaml").read_text(encoding="utf-8"))
    for path in sorted((folder / "cases").glob("*.yaml")):
        for case in yaml.safe_load(path.read_text(encoding="utf-8")):
            named = case.get("base", [])
            flags: dict[str, Any] = {}
            for one in (
                *(bases[name] for name in ([named] if isinstance(named, str) else named)),
                case.get("flags", {}),
            ):
                flags |= one
            words = []
            for flag, value in flags.items():
                if value is not None and value is not False:
                    values = [] if value is True else value if isinstance(value, list) else [value]
                    words += [
                        f"--{flag}",
                        *(str(one).replace("{tests}", "{tree}/tests/functional_tests") for one in values),
                    ]
            yield f"{path.stem}: {case['name']}", case.get("processes", 1), words


def _of_fields(catalog: Catalog, tree: Path, upstream: Mapping[str, list[str]]) -> Iterator[tuple[str, Question]]:
    for path, fields in catalog["fields"].items():
        short = path.rpartition(".")[2]
        for name, default in fields.items():
            values = [default, *_FIELD_VALUES, *upstream.get(name, ())]
            # By text, because True == 1.
            for text, value in {repr(value): value for value in values}.items():
                yield f"{short}({name}={text})", {"ask": "field", "path": path, "name": name, "value": value}
        yield f"{short}(no_such_field=1)", {"ask": "field", "path": path, "name": "no_such_field", "value": 1}


def _of_scripts(catalog: Catalog, tree: Path, upstream: Mapping[str, list[str]]) -> Iterator[tuple[str, Question]]:
    small = shlex.split(_SMALL)
    # A few refused flags stand for all of them, which nothing reads.
    refused = [flag for flag in catalog["flags"] if flag["is_refused"]]
    for flag in [*(flag for flag in catalog["flags"] if not flag["is_refused"]), *refused[:5]]:
        value, dest = _written_value(flag["default"]), flag["dest"]
        for when in ("before", "after"):
            name = f"args.{dest} = {value!r} {when} validation"
            yield name, {"ask": "write", "argv": small, "name": dest, "value": value, "when": when}
    yield from _providers(small)
    for values in _WRITES:
        name = f"args_defaults {values}"
        yield name, {"ask": "validate", "argv": small, "defaults": values}
        yield f"{name} of what is given nowhere", {"ask": "validate", "argv": small[2:], "defaults": values}
        for where in ("provided", "written", "defaults"):
            empty: dict[str, Any] = {"provided": {}, "written": {}, "defaults": {}}
            asked = {"ask": "script", "argv": small, **empty, where: values}
            if values or where == "written":
                yield f"script: {where} {values}", asked
    yield from _translations(catalog, tree, upstream)
    for name, line in _PROGRAMS.items():
        yield name, {"ask": "program", "argv": shlex.split(line)}


def _written_value(default: Any) -> Any:
    if isinstance(default, bool):
        return not default
    return 4 if isinstance(default, int) else 0.25 if isinstance(default, float) else "some"


def _providers(small: list[str]) -> Iterator[tuple[str, Question]]:
    lines: tuple[list[str], ...] = (
        [],
        ["--my-rate", "2", "--my-words", "a", "b", "--my-switch"],
        ["--my-rate", "fast"],
        ["--rl-profile", "4"],
        ["--img-h", "two"],
        ["--no-such-flag", "1"],
        ["--print-config"],
        ["--help"],
    )
    names = ("adds", "adds_without_return", "redefines_unsupported", "redefines_working", "changes_defaults")
    for provider in names:
        for words in lines:
            for ignore in (False, True):
                name = f"{provider}{' ignoring unknown' if ignore else ''}: {shlex.join(words)}"
                asked = {"ask": "provide", "argv": [*small, *words], "provider": provider, "ignore_unknown": ignore}
                yield name, asked
        text = "my_rate: 3\nmy_words: [a, b]\nlr: 0.5\n"
        yield f"{provider}: file", {"ask": "provide", "argv": [], "provider": provider, "yaml": text}


def _translations(catalog: Catalog, tree: Path, upstream: Mapping[str, list[str]]) -> Iterator[tuple[str, Question]]:
    scripts = {path.name: path.read_text(encoding="utf-8") for path in sorted((tree / "examples").glob("*.sh"))}
    stored = tree / "tests" / "unit_tests" / "tools" / "bash_scripts.txt"
    scripts |= {f"stored {index}": text for index, text in enumerate(stored.read_text(encoding="utf-8").split("===\n"))}
    for name, text in scripts.items():
        for launch in ([], ["--launch", "1"]):
            yield f"translation of {name} {shlex.join(launch)}", {"ask": "translate", "text": text, "words": launch}
    for name, _, words in _lines_of_cases(tree / "tests" / "functional_tests"):
        text = f"torchrun --nproc-per-node 2 pretrain_gpt.py {shlex.join(words)}\n"
        yield f"translation of {name}", {"ask": "translate", "text": text, "words": []}
    for flag in catalog["flags"]:
        for value in _translated_words(flag, upstream.get(flag["dest"], ())):
            given = f"{flag['flags'][0]} {value}"
            line = f"{_SMALL} {given}".strip()
            text = f"torchrun --nproc-per-node 2 pretrain_gpt.py {line}\n"
            yield f"translation of {given}", {"ask": "translate", "text": text, "words": []}


def _translated_words(flag: Mapping[str, Any], choices: Sequence[str]) -> list[str]:
    if isinstance(flag["default"], bool):
        return [""]
    return list(dict.fromkeys(["4", *choices]))
