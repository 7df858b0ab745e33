"""Extracts the command that a launch script runs, without running the script: bash, or a model_config.yaml.

bash_reader.py follows bash scripts. Variables set outside the script are unknown unless the caller gives their values.
"""

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from megatron.tools.bash_reader import BashReader, Launch, ScriptEndError, ScriptError
from megatron.tools.bash_values import has_marks


@dataclass(frozen=True)
class Script:
    """The training commands of a launch script.

    launches: training commands in order of execution. notes: constructs that could not be followed, with their lines.
    """

    launches: tuple[Launch, ...]
    notes: tuple[str, ...]


def read_script(text: str, values: Mapping[str, str], *, name: str) -> Script:
    """Reads a bash script or, if `name` ends in .yaml or .yml, a model_config.yaml.

    values: variables set outside the script; positional parameters are named 1, 2 ... Raises ScriptError for a text
    that is neither, and if no training command is found.
    """
    if name.endswith((".yaml", ".yml")):
        return _read_model_config(text, values, name=name)
    if has_marks(text) or "\r\n" in text or "\0" in text:
        raise ScriptError(f"{name}: has Windows line ends or special characters, which bash keeps: remove them")
    reader, ends = BashReader(values), ""
    try:
        reader.run_text(text)
    except ScriptEndError as end:
        ends = str(end)
    except ScriptError as error:
        raise ScriptError(f"{name}: {error}") from None
    if not reader.launches:
        if ends:
            raise ScriptError(f"{name}: {ends}, before any training command; is a --set NAME=VALUE missing?")
        doubts = f"; not followed: {'; '.join(reader.all_doubts())}" if reader.all_doubts() else ""
        raise ScriptError(
            f"{name}: no command runs a Python program with flags (torchrun ... pretrain_gpt.py --num-layers ...); "
            f"if the command depends on a variable, give it with --set NAME=VALUE{doubts}"
        )
    return Script(tuple(reader.launches), tuple(dict.fromkeys(reader.notes)))


# The key under which Megatron-LM's functional tests store a run's flags.
_MODEL_KEY = "MODEL_ARGS"
_EXPANSION = re.compile(r"\$\{?(\w+)\}?")


def _read_model_config(text: str, values: Mapping[str, str], *, name: str) -> Script:
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ScriptError(f"{name}: {error}") from None
    if not isinstance(content, dict):
        raise ScriptError(f"{name}: must be a mapping with MODEL_ARGS, or of flags to values")
    flags = content.get(_MODEL_KEY)
    if flags is None:
        flags = {key: value for key, value in content.items() if str(key).startswith("--")}
    if not isinstance(flags, dict) or not flags:
        raise ScriptError(f"{name}: MODEL_ARGS must be a mapping of flags to values, such as --num-layers: 12")
    environment = {key: str(value) for key, value in (content.get("ENV_VARS") or {}).items()}
    known = {**environment, **values}
    unknown: dict[str, None] = {}

    def expand(word: str) -> str:
        def replace(match: re.Match[str]) -> str:
            if match[1] not in known:
                unknown[match[1]] = None
            return known.get(match[1], f"${{{match[1]}}}")

        return _EXPANSION.sub(replace, word)

    words = [expand(word) for flag, value in flags.items() for word in _words_of_setting(str(flag), value)]
    return Script((Launch((), "", tuple(words), environment, tuple(unknown)),), ())


def _words_of_setting(flag: str, value: Any) -> list[str]:
    if value is True or value is None:
        return [flag]
    if value is False:
        return []
    if isinstance(value, list):
        return [flag, *map(str, value)]
    text = str(value)
    # Several values of a list are stored in one string. Patterns such as ([0]*1+[1]*15) have no spaces.
    return [flag, *shlex.split(text)] if isinstance(value, str) and not text.startswith("(") else [flag, text]
