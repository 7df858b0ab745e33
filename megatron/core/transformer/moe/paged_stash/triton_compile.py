"""How a file of kernels says what a compiler without a GPU needs to build each of them; no kernel here.

Each such file has a function compile_cases() that yields one CompileCase or more of every kernel that it launches.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from triton.compiler import ASTSource

_DIVISIBLE = ":16"


@dataclass(frozen=True)
class CompileCase:
    """One kernel as it is launched. options: num_warps, num_stages, where the launch gives them."""

    name: str
    source: ASTSource
    options: Mapping[str, int] = field(default_factory=dict)


def compile_case(kernel: Any, name: str, *, options: Mapping[str, int], **arguments: object) -> CompileCase:
    """arguments: the type of each parameter, as in "*i64", "i64", "*bf16:16" for an address that 16 divides, or a tuple
    of types; anything but words and tuples of words is the value of a constant.
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
