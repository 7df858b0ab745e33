"""Output of a plan: JSON, page and lines about time; and the choice of the planning rank."""

import json
import os
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

import pretrain_gpt
from megatron.core.pipeline_parallel.schedule import Pipeline, ScheduleKind, stage_orders
from megatron.core.transformer.moe.paged_stash.sizing import PoolBytes
from megatron.planner.activations import SavedSizes
from megatron.planner.fit import fit_of
from megatron.planner.page import page
from megatron.planner.plan import (
    BufferLayout,
    ModelStates,
    Plan,
    RankMemory,
    RankPlan,
    TemporaryBytes,
    moved_to_a_v,
    pipeline_number_of,
)
from megatron.planner.report import links_lines, plan_document, print_plan, schedule_line, time_lines, write_plan
from megatron.planner.step_time import PAIR_ASSUMPTION, STASH_ASSUMPTION, run_time, schedule_times
from megatron.planner.work import ChunkWork, Kernel, Kernels, StageLoad, Traffic, Unit
from megatron.training.arguments import read_run_config
from megatron.training.command_line.errors import CommandLineError
from megatron.training.compute.devices import Device, planned_device
from megatron.training.config import RunConfig
from tests.browser import BROWSER, FIGURE_PROBLEMS, embedded_figures, opened_browser, without_plotly
from tests.functional_tests.case import Flags, command_line, read_bases

GIB = 2**30


def _work(seconds: float) -> Kernels:
    return Kernels(
        {Kernel(kind, Unit.MATMUL, "bf16", seconds * 3e14, 1e6): 1 for kind in ("attention", "feed-forward", "experts")}
    )


def _stage(number: int, stages: int) -> RankPlan:
    links = (
        Traffic("tp_ep", 16, "all-to-all", "forward", 64, 3 * GIB),
        Traffic("tp_ep", 16, "all-to-all", "backward", 64, 3 * GIB),
        Traffic("dp_cp", 8, "reduce-scatter", "grad reduce", 9, 2 * GIB),
        Traffic("pp", stages, "send", "forward", 8, GIB // 2),
    )
    return RankPlan(
        rank=number * 16,
        stage=number,
        layers=(2 * number + 1, 2 * number + 2),
        sizes={},
        memory=RankMemory(
            ModelStates(parameters=3 * GIB, gradients=6 * GIB, masters=GIB, moments=2 * GIB),
            PoolBytes(host=GIB),
            SavedSizes(
                Counter({"attention": (stages - number) * GIB, "experts <b>": 2 * GIB, "norms and residuals": GIB // 2})
            ),
            TemporaryBytes(passes=GIB // 4, update=2 * GIB),
        ),
        load=StageLoad((ChunkWork(_work(0.01), _work(0.02), _work(0.005)),), links if stages > 1 else (), _work(0.03)),
        buffers=(
            BufferLayout(0, "dense", "bfloat16", "float32", (GIB // 2, GIB, GIB), 3 * 5 * GIB // 4, GIB // 64),
            BufferLayout(0, "expert", "bfloat16", "float32", (GIB,), 3 * GIB // 2, 0),
        ),
        groups={"tp_ep": tuple(range(16)), "dp_cp": tuple(range(0, 128, 16)), "pp": tuple(range(0, stages * 16, 16))},
    )


def _run_config(stages: int) -> RunConfig:
    """Returns the settings that a plan of hand-written stages reads."""
    sizes = {
        "world_size": stages * 16,
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": stages,
        "virtual_pipeline_model_parallel_size": None,
        "context_parallel_size": 1,
        "expert_model_parallel_size": 8,
        "expert_tensor_parallel_size": None,
        "num_experts": 64,
        "sequence_parallel": True,
        "num_layers": 4 * stages,
        "data_parallel_size": 8,
        "micro_batch_size": 1,
        "seq_length": 4096,
        "microbatch_group_size_per_vp_stage": None,
        "moe_shared_expert_overlap": False,
        "cp_comm_type": "p2p",
        "overlap_grad_reduce": True,
        "overlap_param_gather": False,
        "use_torch_fsdp2": False,
        "overlap_p2p_comm": True,
    }
    return _tiny({}, ranks=1).changed(**sizes)


def _plan(stages: int, *, num_microbatches: int = 8) -> Plan:
    return Plan([_stage(number, stages) for number in range(stages)], 10**9, 10**8, num_microbatches, True, 1e15)


def _document(stages: int = 4, *, device: Device | None = None, num_microbatches: int = 8) -> dict:
    plan, run_config = _plan(stages, num_microbatches=num_microbatches), _run_config(stages)
    device = device or planned_device({})
    return plan_document(
        plan, run_config, device=device, step=run_time(plan, run_config, device=device), fit=fit_of(plan, device)
    )


def test_json_holds_the_plan_and_the_page_is_made_of_it(tmp_path: Path) -> None:
    document = _document()
    files = write_plan(document, tmp_path / "new" / "folder")
    assert [file.name for file in files] == ["plan.json", "plan.html"]
    read = json.loads(files[0].read_text())
    assert read == document
    assert files[1].read_text() == page(read)
    stage = read["stages"][1]
    assert stage["memory"] | {"activations": None} == {
        "parameters": 3 * GIB,
        "gradients": 6 * GIB,
        "masters": GIB,
        "moments": 2 * GIB,
        "pages": 0,
        "activations": None,
    }
    memory = _stage(1, 4).memory
    assert stage["total"] == memory.total and (stage["host_pages"], stage["host_states"]) == (GIB, 0)
    # Activations occupy more memory than the update, which runs after they are freed.
    assert stage["peak"] == stage["total"] + GIB // 4 == memory.peak
    assert replace(memory, temporary=TemporaryBytes(update=7 * GIB)).peak == 19 * GIB
    assert stage["groups"]["dp_cp"] == {"size": 8, "ranks": "0:113:16"}
    # 15 of 16 parts leave the rank; a node has 8 of the group's ranks.
    assert stage["links"][0] | {"seconds": 0} == {
        "group": "tp_ep",
        "group_size": 16,
        "operation": "all-to-all",
        "phase": "forward",
        "count": 64,
        "num_bytes": 3 * GIB,
        "link_bytes": 3 * GIB * 15 / 16,
        "in_node": 8,
        "seconds": 0,
    }
    assert [len(passes) for passes in read["schedule"]] == [16] * 4
    assert sum(read["step"]["split"].values()) == pytest.approx(read["step"]["seconds"])


def test_payload_and_bytes_on_links_stand_in_their_columns_in_the_unit_of_the_table() -> None:
    # 15 of 16 parts of 3 GiB leave the rank.
    _, head, row, *_ = links_lines(_stage(0, 4), unit="GiB", size=GIB)
    assert head.endswith("payload  on links") and row.split()[-2:] == ["3.00", "2.81"]
    text = without_plotly(page(_document()))
    rows = [re.findall("<t[hd][^>]*>([^<]*)", row) for row in re.findall("(?s)<tr>.*?</tr>", text)]
    [head] = [cells for cells in rows if "on the link" in cells]
    row = dict(zip(head, next(cells for cells in rows if "all-to-all" in cells)))
    assert (row["payload"], row["on the link"]) == ("3 GiB", "2.812 GiB")


def test_the_line_of_the_devices_memory_stands_where_its_gibibytes_are() -> None:
    memory, *_ = embedded_figures(page(_document(device=replace(planned_device({}), memory_gib=17.0))))
    assert memory["layout"]["annotations"][-1]["text"] == "H100: 17 GiB"
    assert memory["layout"]["shapes"][0]["x0"] == memory["layout"]["annotations"][-1]["x"] == 17.0
    # 6.5 GiB of activations, the first stage's 12 GiB of persistent memory, and temporary memory of passes.
    document = _document()
    peaks = [stage["peak"] / GIB for stage in document["stages"]]
    memory, *_ = embedded_figures(page(document))
    lengths = [sum(dict(zip(trace["y"], trace["x"])).get(row, 0) for trace in memory["data"]) for row in range(4)]
    assert lengths == pytest.approx(peaks)
    assert [label["text"] for label in memory["layout"]["annotations"][:4]] == [f"{peak:.2f} GiB" for peak in peaks]


def test_notes_name_the_stages_that_do_not_fit() -> None:
    small = replace(planned_device({}), memory_gib=16.0)
    notes = " ".join(_document(device=small)["notes"])
    assert "Stages that exceed the memory of the H100 (16 GiB): 0, 1, 2." in notes
    assert "is more than" not in " ".join(_document()["notes"])


def test_the_page_needs_no_network_and_shows_names_as_they_are() -> None:
    document = _document()
    document["notes"].append("</script><script>alert(1)</script>")
    document["stages"][0]["links"][0]["group"] = "</script><i>"
    text = without_plotly(page(document))
    assert re.findall(r"https?://", text) == [] and "src=" not in text and "<link" not in text
    assert "experts &lt;b&gt;" in text and "experts <b>" not in text
    assert "alert(1)</script>" not in text and "<i>" not in text and "&lt;i&gt;" in text
    memory, *_ = embedded_figures(text)
    assert "activations: experts &lt;b&gt;" in [trace["name"] for trace in memory["data"]]


def test_without_the_packages_of_pages_the_plan_is_still_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron.pages.page.find_spec", lambda name: None if name == "jinja2" else name)
    document = _document()
    assert write_plan(document, tmp_path) == [tmp_path / "plan.json"]
    assert json.loads((tmp_path / "plan.json").read_text()) == document
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]
    assert capsys.readouterr().err == (
        "plan.html is not written: the page needs jinja2: pip install 'jinja2>=3.1', or this project's extra report\n"
    )


@pytest.mark.slow
def test_long_schedules_are_drawn_from_their_beginning() -> None:
    document = _document(num_microbatches=6000)
    assert [len(passes) for passes in document["schedule"]] == [5000] * 4
    assert "Shows the first 1000 of 12000 passes of each stage." in page(document)


@pytest.mark.slow
def test_passes_of_a_pair_are_drawn_in_one_interval() -> None:
    document = _document()
    alone = page(document)
    for passes in document["schedule"]:
        passes[4][3:] = passes[5][3:] = [passes[4][3], passes[5][4]]
    drawn = page(document)
    assert "with the pass that takes turns" not in alone and drawn.count("with the pass that takes turns") == 8


def test_a_plan_names_a_faster_schedule_and_draws_its_weight_passes() -> None:
    device = planned_device({})
    stages = [
        replace(
            stage,
            load=replace(stage.load, chunks=(ChunkWork(_work(0.01), _work(0.02), weights=_work(0.01)),)),
            activations_by_schedule={ScheduleKind.ONE_F_ONE_B: 2 * GIB, ScheduleKind.ZB_H1: (2 + stage.stage) * GIB},
        )
        for stage in _plan(4).stages
    ]
    plan = replace(_plan(4), stages=stages)
    times = schedule_times(plan, _run_config(4), device=device)
    assert [one.kind for one in times] == [ScheduleKind.ONE_F_ONE_B, ScheduleKind.ZB_H1] and times[1].seconds < times[
        0
    ].seconds
    line = schedule_line(times, given="1f1b")
    assert re.fullmatch(
        r"1f1b \S+ m?s \(bubble \S+%\), zb-h1 \S+ m?s \(bubble \S+%\); with --pipeline-schedule zb-h1 the step takes "
        r"\S+% less time, and a stage needs up to 3.00 GiB more memory",
        line,
    ), line
    assert schedule_line(times, given="zb-h1").endswith("; none is faster than zb-h1")
    # Halves of the stages in a V wait for half a forward only, and the first stage needs more memory.
    run_config = _run_config(4)
    in_a_v = moved_to_a_v(run_config)
    assert in_a_v is not None and moved_to_a_v(in_a_v) is None
    halves = (ChunkWork(_work(0.005), _work(0.01), weights=_work(0.005)),) * 2
    moved = [
        replace(
            stage,
            load=replace(stage.load, chunks=halves),
            activations_by_schedule={ScheduleKind.ZBV: (4 - stage.stage) * GIB},
        )
        for stage in stages
    ]
    times = schedule_times(plan, run_config, device=device, moved=(replace(plan, stages=moved), in_a_v))
    assert schedule_line(times, given="1f1b").endswith("% less time, and a stage needs up to 2.00 GiB more memory")
    assert [one.kind for one in times] == [ScheduleKind.ONE_F_ONE_B, ScheduleKind.ZB_H1, ScheduleKind.ZBV]
    times = schedule_times(plan, run_config, device=device)
    # A layout without a choice.
    assert schedule_times(_plan(4), _run_config(4), device=device) == []
    run_config = _run_config(4).changed(pipeline_schedule="zb-h1")
    step = run_time(plan, run_config, device=device)
    assert step is not None and step.seconds == times[1].seconds
    document = plan_document(plan, run_config, device=device, step=step, fit=fit_of(plan, device), schedules=times)
    text = page(document)
    assert "weight gradients of micro-batch 7 in chunk 0" in text and schedule_line(times, given="zb-h1") in text
    assert "weight gradients of micro-batch" not in page(_document())


def test_lines_split_a_step_by_cause() -> None:
    plan, run_config, device = _plan(4), _run_config(4), planned_device({})
    step = run_time(plan, run_config, device=device)
    assert step is not None and step.tokens_per_second == pytest.approx(8 * 8 * 4096 / step.seconds)
    first, split, passes, *assumed = time_lines(step, plan)
    assert re.fullmatch(r"estimated step on H100: .* m?s, .* tokens/s, .* TFLOP/s a device, MFU .*%", first), first
    assert re.search("compute .* exposed communication .* bubble .* optimizer", split), split
    assert "which waits the least: forward" in passes and all(line.startswith("assumed: ") for line in assumed)
    assert assumed[-1] == f"assumed: {STASH_ASSUMPTION}"
    no_pages = [replace(stage, memory=replace(stage.memory, pages=PoolBytes())) for stage in plan.stages]
    without = replace(plan, stages=no_pages)
    assert time_lines(step, without) == [first, split, passes, *assumed[:-1]]
    assert time_lines(step, replace(plan, has_pairs=True))[-1] == f"assumed: {PAIR_ASSUMPTION}"
    untrained = replace(plan, stages=[replace(stage, load=replace(stage.load, chunks=())) for stage in plan.stages])
    assert run_time(untrained, run_config, device=device) is None
    text = page(plan_document(untrained, run_config, device=device, step=None, fit=fit_of(untrained, device)))
    assert "Step time by pipeline stage" not in text and "Pipeline schedule" not in text


@pytest.mark.slow
@pytest.mark.skipif(
    BROWSER is None and "CI_HAS_BROWSER" not in os.environ,
    reason="needs a browser: apt-get install chromium, as .ci/run does",
)
def test_a_browser_shows_every_picture_readably(tmp_path: Path) -> None:
    # The longest possible names of stages.
    document = _document()
    document["stages"][-1] |= {"stage": 255, "rank": 262_143}
    copy = tmp_path / "plan.html"
    copy.write_text(page(document), encoding="utf-8")
    with opened_browser(tmp_path) as tab:
        for width in (390, 1200):
            tab.open(copy.as_uri(), width=width)
            assert [*tab.evaluate(FIGURE_PROBLEMS), *tab.problems] == []
            assert {url for url in tab.requests if not url.startswith(("data:", "blob:"))} == {copy.as_uri()}
            assert tab.evaluate("document.querySelectorAll('.plot .main-svg .barlayer').length") == 6
            assert tab.evaluate("document.documentElement.scrollWidth") == width
        text = tab.evaluate("document.body.innerText + document.querySelector('.plot').textContent")
    for words in (
        "Plan of 64 ranks",
        "H100: 79.6 GiB",
        "Host memory",
        "stage 255 (rank 262,143)",
        "exposed communication",
        "experts <b>",
    ):
        assert words in text, words


def _tiny(flags: Flags, *, ranks: int) -> RunConfig:
    argv = command_line({**read_bases()["dense"], "global-batch-size": 8, **flags})
    return read_run_config([*argv, "--dry-run", "--world-size", str(ranks)])


def test_place_of_numbers_the_pipelines() -> None:
    run_config = _tiny({"pipeline-model-parallel-size": 2}, ranks=8)
    assert [pipeline_number_of(run_config, rank) for rank in range(8)] == [0, 1, 2, 3, 0, 1, 2, 3]
    with pytest.raises(ValueError, match="RANK is 8 in the environment: must be from 0 to 7 for this --world-size"):
        pipeline_number_of(run_config, 8)


def test_any_rank_can_be_planned_and_written(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setenv("RANK", "6")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    run_config = _tiny({"pipeline-model-parallel-size": 2, "tensorboard-dir": str(tmp_path / "logs")}, ranks=8)
    print_plan(
        run_config,
        pretrain_gpt.model_provider,
        reread=lambda words: run_config,
        forward_step_func=pretrain_gpt.forward_step,
    )
    printed = capsys.readouterr().out
    assert "memory of one rank of each stage" in printed and re.search(r"\n +0 +2 .*\n +1 +6 ", printed), printed
    assert f"written: {tmp_path}/logs/plan.json and {tmp_path}/logs/plan.html" in printed
    document = json.loads((tmp_path / "logs" / "plan.json").read_text())
    assert [stage["rank"] for stage in document["stages"]] == [2, 6]
    assert (tmp_path / "logs" / "plan.html").read_text() == page(document)
    # Under torchrun the first rank plans for all ranks.
    monkeypatch.setenv("WORLD_SIZE", "8")
    print_plan(
        run_config,
        pretrain_gpt.model_provider,
        reread=lambda words: run_config,
        forward_step_func=pretrain_gpt.forward_step,
    )
    assert capsys.readouterr().out == ""


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    run_config = _tiny({"tensorboard-dir": str(tmp_path / "file")}, ranks=1)
    with pytest.raises(CommandLineError, match="--tensorboard-dir is .*/file: the plan cannot be written there"):
        print_plan(
            run_config,
            pretrain_gpt.model_provider,
            reread=lambda words: run_config,
            forward_step_func=pretrain_gpt.forward_step,
        )


def test_an_estimated_step_runs_the_schedule_of_the_run() -> None:
    plan, run_config = _plan(4), _run_config(4)
    step = run_time(plan, run_config, device=planned_device({}))
    assert step is not None
    assert [list(spans) for spans in step.spans] == stage_orders(Pipeline(4), 8)
