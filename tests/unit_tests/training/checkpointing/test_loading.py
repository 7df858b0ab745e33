"""Bit-identical save and resume of a run in one process, and the effect of each flag."""

import errno
import json
import math
import os
import random
from unittest.mock import Mock

import numpy
import pytest
import torch

from megatron.core.device import seed_all
from megatron.core.dist_checkpointing import list_tensors
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.training.checkpointing import get_checkpoint_tracker_filename, saving
from megatron.training.checkpointing.folder import iteration_folder
from megatron.training.checkpointing.run_values import check_same_model
from tests.fuzz.checkpoint_damage import vouch
from tests.unit_tests.training.small_run import SmallRun


def assert_equal(a, b, *, but=()):
    assert a.keys() == b.keys()
    different = {name for name in a if not torch.equal(a[name], b[name])}
    assert different == set(but)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("step", [0, 1, 3])
def test_resume_at_any_step_continues_bit_for_bit(tmp_path, dtype, step):
    whole = SmallRun(dtype=dtype).train(step)
    folder = whole.save(tmp_path)
    expected = whole.train(4).snapshot()
    resumed = SmallRun(dtype=dtype)
    random.gauss(0, 1), numpy.random.normal()  # the generators' states differ from the saved run
    assert resumed.load(tmp_path) == step
    assert_equal(resumed.train(4).snapshot(), expected)
    assert folder == tmp_path / f"iter_{step:07d}"
    assert get_checkpoint_tracker_filename(str(tmp_path)) == str(tmp_path / "latest_checkpointed_iteration.txt")
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == str(step)


def test_finetune_takes_weights_alone(tmp_path):
    saved = SmallRun().train(3)
    saved.save(tmp_path)
    fresh, expected = SmallRun(), SmallRun().snapshot()
    assert fresh.load(tmp_path, finetune=True) == 0
    weights = list(saved.model.state_dict())
    seed_all(1)
    SmallRun()
    for name, value in fresh.snapshot().items():
        assert torch.equal(value, saved.snapshot()[name] if name in weights else expected[name]), name


def test_weights_alone_may_change_precision_and_the_masters_follow(tmp_path):
    saved = SmallRun().train(3)
    saved.save(tmp_path)
    low = SmallRun(dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="--bf16 is on here, off in the checkpoint; use --no-load-optim or --finetune"):
        low.load(tmp_path)
    assert low.load(tmp_path, no_load_optim=True) == 3
    weight = saved.model.module[0].weight.bfloat16()
    masters = low.optimizer_tensors()
    assert torch.equal(low.model.module[0].weight, weight)
    assert torch.equal(masters["optimizer.fp32_param.0.weight"], weight.float())


def test_what_was_not_saved_must_not_be_asked_for(tmp_path):
    saved = SmallRun().train(2)
    saved.save(tmp_path, no_save_optim=True, no_save_rng=True)
    assert not [key for key in list_tensors(tmp_path / "iter_0000002") if key.startswith(("optimizer.", "rng."))]
    with pytest.raises(ValueError, match="no optimizer state: add --no-load-optim"):
        SmallRun().load(tmp_path)
    with pytest.raises(ValueError, match="no rng state: add --no-load-rng"):
        SmallRun().load(tmp_path, no_load_optim=True)
    assert SmallRun().load(tmp_path, no_load_optim=True, no_load_rng=True) == 2


def test_a_schedule_is_adopted_without_the_optimizer_or_the_flag_is_refused(tmp_path, capsys):
    SmallRun().train(3).save(tmp_path / "whole")
    SmallRun().train(3).save(tmp_path / "weights", no_save_optim=True)
    adopts = {"use_checkpoint_opt_param_scheduler": True}
    run = SmallRun(**adopts)
    assert run.load(tmp_path / "whole", no_load_optim=True) == 3
    assert run.scheduler.num_steps == 12 and run.optimizer.state_dict()["step"] == 0
    with pytest.raises(ValueError, match="the checkpoint has no schedule"):
        SmallRun(**adopts).load(tmp_path / "weights", no_load_optim=True)
    with pytest.raises(ValueError, match="training starts at iteration 0, where the checkpoint's schedule cannot"):
        SmallRun(**adopts).load(tmp_path / "whole", finetune=True)
    run = SmallRun(**adopts)
    assert run.load(tmp_path / "own", pretrained_checkpoint=str(tmp_path / "whole")) == 0
    assert run.scheduler.num_steps == 0  # the first start of a command that adopts the schedule when it resumes
    capsys.readouterr()
    run = SmallRun()
    run.load(tmp_path / "whole", no_load_optim=True)
    assert run.scheduler.num_steps == 0
    assert "note: the schedules of learning rate and weight decay start at step 0" in capsys.readouterr().out


def test_a_step_schedule_of_an_older_version_is_named_with_the_factor(tmp_path, capsys):
    flags = {"step_batch_size_schedule": "0:2 256:4", "seq_length": 128}
    for name, removed, added in (
        ("newer", (), {}),
        ("older", ("data_order",), {}),
        ("converted from Megatron-LM", ("data_order",), {"origin": "megatron"}),
    ):
        SmallRun(**flags).train(3).save(tmp_path / name)
        path = iteration_folder(tmp_path / name, 3) / "common.json"
        common = json.loads(path.read_text()) | added
        common["train_state"] = {key: value for key, value in common["train_state"].items() if key not in removed}
        path.write_text(json.dumps(common))
        vouch(path.parent)
        capsys.readouterr()
        loaded = SmallRun(**flags)
        assert loaded.load(tmp_path / name) == 3
        said = "multiply thresholds without a suffix by --seq-length (128)" in capsys.readouterr().out
        assert said == (name == "older"), name
        # The older meaning of the schedule does not give the order of the data.
        assert (loaded.state.data_order is None) == said


STYLES = {
    "linear": {"lr_decay_style": "linear"},
    "cosine": {"lr_decay_style": "cosine"},
    "constant": {"lr_decay_style": "constant"},
    "short WSD": {"lr_decay_style": "WSD", "wsd_decay_steps": 10, "lr_wsd_decay_style": "linear"},
    "long WSD": {"lr_decay_style": "WSD", "wsd_decay_steps": 18, "lr_wsd_decay_style": "cosine"},
    "WSD by roots": {"lr_decay_style": "WSD", "wsd_decay_steps": 16, "lr_wsd_decay_style": "minus_sqrt"},
}


def rate(style, step):
    """Returns the learning rate of a schedule of 20 steps to 0, after 2 steps of warm-up to 0.1."""
    if step < 2:
        return 0.05 * step
    share = {
        "linear": 1 - (step - 2) / 18,
        "cosine": (1 + math.cos(math.pi * (step - 2) / 18)) / 2,
        "constant": 1,
        "short WSD": min(1, (20 - step) / 10),
        "long WSD": (1 + math.cos(math.pi * max(0, step - 2) / 18)) / 2,
        "WSD by roots": 1 - math.sqrt(max(0, step - 4) / 16),
    }
    return 0.1 * share[style]


def run_of(style, **flags):
    run = SmallRun(use_checkpoint_opt_param_scheduler=flags.get("use_checkpoint_opt_param_scheduler", False))
    decay = {"start_wd": 0.1, "end_wd": 0.1, "wd_incr_steps": 20, "wd_incr_style": "constant"}
    steps = {"init_lr": 0.0, "max_lr": 0.1, "min_lr": 0.0, "lr_warmup_steps": 2, "lr_decay_steps": 20}
    policy = {"use_checkpoint_opt_param_scheduler": False, "override_opt_param_scheduler": False, **flags}
    run.scheduler = OptimizerParamScheduler(run.optimizer, **decay, **steps, **STYLES[style], **policy)
    return run


@pytest.mark.parametrize("no_load_optim", [False, True])
@pytest.mark.parametrize("flag", [None, "use_checkpoint_opt_param_scheduler", "override_opt_param_scheduler"])
@pytest.mark.parametrize(
    "stored, given",
    [
        ("short WSD", "short WSD"),
        ("short WSD", "linear"),
        ("long WSD", "short WSD"),
        ("WSD by roots", "constant"),
        ("cosine", "WSD by roots"),
        ("linear", "long WSD"),
    ],
)
def test_rates_after_a_resume_follow_the_schedule_that_the_flags_choose(stored, given, flag, no_load_optim, tmp_path):
    """The stored run ends after 12 samples, where each of the schedules but the constant one has begun to decay."""
    run_of(stored).train(3).save(tmp_path)
    run = run_of(given, **({} if flag is None else {flag: True}))
    if flag is None and stored != given and not no_load_optim:
        with pytest.raises(ValueError, match="the learning-rate schedule differs from the checkpoint's"):
            run.load(tmp_path)
        return
    assert run.load(tmp_path, no_load_optim=no_load_optim) == 3
    adopts = flag == "use_checkpoint_opt_param_scheduler"
    style, start = stored if adopts else given, 0 if no_load_optim and not adopts else 12
    found = []
    for _ in range(2):
        found.append(run.optimizer.param_groups[0]["lr"])
        run.train(1)
    assert found == pytest.approx([rate(style, start), rate(style, start + 4)], abs=1e-12)


def test_settings_that_changed_are_named(tmp_path, capsys):
    SmallRun(adam_beta2=0.95, clip_grad=1.0, adam_eps=1e-8).train(1).save(tmp_path)
    capsys.readouterr()
    SmallRun(adam_beta2=0.99, clip_grad=0.5, adam_eps=1e-8).load(tmp_path)
    assert (
        "note: this run has other settings than the checkpoint's run: --adam-beta2 is 0.99 here, 0.95 in the "
        "checkpoint, --clip-grad is 0.5 here, 1.0 in the checkpoint\n"
    ) in capsys.readouterr().out


@pytest.mark.parametrize("before, after", [(["0.weight"], []), ([], ["0.weight"]), (["0.weight"], ["2.bias"])])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parameters_may_be_frozen_and_thawed_between_runs(tmp_path, before, after, dtype, capsys):
    saved = SmallRun(dtype=dtype, frozen=before).train(3)
    saved.save(tmp_path)
    resumed = SmallRun(dtype=dtype, frozen=after)
    assert resumed.load(tmp_path) == 3
    expected, loaded = saved.snapshot(), resumed.snapshot()
    for name in loaded.keys() & expected.keys() - {"draws"}:
        assert torch.equal(loaded[name], expected[name]), name
    for name in loaded.keys() - expected.keys():
        fresh = expected[before[0]].float() if "fp32_param" in name else torch.zeros(())
        assert (loaded[name] == fresh).all(), name
    assert ("start with fresh optimizer state" in capsys.readouterr().out) == bool(set(before) - set(after))


def test_another_model_is_named_by_its_arguments_before_any_tensor(tmp_path):
    SmallRun().train(1).save(tmp_path)
    other = SmallRun(hidden_size=64, swiglu=True)
    before = other.snapshot()
    with pytest.raises(ValueError) as error:
        other.load(tmp_path)
    assert "--hidden-size is 64 here, 8 in the checkpoint, --swiglu is on here, off in the checkpoint" in str(
        error.value
    )
    assert_equal(other.snapshot(), before, but=["draws"])


@pytest.mark.parametrize(
    ("other", "advice"),
    [
        ({"hidden_size": 16}, "; --use-checkpoint-args adopts the checkpoint's values$"),
        (
            {"unpadded_vocab_size": 5},
            "vocabulary is 5 here, 9 in the checkpoint; use the tokenizer of the checkpoint's run$",
        ),
        (
            {"hidden_size": 16, "unpadded_vocab_size": 5},
            "--use-checkpoint-args .* and use the tokenizer of the checkpoint's run$",
        ),
    ],
)
def test_another_model_comes_with_the_advice_that_helps(other, advice):
    stored = {"hidden_size": 8, "unpadded_vocab_size": 9}
    with pytest.raises(ValueError, match=advice):
        check_same_model(stored | other, stored)


def test_a_folder_without_checkpoints_starts_from_scratch_and_says_so(tmp_path, capsys):
    run = SmallRun()
    before = run.snapshot()
    assert run.load(tmp_path / "new") == 0
    assert_equal(run.snapshot(), before, but=["draws"])
    assert capsys.readouterr().out == f"No checkpoint found in {tmp_path}/new: starting from scratch.\n"
    with pytest.raises(ValueError, match="--exit-on-missing-checkpoint: no checkpoint found"):
        run.load(tmp_path / "new", exit_on_missing_checkpoint=True)
    assert not (tmp_path / "new").exists()


def test_a_save_cleans_up_after_killed_ones_and_leaves_everything_else(tmp_path):
    names = ["iter_0000001.incomplete-0123456789ab", "iter_0000001.incomplete-mine", "notes"]
    for name in names:
        (tmp_path / name).mkdir()
    SmallRun().train(2).save(tmp_path)
    assert sorted(os.listdir(tmp_path)) == sorted([*names[1:], "iter_0000002", "latest_checkpointed_iteration.txt"])


def test_where_the_tracker_cannot_be_written_the_checkpoint_that_it_names_stays(tmp_path, monkeypatch):
    run = SmallRun().train(1)
    run.save(tmp_path, save_retain_interval=100)
    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
        full = OSError(errno.ENOSPC, "No space left on device")
        patch.setattr(saving, "write_tracker", Mock(side_effect=full))
        run.train(1).save(tmp_path, save_retain_interval=100)
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "1"
    assert (tmp_path / "iter_0000001").exists() and SmallRun().load(tmp_path) == 1
    run.train(1).save(tmp_path, save_retain_interval=100)
    assert not (tmp_path / "iter_0000001").exists() and SmallRun().load(tmp_path) == 3


def test_a_run_that_only_evaluates_needs_no_optimizer(tmp_path):
    SmallRun().train(2).save(tmp_path)
    run = SmallRun(dtype=torch.bfloat16)
    run.optimizer = run.scheduler = None
    assert run.load(tmp_path) == 2


def test_saving_prints_nothing_and_loading_what_it_took(tmp_path, capfd):
    SmallRun().train(1).save(tmp_path)
    assert capfd.readouterr() == ("", "")
    SmallRun().load(tmp_path)
    loaded = f"  successfully loaded checkpoint from {tmp_path} at iteration 1"
    assert capfd.readouterr() == (f"{loaded}\n", "")
    SmallRun().load(tmp_path, finetune=True)
    assert capfd.readouterr() == (f"{loaded}: weights only, training starts at iteration 0\n", "")


def test_a_run_that_goes_on_from_an_earlier_step_of_its_folder_has_that_as_the_latest(tmp_path):
    run = SmallRun().train(2)
    run.save(tmp_path)
    run.train(2).save(tmp_path)
    # A run that saves elsewhere, and one that only evaluates, leave the tracker unchanged.
    for other in ({"save": str(tmp_path / "other")}, {}):
        assert SmallRun().load(tmp_path, ckpt_step=2, **other) == 2 and SmallRun().load(tmp_path) == 4
    assert SmallRun().load(tmp_path, ckpt_step=2, save=str(tmp_path)) == 2
    # As after a restart or a rollback.
    assert SmallRun().load(tmp_path) == 2
