"""Configuration fields: values that validate_fields accepts, and its messages for others."""

from dataclasses import dataclass
from typing import Any

import pytest

from megatron.core.config_field import config_field, validate_fields


@dataclass(kw_only=True)
class Sample:
    """Fields of every kind."""

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
        ({"label": ""}, "Sample.label is empty: must have a value, or be left out"),
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
