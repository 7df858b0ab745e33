"""Builds the table of all flags: working flags of configuration fields, and Megatron-LM's other flags.

A flag converts words of the command line and scalars of YAML files to its value; the configuration dataclass that
receives the value checks its bounds. parser.py parses command lines. megatron/core/absent_features.json lists the flags
that do not work, with advice.
"""

import dataclasses
import enum
import functools
import inspect
import types
import typing
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from megatron.core.absent_features import AbsentFlag, absent_features
from megatron.core.config_field import FieldSpec, field_spec, type_hints
from megatron.training.config import areas_with_flags


class FlagState(enum.Enum):
    """Effect of a flag that is given on the command line."""

    WORKS = "works"
    NO_EFFECT = "no effect"
    DEFAULT_ONLY = "rejected unless it has its default value"
    REFUSED = "refused"


# Values stored by flags that take no argument, by argparse action.
_CONSTANTS = {"store_true": True, "store_false": False, "boolean_optional": True}
_WORD_PARSERS: dict[str, Callable[[str], Any]] = {"int": int, "float": float}
_KIND_NAMES = {"int": "an integer", "float": "a number"}


@dataclass(frozen=True, kw_only=True)
class Flag:
    """A flag as used by the parser, the YAML reader, the help and the docs.

    constant: value stored by a flag without an argument, else None. parse: converts one word to a value. unwraps:
    whether a list of one value becomes that value. choices: allowed values after parsing. field: qualified name of the
    configuration field of a working flag. opposite: option strings of the flag that stores the field's default. absent:
    row of a flag that does not work, in absent_features.json.
    """

    flags: tuple[str, ...]
    dest: str
    default: Any
    group: str
    state: FlagState
    type_name: str
    parse: Callable[[str], Any] = str
    constant: bool | None = None
    nargs: str | int | None = None
    unwraps: bool = False
    choices: tuple[Any, ...] | None = None
    help: str = ""
    field: str | None = None
    opposite: tuple[str, ...] = ()
    absent: AbsentFlag | None = None

    @property
    def takes_list(self) -> bool:
        return self.nargs is not None

    def unwrapped(self, values: list[Any]) -> Any:
        """Converts a list of parsed words to the flag's value."""
        return values[0] if self.unwraps and len(values) == 1 else values

    def choice_names(self) -> list[str]:
        """Returns the allowed values as words. Empty if any value is allowed."""
        if isinstance(self.default, enum.Enum) and self.choices is None:
            return list(type(self.default).__members__)
        return [text_of_value(choice) for choice in self.choices or ()]

    def value_of_word(self, word: str) -> Any:
        """Converts a word to a value. Raises ValueError with a message that does not repeat the flag's name."""
        try:
            value = self.parse(word)
        except ValueError as error:
            kind = _KIND_NAMES.get(self.type_name)
            # Messages of a field's parser start with the field's name, and the caller adds the flag's name.
            reason = str(error).removeprefix(f"{self.dest} is ")
            raise ValueError(f"{word!r} is not {kind}" if kind else self._choice_error(word) or reason) from None
        if self.choices is not None and value not in self.choices:
            names = ", ".join(self.choice_names())
            raise ValueError(self._choice_error(word) or f"{word!r} is not one of {names}")
        return value

    def _choice_error(self, word: str) -> str | None:
        """Returns an error for a value that only Megatron-LM supports, or None if Megatron-LM does not know it."""
        for row in absent_features().values:
            if row.flag == self.flags[0] and word in row.values:
                advice = row.advice or f"choose one of {', '.join(self.choice_names())}"
                return f"{word!r} is not available here; {advice}"
        return None

    def value_of_yaml(self, data: Any) -> Any:
        """Converts YAML data to a value. Raises ValueError with a message for users if the type is wrong."""
        # --print-config writes an empty value for "not set".
        if data is None and self.default is None:
            return None
        if self.constant is not None:
            if not isinstance(data, bool):
                raise ValueError(f"{data!r} is not true or false")
            return data
        if self.takes_list:
            return self._list_of_yaml(data if isinstance(data, list) else [data])
        return self.value_of_word(self._word_of_yaml(data))

    def _list_of_yaml(self, items: list[Any]) -> Any:
        # argparse counts the words of the command line, but not the values of a file.
        if isinstance(self.nargs, int) and len(items) != self.nargs:
            raise ValueError(f"{len(items)} values instead of {self.nargs}")
        # A list of strings may hold numbers: `data_path: [0.3, books, 0.7, web]`.
        words = [str(item) if _is_number(item) else self._word_of_yaml(item) for item in items]
        return self.unwrapped([self.value_of_word(word) for word in words])

    def _word_of_yaml(self, data: Any) -> str:
        if isinstance(data, str):
            return data
        # YAML reads 1e-4 as a string, which value_of_word converts to a number. A number where a string is expected is
        # a mistake, unless the field has its own parser (`moe_layer_freq: [0, 1, 1]`).
        if self.type_name == "str":
            raise ValueError(f"{data!r} is not a string; put it in quotes")
        if self.parse in (int, float) and not _is_number(data):
            raise ValueError(f"{data!r} is not {_KIND_NAMES[self.type_name]}")
        return str(data)


def text_of_value(value: Any) -> str:
    """Formats a flag's value as on the command line."""
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, (list, tuple)):
        return " ".join(text_of_value(item) for item in value)
    return str(value)


def yaml_of_value(value: Any) -> Any:
    """Converts a flag's value to plain YAML data. Inverse of Flag.value_of_yaml."""
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, (list, tuple)):
        return [yaml_of_value(item) for item in value]
    return value


def _is_number(data: Any) -> bool:
    return isinstance(data, (int, float)) and not isinstance(data, bool)


@dataclass(frozen=True)
class FlagTable:
    """All flags: working flags first, in the order of their classes. `by_dest` excludes rejected flags."""

    flags: tuple[Flag, ...]

    @functools.cached_property
    def by_dest(self) -> dict[str, Flag]:
        return {flag.dest: flag for flag in self.flags if flag.state is not FlagState.REFUSED}

    def in_state(self, state: FlagState) -> list[Flag]:
        return [flag for flag in self.flags if flag.state is state]

    def working_groups(self) -> dict[str, list[Flag]]:
        """Working flags by group title, in order of first appearance."""
        groups: dict[str, list[Flag]] = {}
        for flag in self.in_state(FlagState.WORKS):
            groups.setdefault(flag.group, []).append(flag)
        return groups


def build_flag_table(config_classes: Iterable[type], absent: Iterable[AbsentFlag]) -> FlagTable:
    """Builds the table from the fields of `config_classes` and the absent flags."""
    working: dict[str, Flag] = {}
    for config_class in config_classes:
        for flag in flags_of_class(config_class):
            if flag.dest in working:
                raise ValueError(f"{flag.field} and {working[flag.dest].field} both define {flag.flags[0]}")
            working[flag.dest] = flag
    opposites = [_opposite(flag) for flag in working.values() if flag.opposite]
    return FlagTable((*working.values(), *opposites, *map(_flag_of_absent, absent)))


def _opposite(flag: Flag) -> Flag:
    return dataclasses.replace(
        flag,
        flags=flag.opposite,
        constant=not flag.constant,
        opposite=(),
        help=f"Opposite of {flag.flags[0]}, and the default.",
    )


def flags_of_class(config_class: type) -> list[Flag]:
    """Returns the flags of a configuration class: flags of its own fields first, then of inherited fields."""
    hints = type_hints(config_class)
    flags: list[tuple[int, Flag]] = []
    for field in dataclasses.fields(config_class):
        spec = field_spec(field)
        if spec is not None and spec.flags != ():
            owner = _defining_class(config_class, field.name)
            flag = _flag_of_field(owner, field, hint=hints[field.name])
            flags.append((config_class.__mro__.index(owner), flag))
    # Own fields first, because readers of --help look for num-layers before MoE flags.
    return [flag for _, flag in sorted(flags, key=lambda pair: pair[0])]


def _defining_class(config_class: type, name: str) -> type:
    # Inherited fields keep the group of the class that declares them, so that MoE flags stay in the MoE group.
    return next(base for base in config_class.__mro__ if name in inspect.get_annotations(base))


def _flag_of_field(owner: Any, field: "dataclasses.Field[Any]", *, hint: Any) -> Flag:
    spec = field_spec(field)
    assert spec is not None
    default = field.default
    if field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    default = spec.default_of_flag(default)
    shape = _shape_of_hint(hint, spec, default=default)
    return Flag(
        flags=spec.flags or _derived_flags(field.name, default),
        dest=spec.dest or field.name,
        default=_typed_default(default, shape["type_name"]),
        group=owner.cli_group,
        state=FlagState.WORKS,
        help=spec.help,
        field=f"{owner.__name__}.{field.name}",
        opposite=spec.opposite,
        **shape,
    )


def _derived_flags(name: str, default: Any) -> tuple[str, ...]:
    # A flag without a value only needs to change the default, so a field that defaults to True gets --no-NAME.
    prefix = "--no-" if default is True else "--"
    return (prefix + name.replace("_", "-"),)


def _shape_of_hint(hint: Any, spec: FieldSpec, *, default: Any) -> dict[str, Any]:
    """Derives arguments of Flag from a field's annotation: number of words, type name and parser."""
    kinds = [one for one in _alternatives(hint) if one is not type(None)]
    # A flag with two states takes no value, whatever the default. `bool | None` counts as two states.
    if bool in kinds:
        return {"type_name": "flag", "constant": default is not True}
    common: dict[str, Any] = {"nargs": spec.nargs, "choices": spec.choices}
    # The field has a custom parser, which the annotation cannot express.
    if spec.parse is not None:
        return {"type_name": "value", "parse": spec.parse, **common}
    lists = [one for one in kinds if typing.get_origin(one) in (list, tuple)]
    type_name, parse = _word_type(typing.get_args(lists[0])[0] if lists else kinds[0])
    if lists:
        # `float | list[float]`: a single word stands for the bare value.
        common.update(nargs=spec.nargs or "+", unwraps=len(kinds) > len(lists))
    return {"type_name": type_name, "parse": parse, **common}


def _typed_default(default: Any, type_name: str) -> Any:
    # A float default written as 1000 prints as 1000.0, as it would after a round trip through a file.
    return float(default) if type_name == "float" and isinstance(default, int) else default


def _word_type(item: Any) -> tuple[str, Callable[[str], Any]]:
    if isinstance(item, type) and issubclass(item, enum.Enum):
        return item.__name__, _enum_parser(item)
    if item in (int, float):
        return item.__name__, item
    return "str", str


def _enum_parser(kind: type[enum.Enum]) -> Callable[[str], enum.Enum]:
    def parse(word: str) -> enum.Enum:
        if word not in kind.__members__:
            raise ValueError(f"must be one of {', '.join(kind.__members__)}")
        return kind[word]

    return parse


def _alternatives(hint: Any) -> tuple[Any, ...]:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return typing.get_args(hint)
    return (hint,)


def _flag_of_absent(row: AbsentFlag) -> Flag:
    # All flags of the form --x/--no-x are rejected, so the two forms need not be distinguished.
    takes_no_value = row.action in _CONSTANTS
    return Flag(
        flags=row.flags,
        dest=row.dest,
        default=_typed_default(row.default, row.type),
        group=row.group,
        state=FlagState[row.state.name],
        type_name="flag" if takes_no_value else row.type if row.type in _WORD_PARSERS else "str",
        parse=_WORD_PARSERS.get(row.type, str),
        constant=_CONSTANTS.get(row.action),
        nargs=None if takes_no_value else row.nargs,
        choices=row.choices if row.type in ("int", "str") else None,
        absent=row,
    )


@functools.cache
def flag_table() -> FlagTable:
    """Returns the table of all flags, built once per process."""
    return build_flag_table(areas_with_flags().values(), absent_features().flags)


def refusal(flag: Flag) -> str:
    """Returns the advice for a rejected flag: the reason, and a replacement if there is one."""
    assert flag.absent is not None, f"{flag.flags[0]} works"
    return flag.absent.advice


def no_effect_notice(flags: list[Flag]) -> str:
    """Formats the notice that names flags which are accepted without effect."""
    hints = [(flag.flags[0], None if flag.absent is None else flag.absent.hint) for flag in flags]
    names = [name if hint is None else f"{name} ({hint})" for name, hint in hints]
    return f"note: accepted without effect: {', '.join(names)}"
