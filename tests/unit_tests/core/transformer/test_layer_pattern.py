"""Layer patterns in text form: their meaning, and errors for invalid ones."""

import pytest

from megatron.core.transformer.layer_pattern import parse_layer_pattern


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("2", 2),
        ("[0,1]", [0, 1]),
        ("([0]+[1]*3)*2", [0, 1, 1, 1, 0, 1, 1, 1]),
        (" [1] * 2 + 2*[0, 1,] ", [1, 1, 0, 1, 0, 1]),
        ("(" * 50 + "[1]" + ")" * 50, [1]),
        ("+".join(["([0]+[1])"] * 60), [0, 1] * 60),
    ],
)
def test_layer_patterns_are_read(word: str, value: object) -> None:
    assert parse_layer_pattern(word, field="moe_layer_freq") == value


@pytest.mark.parametrize(
    "word",
    [
        "",
        "-1",
        "[0]+[1",
        "([0]",
        "[0])",
        "[0]+1",
        "[0]*[1]",
        "2*3",
        "[a]",
        "[1]*999999999",
        "(" * 51 + "[1]" + ")" * 51,
        "__import__('os').getcwd()",
    ],
)
def test_what_is_not_a_layer_pattern_is_refused(word: str) -> None:
    with pytest.raises(ValueError, match="moe_layer_freq is"):
        parse_layer_pattern(word, field="moe_layer_freq")
