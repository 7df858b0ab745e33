"""Tests of checks within one configuration class of the training program."""

from typing import Any

import pytest

from megatron.training.config import CheckpointConfig, LoggingConfig, VirtualStagesConfig


@pytest.mark.parametrize(
    ("config_class", "fields", "messages"),
    [
        (
            CheckpointConfig,
            {"finetune": True, "ckpt_step": 0, "use_checkpoint_args": True, "exit_on_missing_checkpoint": True},
            [
                "CheckpointConfig.finetune needs CheckpointConfig.load: give",
                "CheckpointConfig.ckpt_step needs CheckpointConfig.load: give",
                "CheckpointConfig.use_checkpoint_args needs CheckpointConfig.load: give",
                "CheckpointConfig.exit_on_missing_checkpoint needs CheckpointConfig.load: give",
            ],
        ),
        (
            CheckpointConfig,
            {"moe_use_upcycling": True, "save_interval": 5, "async_save": True, "save_retain_interval": 10},
            [
                "CheckpointConfig.moe_use_upcycling needs CheckpointConfig.load: add it",
                "CheckpointConfig.save_interval needs CheckpointConfig.save",
                "CheckpointConfig.async_save needs CheckpointConfig.save",
                "CheckpointConfig.save_retain_interval needs CheckpointConfig.save",
            ],
        ),
        (
            CheckpointConfig,
            {"ckpt_format": "torch", "save": "folder"},
            ["CheckpointConfig.ckpt_format is torch with CheckpointConfig.save folder: that format can only be read"],
        ),
        (
            LoggingConfig,
            {"wandb_project": "project"},
            ["LoggingConfig.wandb_project is project without wandb_exp_name"],
        ),
        (
            VirtualStagesConfig,
            {"num_layers_per_virtual_pipeline_stage": 1, "num_virtual_stages_per_pipeline_rank": 2},
            [
                "VirtualStagesConfig.num_layers_per_virtual_pipeline_stage is 1 and "
                "num_virtual_stages_per_pipeline_rank is 2: give one of them"
            ],
        ),
    ],
)
def test_contradictory_fields_are_reported_together(
    config_class: type[Any], fields: dict[str, Any], messages: list[str]
) -> None:
    with pytest.raises(ValueError) as caught:
        config_class(**fields)
    lines = str(caught.value).splitlines()
    assert len(lines) == len(messages) and all(map(str.startswith, lines, messages)), lines


@pytest.mark.parametrize("folder", ["load", "pretrained_checkpoint"])
def test_settings_of_a_load_are_accepted_with_a_folder(folder: str) -> None:
    fields: dict[str, Any] = {"finetune": True, "ckpt_step": 0, "moe_use_upcycling": True, "ckpt_format": "torch"}
    fields[folder] = "folder"
    assert vars(CheckpointConfig(**fields))[folder] == "folder"
