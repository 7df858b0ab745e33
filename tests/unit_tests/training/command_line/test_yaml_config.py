"""A --config file may contain only names, lists, numbers and words, and only a limited number."""

import pytest

from megatron.training.command_line.yaml_config import plain_values


def bomb(line: str, *, levels: int = 9) -> str:
    """Returns YAML that expands to 10^levels values. line: template for ten references to the previous level."""
    refer = [", ".join([f"*a{level}"] * 10) for level in range(levels)]
    return "\n".join(["a0: &a0 {x: 1}", *(line.format(level + 1, refer[level]) for level in range(levels))])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lr: 1\nlr: 2", "lr is given twice"),
        ("lr: !!int abc", "'abc' is not a valid int"),
        ("lr: !!int", "'' is not a valid int"),
        ("lr: !!bool x", "'x' is not a valid bool"),
        ("lr: !!float x", "'x' is not a valid float"),
        ("lr: " + "9" * 5000, "4300 digits"),
        ("save: 2001-01-01", "YAML reads '2001-01-01' as a timestamp: put it in quotes"),
        ("save: 2001-13-45", "as a timestamp: put it in quotes"),
        ("save: !!timestamp x", "as a timestamp: put it in quotes"),
        ("save: !!binary x", "as a binary: put it in quotes"),
        ("save: !!python/name:os.system", "as a python/name:os.system: put it in quotes"),
        ("save: !!python/object/apply:os.mkdir [x]", "os.mkdir is not available"),
        ("save: !!set {a}", "set is not available"),
        ("save: " + "[" * 3000, "nested deeper than 20 levels"),
        ("save: &a [*a]", "it refers to itself"),
        ("? [a]\n: 1", "cannot be the name of a value"),
        (bomb("a{0}: &a{0} [{1}]"), "it expands to more than 100000 values"),
        (bomb("a{0}: &a{0} {{<<: [{1}]}}"), "it expands to more than 100000 values"),
        ("#" * (1 << 20) + "\n", "1048577 characters: must be at most 1048576"),
        ("a: 'x", "while scanning"),
        ("a: \x00", "special characters"),
    ],
)
def test_what_is_no_configuration_is_refused_with_its_reason(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plain_values(text)


def test_names_lists_numbers_words_and_references_are_read() -> None:
    text = "common: &c {lr: 0.1, bf16: true}\nmodel:\n  <<: *c\n  layers: [1, 2]\n  word: 'x'\n  none: null"
    model = {"lr": 0.1, "bf16": True, "layers": [1, 2], "word": "x", "none": None}
    assert plain_values(text) == {"common": {"lr": 0.1, "bf16": True}, "model": model}
    assert plain_values("") is None
