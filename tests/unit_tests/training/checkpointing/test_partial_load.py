"""Each value of --dist-ckpt-strictness, with keys that exist only in the run or only in the checkpoint."""

import pytest
import torch

from tests.unit_tests.training.small_run import SmallRun


def with_bias(run):
    """Adds a buffer that exists in no other run."""
    run.model.module.register_buffer("later_bias", torch.full((2,), 5.0))
    return run


def load(run, folder, strictness):
    return run.load(folder, dist_ckpt_strictness=strictness)


@pytest.mark.parametrize("strictness", ["assume_ok_unexpected", "raise_unexpected", "raise_all"])
def test_a_lacking_key_is_an_error_by_name(tmp_path, strictness):
    SmallRun().train(1).save(tmp_path)
    with pytest.raises(ValueError, match="later_bias is not in it"):
        load(with_bias(SmallRun()), tmp_path, strictness)


@pytest.mark.parametrize("strictness", ["log_unexpected", "log_all", "ignore_all"])
def test_a_lacking_key_keeps_its_values_and_the_rest_is_loaded(tmp_path, strictness, capsys):
    saved = SmallRun().train(2)
    saved.save(tmp_path)
    run = with_bias(SmallRun())
    assert load(run, tmp_path, strictness) == 2
    snapshot, expected = run.snapshot(), saved.snapshot()
    assert all(torch.equal(snapshot[name], value) for name, value in expected.items() if name != "draws")
    assert (run.model.module.later_bias == 5).all()
    said = "The checkpoint lacks later_bias, " in capsys.readouterr().out
    assert said == (strictness != "ignore_all")


def test_a_lacking_parameter_starts_with_fresh_state(tmp_path, capsys):
    saved = SmallRun().train(2)
    saved.save(tmp_path)
    fresh = SmallRun(more=[torch.nn.Linear(3, 3)])
    weight = fresh.model.module[3].weight.detach().clone()
    assert load(fresh, tmp_path, "log_unexpected") == 2
    state = fresh.optimizer_tensors()
    assert torch.equal(fresh.model.module[3].weight, weight)
    assert (state["optimizer.exp_avg.3.weight"] == 0).all() and (state["optimizer.exp_avg.2.weight"] != 0).any()
    assert "lacks 3.bias, 3.weight, optimizer.exp_avg.3.bias" in capsys.readouterr().out


@pytest.mark.parametrize("strictness", ["log_unexpected", "log_all", "raise_all", "ignore_all"])
def test_a_key_that_nothing_takes_is_said_or_refused(tmp_path, strictness, capsys):
    with_bias(SmallRun()).train(1).save(tmp_path)
    if strictness == "raise_all":
        with pytest.raises(ValueError, match="raise_all: this run does not use later_bias of the checkpoint"):
            load(SmallRun(), tmp_path, strictness)
    else:
        assert load(SmallRun(), tmp_path, strictness) == 1
    said = "This run does not use later_bias of the checkpoint." in capsys.readouterr().out
    assert said == (strictness == "log_all")


def test_state_that_is_left_out_on_purpose_is_not_unused(tmp_path):
    SmallRun().train(1).save(tmp_path)
    assert SmallRun().load(tmp_path, dist_ckpt_strictness="raise_all", finetune=True) == 0
    assert SmallRun().load(tmp_path, dist_ckpt_strictness="raise_all") == 1
