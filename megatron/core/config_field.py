"""Fields of configuration dataclasses: help text, command-line flag and constraints in one place.

The command line is parsed elsewhere: megatron/training/command_line/flags.py generates flags and help from these
fields. absent_features.json lists Megatron-LM's fields for features that are not here.
"""

import abc
import dataclasses
import enum
import functools
import math
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megatron.core.absent_features import AbsentField, AbsentState, absent_features


class _Unset(enum.Enum):
    """Marker for a FieldSpec whose flag uses the field's default."""

    UNSET = "unset"


@dataclasses.dataclass(frozen=True)
class FieldSpec:
    """Properties of a configuration field for the command line and the validator.

    flags: option strings; None derives `--field-name`, an empty tuple keeps the field off the command line. dest:
    attribute name in the parsed arguments, if it differs from the field name (`num_experts` for `num_moe_experts`).
    opposite: option strings of another flag, which stores the default of a boolean field.
    parse: converts one command-line word to a value; None uses the annotation. cli_default: default of the flag, if it
    differs from the field's default. named: maps the names on the command line and in `choices` to values; the field
    accepts both and stores the value. filled_in: None is valid although the annotation lacks it, because __post_init__
    replaces it, or because the program that reads the field requires a value.
    """

    help: str
    flags: tuple[str, ...] | None = None
    dest: str | None = None
    opposite: tuple[str, ...] = ()
    choices: tuple[Any, ...] | None = None
    at_least: float | None = None
    more_than: float | None = None
    at_most: float | None = None
    less_than: float | None = None
    nargs: str | int | None = None
    parse: Callable[[str], Any] | None = None
    cli_default: Any = _Unset.UNSET
    named: Mapping[str, Any] | None = None
    filled_in: bool = False

    def default_of_flag(self, default: Any) -> Any:
        """Returns cli_default if it is set, otherwise `default`, which is the field's default."""
        return default if self.cli_default is _Unset.UNSET else self.cli_default


def config_field(default: Any = dataclasses.MISSING, *, help: str, **spec: Any) -> Any:
    """Returns a dataclass field with a FieldSpec. Keywords are the fields of FieldSpec, or `default_factory`."""
    factory = spec.pop("default_factory", dataclasses.MISSING)
    for key in ("flags", "opposite", "choices"):
        if spec.get(key) is not None:
            spec[key] = tuple(spec[key])
    metadata = {"spec": FieldSpec(help=help, **spec)}
    if factory is not dataclasses.MISSING:
        return dataclasses.field(default_factory=factory, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def field_spec(field: "dataclasses.Field[Any]") -> FieldSpec | None:
    """Returns the FieldSpec of a dataclass field; None for a field that was declared without config_field."""
    return field.metadata.get("spec")


def field_dest(field: "dataclasses.Field[Any]") -> str:
    """Returns the argument name under which a field's value is stored."""
    spec = field_spec(field)
    return spec.dest if spec is not None and spec.dest is not None else field.name


def validate_fields(config: Any) -> None:
    """Checks every field of a dataclass instance against its FieldSpec and annotation, and the absent_values.

    Absent fields must equal their defaults, unless they have no effect. After the checks, names (FieldSpec.named) are
    replaced by their values, and a list or tuple is converted to the other type if the annotation allows only that one.

    Raises ValueError with one line per invalid field, naming class, field, value and valid values.
    """
    problems = field_problems(type(config), vars(config))
    if problems:
        raise ValueError("\n".join(problems.values()))
    own_class: Any = type(config)
    hints = type_hints(own_class)
    for field in dataclasses.fields(config):
        if not field.init:
            continue  # derived from other fields later
        spec, value = field_spec(field), vars(config)[field.name]
        if spec is not None and spec.named is not None and isinstance(value, str):
            vars(config)[field.name] = spec.named[value]
        elif spec is not None and isinstance(value, (list, tuple)):
            vars(config)[field.name] = _as_annotated(value, hints[field.name])
    if isinstance(config, MegatronConfig):
        absent = absent_fields(type(config))
        given = config.absent_values.items()
        config.absent_values = {name: value for name, value in given if value != absent[name].default}


def _as_annotated(value: list[Any] | tuple[Any, ...], hint: Any) -> Any:
    kinds = {typing.get_origin(one) or one for one in _alternatives(hint)} & {list, tuple}
    return value if type(value) in kinds or len(kinds) != 1 else kinds.pop()(value)


@functools.cache
def type_hints(config_class: Any) -> Mapping[str, Any]:
    """Returns the evaluated type hints of a dataclass and its bases. Cached, because the evaluation is slow."""
    return types.MappingProxyType(typing.get_type_hints(config_class))


def field_problems(config_class: Any, values: Mapping[str, Any]) -> dict[str, str]:
    """Checks `values` against the fields of a dataclass. Returns an error message for each invalid field, by name."""
    hints = type_hints(config_class)
    problems = {}
    absent = values.get("absent_values", {})
    if not isinstance(absent, dict):
        return {"absent_values": f"{config_class.__name__}.absent_values is {absent!r}: must be a dict by field name"}
    for name, value in absent.items():
        problem = _absent_problem(absent_fields(config_class).get(name), value)
        if problem is not None:
            problems[name] = f"{config_class.__name__}.{name} is {value!r}: {problem}"
    for field in dataclasses.fields(config_class):
        spec = field_spec(field)
        if spec is None or field.name not in values:
            continue
        try:
            _check_value(f"{config_class.__name__}.{field.name}", values[field.name], spec=spec, hint=hints[field.name])
        except ValueError as error:
            problems[field.name] = str(error)
    return problems


def _absent_problem(field: AbsentField | None, value: Any) -> str | None:
    if field is None:
        return "is not a field of this class in Megatron-LM"
    if field.state is AbsentState.NO_EFFECT:
        return None if _matches(value, field.hint) else f"must be {_describe(field.hint)}"
    return None if value == field.default else f"{field.advice}; keep the default {field.default!r}"


@functools.cache
def absent_fields(config_class: Any) -> Mapping[str, AbsentField]:
    """Returns Megatron-LM's fields that a configuration class accepts without having them, by name."""
    names = {base.__name__ for base in config_class.__mro__}
    # A subclass may declare such a field, which is then its own.
    own = {field.name for field in dataclasses.fields(config_class)}
    rows = (row for row in absent_features().fields if row.config in names and row.name not in own)
    return types.MappingProxyType({row.name: row for row in rows})


class _TakesAbsentFields(type(typing.Protocol)):  # type: ignore[misc]
    """Metaclass that wraps each constructor of its classes, so that they accept absent fields as keywords.

    It derives from the metaclass of protocols and abstract classes, with which users may combine their configurations.
    """

    def __instancecheck__(cls, instance: Any) -> bool:
        """Checks instances by their class, because no configuration is a protocol itself."""
        return abc.ABCMeta.__instancecheck__(cls, instance)

    def __setattr__(cls, name: str, value: Any) -> None:
        # @dataclass sets the constructor that it generates, and generates another one for each decorated subclass.
        super().__setattr__(name, _taking_absent_fields(value) if name == "__init__" else value)


def _taking_absent_fields(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **given: Any) -> None:
        config_class: Any = type(self)
        absent = absent_fields(config_class)
        values = {name: given.pop(name) for name in list(given) if name in absent}
        if values:
            given["absent_values"] = {**given.get("absent_values", {}), **values}
        init(self, *args, **given)

    return __init__


@dataclasses.dataclass(kw_only=True)
class MegatronConfig(metaclass=_TakesAbsentFields):
    """Base of configurations whose names are Megatron-LM's: accepts Megatron-LM's other fields as keywords.

    validate_fields refuses values other than the default, unless the field has no effect. absent_values: the accepted
    values that are not defaults. Reading an absent field returns its value or its default.
    """

    absent_values: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets a field. Values of absent fields are kept in absent_values, which copies check and compare."""
        if name in absent_fields(type(self)):
            self.absent_values = {**self.absent_values, name: value}
        else:
            super().__setattr__(name, value)

    # Hidden from type checkers, which would accept every name.
    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Returns the value of an absent field. Python calls this only for attributes that do not exist."""
            if name not in absent_fields(type(self)):
                message = f"{type(self).__name__!r} object has no attribute {name!r}"
                raise AttributeError(message, name=name, obj=self)
            # Not self.absent_values, which does not exist yet while an object is copied or unpickled.
            given = vars(self).get("absent_values", {})
            return given[name] if name in given else absent_fields(type(self))[name].default


def require_defaults(call: str, why: str, /, **arguments: tuple[Any, Any]) -> None:
    """Raises ValueError if Megatron arguments for unsupported features differ from their defaults.

    call: name of the function or class. why: a sentence without a final period that names the missing feature and, if
    possible, the alternative. arguments: (value, default) of each argument, by name. The error lists every argument
    that differs.
    """
    wrong = {name: pair for name, pair in arguments.items() if pair[0] is not pair[1] and pair[0] != pair[1]}
    if wrong:
        problems = [
            f"{name} is {value!r}: {why}; keep the default {default!r}" for name, (value, default) in wrong.items()
        ]
        raise ValueError("\n".join(f"{call}: {problem}" for problem in problems))


def run_checks(*checks: Callable[[], object]) -> None:
    """Runs all checks and raises one ValueError with the messages of all failed checks, one per line.

    The checks must be independent: each one runs even if earlier ones failed.
    """
    messages: list[str] = []
    for check in checks:
        try:
            check()
        except ValueError as error:
            messages += str(error).splitlines()
    if messages:
        raise ValueError("\n".join(dict.fromkeys(messages)))


def _check_value(where: str, value: Any, *, spec: FieldSpec, hint: Any) -> None:
    if value is None and (_allows_none(hint) or spec.filled_in):
        return
    if not _matches(value, hint):
        raise ValueError(f"{where} is {value!r}: must be {_describe(hint | None if spec.filled_in else hint)}")
    for item in value if isinstance(value, (list, tuple)) else [value]:
        if spec.named is not None and not isinstance(item, str):
            item = next((name for name, named in spec.named.items() if named == item), item)
        if spec.choices is not None and item not in spec.choices:
            raise ValueError(f"{where} is {item!r}: must be one of {', '.join(map(str, spec.choices))}")
        # An unset "$VARIABLE" in a script expands to an empty string. An empty path would mean the current folder.
        if item == "":
            raise ValueError(f"{where} is empty: must have a value, or be omitted")
        if isinstance(item, (int, float)) and not isinstance(item, bool):
            _check_bounds(where, item, spec=spec)


def _check_bounds(where: str, value: float, *, spec: FieldSpec) -> None:
    # Sizes and counts are passed to C++ as 64-bit integers.
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError(f"{where} is {value}: must fit in 64 bits")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{where} is {value}: must be {'a number' if math.isnan(value) else 'finite'}")
    bounds: Sequence[tuple[float | None, Callable[[float, float], bool], str]] = (
        (spec.at_least, lambda v, b: v >= b, "at least"),
        (spec.more_than, lambda v, b: v > b, "more than"),
        (spec.at_most, lambda v, b: v <= b, "at most"),
        (spec.less_than, lambda v, b: v < b, "less than"),
    )
    for bound, holds, words in bounds:
        if bound is not None and not holds(value, bound):
            raise ValueError(f"{where} is {value}: must be {words} {bound}")


def _alternatives(hint: Any) -> tuple[Any, ...]:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return typing.get_args(hint)
    return (hint,)


def _allows_none(hint: Any) -> bool:
    return type(None) in _alternatives(hint) or hint is Any


def _matches(value: Any, hint: Any) -> bool:
    return any(_matches_one(value, one) for one in _alternatives(hint))


def _matches_one(value: Any, hint: Any) -> bool:
    origin = typing.get_origin(hint) or hint
    if origin is type(None):
        return value is None
    if origin is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if origin is int:
        # A bool is an int in Python, but passing one (`bucket_size=True`) is a user mistake.
        return isinstance(value, int) and not isinstance(value, bool)
    if origin in (list, tuple):
        return isinstance(value, (list, tuple))
    if origin in (bool, str) or (isinstance(origin, type) and issubclass(origin, enum.Enum)):
        return isinstance(value, origin)
    return True


def _describe(hint: Any) -> str:
    names = {int: "an integer", float: "a number", bool: "true or false", str: "a string", type(None): "none"}
    names |= {list: "a list", tuple: "a tuple"}
    kinds = [typing.get_origin(one) or one for one in _alternatives(hint)]
    return " or ".join(names.get(one, one.__name__ if isinstance(one, type) else str(one)) for one in kinds)
