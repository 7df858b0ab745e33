"""Fuzzed --config files: the arguments survive a round trip through --print-config, or one line rejects the file."""

import contextlib
import copy
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

import pretrain_gpt
from megatron.training.arguments import parse_args, validate_args
from megatron.training.command_line.flags import flag_table
from megatron.training.errors import exit_on_user_error
from tests.functional_tests.case import read_bases
from tests.fuzz.flags import SHORT, as_drawn
from tests.fuzz.judging import Verdict, judged
from tests.fuzz.values import ODD_WORDS, Choices, mutate_json

# YAML texts that replace a value.
_SCALARS = """1e-4 1E5 .5 +1 0x10 0o17 017 1_000 1:30 190:20:30 .inf -.INF .nan ~ null yes No on OFF true 2001-01-01
2001-13-45 2001-12-14t21:59:43.10-05:00 = << ! - ? : !!int !!float !!null !!str !!bool !!binary !!timestamp !!set !!omap
!!pairs *a &a @a `a % | > {} [] [[]] {a} [a,b]""".split()
_SCALARS += [
    "!!int abc",
    "!!float x",
    "!!timestamp x",
    "!!bool x",
    "!!binary %%",
    "!!null x",
    "!!set {a, b}",
    "9" * 5000,
]
_SCALARS += ["!!python/object/apply:os.mkdir [harm]", "!!python/name:os.system", "!python/tuple [1]", "!<tag:x> 1"]
_SCALARS += ["&a [*a]", "&a {b: *a}", '"\\x00"', '"\\ud800"', '"a\\nb"', "'", '"', "{a: 1", "[1, 2", "{? a : b}", "? a"]
_SCALARS += [
    "[" * 3000,
    "{a: " * 2000 + "1",
    "- " * 2000 + "1",
    "!!omap [a: 1, a: 2]",
    "!!pairs [[1]]",
    "2 # note",
    "\u00e9",
]
_LINES = ["a: 1", "? [a, b]\n: 1", "? {a: 1}\n: 2", "<<: {num_layers: 3}", "<<: 1", "<<: [*x]", "---", "...", "--- {}"]
_LINES += ["%YAML 9.9", "%TAG ! x", "num_layers: 3", "\tx: 1", "  x: 1", "- 1", "1: 2", "null: 3", "true: x", "# note"]
_LINES += ["config: x.yaml", "print_config: true", "&a num_layers: *a", "'': 1", "hidden_size:", "model: {}", "model:"]
_LINES += [
    "no_such_flag: 1",
    "num_layer: 2",
    "lr: {lr: 1}",
    "training: {lr: 0.1}",
    "training: [lr]",
    "\x00",
    "\x1b[1m: 2",
]


@dataclass(frozen=True)
class ConfigFile:
    """Contents of a --config file. is_run: whether to train with it instead of only parsing it."""

    text: bytes
    is_run: bool

    def __str__(self) -> str:
        return f"{self.text!r:.3000} run: {self.is_run}"


class YamlFuzzer:
    """Draws configurations of tiny models, with damage to their values and to their text."""

    def __init__(self, _shared: Path) -> None:
        self._bases = read_bases()
        self._table = flag_table()

    def draw(self, choices: Choices, folder: Path) -> ConfigFile:
        base = {**self._bases[choices.one(["dense", "llama", "moe"])], **SHORT}
        values: dict[str, Any] = {name.replace("-", "_"): value for name, value in base.items() if value is not None}
        values["add_bias_linear"] = not values.pop("disable_bias_linear", False)
        values["untie_embeddings_and_output_weights"] = choices.chance(0.5)
        if choices.chance(0.5):
            values = self._grouped(choices, values)
        for _ in range(choices.one([0, 0, 0, 1])):
            self._set_flag(choices, values)
        for _ in range(choices.one([0, 0, 0, 1])):
            mutate_json(choices, values)
        text = yaml.safe_dump(values, sort_keys=False, allow_unicode=choices.chance(0.5))
        for _ in range(choices.one([0, 0, 1, 1, 1, 2])):
            text = _damaged(choices, text)
        content = text.encode(choices.one(["utf-8"] * 9 + ["utf-16", "utf-8-sig"]), errors="surrogatepass")
        (folder / "config.yaml").write_bytes(content)
        return ConfigFile(content, is_run=choices.chance(0.2))

    def _grouped(self, choices: Choices, values: dict[str, Any]) -> dict[str, Any]:
        grouped: dict[str, Any] = {}
        for name, value in values.items():
            title = self._table.by_dest[name].group if name in self._table.by_dest else None
            place = grouped if title is None or choices.chance(0.2) else grouped.setdefault(title, {})
            place[name] = value
        return grouped

    def _set_flag(self, choices: Choices, values: dict[str, Any]) -> None:
        """Sets any flag of the table, including flags that have no effect or are rejected."""
        flag = choices.one(self._table.flags)
        name = choices.one(
            [flag.dest, flag.flags[0].removeprefix("--"), flag.dest.upper(), flag.dest + "s"][: choices.one([1, 4])]
        )
        value: Any = (
            choices.one([True, False, None, 1, 0.5, "1"]) if flag.constant is not None else as_drawn(choices, flag)
        )
        values[name] = choices.one([value, [value], {"value": value}][: choices.one([1, 3])])

    def check(self, case: ConfigFile, folder: Path) -> Verdict:
        argv = ["--config", str(folder / "config.yaml")]
        if case.is_run:
            verdict = judged(lambda: pretrain_gpt.main(argv), folder)
        else:
            verdict = judged(lambda: _check_round_trip(argv, folder), folder)
        assert not (folder / "harm").exists(), "code in the file was executed"
        return verdict


def _check_round_trip(argv: list[str], folder: Path) -> None:
    with exit_on_user_error():
        args = parse_args(argv=argv)
        before = copy.deepcopy(vars(args))
        validate_args(args)
        shown = io.StringIO()
        with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
            parse_args(argv=[*argv, "--print-config"])
    (folder / "shown.yaml").write_text(shown.getvalue(), encoding="utf-8")
    again = vars(parse_args(argv=["--config", str(folder / "shown.yaml")]))
    # Compared as text, since NaN does not equal itself.
    assert repr({**again, "config": None}) == repr({**before, "config": None})


def _damaged(choices: Choices, text: str) -> str:
    """Returns the text with a value, a line or some characters changed."""
    lines = text.split("\n")
    place = choices.below(len(lines))
    key, colon, _ = lines[place].partition(": ")
    match choices.one(["value", "value", "value", "line", "cut", "indent", "double", "bomb", "anchor", "word"]):
        case "value" if colon:
            lines[place] = f"{key}: {choices.one(_SCALARS)}"
        case "line":
            lines.insert(choices.one([place, 0, len(lines)]), choices.one(_LINES))
        case "cut":
            cut = choices.integer(0, len(text))
            return (
                text[:cut]
                + choices.one(["", "", "x", ":", "\n", "\t", "{", "[", '"'])
                + text[cut + choices.integer(0, 9) :]
            )
        case "indent":
            lines[place] = " " * choices.integer(1, 5) + lines[place]
        case "double":
            lines.insert(place, lines[place])
        case "bomb":
            lines = [*_bomb(choices), *lines]
        case "anchor" if colon:
            lines[place] = lines[place].replace(": ", ": &a ", 1)
            lines.append(f"{choices.one(['seed', 'x', key.strip()])}: *{choices.one('ab')}")
        case _:
            lines[place] = lines[place][:3] + choices.one(ODD_WORDS) + lines[place][3:]
    return "\n".join(lines)


def _bomb(choices: Choices) -> list[str]:
    """Returns a few lines of nested aliases that expand to an exponential number of values."""
    if choices.chance(0.5):
        first, later = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]", "a{0}: &a{0} [{1}]"
        refer = ", ".join(["*a{0}"] * 10)
    else:
        first, later = "a0: &a0 {x: 1}", "a{0}: &a{0} {{<<: [{1}], y{0}: 1}}"
        refer = ", ".join(["*a{0}"] * 10)
    depth = choices.integer(2, 30)
    lines = [first, *(later.format(level, refer.format(level - 1)) for level in range(1, depth))]
    name = choices.one(["data_path", "lr", "seed", "moe_layer_freq"])
    return [*lines, f"{name}: *a{depth - 1}"] if choices.chance(0.5) else [f"x: {{{', '.join(lines)}}}"]
