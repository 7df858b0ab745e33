"""How a file of kernels says what it takes to compile each of them without a GPU; no kernel here.

Each such file has a function compile_cases() that yields at least one CompileCase for every kernel that it launches,
and a function residencies() with the Residency that its launchers assume of each kernel.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from triton.compiler import ASTSource

_DIVISIBLE = ":16"


@dataclass(frozen=True)
class Residency:
    """Programs of a kernel on one streaming multiprocessor at a time, as its launcher's grid assumes them.

    at_least: fewer would leave programs of the grid waiting that are to run at once. at_most: more would leave
    processors idle at the end of a grid of a limited size; None for no limit. runs_beside: the kernel is launched
    while expert products run, so it should leave them registers.
    """

    at_least: int = 1
    at_most: int | None = None
    runs_beside: bool = False


@dataclass(frozen=True)
class CompileCase:
    """One kernel as it is launched. options: num_warps and num_stages, as far as the launch gives them."""

    name: str
    source: ASTSource
    options: Mapping[str, int] = field(default_factory=dict)


def compile_case(kernel: Any, name: str, *, options: Mapping[str, int], **arguments: object) -> CompileCase:
    """The case of a kernel with arguments of these types.

    arguments: for each parameter its type, such as "*i64", "i64" or "*bf16:16", an address that 16 divides, or a tuple
    of types; anything but strings and tuples is the value of a constexpr.
    """
    constants = {key: value for key, value in arguments.items() if not isinstance(value, (str, tuple))}
    types = {key: "constexpr" if key in constants else value for key, value in arguments.items()}
    divisible = {
        (index,): [["tt.divisibility", 16]]
        for index, parameter in enumerate(kernel.arg_names)
        if str(types[parameter]).endswith(_DIVISIBLE)
    }
    signature = {
        key: value.removesuffix(_DIVISIBLE) if isinstance(value, str) else value for key, value in types.items()
    }
    return CompileCase(name, ASTSource(kernel, signature=signature, constexprs=constants, attrs=divisible), options)
