"""Descriptions of kernel launches, with which tests compile Triton kernels without a GPU. Contains no kernels.

Each file of Triton kernels has a function compile_cases(), which yields at least one CompileCase for every kernel that
it launches, and a function residencies() with the Residency that its launchers assume for each kernel.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from triton.compiler import ASTSource

_DIVISIBLE = ":16"


@dataclass(frozen=True)
class Residency:
    """Number of programs of a kernel that are resident on one streaming multiprocessor, as its launcher assumes.

    at_least: minimum, below which programs that must run concurrently would wait. at_most: maximum, above which
    multiprocessors would be idle at the end of a grid of limited size; None means no limit. at_most_launched: number of
    programs for each multiprocessor to which the grid is limited; None means one program for each tile. runs_beside:
    whether the kernel overlaps with expert GEMMs and should leave registers for them.
    """

    at_least: int = 1
    at_most: int | None = None
    at_most_launched: int | None = None
    runs_beside: bool = False


@dataclass(frozen=True)
class CompileCase:
    """Kernel with the argument types of one launch. options: num_warps and num_stages, if the launch sets them.

    first_architecture: launchers refuse older ones.
    """

    name: str
    source: ASTSource
    options: Mapping[str, int] = field(default_factory=dict)
    first_architecture: int = 80


def compile_case(kernel: Any, name: str, *, options: Mapping[str, int], **arguments: object) -> CompileCase:
    """Builds the CompileCase of a kernel for a launch with the given argument types.

    arguments: type of each parameter, such as "*i64", "i64", "*bf16:16" (an address divisible by 16), or a tuple of
    types. Values that are neither strings nor tuples are constexpr arguments.
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
