"""Compares this project's public API with Megatron-LM's, name by name: `python -m tools.compare_api [MODULE ...]`.

megatron_api.txt lists Megatron-LM's names with their parameters and defaults, one name per line: a function, a
constructor, a method, a property, a dataclass field, or a class without a signature. A name is

- the same, if ours accepts its parameters in the same order, with the same keywords and the same defaults. Ours may
  have additional parameters after them, if they have defaults;
- thin, if it exists but a call that is valid in Megatron-LM may fail here: the table names the parameter;
- missing, if nothing has that name here.

"Same" compares no annotations, no return values and no behavior. A property, and a default that is computed
(default_factory, or an expression that is not a literal), only have to exist.

Names of unsupported features (inference, FP8 ...) are not counted in the percentages, even if they are defined here
only to reject them. megatron/core/absent_features.json lists them with the reason. A configuration accepts its fields
without having them.
"""

import argparse
import ast
import enum
import importlib
import inspect
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

import torch

from megatron.core.absent_features import AbsentField, AbsentState, absent_features
from megatron.core.config_field import MegatronConfig, absent_fields, field_spec

HERE = Path(__file__).parent
NAMES_FILE = HERE / "megatron_api.txt"

NO_DEFAULT = object()
UNKNOWN = object()  # a default that is not a literal in megatron_api.txt matches any default


class Verdict(enum.Enum):
    """Result of looking up a name: the same here, a thinner version of it, or missing."""

    SAME = "same"
    THIN = "thin"
    MISSING = "missing"


@dataclass(frozen=True)
class Parameter:
    """A parameter of a public name.

    name: with leading stars if it is variadic. default: NO_DEFAULT, a value, or UNKNOWN.
    """

    name: str
    default: object = NO_DEFAULT
    keyword_only: bool = False


@dataclass(frozen=True)
class PublicName:
    """One name of megatron_api.txt.

    module: import path. owner: class of a member, or "". kind: function, class, method, property or field.
    """

    module: str
    owner: str
    name: str
    kind: str
    parameters: tuple[Parameter, ...] = ()

    @property
    def path(self) -> str:
        """The dotted path module.owner.name, which the patterns of an Unsupported are matched against."""
        return ".".join(part for part in (self.module, self.owner, self.name) if part)


@dataclass(frozen=True)
class Comparison:
    """The result of comparing one name.

    why: the difference, or the reason why the name is missing; "" if it is the same. unsupported: why the feature is
    unsupported, or "". no_effect: why a configuration field accepts every value without an effect, or "".
    """

    name: PublicName
    verdict: Verdict
    why: str = ""
    unsupported: str = ""
    no_effect: str = ""


def read_names(text: str) -> list[PublicName]:
    """Parses text in the format of megatron_api.txt."""
    names: list[PublicName] = []
    module = owner = ""
    for line in text.splitlines():
        if not line.strip() or line.startswith("# "):
            continue
        if line.startswith("## "):
            module, owner = _module_name(line[3:].split(":")[0]), ""
        elif line.startswith("class "):
            owner = line[len("class ") :].split("(")[0]
            names.append(PublicName(module, "", owner, "class"))
        elif line.startswith(" "):
            names.append(_member(module, owner, line.strip()))
        else:
            owner = ""
            names.append(_callable(module, "", line, "function"))
    return names


def _module_name(path: str) -> str:
    return path.strip().removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _member(module: str, owner: str, line: str) -> PublicName:
    if line.endswith("(property)"):
        return PublicName(module, owner, line.split()[0], "property")
    head = line.split("(")[0]
    if ":" in head:
        return _field(module, owner, line)
    return _callable(module, owner, line, "method")


def _field(module: str, owner: str, line: str) -> PublicName:
    # Long annotations and defaults are cut off in the file, so only the last "=" and the head of a field() are read.
    name, _, rest = line.partition(":")
    default: object = NO_DEFAULT
    if " = " in rest:
        text = rest.split(" = ", 1)[1] if "field(" in rest else rest.rsplit(" = ", 1)[1]
        default = _field_default(text)
    return PublicName(module, owner, name, "field", (Parameter(name, default),))


def _field_default(text: str) -> object:
    if not text.startswith("field("):
        return _value(text)
    for key in ("default=", "default_factory="):
        if key in text:
            value = text.split(key, 1)[1]
            return UNKNOWN if key == "default_factory=" else _value(value.split(", metadata")[0].rstrip(")"))
    return NO_DEFAULT


def _callable(module: str, owner: str, line: str, kind: str) -> PublicName:
    tree = ast.parse(f"def {line}: pass").body[0]
    assert isinstance(tree, ast.FunctionDef), line
    spec = tree.args
    positional = spec.posonlyargs + spec.args
    defaults: list[object] = [NO_DEFAULT] * (len(positional) - len(spec.defaults))
    defaults += [_value(ast.unparse(node)) for node in spec.defaults]
    found = [Parameter(arg.arg, default) for arg, default in zip(positional, defaults, strict=True)]
    if spec.vararg is not None:
        found.append(Parameter(f"*{spec.vararg.arg}"))
    for arg, node in zip(spec.kwonlyargs, spec.kw_defaults, strict=True):
        found.append(Parameter(arg.arg, NO_DEFAULT if node is None else _value(ast.unparse(node)), keyword_only=True))
    if spec.kwarg is not None:
        found.append(Parameter(f"**{spec.kwarg.arg}"))
    return PublicName(module, owner, tree.name, kind, tuple(found))


def _value(text: str) -> object:
    if text.startswith("torch."):
        return vars(torch).get(text.removeprefix("torch."), UNKNOWN)
    if text == "float('inf')":
        return float("inf")
    try:
        tree = ast.parse(text, mode="eval").body
    except SyntaxError:
        return UNKNOWN
    try:
        if isinstance(tree, ast.BinOp):  # 2 ** 32, 1024 * 1024
            return _power_or_product(tree)
        return ast.literal_eval(tree)
    except ValueError:
        return UNKNOWN


def _power_or_product(tree: ast.BinOp) -> object:
    left, right = ast.literal_eval(tree.left), ast.literal_eval(tree.right)
    if isinstance(tree.op, ast.Pow):
        return left**right
    return left * right if isinstance(tree.op, ast.Mult) else UNKNOWN


@cache
def load_names() -> tuple[PublicName, ...]:
    """Reads megatron_api.txt once per process."""
    return tuple(read_names(NAMES_FILE.read_text(encoding="utf-8")))


def compare_all(names: Sequence[PublicName] | None = None) -> list[Comparison]:
    """Compares names, by default all of megatron_api.txt."""
    return [compare(name) for name in (load_names() if names is None else names)]


def compare(name: PublicName) -> Comparison:
    """Looks up a name in this project and compares its parameters. Raises ImportError if an existing module fails."""
    owner = _owner(name)
    if owner is None:
        return Comparison(name, Verdict.MISSING, "its module or class does not exist here", _why_unsupported(name))
    differences = _field_differences(name, owner) if name.kind == "field" else _member_differences(name, owner)
    if differences is None:
        return Comparison(name, Verdict.MISSING, "does not exist here", _why_unsupported(name))
    verdict, why = (Verdict.THIN, "; ".join(differences)) if differences else (Verdict.SAME, "")
    absent = absent_field(name)
    if absent is not None and absent.state is AbsentState.NO_EFFECT:
        return Comparison(name, verdict, why, no_effect=absent.advice)
    if absent is not None:
        return Comparison(name, verdict, why, absent.advice)
    return Comparison(name, verdict, why, "" if is_described_field(name) else _why_unsupported(name))


def _owner(name: PublicName) -> object | None:
    """Returns the module or class that should define a name, or None if it does not exist."""
    try:
        module = importlib.import_module(name.module)
    except ModuleNotFoundError as error:
        # A module that exists but fails to import another one is broken, not missing.
        if error.name is None or not f"{name.module}.".startswith(f"{error.name}."):
            raise
        return None
    return getattr(module, name.owner, None) if name.owner else module


def absent_field(name: PublicName) -> AbsentField | None:
    """Returns a field that a configuration of this project accepts without having it, or None for other names."""
    owner = _owner(name) if name.kind == "field" else None
    is_config = inspect.isclass(owner) and issubclass(owner, MegatronConfig)
    return absent_fields(owner).get(name.name) if is_config else None


def is_described_field(name: PublicName) -> bool:
    """Returns whether a name is a field of a configuration of this project, declared by config_field."""
    owner = _owner(name) if name.kind == "field" else None
    if not (inspect.isclass(owner) and is_dataclass(owner)):
        return False
    return any(field.name == name.name and field_spec(field) is not None for field in fields(owner))


def _why_unsupported(name: PublicName) -> str:
    return next((row.advice for row in absent_features().names if fnmatchcase(name.path, row.pattern)), "")


def _member_differences(name: PublicName, owner: object) -> list[str] | None:
    try:
        found = inspect.getattr_static(owner, name.name)
        value = getattr(owner, name.name)
    except AttributeError:
        return None
    if name.kind == "class":
        return [] if inspect.isclass(value) else ["not a class"]
    if name.kind == "property":
        return []
    has_self = bool(name.owner) and not isinstance(found, staticmethod | classmethod)
    return _parameter_differences(name.parameters, _our_parameters(value, has_self))


def _field_differences(name: PublicName, owner: object) -> list[str] | None:
    if not (inspect.isclass(owner) and is_dataclass(owner)):
        annotations = inspect.get_annotations(owner) if inspect.isclass(owner) else {}
        return [] if name.name in annotations else None
    ours = next((field for field in fields(owner) if field.name == name.name), None)
    absent = absent_field(name)
    if absent is not None:
        return _default_differences(name.parameters[0], UNKNOWN if absent.default == [] else absent.default)
    if ours is None:
        return [] if name.name in vars(owner) else None
    default = UNKNOWN if ours.default_factory is not MISSING else ours.default
    return _default_differences(name.parameters[0], default)


def _our_parameters(value: object, has_self: bool) -> list[inspect.Parameter]:
    found = list(inspect.signature(value).parameters.values())  # type: ignore[arg-type]
    if has_self:
        found = found[1:]
    # megatron_api.txt omits every first parameter named cls, even if callers pass it.
    return found[1:] if found and found[0].name == "cls" else found


def _parameter_differences(theirs: Sequence[Parameter], ours: Sequence[inspect.Parameter]) -> list[str]:
    by_name = {parameter.name: parameter for parameter in ours}
    takes_all = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in ours)
    positions = [p.name for p in ours if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    takes_rest = any(parameter.kind is inspect.Parameter.VAR_POSITIONAL for parameter in ours)
    differences = []
    for index, their in enumerate(theirs):
        if their.name.startswith("*"):
            kind = inspect.Parameter.VAR_KEYWORD if their.name.startswith("**") else inspect.Parameter.VAR_POSITIONAL
            if not any(parameter.kind is kind for parameter in ours):
                differences.append(f"no {their.name}")
            continue
        mine = by_name.get(their.name)
        if mine is None:
            if not (takes_all and (takes_rest or their.keyword_only)):
                differences.append(f"no {their.name}")
        elif not their.keyword_only and (index >= len(positions) or positions[index] != their.name):
            keyword = mine.kind is inspect.Parameter.KEYWORD_ONLY
            differences.append(f"{their.name} is {'keyword-only' if keyword else 'at a different position'}")
        else:
            differences += _default_differences(their, mine.default)
    known = {their.name for their in theirs}
    differences += [f"{name} is required" for name in _needed(ours) if name not in known]
    return differences


def _needed(ours: Sequence[inspect.Parameter]) -> Iterator[str]:
    for parameter in ours:
        variadic = parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        if not variadic and parameter.default is inspect.Parameter.empty:
            yield parameter.name


def _default_differences(their: Parameter, mine: object) -> list[str]:
    has_none = mine is MISSING or mine is inspect.Parameter.empty
    if their.default is NO_DEFAULT:
        return []  # a default that Megatron-LM lacks breaks no call
    if has_none:
        return [f"{their.name} has no default"]
    if their.default is UNKNOWN or mine is UNKNOWN or _same_value(their.default, mine):
        return []
    return [f"{their.name}={mine!r} instead of {their.default!r}"]


def _same_value(theirs: object, mine: object) -> bool:
    if isinstance(mine, enum.Enum):
        return theirs in (mine, mine.value, mine.name)
    if isinstance(theirs, bool) or isinstance(mine, bool):
        return theirs is mine  # 1 == True
    return theirs == mine


def counts(comparisons: Sequence[Comparison]) -> dict[Verdict, int]:
    """Counts the comparisons by verdict, without names of unsupported features."""
    found = Counter(comparison.verdict for comparison in comparisons if not comparison.unsupported)
    return {verdict: found[verdict] for verdict in Verdict}


def main() -> None:
    """Prints one line for each name that is not the same, followed by the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="*", help="for example 'megatron.core.optimizer*'; default: all")
    parser.add_argument("--unsupported", action="store_true", help="include the names of unsupported features")
    args = parser.parse_args()
    wanted = [
        name for name in load_names() if not args.modules or any(fnmatchcase(name.module, at) for at in args.modules)
    ]
    comparisons = compare_all(wanted)
    for row in comparisons:
        if row.verdict is not Verdict.SAME and (args.unsupported or not row.unsupported):
            reason = f" | {row.unsupported}" if row.unsupported else ""
            print(f"{row.verdict.value:8}{row.name.kind:9}{row.name.path}: {row.why}{reason}")
    found = counts(comparisons)
    here = sum(found.values())
    shares = ", ".join(f"{verdict.value} {count}" for verdict, count in found.items())
    absent = len(comparisons) - here
    print(f"{len(comparisons)} names, of which {absent} belong to unsupported features. The other {here}: {shares}")
    if here:
        print(f"same: {100 * found[Verdict.SAME] / here:.1f}%")


if __name__ == "__main__":
    main()
