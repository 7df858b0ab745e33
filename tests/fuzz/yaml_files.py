"""Fuzzed --config files: the arguments that the file says and that read back the same, or one line that names it."""

import contextlib
import copy
import io
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

import pretrain_gpt
from megatron.training.arguments import parse_args, validate_args
from megatron.training.command_line.registry import flag_table
from megatron.training.errors import exit_on_user_error
from tests.functional_tests.case import read_bases
from tests.fuzz.flags import SHORT, as_drawn
from tests.fuzz.trials import Verdict, judged
from tests.fuzz.values import ODD_WORDS, mutate_json

# What replaces a value, or follows it, as text of a YAML file.
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
    """What the file holds, and whether a run is started with it."""

    text: bytes
    is_run: bool

    def __str__(self) -> str:
        return f"{self.text!r:.3000} run: {self.is_run}"


class YamlFuzzer:
    """Configurations of tiny models, as values and as text, with some damage."""

    def __init__(self) -> None:
        self._bases = read_bases()
        self._table = flag_table()

    def draw(self, rng: random.Random, folder: Path) -> ConfigFile:
        base = {**self._bases[rng.choice(["dense", "llama", "moe"])], **SHORT}
        values: dict[str, Any] = {name.replace("-", "_"): value for name, value in base.items() if value is not None}
        values["add_bias_linear"] = not values.pop("disable_bias_linear", False)
        values["untie_embeddings_and_output_weights"] = rng.random() < 0.5
        if rng.random() < 0.5:
            values = self._grouped(rng, values)
        for _ in range(rng.choice([0, 0, 0, 1])):
            self._set_flag(rng, values)
        for _ in range(rng.choice([0, 0, 0, 1])):
            mutate_json(rng, values)
        text = yaml.safe_dump(values, sort_keys=False, allow_unicode=rng.random() < 0.5)
        for _ in range(rng.choice([0, 0, 1, 1, 1, 2])):
            text = _damaged(rng, text)
        content = text.encode(rng.choice(["utf-8"] * 9 + ["utf-16", "utf-8-sig"]), errors="surrogatepass")
        (folder / "config.yaml").write_bytes(content)
        return ConfigFile(content, is_run=rng.random() < 0.2)

    def _grouped(self, rng: random.Random, values: dict[str, Any]) -> dict[str, Any]:
        grouped: dict[str, Any] = {}
        for name, value in values.items():
            title = self._table.by_dest[name].group if name in self._table.by_dest else None
            place = grouped if title is None or rng.random() < 0.2 else grouped.setdefault(title, {})
            place[name] = value
        return grouped

    def _set_flag(self, rng: random.Random, values: dict[str, Any]) -> None:
        """Any flag: those that work mostly, but those of other issues, without effect and refused as well."""
        flag = rng.choice(self._table.flags)
        name = rng.choice(
            [flag.dest, flag.flags[0].removeprefix("--"), flag.dest.upper(), flag.dest + "s"][: rng.choice([1, 4])]
        )
        value: Any = rng.choice([True, False, None, 1, 0.5, "1"]) if flag.constant is not None else as_drawn(rng, flag)
        values[name] = rng.choice([value, [value], {"value": value}][: rng.choice([1, 3])])

    def judge(self, case: ConfigFile, folder: Path) -> Verdict:
        argv = ["--config", str(folder / "config.yaml")]
        if case.is_run:
            verdict = judged(lambda: pretrain_gpt.main(argv), folder)
        else:
            verdict = judged(lambda: _check_round_trip(argv, folder), folder)
        assert not (folder / "harm").exists(), "the file was run"
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
    # As text: what is not a number equals nothing.
    assert repr({**again, "config": None}) == repr({**before, "config": None})


def _damaged(rng: random.Random, text: str) -> str:
    """The text with a value, a line or some characters changed."""
    lines = text.split("\n")
    place = rng.randrange(len(lines))
    key, colon, _ = lines[place].partition(": ")
    match rng.choice(["value", "value", "value", "line", "cut", "indent", "double", "bomb", "anchor", "word"]):
        case "value" if colon:
            lines[place] = f"{key}: {rng.choice(_SCALARS)}"
        case "line":
            lines.insert(rng.choice([place, 0, len(lines)]), rng.choice(_LINES))
        case "cut":
            cut = rng.randint(0, len(text))
            return (
                text[:cut] + rng.choice(["", "", "x", ":", "\n", "\t", "{", "[", '"']) + text[cut + rng.randint(0, 9) :]
            )
        case "indent":
            lines[place] = " " * rng.randint(1, 5) + lines[place]
        case "double":
            lines.insert(place, lines[place])
        case "bomb":
            lines = [*_bomb(rng), *lines]
        case "anchor" if colon:
            lines[place] = lines[place].replace(": ", ": &a ", 1)
            lines.append(f"{rng.choice(['seed', 'x', key.strip()])}: *{rng.choice('ab')}")
        case _:
            lines[place] = lines[place][:3] + rng.choice(ODD_WORDS) + lines[place][3:]
    return "\n".join(lines)


def _bomb(rng: random.Random) -> list[str]:
    """A few lines that mean millions of values."""
    if rng.random() < 0.5:
        first, later = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]", "a{0}: &a{0} [{1}]"
        refer = ", ".join(["*a{0}"] * 10)
    else:
        first, later = "a0: &a0 {x: 1}", "a{0}: &a{0} {{<<: [{1}], y{0}: 1}}"
        refer = ", ".join(["*a{0}"] * 10)
    depth = rng.randint(2, 30)
    lines = [first, *(later.format(level, refer.format(level - 1)) for level in range(1, depth))]
    name = rng.choice(["data_path", "lr", "seed", "moe_layer_freq"])
    return [*lines, f"{name}: *a{depth - 1}"] if rng.random() < 0.5 else [f"x: {{{', '.join(lines)}}}"]
