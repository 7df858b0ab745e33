"""plan_stash.py: rows of layouts that were not recorded, sufficient factors, output texts, and one-line errors."""

import json
import re
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import pretrain_gpt
from megatron.core.transformer.moe_config import GPU_ROW_ALIGNMENT
from megatron.planner.stash.outlook import outlook
from megatron.planner.stash.routing import traced_spans
from megatron.planner.stash.stages import planned_run
from megatron.planner.stash.walk import StepLevel, walk
from megatron.tools.plan_stash import main, read_flags, stash_plan
from megatron.tools.stash_report import NAMES, as_page, paste
from megatron.training.callbacks.routing_trace import RoutingHeader, RoutingStep, read_routing
from megatron.training.command_line.config_builder import run_config_of
from tests.browser import (
    FIGURE_PROBLEMS,
    embedded_figures,
    needs_browser,
    opened_browser,
    without_plotly,
)
from tests.functional_tests.case import Flags, command_line, read_bases
from tests.routing_traces import write_trace

FLAGS: Flags = {
    "num-layers": 4,
    "pipeline-model-parallel-size": 2,
    "expert-model-parallel-size": 2,
    "micro-batch-size": 1,
    "global-batch-size": 8,
    "moe-grouped-gemm": True,
    "moe-token-dispatcher-type": "alltoall",
    "moe-paged-stash-page-size": 2,
    "world-size": 4,
}
TOKENS, EXPERTS = 32, 4


def argv(*words: str, **flags: Any) -> list[str]:
    named = {name.replace("_", "-"): value for name, value in flags.items()}
    return [*command_line({**read_bases()["moe"], **FLAGS, **named}), *words]


def header(**others: Any) -> RoutingHeader:
    return replace(RoutingHeader.of(run_config_of(read_flags(argv("--skew", "balanced")))), **others)


def recorded(steps: int, of: RoutingHeader, *, shape: tuple[int, int]) -> list[RoutingStep]:
    """Draws the routing of some steps. shape: numbers of microbatches and ranks."""
    chance, choices = np.random.default_rng(1), of.tokens_of_microbatch * of.topk
    return [
        RoutingStep(
            of, number, {layer: chance.multinomial(choices, [0.4, 0.3, 0.2, 0.1], shape) for layer in of.layers}
        )
        for number in range(1, steps + 1)
    ]


def written(path: Path, steps: list[RoutingStep]) -> str:
    tokens = ({layer: torch.from_numpy(counts) for layer, counts in one.tokens.items()} for one in steps)
    write_trace(path, steps[0].header, tokens)
    return str(path)


@pytest.mark.parametrize("device", ["cpu", "H100"])
@pytest.mark.parametrize(
    ("tokens", "shape", "is_guessed"),
    [(TOKENS, (4, 2), False), (TOKENS, (8, 1), False), (TOKENS, (2, 4), False), (TOKENS // 2, (8, 2), False)]
    + [(2 * TOKENS, (2, 2), True), (TOKENS, (1, 2), True)],
)
def test_a_trace_of_any_layout_gives_every_rank_its_tokens(
    tokens: int, shape: tuple[int, int], is_guessed: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGATRON_PLAN_DEVICE", device)
    alignment = 1 if device == "cpu" else GPU_ROW_ALIGNMENT
    run = planned_run(run_config_of(read_flags(argv("--skew", "balanced"))), pretrain_gpt.model_provider)
    steps = recorded(2, header(tokens_of_microbatch=tokens), shape=shape)
    (span,), guesses = traced_spans(steps, run, num_groups=1, seed=1)
    assert (len(guesses) > 0) == is_guessed and span.num_steps == 2
    for number, step in enumerate(steps):
        for layer, counts in step.tokens.items():
            rows = span.rows[layer][:, number]
            # Four microbatches of two ranks that share four experts.
            assert rows.shape == (4, 2) and (rows % alignment == 0).all()
            if is_guessed:
                assert alignment > 1 or (rows.sum(axis=1) == 2 * TOKENS * 2).all()
                continue
            joined = counts.reshape(8, -1, EXPERTS).sum(axis=1).reshape(4, 2, 2, 2)
            of_expert = joined.sum(axis=1)
            assert (rows == (of_expert + -of_expert % alignment).sum(axis=2)).all()
            assert span.most_of_pair[number] >= joined.sum(axis=3).max()


def test_what_a_step_spills_is_counted_in_bytes() -> None:
    run = planned_run(run_config_of(read_flags(argv("--skew", "balanced"))), pretrain_gpt.model_provider)
    spans, _ = traced_spans(recorded(2, header(), shape=(4, 2)), run, num_groups=1, seed=1)
    large, none = (3.0, 0.0), (0.0, 3.0)
    on_device, on_host = (
        outlook(
            run,
            replace(
                run.flags, moe_paged_stash_buffer_size_factor_cuda=device, moe_paged_stash_buffer_size_factor_cpu=host
            ),
            spans=spans,
        )
        for device, host in (large, none)
    )
    assert (on_device.spilled_bytes, on_device.largest_spill) == (0, 0)
    # Each tensor of a step is copied to the host once, and many are on the host at the same time.
    at_one_time = max(int(stage.pages_wanted.max()) * stage.page_bytes for stage in on_host.walk.stages)
    assert 0 < at_one_time <= on_host.largest_spill
    assert on_host.largest_spill / 2 < on_host.spilled_bytes <= on_host.largest_spill


def test_a_discarded_step_is_counted_at_its_place_in_the_run() -> None:
    run = planned_run(run_config_of(read_flags(argv("--skew", "balanced"))), pretrain_gpt.model_provider)
    calm = recorded(4, header(), shape=(4, 2))
    tokens = {layer: np.full_like(counts, TOKENS * 2 // EXPERTS) for layer, counts in calm[0].tokens.items()}
    # All rows of the last step belong to the first of the two ranks that share experts.
    of_first_rank = np.array([TOKENS, TOKENS, 0, 0])
    full = {layer: np.broadcast_to(of_first_rank, counts.shape).copy() for layer, counts in tokens.items()}
    steps = [replace(step, tokens=full if number == 3 else tokens) for number, step in enumerate(calm)]
    (span,), _ = traced_spans(steps, run, num_groups=1, seed=1)
    flags = replace(run.flags, moe_expert_rank_capacity_factor=1.5, moe_paged_stash_buffer_size_factor_cuda=4.0)
    found = walk(run, flags, spans=[span.part(0, 2), span.part(2, 4)], grows=True)
    assert found.discards.tolist() == [0, 0, 0, 1]


def test_blocks_that_were_split_at_random_do_not_overflow_the_largest_buffers() -> None:
    # Each rank has one expert, which each token chooses at most once.
    flags = {"world_size": 4, "pipeline_model_parallel_size": 1, "expert_model_parallel_size": EXPERTS}
    flags |= {"moe_expert_rank_capacity_factor": float(EXPERTS), "moe_paged_stash_buffer_size_factor_cuda": 4.0}
    run_config = run_config_of(read_flags(argv("--skew", "balanced", **flags)))
    run = planned_run(run_config, pretrain_gpt.model_provider)
    whole = RoutingHeader.of(run_config)
    whole = replace(whole, tokens_of_microbatch=2 * whole.tokens_of_microbatch)
    of_block = [whole.tokens_of_microbatch, whole.tokens_of_microbatch, 0, 0]
    steps = [RoutingStep(whole, 1, {layer: np.array([[of_block] * 4]) for layer in whole.layers})]
    spans, _ = traced_spans(steps, run, num_groups=1, seed=1)
    assert spans[0].most_of_pair[0] > run.ranks.tokens
    assert not walk(run, run.flags, spans=spans, grows=True).discards.any()


@pytest.mark.slow
def test_what_is_recommended_is_enough_and_less_is_not(tmp_path: Path) -> None:
    trace = written(tmp_path / "trace", recorded(12, header(), shape=(4, 2)))
    args = read_flags(argv("--trace", trace, "--wanted-probability", "1"))
    plan, run = stash_plan(args), planned_run(run_config_of(args), pretrain_gpt.model_provider)
    spans, _ = traced_spans(read_routing(trace), run, num_groups=1, seed=1)
    assert set(plan.recommended) == {StepLevel.DEVICE, StepLevel.HOST, StepLevel.GATE_UP}
    factors = {level: one.flags.moe_paged_stash_buffer_size_factor_cuda for level, one in plan.recommended.items()}
    assert factors[StepLevel.GATE_UP] < factors[StepLevel.DEVICE]
    for level, one in plan.recommended.items():
        assert one.share_up_to(level) == 1
        # Plans again with the printed flags: no buffer of such a run grows.
        again = stash_plan(read_flags([*argv("--trace", trace, "--plan-factors", "1"), *paste(one.flags).split()]))
        assert not again.given.discards.any() and (again.given.levels == one.walk.levels).all()
        tier = "cpu" if level is StepLevel.HOST else "cuda"
        name = f"moe_paged_stash_buffer_size_factor_{tier}"
        less = replace(one.flags, **{name: vars(one.flags)[name] - 0.01})
        assert outlook(run, less, spans=spans).share_up_to(level) < 1


def test_text_and_json_say_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    words = ["--skew", "zipf:0.8", "--plan-steps", "20", "--json", str(path), "--plan-factors", "0.5", "1.5"]
    assert main([*argv(*words), "--plan-page-sizes", "2", "--plan-host-factors", "0", "0.5"]) == 0
    text, plan = capsys.readouterr().out, json.loads(path.read_text())
    assert text.startswith("plan of the paged stash: 2 stages, 4 MoE layers, 2 ranks share 4 experts; 4 micro")
    assert len(plan["table"]) == 4 and len(plan["given"]["rungs"]) == plan["steps"] == 20
    for row in plan["table"]:
        assert sum(row["shares"].values()) == pytest.approx(1)
    best = plan["recommended"]["device"]["flags"]
    assert f"--moe-paged-stash-buffer-size-factor-cuda {best['moe_paged_stash_buffer_size_factor_cuda']:g}" in text
    assert plan["reasons"][0] in text and "pay" in plan["reasons"][0]
    lines = [line.split() for line in text.splitlines()]
    needed = next(line for line in lines if line[:1] == ["--moe-expert-rank-capacity-factor"])
    assert float(needed[-1]) == pytest.approx(max(plan["capacity_factor_needed"]), abs=0.01)
    for row in plan["table"]:
        columns = ["page_size", "buffer_size_factor_cuda", "buffer_size_factor_cpu"]
        begin = [f"{row['flags'][f'moe_paged_stash_{column}']:g}" for column in columns]
        shown = [line for line in lines if line[:3] == begin]
        assert len(shown) == 1 and f"{row['shares']['device']:.1%}" in shown[0], row


def test_the_link_to_the_host_is_that_of_the_planned_device(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    words = ["--skew", "dirichlet:1", "--plan-steps", "20", "--plan-factors", "1", "--json", str(tmp_path / "plan")]
    seconds, long = {}, {"seq_length": 1024, "max_position_embeddings": 1024}
    for device, given, rate in (
        ("H100", [], 0.8 * 64),
        ("A100", [], 0.8 * 32),
        ("A100", ["--host-gb-s", "12.5"], 12.5),
    ):
        monkeypatch.setenv("MEGATRON_PLAN_DEVICE", device)
        assert main([*argv(*words, **long), *given]) == 0
        assert f"{device} of configs/devices.yaml, {rate:g} GB/s to the host" in capsys.readouterr().out
        plan = json.loads((tmp_path / "plan").read_text())
        seconds[rate] = plan["costs"]["host"][0]["seconds"]["spill"]
    assert seconds[25.6] == pytest.approx(2 * seconds[51.2]) and seconds[12.5] > seconds[25.6] > 0


def test_the_page_shows_rungs_against_factors_and_needs_no_network(tmp_path: Path) -> None:
    words = ["--skew", "zipf:0.8", "--plan-steps", "20", "--plan-host-factors", "0", "0.3"]
    plan = stash_plan(read_flags(argv(*words)))
    text = without_plotly(as_page(plan))
    assert re.findall(r"https?://", text) == [] and "src=" not in text and "<link" not in text
    tips = {tip for figure in embedded_figures(text) for trace in figure["data"] for tip in trace["customdata"]}
    shares = [(one.flags, level, share) for one in plan.table for level, share in one.shares.items() if share > 0]
    assert len(shares) > 48
    for flags, level, share in shares:
        # Hovering over a segment of a column shows factor, recompute level and share.
        factor = flags.moe_paged_stash_buffer_size_factor_cuda
        assert any(tip.startswith(f"{factor:g}: {NAMES[level]} {100 * share:.4g} % of the steps; ") for tip in tips)
    assert all(escape(paste(one.flags)).split(" --")[-1] in text for one in plan.recommended.values())


@pytest.mark.slow
@needs_browser
def test_a_browser_shows_the_page_readably(tmp_path: Path) -> None:
    path = tmp_path / "plan.html"
    words = ["--skew", "zipf:0.8", "--plan-steps", "20", "--page", str(path), "--plan-host-factors", "0", "0.3"]
    assert main(argv(*words)) == 0
    with opened_browser(tmp_path) as tab:
        for width in (390, 1200):
            tab.open(path.as_uri(), width=width)
            assert [*tab.evaluate(FIGURE_PROBLEMS), *tab.problems] == []
            assert {url for url in tab.requests if not url.startswith(("data:", "blob:"))} == {path.as_uri()}
            # Two panels per page size, without and with host pages, and panels of memory, costs and spills.
            assert tab.evaluate("document.querySelectorAll('.plot .main-svg .barlayer').length") == 2 * 3 + 3
            assert tab.evaluate("document.documentElement.scrollWidth") == width


@pytest.mark.slow
def test_what_does_not_pay_is_said_plainly(capsys: pytest.CaptureFixture[str]) -> None:
    skew = ["--skew", "balanced", "--plan-steps", "5", "--plan-factors", "1"]
    alone = {"pipeline_model_parallel_size": 1, "num_layers": 1, "world_size": 2}
    assert main(argv(*skew, **alone)) == 0
    assert "stashing has no effect: the backward of every expert group directly follows" in capsys.readouterr().out
    long = {"seq_length": 1024, "max_position_embeddings": 1024, "moe_paged_stash_page_size": 64}
    # Many tokens with equal popularities cause little padding, and two layers save no more than two working sets.
    assert main(argv(*skew, **{**alone, **long, "num_layers": 2})) == 0
    said = capsys.readouterr().out
    assert (
        "stashing does not pay: it costs" in said
        and "routing is balanced" in said
        and "too few groups are saved" in said
    )
    assert main(argv(*skew, moe_paged_stash_page_size=256)) == 0
    assert "pages are too large for the number of rows" in capsys.readouterr().out
    # Strong skew, many microbatches, and small pages: buffers are usually mostly padding.
    pays = ["--skew", "dirichlet:0.3", "--plan-steps", "20", "--wanted-probability", "0.5", "--plan-factors", "1"]
    assert main(argv(*pays, **{**long, "num_layers": 8, "global_batch_size": 16, "moe_paged_stash_page_size": 4})) == 0
    assert "stashing pays: it saves" in capsys.readouterr().out


@pytest.mark.slow
def test_bad_input_is_one_line_that_names_flags_or_the_place_in_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = recorded(1, header(), shape=(4, 2))
    trace = written(tmp_path / "trace", steps)
    other = replace(header(), topk=1)
    (tmp_path / "of topk 1").write_bytes(Path(trace).read_bytes().replace(header().line(0), other.line(0)))
    (tmp_path / "empty").write_bytes(header().line(0))
    (tmp_path / "text").write_text("words\n")
    (tmp_path / "text.gz").write_text("words\n")
    for words, flags, message in (
        ([], {}, "no routing: give --trace FILE"),
        (["--trace", trace, "--skew", "zipf:1"], {}, "--trace is {trace} and --skew is zipf:1: give only one of them"),
        (
            ["--trace", str(tmp_path / "none")],
            {},
            "none: No such file or directory: give a file that --record-routing wrote",
        ),
        (["--trace", str(tmp_path / "text.gz")], {}, "text.gz: Not a gzipped file"),
        (["--trace", str(tmp_path / "text")], {}, "text, line 1 is not a line of a routing trace"),
        (["--trace", str(tmp_path / "empty")], {}, "the trace contains no step"),
        (
            ["--trace", str(tmp_path / "of topk 1")],
            {},
            "different model: --moe-router-topk is 1 in the trace and 2 in the run",
        ),
        (["--trace", trace], {"num-experts": 8}, "different model: --num-experts is 4 in the trace and 8 in the run"),
        (
            ["--trace", trace],
            {"num-layers": 2},
            "layers with experts is [1, 2, 3, 4] in the trace and [1, 2] in the run",
        ),
        (
            ["--trace", trace],
            {"seq-length": 24},
            "has 24 tokens in the run and 32 in the trace: one must be a multiple",
        ),
        (["--skew", "even"], {}, "--skew is 'even': must be one of balanced, dirichlet:0.3"),
        (["--skew", "drift:1e300:3"], {}, "must be drift:SPREAD:STEPS with SPREAD from 0.001 to 100 and STEPS from"),
        (["--skew", "zipf:1", "--wanted-probability", "1.5"], {}, "--wanted-probability is 1.5: must be above 0"),
        (["--skew", "zipf:1", "--plan-steps", "0"], {}, "--plan-steps has 0: must be above 0"),
        (["--skew", "zipf:1", "--plan-factors", "1", "-2"], {}, "--plan-factors has -2: must be at least 0"),
        (["--skew", "zipf:1", "--plan-page-sizes", "48"], {}, "--plan-page-sizes has 48: must be powers of two"),
        (
            ["--skew", "zipf:1", "--plan-page-sizes", "48"],
            {"moe-paged-stash-compute": "pages", "moe-ffn-hidden-size": 72, "moe-paged-stash-page-size": 9},
            "--plan-page-sizes has 48: must be multiples of 9, so that a page holds whole rows of x and gate_up",
        ),
        (["--skew", "zipf:1", "--plan-page-sizes", "1024"], {}, "has 1024: must be at most 256, because buffers have "),
        (["--skew", "zipf:1", "--plan-factors", "0"], {}, "--plan-factors and --plan-host-factors are all 0"),
        (["--skew", "zipf:1", "--plan-groups", "2"], {}, "--plan-groups is 2: must be at most 1"),
        (["--skew", "zipf:1"], {"moe-paged-stash-page-size": 3}, "--moe-paged-stash-page-size is 3: must be a power"),
        (["--skew", "zipf:1"], {"moe-grouped-gemm": False}, "--moe-grouped-gemm"),
    ):
        assert main(command_line({**read_bases()["moe"], **FLAGS, **flags}) + words) == 2, message
        error = capsys.readouterr().err
        assert error.startswith("error: ") and message.format(trace=trace) in error and error.count("\n") == 1, error
    dense = command_line({**read_bases()["dense"], "world-size": 1})
    assert main([*dense, "--skew", "zipf:1"]) == 2
    assert "--num-experts is not given" in capsys.readouterr().err
