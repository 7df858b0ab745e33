"""report.py: a page that a browser draws without network access, for any log that a run may write."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.pages import page
from megatron.tools import report
from megatron.tools.report_figures import DASHES, MAX_POINTS, make_figures, smoothed, thinned
from megatron.tools.report_sections import memory_section, stash_section
from megatron.tools.run_log import MAX_BINS, LayerTable, Series, read_run
from tests.browser import needs_browser, opened_browser
from tests.counts import slow, soak_only
from tests.unit_tests.tools.report_logs import PAGE_FACTS, POOL, RECORD, STASH, write_log

EVERY_FIGURE = """loss perplexity learning-rate grad-norm loss-scale batch-size throughput step-time
tflops mfu timers hidden-share exposed timeline memory memory-stages stash-device stash-host capacity-factor pool-factor
stash-pages rungs stash-tails stash-rows-0 z_loss accuracy layers-load_balancing_loss-0
load-overview load-layer load-step""".split()
# Diagrams that the page's script draws from other parts of the content.
DRAWN_BESIDE_FIGURES = set("timeline memory-stages stash-device stash-host load-overview load-layer load-step".split())


# test_the_page_of_two_runs_has_every_diagram_of_both covers one step and two runs without a browser.
@pytest.mark.slow
@needs_browser
@pytest.mark.parametrize("num_steps, layers, num_runs", [slow(30, 2, 1), soak_only(1, 2, 1), soak_only(80, 12, 2)])
def test_a_browser_draws_every_diagram(tmp_path: Path, capsys, num_steps: int, layers: int, num_runs: int) -> None:
    folders = [write_log(tmp_path / name, num_steps, layers=layers, **RECORD) for name in "ab"[:num_runs]]
    assert report.main([*map(str, folders), "--output", str(tmp_path / "r.html")]) == 0
    assert f"Report: {tmp_path / 'r.html'} (" in capsys.readouterr().out
    with opened_browser(tmp_path) as page:
        for width in (390, 1200):
            page.open((tmp_path / "r.html").as_uri(), width=width)
            seen = page.evaluate(PAGE_FACTS)
            assert [*page.problems, *seen["cut"]] == [] and seen["width"] <= width
        assert [url for url in page.requests if not url.startswith(("file:", "data:", "blob:"))] == []
    drawn = {name.partition(" ")[0]: (marks, titles) for name, marks, titles in seen["drawn"]}
    expected = [name for name in EVERY_FIGURE if name != "loss-scale" or num_steps > 1]
    assert [name for name in expected if name not in drawn] == []
    assert {name: found for name, found in drawn.items() if found[0] == 0 or found[1] != 2} == {}
    for words in ("1.23 million", "0.5 </script>", "Busiest expert", "2.5000 (ppl 12.18)", f"{num_steps * 32:,}"):
        assert words in seen["text"], words


@pytest.mark.parametrize(("num_steps", "layers"), [(1, 2), (80, 12)])
def test_the_page_of_two_runs_has_every_diagram_of_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_steps: int, layers: int
) -> None:
    monkeypatch.setattr(page, "plotly_script", lambda: "")
    folders = [write_log(tmp_path / name, num_steps, layers=layers, **RECORD) for name in "ab"]
    output = tmp_path / "r.html"
    assert report.main([*map(str, folders), "--output", str(output)]) == 0
    found = re.search(r'<script type="application/json" id="content">(.*?)</script>', output.read_text())
    assert found is not None
    content = json.loads(found[1])
    both = {figure["id"]: len(figure["traces"]) for figure in content["figures"]}
    alone = {figure["id"]: len(figure["traces"]) for figure in report.page_content([read_run(folders[0])])["figures"]}
    expected = {name for name in EVERY_FIGURE if name != "loss-scale" or num_steps > 1} - DRAWN_BESIDE_FIGURES
    assert expected <= alone.keys()
    # Diagrams of layers and rows show one run. All others have the lines of both runs.
    of_one = {name for name in alone if name.endswith("-0")}
    assert both == {
        **{name: lines if name in of_one else 2 * lines for name, lines in alone.items()},
        **{name.removesuffix("0") + "1": alone[name] for name in of_one},
    }
    for part in ("runs", "loads", "timelines", "stashes", "memories"):
        assert len(content[part]) == 2 and all(content[part]), part


def test_logs_cut_short_or_without_steps(tmp_path: Path, capsys) -> None:
    run = read_run(write_log(tmp_path / "a", 9, extra='nonsense\n{"iteration": 10, "lm_lo'))
    figures = {figure["id"]: figure for figure in make_figures([run])}
    assert figures["loss"]["traces"][0]["y"][4] is None and run.num_unreadable == 1
    marks = figures["loss"]["traces"][-1]
    assert (marks["name"], marks["x"]) == ("skipped", [5, 7])
    assert "1 lines of" in report.page([run]) and "There is no run.json" in report.page([run])
    (tmp_path / "empty").mkdir()
    (tmp_path / "started").mkdir()
    (tmp_path / "started" / "steps.jsonl").touch()
    for name, message in (
        ("empty", "contains no steps.jsonl"),
        ("started", "no line of a"),
        ("gone", "does not exist"),
    ):
        assert report.main([str(tmp_path / name)]) == 1
        error = capsys.readouterr().err
        assert message in error and len(error.splitlines()) == 1


@pytest.mark.parametrize(
    "fields",
    [
        *('"expert_load": [[1]]', '"expert_load": {"a": [1]}', '"expert_load": {"1": [1], "2": [1, 2]}'),
        *('"per_layer": [1]', '"per_layer": {"z": 3}', f'"lm_loss": {"9" * 400}', '"expert_load": {"1": [null, 2]}'),
        *('"overlap": [1]', '"stash": [1]', '"stash": {"pool": {"device_pages": 3}}', '"held": [1]'),
    ],
)
def test_a_field_of_another_shape_costs_its_line_alone(tmp_path: Path, fields: str) -> None:
    run = read_run(write_log(tmp_path / "a", 3, extra=f'{{"iteration": 4, {fields}}}\n{{"iteration": {2**70}}}\n'))
    assert run.num_unreadable == (1 if "null" in fields else 2) and run.steps.tolist() == [1, 2, 3]
    assert "Loss" in report.page([run])


@pytest.mark.parametrize("held", [{}, {"stages": 3}, {"stages": {"a": {}}}, {"stages": {"0": 3}}, {"rank_0": [1]}])
def test_bytes_that_nobody_can_read_are_not_shown(tmp_path: Path, held: dict[str, Any]) -> None:
    line = json.dumps({"iteration": 4, "lm_loss": 1.0, "held": held})
    run = read_run(write_log(tmp_path / "a", 3, extra=line + "\n", **RECORD))
    assert memory_section(run) is None and '"memories":[null]' in report.page([run])


PLANNED = {"parameters": 2000, "gradients": 4000, "masters": 0, "moments": 8000, "pages": 640}
PLAN: dict[str, Any] = {
    "world_size": 2,
    "parameters": {"all": 1_234_567, "of_a_token": 1000},
    "stages": [
        {"stage": stage, "memory": {**PLANNED, "activations": {"attention": 7, "experts": 5}}, "host_pages": 256}
        for stage in (0, 1)
    ],
    "step": {"seconds": 0.08, "device": "cpu"},
}


def test_what_was_predicted_stands_beside_what_was_measured(tmp_path: Path) -> None:
    folder = write_log(tmp_path / "a", 3, **RECORD)
    section = memory_section(read_run(folder))
    assert "There is no plan.json next to the log" in section["notes"][0] and section["rows"][0]["predicted"] == ""
    (folder / "plan.json").write_text(json.dumps(PLAN))
    section = memory_section(read_run(folder))
    rows = {row["name"]: row for row in section["rows"]}
    assert rows["gradients"] == {
        "name": "gradients",
        "predicted": "3.906 KiB",
        "measured": "3.906 KiB",
        "difference": "none",
        "first": "3.906 KiB",
    }
    # One rank of the second stage uses 100 bytes more than predicted.
    assert rows["parameters"]["difference"] == "+100 bytes (+5.0%)" and rows["parameters"]["first"] == "1.953 KiB"
    assert rows["activations at their peak"]["predicted"] == "12 bytes" and "masters" not in rows
    assert rows["peak resident, with Python and libraries"]["difference"] == ""
    time = rows["step time, median (on cpu)"]
    assert (time["predicted"], time["measured"], time["difference"]) == ("0.08 s", "0.1 s", "+25%")
    (folder / "plan.json").write_text(json.dumps({**PLAN, "step": {"seconds": 0.08, "device": "H100"}}))
    last = memory_section(read_run(folder))["rows"][-1]
    assert last == {"name": "step time, median", "predicted": "", "measured": "0.1 s", "difference": "", "first": ""}
    assert [stage["stage"] for stage in section["stages"]] == [0, 1]
    assert (
        section["stages"][1]["measured"]["parameters"] == 2100 == section["stages"][1]["predicted"]["parameters"] + 100
    )


def test_a_gpu_s_peak_is_set_beside_all_that_was_predicted(tmp_path: Path) -> None:
    run = read_run(write_log(tmp_path / "a", 3, **RECORD))
    (run.path.with_name("plan.json")).write_text(json.dumps(PLAN))
    for sizes in (run.held["rank_0"], run.held["max"], *run.held["stages"].values()):
        sizes["peak_allocated"] = 20_000
    section = memory_section(run)
    (row,) = (row for row in section["rows"] if row["name"] == "peak allocated")
    assert row["difference"] == f"+{20_000 - 14_652:,} bytes (+36.5%)"
    assert section["stages"][0]["measured"]["rest"] == 20_000 - 14_640


@pytest.mark.parametrize(
    "text, words",
    [
        ("{", "it is not JSON"),
        ("[1]", "it is not a plan of --dry-run"),
        ('{"stages": []}', "it is not a plan of --dry-run"),
        (json.dumps({**PLAN, "stages": [{"stage": 0}]}), "it is not a plan of --dry-run"),
        (json.dumps({**PLAN, "step": 3}), "it is not a plan of --dry-run"),
        (json.dumps({**PLAN, "world_size": 8}), "it belongs to a different run: 8 processes, but this run has 2"),
        (
            json.dumps({**PLAN, "parameters": {"all": 7}}),
            "it belongs to a different run: 7 parameters, but this run has 1234567",
        ),
        (
            json.dumps({**PLAN, "stages": PLAN["stages"][:1]}),
            "it belongs to a different run: 1 pipeline stages, but this run has 2",
        ),
        ("\udcff", "it is not JSON"),
    ],
)
def test_a_plan_of_something_else_is_told_on_the_page(tmp_path: Path, text: str, words: str) -> None:
    folder = write_log(tmp_path / "a", 3, **RECORD)
    (folder / "plan.json").write_bytes(text.encode(errors="surrogateescape"))
    section = memory_section(read_run(folder))
    assert words in section["notes"][0] and "plan.json is ignored: " in section["notes"][0]
    assert all(row["predicted"] == "" for row in section["rows"]) and section["stages"][0]["measured"]


def test_no_two_lines_of_a_diagram_look_alike(tmp_path: Path) -> None:
    runs = [read_run(write_log(tmp_path / name, 4)) for name in "ab"]
    figures = {figure["id"]: figure["traces"] for figure in make_figures(runs)}
    for name, traces in figures.items():
        looks = [(trace["color"], trace["dash"]) for trace in traces if "dash" in trace and "symbol" not in trace]
        assert len(set(looks)) == len(looks), name
    # Colors distinguish the four lines of a run, and dashes the two lines of the other diagram.
    assert [{trace["color"] for trace in figures["stash-pages"] if trace["dash"] == dash} for dash in DASHES[:2]] == [
        {0, 1, 2, 3}
    ] * 2
    assert {trace["color"] for trace in figures["pool-factor"]} == {0, 1}


def test_a_run_is_found_by_its_checkpoints_and_by_the_folder_around_it(tmp_path: Path) -> None:
    log = write_log(tmp_path / "logs", 2) / "steps.jsonl"
    common = tmp_path / "save" / "iter_0000002" / "common.json"
    common.parent.mkdir(parents=True)
    common.write_text(json.dumps({"args": {"tensorboard_dir": str(log.parent)}}))
    for place in (log, log.parent, tmp_path, tmp_path / "save"):
        assert read_run(place).path == log


def test_the_factors_that_were_needed_count_every_step(tmp_path: Path) -> None:
    flags = {"moe_expert_rank_capacity_factor": 1.5, "moe_paged_stash_buffer_size_factor_cuda": -1.2}
    folder = write_log(tmp_path / "a", 4, flags=flags)
    # 2,000 steps, of which two needed a larger factor than all others.
    needed = [1.0] * 1000 + [1.3, 1.4] + [1.2] * 994
    with (folder / "steps.jsonl").open("a") as log:
        pool = {**POOL, "factors_needed": needed, "factor": 1.05}
        late = {**STASH, "factors_needed": needed, "pool": pool}
        log.write(json.dumps({"iteration": 2000, "lm_loss": 1.0, "stash": late}) + "\n")
    run = read_run(folder)
    assert run.series["stash/capacity_factor_needed"].steps.tolist() == list(range(1, 2001))
    assert stash_section(run)["lines"][:2] == [
        "--moe-expert-rank-capacity-factor: factor needed at p99.9: 1.25 (of 2,000 steps; you gave 1.5)",
        "--moe-paged-stash-buffer-size-factor-cuda: factor needed at p99.9: 1.20 (of 2,000 steps; you gave -1.2, the "
        "buffers have 1.05)",
    ]
    run = read_run(write_log(tmp_path / "b", 4))
    assert stash_section(run)["lines"][0].endswith(
        "1.25 (of 4 steps; buffers have 1.5; the maximum of these few steps)"
    )
    run.stash.pool["timeline"]["changes"] = [[4, 2, 7, 0]]
    assert stash_section(run)["timeline"] is None


def test_long_lines_keep_their_extremes_and_layers_their_sums() -> None:
    steps = np.arange(1, 100_001)
    values = np.random.default_rng(0).normal(size=steps.size)
    values[77_777], values[55_555], values[1000:2000] = 99.0, -99.0, np.nan
    thin = thinned(Series(steps, values))
    assert len(thin.steps) <= MAX_POINTS and np.all(np.diff(thin.steps) > 0)
    assert thin.values[thin.steps == 77_778] == [99.0] and np.nanmin(thin.values) == -99.0
    assert np.nanmax(np.abs(smoothed(Series(steps, values), np.median).values)) < 0.2
    table, naive = LayerTable(), np.zeros((2, 3))
    for step in range(1, 1001):
        rows = np.random.default_rng(step).integers(0, 9, (2, 3))
        table.add(step, {"3": rows[0].tolist(), "7": rows[1].tolist()})
        naive += rows
    table.add(1001, {"3": [1, 2, 3]})
    assert len(table.sums) <= MAX_BINS and np.array_equal(sum(table.sums), naive) and sum(table.counts) == 1000
    assert table.layers == [3, 7] and table.first_steps[0] == 1 and table.last_steps[-1] == 1000
    assert [last + 1 for last in table.last_steps[:-1]] == table.first_steps[1:]


def test_the_number_of_tokens_leaves_padding_out(tmp_path: Path) -> None:
    """12 samples of 1,000,000 tokens, of which 3 million are padding."""
    padded = '{"iteration": 3, "consumed_samples": 12, "consumed_padding_tokens": 3000000}\n'
    found = []
    for name, extra in (("a", ""), ("b", padded)):
        run = read_run(write_log(tmp_path / name, 3, extra=extra, flags={"seq_length": 1_000_000}))
        found.append(dict(report.facts(run))["tokens"])
    assert found == ["12.0 million", "9.00 million"]
