"""Plans beside figures that others published, and the page that says so."""

import pytest

from tools.write_plan_checks import PARAMETERS, Row, documented, rows, table


@pytest.mark.slow  # plans of 13 large models and of some 30 layouts
def test_plans_are_near_the_published_figures_and_the_page_has_them() -> None:
    found = list(rows())
    exact = [row for row in found if row.unit == "parameters"]
    assert len(exact) == len(PARAMETERS) >= 10 and all(row.planned == row.published for row in exact)
    # The sources round to three digits.
    assert [row for row in found if abs(row.error) > 0.003] == []
    assert table(found) == documented(), "run `python -m tools.write_plan_checks`"


def test_a_row_says_by_how_much_a_plan_is_off() -> None:
    line = table([Row("a", "b", 2.0, 2.01, "GB", 1), Row("c", "d", 3, 3, "parameters")]).splitlines()[2:]
    assert line == ["| a | b | 2.0 GB | 2.0 GB | +0.50 % |", "| c | d | 3 parameters | 3 parameters | 0 |"]
