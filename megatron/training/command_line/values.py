"""Converts words of the command line and scalars of YAML files to flag values, and values back to text.

The configuration dataclass that receives a value checks its bounds.
"""

import enum
from typing import Any

from megatron.core.absent_features import absent_features
from megatron.training.command_line.flags import Flag

_KIND_NAMES = {"int": "an integer", "float": "a number"}


def value_of_word(flag: Flag, word: str) -> Any:
    """Converts a word to the flag's value. Raises ValueError with a message that does not repeat the flag's name."""
    try:
        value = flag.parse(word)
    except ValueError as error:
        kind = _KIND_NAMES.get(flag.type_name)
        # Messages of a field's parser start with the field's name, and the caller adds the flag's name.
        reason = str(error).removeprefix(f"{flag.dest} is ")
        raise ValueError(f"{word!r} is not {kind}" if kind else _choice_error(flag, word) or reason) from None
    if flag.choices is not None and value not in flag.choices:
        raise ValueError(_choice_error(flag, word) or f"{word!r} is not one of {', '.join(choice_names(flag))}")
    return value


def _choice_error(flag: Flag, word: str) -> str | None:
    """Returns an error for a value that only Megatron-LM supports, or None if Megatron-LM does not know it either."""
    for row in absent_features().values:
        if row.flag == flag.flags[0] and word in row.values:
            advice = row.advice or f"choose one of {', '.join(choice_names(flag))}"
            return f"{word!r} is not available here; {advice}"
    return None


def choice_names(flag: Flag) -> list[str]:
    """Returns the allowed values of a flag as words. Empty if any value is allowed."""
    if isinstance(flag.default, enum.Enum) and flag.choices is None:
        return list(type(flag.default).__members__)
    return [text_of_value(choice) for choice in flag.choices or ()]


def text_of_value(value: Any) -> str:
    """Formats a flag's value as on the command line."""
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, (list, tuple)):
        return " ".join(text_of_value(item) for item in value)
    return str(value)


def yaml_of_value(value: Any) -> Any:
    """Converts a flag's value to plain YAML data. Inverse of value_of_yaml."""
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, (list, tuple)):
        return [yaml_of_value(item) for item in value]
    return value


def value_of_yaml(flag: Flag, data: Any) -> Any:
    """Converts YAML data to a flag's value. Raises ValueError with a message for users if the type is wrong."""
    # --print-config writes an empty value for "not set".
    if data is None and flag.default is None:
        return None
    if flag.constant is not None:
        if not isinstance(data, bool):
            raise ValueError(f"{data!r} is not true or false")
        return data
    if flag.takes_list:
        return _list_of_yaml(flag, data if isinstance(data, list) else [data])
    return value_of_word(flag, _word_of_yaml(flag, data))


def _list_of_yaml(flag: Flag, items: list[Any]) -> Any:
    # argparse counts the words of the command line, but not the values of a file.
    if isinstance(flag.nargs, int) and len(items) != flag.nargs:
        raise ValueError(f"{len(items)} values instead of {flag.nargs}")
    # A list of strings may hold numbers: `data_path: [0.3, books, 0.7, web]`.
    words = [str(item) if _is_number(item) else _word_of_yaml(flag, item) for item in items]
    return flag.unwrapped([value_of_word(flag, word) for word in words])


def _word_of_yaml(flag: Flag, data: Any) -> str:
    if isinstance(data, str):
        return data
    # YAML reads 1e-4 as a string, which value_of_word converts to a number. A number where a string is expected is a
    # mistake, unless the field has its own parser (`moe_layer_freq: [0, 1, 1]`).
    if flag.type_name == "str":
        raise ValueError(f"{data!r} is not a string; put it in quotes")
    if flag.parse in (int, float) and not _is_number(data):
        raise ValueError(f"{data!r} is not {_KIND_NAMES[flag.type_name]}")
    return str(data)


def _is_number(data: Any) -> bool:
    return isinstance(data, (int, float)) and not isinstance(data, bool)
