"""Translates a Megatron-LM launch script into this project's command: `python tools/translate_flags.py SCRIPT`.

SCRIPT is a bash script that runs `torchrun ... pretrain_gpt.py ...`, or a model_config.yaml of Megatron-LM's functional
tests. It is not executed. --set NAME=VALUE defines its variables. The output is a shell command with one comment per
change. The first line and the exit status say whether the command trains the same (VERDICTS). The exit status is 2 if
the script cannot be read or the command line rejects the result.
"""

import argparse
import math
import os
import re
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import cache
from pathlib import Path
from typing import Any

import yaml

if not __package__:  # run by its path, as in a clone without installation
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.core.absent_features import absent_features
from megatron.tools.bash_reader import Launch, ScriptError, ShellWord
from megatron.tools.launch_scripts import Script, read_script
from megatron.training.arguments import parse_args, validate_args
from megatron.training.command_line.flags import Flag, FlagState, flag_table, refusal
from megatron.version_flag import PrintVersions

RULES_FILE = Path(__file__).with_name("translations.yaml")
OUR_PROGRAM = "pretrain_gpt.py"

# Programs of Megatron-LM that train unsupported models.
_OTHER_PROGRAMS = re.compile(r"(pretrain_(?!gpt\b)\w+|train_(rl|dpo|sft)\w*|finetune_\w+)\.py$")
# Options of torchrun that determine the number of ranks.
_NODES, _PER_NODE = ("--nnodes",), ("--nproc-per-node", "--nproc_per_node")


class Effect(IntEnum):
    """The effect of a change on the run. Values are exit statuses. The highest one of a command counts."""

    SAME = 0
    SPEED = 10
    DIFFERENT = 20


# docs/migration.md has the same texts.
VERDICTS = {
    Effect.SAME: "trains the same: model, data, optimizer and schedule agree, and losses do up to rounding",
    Effect.SPEED: "trains the same, but slower or faster, or with other memory",
    Effect.DIFFERENT: "trains differently: a setting that changes losses is not available, or has another meaning",
}


@dataclass(frozen=True)
class Setting:
    """A flag with its words as given in a script."""

    flag: str
    words: tuple[str, ...]

    @property
    def text(self) -> str:
        return " ".join(self.words)

    def __str__(self) -> str:
        return " ".join((self.flag, *self.words))


@dataclass(frozen=True)
class Change:
    """A setting that is replaced or omitted, or whose meaning differs. becomes: its words; empty if it is omitted."""

    setting: Setting
    becomes: tuple[str, ...]
    effect: Effect
    why: str

    def __str__(self) -> str:
        result = f"becomes {' '.join(self.becomes)}" if self.becomes else "left out"
        if self.becomes == (self.setting.flag, *self.setting.words):
            result = "kept"
        return f"[{self.effect.name.lower()}] {self.setting}: {result}: {self.why}"


@dataclass(frozen=True)
class Rule:
    """A row of translations.yaml, which explains its fields, or of an absent flag (absent_features.json)."""

    flags: tuple[str, ...]
    becomes: tuple[str, ...]
    effect: Effect
    why: str
    values: str | None = None
    given: Mapping[str, str] = field(default_factory=dict)
    without: tuple[str, ...] = ()

    def matches(self, setting: Setting, command: Mapping[str, Setting]) -> bool:
        """Returns whether the rule applies to a setting. command: all settings of the command by flag."""
        if setting.flag not in self.flags:
            return False
        if self.values is not None and re.fullmatch(self.values, setting.text) is None:
            return False
        if not command.keys().isdisjoint(self.without):
            return False
        others = ((command.get(flag), pattern) for flag, pattern in self.given.items())
        return all(other is not None and re.fullmatch(pattern, other.text) for other, pattern in others)

    def result(self, setting: Setting) -> tuple[str, ...]:
        """Returns the words that replace a setting."""
        words: list[str] = []
        for word in self.becomes:
            words += setting.words if word == "{value}" else [word]
        return tuple(_plus_one(setting) if word == "{value + 1}" else word for word in words)


@dataclass(frozen=True)
class Translation:
    """The translated command.

    world_size: number of ranks that its launcher starts, or None. notes: additional lines to print.
    """

    launch: Launch
    changes: tuple[Change, ...]
    world_size: int | None
    notes: tuple[str, ...] = ()

    @property
    def effect(self) -> Effect:
        effects = [change.effect for change in self.changes]
        # With doubts, it is unknown which run the script trains.
        effects += [Effect.DIFFERENT] if self.launch.doubts else []
        return max(effects, default=Effect.SAME)


@cache
def load_rules() -> tuple[Rule, ...]:
    """Returns the rules of translations.yaml and of all absent flags. Reads them once per process."""
    rows = yaml.safe_load(RULES_FILE.read_text(encoding="utf-8"))
    of_absent = [(flag.flags[:1], row) for flag in absent_features().flags for row in flag.in_scripts]
    return tuple(_rule(flags, row) for flags, row in [*((row["flags"], row) for row in rows), *of_absent])


def _rule(flags: Sequence[str], row: Mapping[str, Any]) -> Rule:
    return Rule(
        tuple(flags),
        tuple(row["becomes"]),
        Effect[row["effect"].upper()],
        row["why"],
        row.get("values"),
        row.get("given", {}),
        tuple(row.get("without", ())),
    )


def translate(launch: Launch) -> Translation:
    """Translates a command. Raises ScriptError for a program that trains an unsupported model."""
    program = launch.program.rpartition("/")[2] or OUR_PROGRAM
    if _OTHER_PROGRAMS.search(program):
        raise ScriptError(
            f"{program} trains an unsupported model: only {OUR_PROGRAM} and similar scripts are supported"
        )
    # A user's own script may have its own flags.
    own_script = program != OUR_PROGRAM
    words: list[str] = []
    changes: list[Change] = []
    try:
        settings = _with_implied(group_words(launch.words))
    except ScriptError as error:
        doubts = f"; not followed: {'; '.join(launch.doubts)}" if launch.doubts else ""
        raise ScriptError(f"line {launch.line}: {error}{doubts}") from None
    command = {setting.flag: setting for setting in settings}
    for setting in settings:
        change = change_of(setting, command, own_script=own_script)
        if change is None:
            words += (setting.flag, *setting.words)
        else:
            words += change.becomes
            changes.append(change)
    translated = replace(launch, program=launch.program if own_script else OUR_PROGRAM, words=tuple(_unrepeated(words)))
    return Translation(translated, tuple(changes), _world_size(launch.launcher))


def group_words(words: Sequence[str]) -> list[Setting]:
    """Splits a command line into flags with their words. Raises ScriptError if a word precedes the first flag."""
    settings: list[Setting] = []
    for word in words:
        if word.startswith("--"):
            flag, equals, value = word.partition("=")
            settings.append(Setting(flag, (value,) if equals else ()))
        elif not settings:
            raise ScriptError(f"{word!r} precedes the first flag of the program")
        else:
            settings[-1] = Setting(settings[-1].flag, (*settings[-1].words, word))
    return settings


def _with_implied(settings: list[Setting]) -> list[Setting]:
    """Adds defaults of Megatron-LM that differ from this project's, if they affect the run."""
    given = {setting.flag: setting for setting in settings}
    optimizer = given.get("--optimizer")
    if optimizer is not None and "muon" in " ".join(optimizer.words) and "--muon-coefficient-type" not in given:
        return [*settings, Setting("--muon-coefficient-type", ("quintic",))]
    return settings


def change_of(setting: Setting, command: Mapping[str, Setting], *, own_script: bool) -> Change | None:
    """Returns the change of one setting of a command, or None if it remains unchanged."""
    flag = _flags_by_word().get(setting.flag)
    canonical = replace(setting, flag=flag.flags[0]) if flag is not None else setting
    rule = next((rule for rule in load_rules() if rule.matches(canonical, command)), None)
    if rule is not None:
        becomes = rule.result(setting)
        unchanged = becomes == (setting.flag, *setting.words)
        return None if unchanged and rule.effect is Effect.SAME else Change(setting, becomes, rule.effect, rule.why)
    if flag is None:
        if own_script:
            return None
        why = "it is not a known flag of Megatron-LM; add it to your script with extra_args_provider"
        return Change(setting, (), Effect.DIFFERENT, why)
    return _change_by_state(setting, flag)


def _plus_one(setting: Setting) -> str:
    """Returns the number after a setting's value, or a shell expression if the value is a variable."""
    return str(int(setting.text) + 1) if setting.text.isdigit() else f"$(({setting.text}+1))"


def _change_by_state(setting: Setting, flag: Flag) -> Change | None:
    if flag.state is FlagState.NO_EFFECT:
        changes_speed = flag.absent is not None and flag.absent.changes_speed
        return Change(setting, (), Effect.SPEED if changes_speed else Effect.SAME, f"it {refusal(flag)}")
    if flag.state is FlagState.WORKS:
        return _refused_value(setting, flag)
    if _has_default(setting, flag):
        if flag.state is FlagState.DEFAULT_ONLY:
            return None
        return Change(setting, (), Effect.SAME, "its value is the default")
    return Change(setting, (), Effect.DIFFERENT, refusal(flag))


def _refused_value(setting: Setting, flag: Flag) -> Change | None:
    for word in setting.words:
        # The value of a variable that was not given is unknown.
        if flag.constant is None and not word.startswith("${"):
            try:
                flag.value_of_word(word)
            except ValueError as error:
                return Change(setting, (), Effect.DIFFERENT, str(error))
    return None


def _has_default(setting: Setting, flag: Flag) -> bool:
    if flag.constant is not None:
        return flag.default == flag.constant
    try:
        values = [flag.value_of_word(word) for word in setting.words]
    except ValueError:
        return False
    return flag.default in (values, values[0] if len(values) == 1 else None)


@cache
def _flags_by_word() -> Mapping[str, Flag]:
    return {word: flag for flag in flag_table().flags for word in flag.flags}


def _unrepeated(words: Sequence[str]) -> list[str]:
    """Removes earlier repetitions of a setting, such as the --bf16 that replaces an 8-bit format.

    The last occurrence remains, because it takes effect. Flags of a user's own script may accumulate, so all remain.
    """
    settings = group_words(words)
    kept = [
        setting
        for index, setting in enumerate(settings)
        if setting.flag not in _flags_by_word() or setting not in settings[index + 1 :]
    ]
    return [word for setting in kept for word in (setting.flag, *setting.words)]


def _world_size(launcher: Sequence[str]) -> int | None:
    nodes, per_node = _option(launcher, _NODES, default="1"), _option(launcher, _PER_NODE, default=None)
    if nodes is None or per_node is None or not (nodes.isdigit() and per_node.isdigit()):
        return None
    return int(nodes) * int(per_node)


def _option(words: Sequence[str], names: Iterable[str], default: str | None) -> str | None:
    for index, word in enumerate(words):
        for name in names:
            if word == name and index + 1 < len(words):
                return words[index + 1]
            if word.startswith(f"{name}="):
                return word.partition("=")[2]
    return default


def problems_of(translation: Translation) -> list[str]:
    """Returns the errors with which the command line would reject the translated command; empty if it accepts it."""
    if any(_flags_by_word().get(word) is None for word in translation.launch.words if word.startswith("--")):
        return []  # flags that the user's own script defines cannot be checked without it
    environment = dict(os.environ)
    try:
        os.environ.update({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(translation.world_size or 1)})
        args = parse_args(argv=translation.launch.words)
        # A plan is checked like a run, except for resources that this machine lacks, because the script may target
        # another.
        args.dry_run = True
        if translation.world_size is None:
            args.world_size = smallest_world(args)
        validate_args(args)
    except ValueError as error:
        return str(error).splitlines()
    finally:
        os.environ.clear()
        os.environ.update(environment)
    return []


def smallest_world(args: argparse.Namespace) -> int:
    """Returns the smallest number of ranks on which one model replica fits."""
    dense = args.tensor_model_parallel_size * args.pipeline_model_parallel_size * args.context_parallel_size
    expert_tensor = args.expert_tensor_parallel_size or args.tensor_model_parallel_size
    experts = args.pipeline_model_parallel_size * args.expert_model_parallel_size * expert_tensor
    return math.lcm(dense, experts)


def print_translation(translation: Translation, problems: Sequence[str] = ()) -> None:
    """Prints the command and a comment for each change. problems: why the command line rejects the command."""
    launch = translation.launch
    reasons = [change for change in translation.changes if change.effect is translation.effect]
    flags = ", ".join(change.setting.flag for change in reasons)
    because = "" if translation.effect is Effect.SAME or not flags else f", because of {flags}"
    if launch.doubts:
        doubts = "; ".join(launch.doubts)
        print(f"# [different] parts of the script could not be evaluated, so compare its values with these: {doubts}")
    for problem in problems:
        print(f"# [rejected] the command line rejects this command: {' '.join(problem.split())}")
    if not problems and (flags or not launch.doubts):
        print(f"# [{translation.effect.name.lower()}] {VERDICTS[translation.effect]}{because}")
    for line in (*translation.notes, *map(str, translation.changes)):
        print(f"# {line}")
    for line in launch.outer:
        print(line)
    text = "\n".join(command_lines(launch))
    print(f"{' '.join(launch.wrapper)} {shlex.quote(text)}" if launch.wrapper else text)


def command_lines(launch: Launch) -> list[str]:
    """Returns the shell lines of a command: variables first, the command last."""
    exports = [f"export {name}={quoted(value)}" for name, value in launch.environment.items()]
    # Captures may depend on the environment, and the environment on captures.
    exports.sort(key=lambda line: any(f"${{{name}}}" in line for name in _names_of_setup(launch)))
    first = sum(not any(f"${{{name}}}" in line for name in _names_of_setup(launch)) for line in exports)
    start = " ".join(map(quoted, (*launch.launcher, launch.program)))
    flags = [" ".join(map(quoted, (setting.flag, *setting.words))) for setting in group_words(launch.words)]
    return [*exports[:first], *launch.setup, *exports[first:], " \\\n    ".join([start, *flags])]


def _names_of_setup(launch: Launch) -> list[str]:
    return [line.partition("=")[0] for line in launch.setup]


def quoted(word: str) -> str:
    """Returns a word's shell source. Words that the script does not contain keep ${NAME} as an expansion."""
    if isinstance(word, ShellWord):
        return word.source
    if re.search(r"\$\{\w+\}", word):
        return '"' + re.sub(r'(["`\\])', r"\\\1", word) + '"'
    return shlex.quote(word)


def choose_launch(script: Script, number: int | None, *, name: str) -> Launch:
    """Returns the training command with that number, starting at 1. Raises ScriptError if the choice is ambiguous."""
    launches = script.launches
    if number is not None:
        if not 1 <= number <= len(launches):
            raise ScriptError(f"--launch is {number}: {name} has {len(launches)} training commands")
        return launches[number - 1]
    if len(launches) > 1:
        lines = ", ".join(f"{index}: line {launch.line}" for index, launch in enumerate(launches, start=1))
        raise ScriptError(f"{name} has {len(launches)} training commands: choose one with --launch N ({lines})")
    return launches[0]


def read_values(settings: Sequence[str]) -> dict[str, str]:
    """Parses NAME=VALUE words. Raises ScriptError for other words."""
    values = {}
    for text in settings:
        name, equals, value = text.partition("=")
        if not equals or not re.fullmatch(r"\w+", name):
            raise ScriptError(f"--set is {text!r}: must be NAME=VALUE (1=VALUE for the script's first argument)")
        values[name] = value
    return values


def with_launcher(translation: Translation) -> Translation:
    """Adds torchrun with the smallest number of ranks to a command without a launcher, as from a model_config.yaml."""
    if translation.launch.launcher or translation.world_size is not None:
        return translation
    try:
        ranks = smallest_world(parse_args(argv=translation.launch.words))
    except ValueError:
        return translation  # problems_of reports the reason
    launcher = ("torchrun", "--nproc-per-node", str(ranks))
    note = f"{ranks} ranks are the minimum for one model replica; with more ranks the batch is split further"
    launch = replace(translation.launch, launcher=launcher)
    return replace(translation, launch=launch, world_size=ranks, notes=(*translation.notes, note))


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the translation and returns the exit status."""
    statuses = "\n".join(f"  {effect.value:<4}{verdict}" for effect, verdict in VERDICTS.items())
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog=f"exit status:\n{statuses}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=PrintVersions)
    parser.add_argument("script", type=Path, help="bash script or model_config.yaml")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="value of a variable set outside the script; repeatable",
    )
    parser.add_argument(
        "--launch", type=int, metavar="N", help="number of the training command, if the script has several"
    )
    args = parser.parse_args(argv)
    name = args.script.name
    try:
        script = read_script(args.script.read_text(encoding="utf-8"), read_values(args.set), name=name)
        translation = translate(choose_launch(script, args.launch, name=name))
    except (ScriptError, OSError, UnicodeDecodeError) as error:
        print(f"translate_flags: {error}", file=sys.stderr)
        return 2
    unknown = translation.launch.unknown
    printed = " ".join((*translation.launch.launcher, translation.launch.program, *translation.launch.words))
    if lost := [one for one in sorted(translation.launch.splitting) if f"${{{one}}}" not in printed]:
        print(
            f"translate_flags: {', '.join(lost)} has no value and may contain flags, but follows a flag that is left "
            f"out: give --set {lost[0]}= if it is empty, or its value",
            file=sys.stderr,
        )
        return 2
    notes = list(script.notes)
    if unknown:
        notes.append(f"unknown variables were left unchanged: {', '.join(unknown)}; set them with --set NAME=VALUE")
    if assumed := [name for name in translation.launch.assumed if name not in unknown]:
        names = ", ".join("the script's arguments" if name == "1" else name for name in assumed)
        notes.append(f"assumed to be unset: {names}; if not, set them with --set NAME=VALUE")
    translation = with_launcher(replace(translation, notes=tuple(notes)))
    problems = problems_of(translation)
    print_translation(translation, problems)
    for problem in problems:
        print(f"translate_flags: the command line rejects the result: {problem}", file=sys.stderr)
    return 2 if problems else int(translation.effect)


if __name__ == "__main__":
    sys.exit(main())
