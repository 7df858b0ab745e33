"""Configuration fields: values that validate_fields accepts, and error messages for other values."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from megatron.core.config_field import (
    config_field,
    no_effect_field,
    require_defaults,
    unsupported_field,
    validate_fields,
)


@dataclass(kw_only=True)
class Sample:
    """Has a field of each type."""

    count: int | None = config_field(None, help="h", at_least=1, at_most=9)
    rate: float = config_field(0.5, help="h", more_than=0, less_than=1)
    style: str = config_field("a", help="h", choices=("a", "b"))
    label: str | None = config_field(None, help="h")
    names: list[str] = config_field(help="h", choices=("x", "y"), default_factory=list)

    def __post_init__(self) -> None:
        validate_fields(self)


@pytest.mark.parametrize("values", [{}, {"count": 9}, {"rate": 0.9}, {"style": "b"}, {"names": ["x", "y"]}])
def test_right_values_pass(values: dict[str, Any]) -> None:
    Sample(**values)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"count": 0}, "Sample.count is 0: must be at least 1"),
        ({"count": 10}, "Sample.count is 10: must be at most 9"),
        ({"count": True}, "Sample.count is True: must be an integer or none"),
        ({"rate": 0}, "Sample.rate is 0: must be more than 0"),
        ({"rate": 1.0}, "Sample.rate is 1.0: must be less than 1"),
        ({"rate": float("nan")}, "Sample.rate is nan"),
        ({"rate": float("inf")}, "Sample.rate is inf: must be finite"),
        ({"names": [""]}, "Sample.names is '': must be one of x, y"),
        ({"label": ""}, "Sample.label is empty: must have a value, or be omitted"),
        ({"rate": None}, "Sample.rate is None: must be a number"),
        ({"style": "c"}, "Sample.style is 'c': must be one of a, b"),
        ({"names": ["x", "z"]}, "Sample.names is 'z': must be one of x, y"),
        ({"names": "x"}, "Sample.names is 'x': must be a list"),
    ],
)
def test_wrong_values_are_refused_by_name(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError) as caught:
        Sample(**values)
    assert words in str(caught.value)


@dataclass(kw_only=True)
class _Foreign:
    window: int | None = unsupported_field(None, why="windows do not exist here")
    modules: list[str] = unsupported_field(default_factory=list, why="modules cannot be chosen here")

    def __post_init__(self) -> None:
        validate_fields(self)


def test_unsupported_fields_accept_their_defaults() -> None:
    assert _Foreign(window=None, modules=[]) == _Foreign()


def test_unsupported_fields_refuse_other_values_by_name() -> None:
    with pytest.raises(ValueError) as caught:
        _Foreign(window=3, modules=["mlp"])
    assert str(caught.value).splitlines() == [
        "_Foreign.window is 3: windows do not exist here; keep the default None",
        "_Foreign.modules is ['mlp']: modules cannot be chosen here; keep the default []",
    ]


def test_unsupported_arguments_are_refused_by_name() -> None:
    require_defaults("build", "sharp does not exist here", use_sharp=(False, False), name=(None, None))
    with pytest.raises(
        ValueError, match=r"^build: use_sharp is True: sharp does not exist here; keep the default False$"
    ):
        require_defaults("build", "sharp does not exist here", use_sharp=(True, False), name=(None, None))


@dataclass(kw_only=True)
class Named:
    """Has fields that accept several forms."""

    dtype: torch.dtype = config_field(
        torch.float32, help="x", cli_default="fp32", choices=("fp32",), named={"fp32": torch.float32, "u8": torch.uint8}
    )
    parts: list[str] | None = config_field(None, help="x")
    window: tuple[int, int] | None = config_field(None, help="x")
    either: list[int] | tuple[int, ...] = config_field((), help="x")
    fused: bool = no_effect_field(False, why="kernels are chosen elsewhere")

    def __post_init__(self) -> None:
        validate_fields(self)


def test_fields_hold_values_whether_they_or_their_names_are_given() -> None:
    assert Named(dtype="fp32").dtype is Named(dtype=torch.float32).dtype is Named().dtype is torch.float32
    for wrong in ("u8", torch.uint8, "fp64"):
        with pytest.raises(ValueError, match=r"Named\.dtype is .*: must be one of fp32"):
            Named(dtype=wrong)


def test_lists_and_tuples_replace_each_other() -> None:
    named = Named(parts=("a", "b"), window=[4, 0], either=[1])
    assert (named.parts, named.window, named.either) == (["a", "b"], (4, 0), [1])


def test_fields_without_effect_accept_their_type_alone() -> None:
    assert Named(fused=True).fused
    with pytest.raises(ValueError, match=r"Named\.fused is 'yes': must be true or false"):
        Named(fused="yes")
