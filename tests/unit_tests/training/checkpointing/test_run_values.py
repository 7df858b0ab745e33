"""The JSON part of a training run's checkpoint. Values of the wrong type raise errors with their names."""

import argparse
import json
from dataclasses import fields

import pytest

from megatron.core.absent_config import AbsentOptimizerFields
from megatron.core.optimizer import OptimizerConfig
from megatron.training.arguments import parse_args
from megatron.training.checkpointing.folder import iteration_folder
from megatron.training.checkpointing.run_values import NOTED_ON_RESUME, changed_optimizer_settings, load_run_values
from tests.fuzz.checkpoint_damage import vouch
from tests.unit_tests.training.small_run import SmallRun


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    SmallRun().train(1).save(folder)
    return iteration_folder(folder, 1)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("iteration", "1"),
        ("args", []),
        ("args.hidden_size", "8"),
        ("args.hidden_size", True),
        ("args.swiglu", 1),
        ("args.optimizer", 3),
        ("args.padded_vocab_size", -1),
        ("args.moe_aux_loss_coeff", ["x"]),
        ("contents.optimizer", "yes"),
        ("frozen", [3]),
        ("optimizer", None),
        ("optimizer.step", 1.5),
        ("optimizer.grad_scaler", {"scale": "x"}),
        ("scheduler.num_steps", None),
        ("train_state.iteration", -1),
        ("train_state.recent_losses", 1.0),
        ("train_state.learned_sizes", []),
        ("train_state.learned_sizes.rows_share", {"x": 1.0}),
        ("train_state.learned_sizes.capacity_factor", "1"),
        ("train_state.learned_sizes.expert_ranks", 0.5),
    ],
)
def test_a_value_of_another_type_is_named_before_anything_is_loaded(saved, place, value):
    whole = (saved / "common.json").read_text()
    values = json.loads(whole)
    *path, last = place.split(".")
    # Errors name these values as a whole.
    named = next((whole for whole in ("scheduler", "learned_sizes", "optimizer.grad_scaler") if whole in place), place)
    holder = values
    for name in path:
        holder = holder[name]
    holder[last] = value
    try:
        (saved / "common.json").write_text(json.dumps(values))
        vouch(saved)
        with pytest.raises(ValueError, match=rf"holds a value that training runs do not write: .*{named}.*: must "):
            load_run_values(saved)
    finally:
        (saved / "common.json").write_text(whole)
        vouch(saved)


def test_what_a_run_wrote_is_read_as_it_is(saved):
    assert load_run_values(saved) == json.loads((saved / "common.json").read_text())


# Compared by the scheduler, or by check_same_optimizer (params_dtype follows from fp16 and bf16).
SCHEDULED, COMPARED = {"lr", "min_lr", "weight_decay"}, {"optimizer", "fp16", "bf16", "params_dtype"}
# The stored scale replaces the first; the others change where or when updates are computed, but none of their numbers.
WITHOUT_EFFECT = {
    "initial_loss_scale",
    "muon_tp_mode",
    "optimizer_cpu_offload",
    "optimizer_offload_fraction",
    "overlap_cpu_optimizer_d2h_h2d",
    "store_param_remainders",
    "use_distributed_optimizer",
    "overlap_param_gather",
    "overlap_param_gather_with_optimizer_step",
    "log_num_zeros_in_grad",
    "optimizer_cuda_graph",
    "timers",
}
# Applied in a step, but not settings of the optimizer's configuration.
OF_OTHER_PARTS = {
    "qk_clip",
    "qk_clip_alpha",
    "qk_clip_threshold",
    "moe_router_bias_update_rate",
    "calculate_per_token_loss",
    "accumulate_allreduce_grads_in_fp32",
    "grad_reduce_in_bf16",
}


def test_each_setting_of_the_optimizer_is_compared_noted_or_without_effect_on_resume():
    absent = {field.name for field in fields(AbsentOptimizerFields)}
    names = [field.name for field in fields(OptimizerConfig) if field.name not in absent]
    groups = [*SCHEDULED, *COMPARED, *WITHOUT_EFFECT, *NOTED_ON_RESUME]
    assert sorted([*names, *OF_OTHER_PARTS]) == sorted(groups)


def test_each_setting_that_is_noted_is_an_argument_and_so_in_checkpoints():
    assert set(NOTED_ON_RESUME) <= set(vars(parse_args(argv=[])))


@pytest.mark.parametrize("name", NOTED_ON_RESUME)
def test_a_changed_setting_is_described_with_both_values(name):
    here = argparse.Namespace(**dict.fromkeys(NOTED_ON_RESUME))
    assert changed_optimizer_settings(here, vars(here)) == []
    [line] = changed_optimizer_settings(here, {**vars(here), name: 0.25})
    assert line.startswith("--") and line.endswith(" in the checkpoint")
    # A checkpoint of an older version lacks the setting.
    assert changed_optimizer_settings(here, {other: None for other in NOTED_ON_RESUME if other != name}) == []
