"""The checkpoint that --load selects, and the check that --save is writable."""

import os
import re

import pytest

from megatron.core.dist_checkpointing import save_items
from megatron.training.checkpointing.folder import (
    check_save_folder,
    clean_save_folder,
    complete_iterations,
    find_checkpoint,
    iteration_folder,
    prune,
    refuse_checkpoints_of_another_run,
    write_tracker,
)
from megatron.training.checkpointing.run_values import load_args_from_checkpoint, load_run_values, model_arguments


def make(folder, *iterations):
    for iteration in iterations:
        save_items([], iteration_folder(folder, iteration), common={"iteration": iteration})


def found_iteration(folder, **step):
    found = find_checkpoint(str(folder), **step)
    return None if found is None else found.iteration


def test_the_tracker_decides_and_a_step_overrules_it(tmp_path):
    make(tmp_path, 5, 10, 15, 12345678)
    write_tracker(str(tmp_path), 10)
    assert found_iteration(tmp_path) == 10
    assert found_iteration(tmp_path, step=5) == 5
    assert found_iteration(tmp_path, step=12345678) == 12345678


def test_without_tracker_the_newest_complete_one_is_taken_and_named(tmp_path):
    assert found_iteration(tmp_path) is None
    make(tmp_path, 5, 10)
    (tmp_path / "iter_0000020").mkdir()
    found = find_checkpoint(str(tmp_path))
    assert found is not None and found.iteration == 10 and "loading iteration 10" in (found.notice or "")


def test_release_is_iteration_zero(tmp_path):
    save_items([], tmp_path / "release", common={})
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("release\n")
    found = find_checkpoint(str(tmp_path))
    assert found is not None and found.is_release and found.iteration == 0


@pytest.mark.parametrize(
    "text, message",
    [
        ("15", r"txt names iteration 15: checkpoint .*0000015 does not exist; .*common.json is truncated"),
        ("20", r"0000020 is not a complete checkpoint: it has no manifest.json; .*"),
        ("10", r"names iteration 10: .*common.json is truncated or changed"),
        (
            "-5",
            "holds '-5': must be an iteration number or 'release'; .*common.json is truncated",
        ),
        ("", "holds '': must be"),
        ("\u0665", "must be an iteration number"),
        ("9" * 5000, "holds '9999999999999999999999999999999999999999': must be"),
    ],
)
def test_instead_of_what_is_not_whole_the_newest_complete_one_is_taken_and_named(tmp_path, text, message):
    make(tmp_path, 5, 10)
    (tmp_path / "iter_0000010" / "common.json").write_text("{")
    (tmp_path / "iter_0000020").mkdir()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text(text)
    found = find_checkpoint(str(tmp_path))
    assert found is not None and found.iteration == 5
    assert re.search(f"{message}.*: loading iteration 5 instead, the newest complete checkpoint$", found.notice)
    with pytest.raises(ValueError, match=f"{message}.*iter_0000005 is on a bad disk; complete iterations: none"):
        find_checkpoint(str(tmp_path), damaged={5: "iter_0000005 is on a bad disk"})
    with pytest.raises(ValueError, match="--ckpt-step is 20: .*not a complete checkpoint"):
        find_checkpoint(str(tmp_path), step=20)


def test_a_tracker_that_was_set_back_is_heeded_also_where_its_checkpoint_is_damaged(tmp_path):
    make(tmp_path, 5, 10, 15)
    write_tracker(str(tmp_path), 10)
    found = find_checkpoint(str(tmp_path), damaged={10: "is damaged"})
    assert found is not None and found.iteration == 5
    assert find_checkpoint(str(tmp_path), damaged={10: "is damaged", 5: "too"}).iteration == 15


@pytest.mark.parametrize("text", ["10", "release"])
def test_what_a_tracker_names_is_never_replaced_by_a_start_from_scratch(tmp_path, text):
    (tmp_path / "latest_checkpointed_iteration.txt").write_text(text)
    with pytest.raises(ValueError, match="does not exist"):
        find_checkpoint(str(tmp_path))


def test_old_checkpoints_go_but_for_those_at_the_interval_and_the_latest(tmp_path):
    make(tmp_path, 5, 10, 15, 20, 25, 30)
    prune(str(tmp_path), latest=25, interval=None)
    assert complete_iterations(tmp_path) == [5, 10, 15, 20, 25, 30]
    prune(str(tmp_path), latest=25, interval=10)
    assert complete_iterations(tmp_path) == [10, 20, 25, 30]
    assert sorted(os.listdir(tmp_path))[0] == "iter_0000010"


def test_a_checkpoint_that_a_killed_replacement_left_aside_is_one(tmp_path):
    make(tmp_path, 5, 10)
    os.rename(tmp_path / "iter_0000005", tmp_path / "iter_0000005.replaced-0123456789ab")
    write_tracker(str(tmp_path), 10)
    assert complete_iterations(tmp_path) == [5, 10]
    found = find_checkpoint(str(tmp_path), damaged={10: "is damaged"})
    assert found.iteration == 5 and found.path.is_dir()
    prune(str(tmp_path), latest=10, interval=100)
    assert sorted(os.listdir(tmp_path)) == ["iter_0000010", "latest_checkpointed_iteration.txt"]


def test_a_wrong_step_or_folder_says_what_would_be_right(tmp_path):
    make(tmp_path, 5)
    with pytest.raises(ValueError, match="--ckpt-step is 6: .* complete iterations: 5"):
        find_checkpoint(str(tmp_path), step=6)
    with pytest.raises(ValueError, match="is a single checkpoint: give its parent folder"):
        find_checkpoint(str(tmp_path / "iter_0000005"))
    with pytest.raises(ValueError, match="not of a training run"):
        load_run_values(tmp_path / "iter_0000005")


def test_check_save_folder_makes_it_and_leaves_nothing(tmp_path):
    check_save_folder(str(tmp_path / "a" / "b"))
    assert os.listdir(tmp_path / "a" / "b") == []
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below", "/proc/nothing"):
        with pytest.raises(ValueError, match=f"--save {path} cannot be written"):
            check_save_folder(str(path))


def test_clean_up_keeps_checkpoints_and_foreign_names(tmp_path):
    make(tmp_path, 5)
    kept = ["iter_0000005", "other.incomplete-0123456789ab"]
    (tmp_path / kept[1]).mkdir()
    for name in ("latest_checkpointed_iteration.txt", "probe"):
        (tmp_path / f"{name}.incomplete-0123456789ab").write_text("")
    clean_save_folder(str(tmp_path))
    assert sorted(os.listdir(tmp_path)) == kept


def test_a_new_run_does_not_overwrite_another_ones_checkpoints(tmp_path):
    save, link = str(tmp_path), tmp_path.with_name("link")
    refuse_checkpoints_of_another_run(save, continued_from=None)
    make(tmp_path, 5)
    for other in (None, str(tmp_path / "elsewhere")):
        with pytest.raises(ValueError, match=f"--save {save} holds .* iteration 5: continue it with --load {save}"):
            refuse_checkpoints_of_another_run(save, continued_from=other)
    link.symlink_to(tmp_path)
    refuse_checkpoints_of_another_run(save, continued_from=str(link))


class Args:
    """Parsed arguments."""

    def __init__(self, **values):
        vars(self).update(values)


def test_model_shape_comes_from_the_checkpoint_and_nothing_else_does(tmp_path):
    stored = {"num_layers": 3, "hidden_size": 96, "moe_layer_freq": [0, 1, 1], "micro_batch_size": 64, "lr": 1.0}
    contents = {"optimizer": False, "rng": False}
    run = {"iteration": 5, "args": stored, "train_state": {}, "contents": contents, "frozen": []}
    save_items([], iteration_folder(tmp_path, 5), common=run)
    args = Args(
        load=str(tmp_path),
        pretrained_checkpoint=None,
        ckpt_step=None,
        num_layers=None,
        hidden_size=8,
        micro_batch_size=2,
        lr=0.1,
    )
    load_args_from_checkpoint(args)
    assert (args.num_layers, args.hidden_size, args.moe_layer_freq) == (3, 96, [0, 1, 1])
    assert (args.micro_batch_size, args.lr) == (2, 0.1)
    # Load balancing is a choice of the run, except for sinkhorn, which also determines the weights of experts.
    plain, sinkhorn = ({"moe_router_load_balancing_type": kind} for kind in ("aux_loss", ["sinkhorn"]))
    assert [model_arguments(plain, here=here) for here in ({}, sinkhorn)] == [{}, plain]
    assert [model_arguments(sinkhorn, here=here) for here in (plain, sinkhorn)] == [sinkhorn, {}]
    with pytest.raises(ValueError, match="--use-checkpoint-args: no checkpoint found in --load"):
        load_args_from_checkpoint(Args(load=str(tmp_path / "empty"), pretrained_checkpoint=None, ckpt_step=None))


def test_adapters_that_a_run_begins_stay_beside_the_arguments_of_a_checkpoint_without_any() -> None:
    asked = {"lora_rank": 4, "lora_alpha": 8, "lora_target_modules": ["linear_qkv"]}
    plain = {"lora_rank": None, "lora_alpha": 32, "lora_target_modules": ["linear_fc1"], "hidden_size": 64}
    assert model_arguments(plain, here=asked) == {"hidden_size": 64}
    other = {**plain, "lora_rank": 16}
    assert model_arguments(other, here=asked) == other and model_arguments(plain, here=plain) == plain


def test_experts_that_a_run_makes_of_a_dense_checkpoint_stay_beside_its_arguments() -> None:
    asked = {"moe_use_upcycling": True, "num_experts": 4, "moe_ffn_hidden_size": 16}
    dense = {"num_experts": None, "moe_ffn_hidden_size": None, "hidden_size": 64}
    assert model_arguments(dense, here=asked) == {"hidden_size": 64}
    assert model_arguments(dense, here={**asked, "moe_use_upcycling": False}) == dense
    experts = {**dense, "num_experts": 8, "moe_ffn_hidden_size": 16}
    assert model_arguments(experts, here=asked) == experts


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (
            [".metadata", "__0_0.distcp"],
            "torch.distributed.checkpoint alone, .*fsdp_dtensor.*is not read",
        ),
        (["metadata.json", ".metadata"], "is in Megatron-Core's torch_dist format: choose it with --ckpt-step 7"),
        (["mp_rank_00/model_optim_rng.pt"], "is in Megatron's older format .*: choose it with --ckpt-step 7"),
    ],
)
def test_a_folder_of_another_format_is_never_a_start_from_scratch(tmp_path, names, message):
    for name in names:
        path = tmp_path / "iter_0000007" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    # With a tracker, Megatron's formats are found, and others are not complete.
    if "__0_0.distcp" in names:
        (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")
    with pytest.raises(ValueError, match=message):
        find_checkpoint(str(tmp_path))
    if "__0_0.distcp" not in names:
        assert find_checkpoint(str(tmp_path), step=7).path == tmp_path / "iter_0000007"
        with pytest.raises(ValueError, match="is a single checkpoint: give its parent folder"):
            find_checkpoint(str(tmp_path / "iter_0000007"))
