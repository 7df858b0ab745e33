"""Linear and embedding layers of a group of one rank: values, biases and initial values."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from tests.unit_tests.core.models.small_models import small_config

LINEAR = [ColumnParallelLinear, RowParallelLinear]


@pytest.mark.parametrize("layer_class", LINEAR)
@pytest.mark.parametrize("skip_bias_add", [False, True])
def test_linear_layers_agree_with_torch(layer_class: type, skip_bias_add: bool) -> None:
    layer = layer_class(6, 4, config=small_config(), init_method=nn.init.normal_, skip_bias_add=skip_bias_add)
    assert not layer.bias.any()
    layer.bias.data.normal_()
    x = torch.randn(3, 2, 6)
    output, bias = layer(x)
    assert (bias is layer.bias) == skip_bias_add
    torch.testing.assert_close(output, F.linear(x, layer.weight, None if skip_bias_add else layer.bias))


def test_a_layer_without_a_weight_takes_the_callers() -> None:
    layer = ColumnParallelLinear(
        6, 4, config=small_config(), init_method=nn.init.normal_, bias=False, skip_weight_param_allocation=True
    )
    weight, x = torch.randn(4, 6), torch.randn(2, 6)
    assert list(layer.parameters()) == []
    torch.testing.assert_close(layer(x, weight=weight)[0], x @ weight.t())


def test_layers_built_alone_are_initialized() -> None:
    config = small_config()
    for layer in (
        ColumnParallelLinear(64, 64, config=config, init_method=config.init_method),
        VocabParallelEmbedding(64, 64, config=config, init_method=config.init_method),
    ):
        assert layer.weight.std().item() == pytest.approx(0.2, rel=0.1)
    with pytest.raises(ValueError, match=r"ids from 0 to 64: must be from 0 to num_embeddings - 1 \(63\)"):
        layer(torch.tensor([0, 64]))


@pytest.mark.parametrize("kind", LINEAR)
def test_a_plain_model_parallel_config_suffices_for_a_layer(kind: type) -> None:
    layer = kind(6, 8, config=ModelParallelConfig(), init_method=nn.init.ones_)
    assert torch.equal(layer(torch.ones(2, 6))[0], torch.full((2, 8), 6.0))
