"""Pages are self-contained, escape all values, and name packages that are not installed."""

from pathlib import Path

import pytest

from megatron.pages import page
from megatron.pages.figures import Bar, Box, Panel, stacked_bars, stacked_columns, time_line

HOSTILE = "</script><b>&'\""


def test_values_are_escaped_wherever_a_template_inserts_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "plotly_script", lambda: "plotly < source")
    template = tmp_path / "own.html.jinja"
    template.write_text(
        '{% extends "frame.html.jinja" %}{% from "parts.html.jinja" import card, notice, table %}'
        "{% block body %}{{ notice(text, true) }}{{ table([text], [[text]]) }}{{ card(figure) }}{% endblock %}"
    )
    figure = stacked_bars([Bar(HOSTILE, {HOSTILE: 1.0}, HOSTILE)], {HOSTILE: "red"}, axis=HOSTILE, limit=(1.0, HOSTILE))
    text = page.render(template, title=HOSTILE, text=HOSTILE, figure=figure)
    assert "<b>" not in text and text.count("</script>") == 3, "the scripts of plotly, of the figure and of the page"
    assert "plotly < source" in text and "&lt;b&gt;" in text and "src=" not in text


@pytest.mark.parametrize("missing", [["jinja2"], ["plotly"], ["jinja2", "plotly"]])
def test_packages_that_are_not_installed_are_named(missing: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "find_spec", lambda name: None if name in missing else name)
    with pytest.raises(page.MissingPackageError, match=f"the page needs {' and '.join(missing)}: pip install '"):
        page.render(Path("any.html.jinja"))


def test_bars_have_the_lengths_of_their_parts() -> None:
    bars = [Bar("one", {"a": 1.0, "b": 2.0}, "3 s"), Bar("two", {"b": 4.0}, "4 s")]
    figure = stacked_bars(bars, {"b": "blue", "a": "red", "unused": "white"}, axis="s", limit=(5.0, "at most"))
    assert [(trace["name"], trace["y"], trace["x"]) for trace in figure.data] == [
        ("b", [0, 1], [2.0, 4.0]),
        ("a", [0], [1.0]),
    ]
    assert [(label["x"], label["text"]) for label in figure.layout["annotations"]] == [
        (3, "3 s"),
        (4, "4 s"),
        (5, "at most"),
    ]
    assert figure.layout["xaxis"]["range"] == [0, 5] and figure.layout["shapes"][0]["x0"] == 5
    assert figure.legend == [("b", "blue"), ("a", "red")]


def test_columns_of_all_panels_have_one_legend() -> None:
    panels = [Panel("first", [Bar("1", {"a": 100.0}, "")]), Panel("second", [Bar("1", {"b": 40.0, "a": 60.0}, "")])]
    figures = stacked_columns(panels, {"a": "red", "b": "blue"}, x_axis="x", y_axis="%", limit=(99.0, "wanted"))
    assert [figure.title for figure in figures] == ["first", "second"]
    assert [[trace["y"] for trace in figure.data] for figure in figures] == [[[100.0]], [[60.0], [40.0]]]
    assert [figure.legend for figure in figures] == [[("a", "red"), ("b", "blue")]] * 2


def test_boxes_lie_on_their_rows_from_start_to_end() -> None:
    boxes = [Box(0, 1.0, 3.0, "F", "7", "forward"), Box(1, 3.0, 4.0, "B", "7", "backward")]
    figure = time_line(boxes, ["up", "down"], axis="s", colors={"F": "blue", "B": "green", "none": "red"})
    found = [(trace["name"], trace["y"], trace["base"], trace["x"], trace["text"]) for trace in figure.data]
    assert found == [("F", [0], [1.0], [2.0], ["7"]), ("B", [1], [3.0], [1.0], ["7"])]
    assert figure.layout["yaxis"]["ticktext"] == ["up", "down"]
