"""Numbers of layers in each pipeline part, and errors for settings that do not add up to all layers."""

from typing import Any

import pytest

from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.transformer.pipeline_split import (
    layer_offset,
    layers_per_part,
    num_parts_in_layout,
    validate_pipeline_split,
)


def config_of(stages: int, chunks: int | None = None, **fields: Any) -> ModelParallelConfig:
    config = ModelParallelConfig(**fields)
    # Set after validation, because this test does not depend on the available parallel sizes.
    config.pipeline_model_parallel_size, config.virtual_pipeline_model_parallel_size = stages, chunks
    return config


@pytest.mark.parametrize(
    ("stages", "chunks", "fields", "counts"),
    [
        (1, None, {}, [8]),
        (4, None, {}, [2, 2, 2, 2]),
        (2, 2, {}, [2, 2, 2, 2]),
        (3, None, {"account_for_embedding_in_pipeline_split": True}, [2, 3, 3]),
        (
            5,
            None,
            {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True},
            [1] + 3 * [2] + [1],
        ),
        (3, None, {"num_layers_in_first_pipeline_stage": 2}, [2, 3, 3]),
        (4, None, {"num_layers_in_first_pipeline_stage": 1, "num_layers_in_last_pipeline_stage": 3}, [1, 2, 2, 3]),
        (2, None, {"num_layers_in_first_pipeline_stage": 3, "num_layers_in_last_pipeline_stage": 5}, [3, 5]),
        (2, 2, {"num_layers_in_last_pipeline_stage": 2}, [3, 1, 3, 1]),
        (2, 2, {"pipeline_model_parallel_layout": "Et*3|(tt|)*2tL"}, [3, 2, 2, 1]),
        (2, 2, {"pipeline_model_parallel_layout": "E|(t*4|)*2,L"}, [0, 4, 4, 0]),
        (2, 2, {"pipeline_model_parallel_layout": "E|t*8||L"}, [0, 8, 0, 0]),
        (2, None, {"pipeline_model_parallel_layout": "E(t(t)*2)*2 | ttL"}, [6, 2]),
    ],
)
def test_layers_are_spread_as_the_settings_say(
    stages: int, chunks: int | None, fields: dict[str, Any], counts: list[int]
) -> None:
    found = layers_per_part(config_of(stages, chunks, **fields), num_layers=8)
    assert found == counts
    assert [layer_offset(found, part) for part in range(len(counts))] == [sum(counts[:n]) for n in range(len(counts))]


@pytest.mark.parametrize(
    ("stages", "fields", "message"),
    [
        (3, {}, r"num_layers is 8: must be a multiple of pipeline_model_parallel_size \(3\)"),
        (2, {"account_for_loss_in_pipeline_split": True}, r"num_layers is 8 \+ 1 \(account_for_loss_in"),
        (1, {"num_layers_in_first_pipeline_stage": 8}, "require a pipeline_model_parallel_size of at least 2"),
        (3, {"num_layers_in_last_pipeline_stage": 3}, "with 3 in stage 2 .* 5 are left for 2 other stages"),
        (2, {"num_layers_in_last_pipeline_stage": 9}, "-1 are left for 1 other stages"),
        (2, {"pipeline_model_parallel_layout": "Et*8L"}, "with 1 stages: must have .* x virtual stages \\(2\\)"),
        (2, {"pipeline_model_parallel_layout": "Et*3|ttL"}, r"with 5 layers \(t\): must be num_layers \(8\)"),
        (2, {"pipeline_model_parallel_layout": "Et*4m|t*4L"}, r"multi-token prediction \(m\) directly before"),
        (2, {"pipeline_model_parallel_layout": "Et|xL"}, "'x' is not allowed"),
        (2, {"pipeline_model_parallel_layout": "t*4E|t*4L"}, "must begin with the embedding"),
        (2, {"pipeline_model_parallel_layout": "Ett|(tt|L"}, "unbalanced parentheses"),
        (2, {"pipeline_model_parallel_layout": "[['embedding', 'decoder'], ['loss']]"}, "lists are not supported"),
        (2, {"microbatch_group_size_per_vp_stage": 1}, "microbatch_group_size_per_vp_stage is 1: must be at least"),
        (2, {"pipeline_model_parallel_layout": "Et*4|t*4L", "num_layers_in_last_pipeline_stage": 4}, "remove the"),
    ],
)
def test_settings_that_do_not_fit_are_refused(stages: int, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        validate_pipeline_split(config_of(stages, **fields), num_layers=8)


def test_a_layout_of_nothing_but_repetition_is_refused() -> None:
    with pytest.raises(ValueError, match="too many repetitions"):
        num_parts_in_layout("E(t*1000)*1000L")
