"""Plans of runs: saved tensors, peaks of schedules, printed lines. tests/distributed/test_dry_run.py compares runs."""

from unittest.mock import patch

import pytest
import torch
from torch import nn

from megatron.core.pipeline_parallel.schedule import one_forward_one_backward
from megatron.planner.activations import ChunkSaved, SavedBytes, peak_bytes
from megatron.planner.plan import with_planned_device
from megatron.planner.work import END, EXPERTS
from megatron.training.arguments import parse_args, read_run_config, validate_args
from megatron.training.command_line.errors import CommandLineError
from tests.functional_tests.case import Flags, command_line, read_bases
from tests.unit_tests.planner.plans import planned


def test_tensors_freed_before_backward_are_not_counted() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    saved = SavedBytes(model, persistent=model.parameters())
    with saved.counting():
        kept = model(torch.zeros(2, 4, requires_grad=True))
        model(torch.zeros(100, 4, requires_grad=True))
    # The first pass saves its input and the last layer's output. The second pass has been freed.
    assert saved.by_kind() == {"norms and residuals": 2 * 2 * 4 * 4}
    del kept
    assert not saved.by_kind()


def test_a_peak_follows_the_schedule() -> None:
    of_one = [ChunkSaved({END: {"attention": 3, "experts": 4}})]
    assert peak_bytes(one_forward_one_backward(0, 1, num_microbatches=5), of_one) == {"attention": 3, "experts": 4}
    for stage in range(4):
        actions = one_forward_one_backward(stage, 4, num_microbatches=6)
        assert peak_bytes(actions, of_one) == {"attention": 3 * (4 - stage), "experts": 4 * (4 - stage)}


def test_a_plan_names_its_ranks_and_assumptions() -> None:
    plan, lines = planned("moe", {"expert-model-parallel-size": 2, "global-batch-size": 8}, ranks=4)
    assert lines[0].startswith("plan of 4 ranks: expert 2, data 4; 1 microbatch of 2 x ")
    assert "equally often" in lines[-1] and plan.is_balanced
    assert plan.num_parameters > plan.active_parameters > 0
    memory = plan.stages[0].memory
    states = [memory.states.parameters, memory.states.gradients, memory.states.masters, memory.states.moments]
    assert memory.total == sum(states) + memory.pages.device + sum(memory.activations.by_kind.values())


def test_passes_allocate_temporary_memory() -> None:
    (stage,) = planned("dense", {})[0].stages
    assert stage.memory.temporary.passes > 0 and stage.memory.peak > stage.memory.total


@pytest.mark.parametrize(("recipe", "on_cpu", "on_gpu"), [("mxfp8", 32, 64), ("blockwise", 128, 128)])
@pytest.mark.parametrize("has_gpu", [False, True])
def test_rows_in_8_bits_have_the_alignment_of_the_planned_device(
    recipe: str, on_cpu: int, on_gpu: int, has_gpu: bool
) -> None:
    flags: Flags = {"bf16": True, "fp8-format": "e4m3", "fp8-recipe": recipe, "moe-expert-rank-capacity-factor": 2.0}
    run_config = read_run_config([*command_line({**read_bases()["moe"], **flags}), "--dry-run"])
    for plans_for_gpu, aligned in ((False, on_cpu), (True, on_gpu)):
        with (
            patch("torch.cuda.is_available", return_value=has_gpu),
            patch("megatron.planner.plan.plans_for_gpu", return_value=plans_for_gpu),
        ):
            assert with_planned_device(run_config).transformer.row_alignment == aligned


def test_padded_expert_rows_are_counted() -> None:
    flags: Flags = {"expert-model-parallel-size": 2, "moe-token-dispatcher-type": "alltoall", "global-batch-size": 8}
    flags |= {"moe-expert-capacity-factor": 2.0}
    (dropping,), (padding,) = (
        planned("moe", {**flags, "moe-pad-expert-input-to-capacity": pads}, ranks=2)[0].stages for pads in (False, True)
    )
    saved = [stage.memory.activations.by_kind[EXPERTS] for stage in (dropping, padding)]
    assert saved[1] > 1.5 * saved[0]


def test_a_stash_without_effect_is_refused_as_in_a_run() -> None:
    flags: Flags = {"moe-paged-stash": True, "moe-expert-rank-capacity-factor": 2.0, "num-layers": 1}
    with pytest.raises(ValueError, match="--moe-paged-stash is True but has no effect"):
        planned("moe", flags)


def test_an_evaluation_saves_nothing_and_has_no_pages() -> None:
    flags: Flags = {"moe-paged-stash": True, "moe-expert-rank-capacity-factor": 2.0}
    trained, _ = planned("moe", flags)
    (stage,) = planned("moe", {**flags, "skip-train": True, "load": "nowhere"})[0].stages
    trained_memory, memory = trained.stages[0].memory, stage.memory
    assert trained_memory.pages.total > 0 == memory.pages.total
    assert memory.total == memory.states.parameters + memory.states.gradients
    assert memory.states.parameters == trained_memory.states.parameters


@pytest.mark.slow
def test_a_plan_counts_the_parameters_of_the_whole_model() -> None:
    one, _ = planned("moe", {})
    cut, _ = planned("moe", {"expert-model-parallel-size": 2, "pipeline-model-parallel-size": 2}, ranks=4)
    assert (one.num_parameters, one.active_parameters) == (cut.num_parameters, cut.active_parameters)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["deepep", "symm_mem"])
def test_flex_backends_are_planned_without_their_libraries(backend: str) -> None:
    experts: Flags = {"expert-model-parallel-size": 2, "moe-expert-rank-capacity-factor": 2.0, "bf16": True}
    alone: Flags = {"expert-model-parallel-size": 1}
    flex: Flags = {"moe-token-dispatcher-type": "flex", "moe-flex-dispatcher-backend": backend}
    plan, lines = planned("moe", {**experts, **flex}, ranks=2)
    same, _ = planned("moe", {**experts, "moe-token-dispatcher-type": "alltoall"}, ranks=2)
    (stage,) = plan.stages
    assert [stage] == list(same.stages)
    assert any(one.operation == "all-to-all" for one in stage.load.traffic)
    assert any(f"backend {backend} is planned with the rows of" in line for line in lines)
    with pytest.raises(CommandLineError, match="which requires a CUDA device"):
        validate_args(parse_args(argv=command_line({**read_bases()["moe"], **experts, **flex, **alone})))


def test_a_plan_and_a_run_report_the_same_flag_conflicts() -> None:
    clashing: Flags = {
        "optimizer": "muon",
        "use-torch-fsdp2": True,
        "overlap-param-gather": True,
        "moe-paged-stash": True,
    }
    argv = command_line({**read_bases()["dense"], **clashing})
    words = ("--moe-paged-stash needs", "--optimizer is muon and --use-torch-fsdp2", "--overlap-param-gather is True")
    with pytest.raises(CommandLineError) as planned:
        validate_args(parse_args(argv=[*argv, "--dry-run"]))
    lines = str(planned.value).splitlines()
    assert all(sum(word in line for line in lines) == 1 for word in words) and len(set(lines)) == len(lines), lines
    with pytest.raises(CommandLineError) as refused:
        validate_args(parse_args(argv=argv))
    assert str(refused.value).splitlines() == lines
