"""The JSON part of a training run's checkpoint. Values of the wrong type raise errors with their names."""

import json

import pytest

from megatron.training.checkpointing.folder import iteration_folder
from megatron.training.checkpointing.run_values import load_run_values
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
        ("train_state.learned_sizes.row_bytes", -1),
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
