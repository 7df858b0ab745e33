"""Parameters and gradients in flat tensors: views, hooks and accumulation."""

from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron.core.device import Writers
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.bucket_storage import BufferSettings
from megatron.core.distributed.param_and_grad_buffer import (  # plug-ins of users import from this path
    BufferKind,
    _ParamAndGradBucketGroup,
    _ParamAndGradBuffer,
    buffer_kind,
    partition_buckets,
    shard_buffer,
)
from megatron.core.model_parallel_config import ModelParallelConfig


def buffer_of(model, grad_dtype=torch.float32, **settings):
    named = list(model.named_parameters())
    kind = BufferKind(named[0][1].dtype, grad_dtype, is_expert=False)
    buffer = _ParamAndGradBuffer.of_kind(
        kind, named, settings=BufferSettings(**{"group": None, "bucket_size": None, **settings})
    )
    for bucket in buffer.buckets:
        for slot in bucket.slots:
            slot.param.register_post_accumulate_grad_hook(bucket.grads.accumulate)
    return buffer


def grads(buffer):
    return {slot.name: slot.main_grad for slot in buffer.slots}


def test_parameters_and_gradients_are_views_of_flat_tensors():
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 5))
    values = [param.detach().clone() for param in model.parameters()]
    model[1].weight.shared_embedding = True
    buffer = buffer_of(model, bucket_size=1)
    assert [len(bucket.slots) for bucket in partition_buckets([buffer], force_single_bucket_group=True)[0].buckets] == [
        1
    ] * 4
    last = partition_buckets([buffer])[-1]
    assert [slot.name for slot in last.slots] == ["0.weight"]
    for (name, param), value, slot in zip(model.named_parameters(), values, buffer.slots):
        assert slot.name == name and torch.equal(param, value)
        assert param.data_ptr() == buffer.param_data[slot.span.start].data_ptr()
        assert param.main_grad.data_ptr() == buffer.grad_data[slot.span.start].data_ptr()
    assert [span.numel for span in buffer.owned_spans()] == [128] * 4


def test_buffers_and_buckets_have_what_megatrons_users_read():
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 5)).bfloat16()
    buffer = buffer_of(model, torch.bfloat16, bucket_size=8, scale=0.5, fp32_patterns=("1.bias",))
    first, second = buffer.buckets
    params = dict(model.named_parameters())
    assert buffer.params == list(params.values())
    assert (buffer.param_dtype, buffer.grad_dtype, buffer.gradient_scaling_factor) == (torch.bfloat16,) * 2 + (0.5,)
    assert [[*bucket.params_list] for bucket in buffer.buckets] == [
        [params["1.bias"], params["1.weight"]],
        [params["0.bias"], params["0.weight"]],
    ]
    for number, bucket in enumerate(buffer.buckets):
        assert bucket.bucket_id == number and bucket.gradient_scaling_factor == 0.5
        assert bucket.params == set(bucket.params_list) and bucket.numel_unpadded <= bucket.param_data.numel()
        assert bucket.param_data.data_ptr() == buffer.param_data[bucket.offset :].data_ptr()
        assert bucket.grad_data.data_ptr() == buffer.grad_data[bucket.offset :].data_ptr()
        for param in bucket.params:
            start, end, bucket_id = buffer.param_index_map[param]
            assert bucket.param_index_map[param] == (start, end, bucket_id) and bucket_id == number
            assert torch.equal(buffer.param_data[start:end], param.flatten())
            assert buffer.param_to_bucket[param] is bucket
        start, end = buffer.bucket_indices[number]
        assert (start, end - start) == (bucket.offset, bucket.param_data.numel())
    assert first.params_with_extra_main_grads == [params["1.bias"]] and second.params_with_extra_main_grads == []
    assert buffer.param_to_name == {param: name for name, param in params.items()}
    group = _ParamAndGradBucketGroup([first], name="first")
    assert group.collective_group is buffer.data_parallel_group is None and group.collective_group_size == 1


def test_gradients_of_a_buffer_are_scaled_and_zeroed_in_place():
    model = nn.Linear(3, 2).bfloat16()
    buffer = buffer_of(model, torch.bfloat16, fp32_patterns=("weight",))
    model(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
    buffer.scale_gradients(2.0)
    assert all(torch.equal(grad, torch.full_like(grad, 2.0)) for grad in grads(buffer).values())
    buffer.reset()
    assert not any(grad.any() for grad in grads(buffer).values()) and not buffer.grad_data.any()


def test_gradients_of_microbatches_add_up_until_cleared():
    model = nn.Linear(3, 2)
    buffer = buffer_of(model)
    for _ in range(2):
        buffer.reset()
        for value in (1.0, 2.0, 4.0):
            model(torch.full((1, 3), value)).sum().backward()
        assert torch.equal(grads(buffer)["weight"], torch.full((2, 3), 7.0))
        assert all(param.grad is None for param in model.parameters())


def test_sixteen_bit_gradients_are_scaled_and_summed_in_fp32():
    model = nn.Linear(3, 2).bfloat16()
    buffer = buffer_of(model, scale=1 / 3)
    inputs = [torch.full((1, 3), value, dtype=torch.bfloat16) for value in (256.0, 1.0)]
    for x in inputs:
        model(x).sum().backward()
    # Neither 257 nor a third of it is representable in bfloat16.
    assert torch.equal(grads(buffer)["weight"], torch.full((2, 3), 256.0) * (1 / 3) + 1 / 3)


def test_a_kernel_may_add_to_main_grad_itself():
    model = nn.Linear(3, 2, bias=False)
    buffer = buffer_of(model, scale=0.5)
    grads_of_bucket = buffer.buckets[0].grads
    for zero_out in (False, True):
        grads_of_bucket.reset()
        buffer.reset()
        vars(model.weight).update(grad_added_to_main_grad=True, zero_out_wgrad=zero_out)
        for _ in range(2):
            model.weight.main_grad.add_(4.0)
            model(torch.ones(1, 3)).sum().backward()
        grads_of_bucket.launch(is_last=True)
        assert torch.equal(model.weight.main_grad, torch.full((2, 3), 5.0 if zero_out else 4.0))
    grads_of_bucket.reset()
    buffer.reset()
    assert not model.weight.grad_added_to_main_grad
    model(torch.ones(1, 3)).sum().backward()
    with pytest.raises(RuntimeError, match="parameter weight has both autograd gradients and gradients added"):
        grads_of_bucket.mark_added(model.weight)


def test_chosen_parameters_add_up_in_fp32_beside_a_16_bit_buffer():
    model = nn.Linear(3, 2).bfloat16()
    buffer = buffer_of(model, torch.bfloat16, fp32_patterns=("wei*",))
    for value in (256.0, 1.0, 1.0, 1.0):
        model(torch.full((1, 3), value, dtype=torch.bfloat16)).sum().backward()
    buffer.buckets[0].grads.launch(is_last=True)
    assert model.weight.main_grad[0, 0] == 259.0 and model.bias.main_grad.dtype == torch.bfloat16
    assert buffer.slots[0].comm_view[0, 0] == 260.0  # rounded once, unlike a bfloat16 256 + 1, which remains 256


@pytest.mark.parametrize(
    ("dtype", "in_fp32", "expected"),
    [
        (torch.bfloat16, True, torch.float32),
        (torch.bfloat16, False, torch.bfloat16),
        (torch.float32, False, torch.float32),
        (torch.float64, True, torch.float64),
    ],
)
def test_the_type_of_gradients(dtype, in_fp32, expected):
    param = nn.Parameter(torch.zeros(1, dtype=dtype))
    assert buffer_kind(param, grad_reduce_in_fp32=in_fp32, experts_apart=True).grad_dtype == expected


@pytest.mark.parametrize("move", [nn.Module.double, nn.Module.bfloat16, lambda m: m.to("cpu", torch.float16)])
def test_hooks_survive_a_move_of_the_module(move):
    model = nn.Linear(3, 2)
    model(torch.ones(1, 3)).sum().backward()  # creates autograd's AccumulateGrad node for the old dtype
    model.zero_grad()
    buffer = buffer_of(model)
    move(model)
    model(torch.ones(1, 3, dtype=model.weight.dtype)).sum().backward()
    assert torch.equal(grads(buffer)["weight"], torch.ones(2, 3))


class Tied(nn.Module):
    """Uses one matrix as the embedding and as the output layer."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(4, 3)
        self.output = nn.Linear(3, 4, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, tokens):
        return self.output(self.embedding(tokens))


def test_a_shared_parameter_is_counted_once():
    tokens = torch.tensor([0, 1, 1])
    torch.manual_seed(0)
    model = Tied()
    model(tokens).square().sum().backward()
    expected = model.embedding.weight.grad.clone()
    model.zero_grad()
    buffer = buffer_of(model)
    model(tokens).square().sum().backward()
    assert [slot.name for slot in buffer.slots] == ["embedding.weight"]
    assert torch.equal(grads(buffer)["embedding.weight"], expected)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_layer_used_twice_under_recompute_gets_the_sum_of_both_uses(reentrant):
    model = nn.Linear(3, 3)
    x = torch.randn(2, 3, requires_grad=True)

    def twice():
        hidden = checkpoint(model, x, use_reentrant=reentrant)
        return checkpoint(model, hidden, use_reentrant=reentrant).square().sum()

    twice().backward()
    expected = model.weight.grad.clone()
    model.zero_grad()
    buffer = buffer_of(model)
    twice().backward()
    torch.testing.assert_close(grads(buffer)["weight"], expected)


def test_sparse_gradients_and_those_that_have_a_graph_are_taken_by_value():
    model = nn.Embedding(4, 3, sparse=True)
    buffer = buffer_of(model)
    for _ in range(2):
        model(torch.tensor([1, 2, 1])).sum().backward()
    assert torch.equal(grads(buffer)["weight"], torch.tensor([[0.0], [4.0], [2.0], [0.0]]).expand(4, 3))
    model = nn.Linear(3, 1)
    buffer = buffer_of(model)
    for _ in range(2):
        model(torch.ones(1, 3)).square().sum().backward(create_graph=True)
    assert grads(buffer)["weight"].any() and not grads(buffer)["weight"].requires_grad


def test_parameters_that_backward_did_not_reach_have_zero_gradients():
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    buffer = buffer_of(model)
    for used in (0, 1, 0):
        buffer.reset()
        model[used](torch.ones(1, 2)).sum().backward()
        sums = [float(grads(buffer)[f"{i}.weight"].sum()) for i in range(2)]
        assert sums == [4.0 if i == used else 0.0 for i in range(2)]


def test_an_interrupted_backward_leaves_nothing_behind():
    model = nn.Linear(3, 2)
    buffer = buffer_of(model)
    model(torch.ones(1, 3)).sum().backward()
    buffer.reset()
    model(torch.ones(1, 3)).sum().backward()
    assert torch.equal(grads(buffer)["bias"], torch.ones(2))
    assert float(buffer.grad_data.sum()) == 8.0


def test_shard_buffer_returns_the_shard_of_each_rank():
    flat = torch.arange(8.0)
    shards = shard_buffer(flat, 2)
    assert [shard.tolist() for shard in shards] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert shards[1].data_ptr() == flat[4:].data_ptr()
    with pytest.raises(ValueError, match="has 8 elements: must be a multiple of the 3 ranks"):
        shard_buffer(flat, 3)


class _Stream:
    """A mock of torch.Stream that records the streams that it waits for."""

    def __init__(self) -> None:
        self.waited: list[_Stream] = []

    def wait_stream(self, other: "_Stream") -> None:
        self.waited.append(other)


@pytest.mark.parametrize("settings", [{}, {"use_distributed_optimizer": True, "shard_gradients": True}], ids=str)
def test_a_reset_waits_for_writers_of_an_aborted_iteration_and_forgets_them(settings):
    model = nn.Linear(3, 2)
    wrapped = DistributedDataParallel(ModelParallelConfig(), DistributedDataParallelConfig(**settings), model)
    storages = {bucket.grads: bucket for buffer in wrapped.buffers for bucket in buffer.buckets}
    for storage in storages:
        storage._writers = Writers(torch.device("cuda"))
    aborted, main = _Stream(), _Stream()
    with patch.object(torch.accelerator, "current_stream", lambda _: aborted):
        for storage, bucket in storages.items():
            for slot in bucket.slots:
                slot.param.grad = torch.ones_like(slot.param)
                storage.accumulate(slot.param)
    with patch.object(torch.accelerator, "current_stream", lambda _: main):
        for storage in storages:
            storage.reset()
        assert main.waited == [aborted] * len(storages) and storages
        for storage in storages:
            storage.launch(is_last=True)
        assert len(main.waited) == len(storages), "a later reduction waits for streams of an aborted iteration"
