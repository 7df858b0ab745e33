"""Plans compared with published values, and the page that shows both."""

from itertools import islice

import pytest

from megatron.tools import write_plan_checks
from megatron.tools.write_plan_checks import PARAMETERS, Row, activation_rows, documented, rows, table

# The smallest models with different kinds of attention, experts and embeddings. `make soak` plans the others.
FEW = ("llama3.2-1b", "qwen2-7b", "deepseek-v2-lite", "gpt-oss-20b")


def check(found: list[Row]) -> None:
    """Checks that planned values are near the published ones, and that the page lists them."""
    assert found and all(row.planned == row.published for row in found if row.unit == "parameters")
    # The sources round to three digits.
    assert [row for row in found if abs(row.error) > 0.003] == []
    lines = documented().splitlines()
    missing = [line for line in table(found).splitlines() if line not in lines]
    assert not missing, "run `python -m tools.write_plan_checks`"


@pytest.mark.slow
def test_plans_count_the_parameters_that_model_cards_publish(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_plan_checks, "PARAMETERS", {name: PARAMETERS[name] for name in FEW})
    check(list(write_plan_checks.parameter_rows()))


@pytest.mark.slow
def test_activations_are_those_of_published_formulas() -> None:
    # One model size, first with attention recomputed, then with full recompute.
    check(list(islice(activation_rows(), 2)))


@pytest.mark.slow
def test_model_states_are_those_of_the_three_stages_of_zero() -> None:
    # ZeRO over four ranks.
    check(list(islice(write_plan_checks.zero_rows(), 3)))


@pytest.mark.slow
def test_a_routed_row_saves_what_its_published_tensors_take() -> None:
    check(list(write_plan_checks.expert_rows()))


@pytest.mark.soak  # the four tests above include each kind of row
def test_all_plans_are_near_the_published_figures_and_the_page_has_them() -> None:
    """Repeats the tests above with every model, and checks that the page has no other lines."""
    found = list(rows())
    check(found)
    assert sum(row.unit == "parameters" for row in found) == len(PARAMETERS) >= 10
    assert table(found) == documented(), "run `python -m tools.write_plan_checks`"


def test_the_page_has_a_line_for_every_model() -> None:
    lines = documented().splitlines()
    assert [name for name in PARAMETERS if not any(line.startswith(f"| {name} |") for line in lines)] == []


def test_a_row_says_by_how_much_a_plan_is_off() -> None:
    line = table([Row("a", "b", 2.0, 2.01, "GB", 1), Row("c", "d", 3, 3, "parameters")]).splitlines()[2:]
    assert line == ["| a | b | 2.0 GB | 2.0 GB | +0.50 % |", "| c | d | 3 parameters | 3 parameters | 0 |"]
