"""Forms of configuration values that Megatron-LM scripts pass."""

import copy
from typing import Any

import pytest
import torch

from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import TransformerConfig


@pytest.mark.parametrize(
    ("given", "held"),
    [
        ({"params_dtype": "bf16"}, {"params_dtype": torch.bfloat16}),
        ({"params_dtype": "float16", "pipeline_dtype": "float16"}, {"pipeline_dtype": torch.float16}),
        ({"cuda_graph_modules": "full"}, {"cuda_graph_modules": []}),
        ({"cuda_graph_modules": None}, {"cuda_graph_modules": []}),
        ({"cuda_graph_modules": "attn"}, {"cuda_graph_modules": ["attn"]}),
        (
            {
                "pipeline_model_parallel_layout": [["embedding", "decoder"], ["decoder", "loss"]],
                "pipeline_model_parallel_size": 2,
            },
            {"pipeline_model_parallel_layout": "Et|tL"},
        ),
    ],
)
def test_forms_that_scripts_of_megatron_give_mean_ours(given: dict[str, Any], held: dict[str, Any]) -> None:
    config = TransformerConfig(num_layers=2, hidden_size=16, num_attention_heads=4, **given)
    assert {name: vars(config)[name] for name in held} == held


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"params_dtype": "int8"}, "params_dtype is 'int8': must be a torch dtype, or one of fp32, "),
        ({"pipeline_dtype": 3}, "pipeline_dtype is 3: must be a torch dtype"),
        (
            {"pipeline_model_parallel_layout": [["decoder", "x"]]},
            "contains 'x': must consist of lists of embedding, decoder, mtp, loss",
        ),
        ({"pipeline_model_parallel_layout": 7}, "pipeline_model_parallel_layout is 7: must be letters"),
    ],
)
def test_unknown_names_in_such_forms_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TransformerConfig(num_layers=2, hidden_size=16, num_attention_heads=4, **given)


def test_copies_of_a_configuration_are_equal() -> None:
    config = TransformerConfig(num_layers=2, hidden_size=16, num_attention_heads=4)
    assert copy.deepcopy(config) == config
    assert copy.deepcopy(OptimizerConfig(lr=0.1)) == OptimizerConfig(lr=0.1)
