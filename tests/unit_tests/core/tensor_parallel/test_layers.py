"""Linear and embedding layers in a group of one rank: values, biases and initialization."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    linear_with_frozen_weight,
    linear_with_grad_accumulation_and_async_allreduce,
    set_defaults_if_not_set_tensor_model_parallel_attributes,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.param_attributes import param_facts
from megatron.core.tensor_parallel.utils import split_tensor_along_last_dim
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


def test_a_frozen_weight_gets_no_gradient_and_its_input_and_bias_do() -> None:
    x, weight, bias = (torch.randn(*shape, requires_grad=True) for shape in ((3, 2, 6), (4, 6), (4,)))
    output = linear_with_frozen_weight(x, weight, bias, False, True, False, None)
    torch.testing.assert_close(output, F.linear(x, weight, bias))
    output.square().sum().backward()
    expected = torch.autograd.grad(F.linear(x, weight, bias).square().sum(), [x, bias])
    assert weight.grad is None
    torch.testing.assert_close([x.grad, bias.grad], list(expected))
    with pytest.raises(ValueError, match="output_dtype is torch.float64"):
        linear_with_frozen_weight(x, weight, bias, False, True, False, None, output_dtype=torch.float64)
    with pytest.raises(ValueError, match="gtp_remat_size is 2"):
        linear_with_grad_accumulation_and_async_allreduce(x, weight, bias, False, False, False, gtp_remat_size=2)


def test_linear_layers_show_their_sizes_and_refuse_what_they_do_not_have() -> None:
    config = small_config()
    layer = ColumnParallelLinear(
        6,
        4,
        config=config,
        init_method=nn.init.normal_,
        stride=2,
        keep_master_weight_for_test=True,
        tp_comm_buffer_name="fc1",
        name="decoder.fc1",
    )
    assert "in_features=6, out_features=4, bias=True, TP=1" in repr(layer)
    assert torch.equal(layer.master_weight, layer.weight) and param_facts(layer.weight).partition_stride == 2
    assert list(dict(layer.named_buffers())) == [] and "master_weight" not in layer.state_dict()
    for wrong in ({"output_dtype": torch.float32}, {"grad_output_buffer": []}, {"embedding_activation_buffer": []}):
        with pytest.raises(ValueError, match=f"ColumnParallelLinear: {next(iter(wrong))} is"):
            ColumnParallelLinear(6, 4, config=config, init_method=nn.init.normal_, **wrong)


def test_marks_of_split_tensors() -> None:
    plain, split = torch.zeros(2), torch.zeros(2)
    set_tensor_model_parallel_attributes(split, True, 0, 2)
    for tensor in (plain, split):
        set_defaults_if_not_set_tensor_model_parallel_attributes(tensor)
    assert (plain.tensor_model_parallel, plain.partition_dim, plain.partition_stride) == (False, -1, 1)
    assert (split.tensor_model_parallel, split.partition_dim, split.partition_stride) == (True, 0, 2)


def test_parts_of_a_tensor() -> None:
    x = torch.arange(12.0).view(2, 6)
    parts = split_tensor_along_last_dim(x, 3, contiguous_split_chunks=True)
    assert [part.tolist() for part in parts] == [[[0, 1], [6, 7]], [[2, 3], [8, 9]], [[4, 5], [10, 11]]]
    assert all(part.is_contiguous() for part in parts)
    assert split_tensor_along_last_dim(x, 3)[1].untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
