"""DistributedDataParallel on one rank: which collectives are launched when, and errors for misuse."""

import copy
import logging
import math
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    NonFiniteGradientError,
)
from megatron.core.distributed.event_log import EventLog, launched_before_next_was_ready
from megatron.core.model_parallel_config import ModelParallelConfig


def wrapped(model, **settings):
    settings = {"overlap_grad_reduce": True, "bucket_size": 1, **settings}
    return DistributedDataParallel(ModelParallelConfig(), DistributedDataParallelConfig(**settings), model)


class Backwards(nn.Module):
    """Layers that are used in the reverse order of their registration."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 2, bias=False) for _ in range(4)])

    def forward(self, x, skip=()):
        for index, layer in reversed(list(enumerate(self.layers))):
            x = x if index in skip else layer(x)
        return x.sum()


def step(ddp, **kwargs):
    ddp.zero_grad_buffer()
    ddp(torch.ones(1, 2, requires_grad=True), **kwargs).backward()
    ddp.finish_grad_sync()


def test_b26_each_bucket_is_launched_before_the_next_one_is_complete_once_the_order_is_known():
    ddp, log = wrapped(Backwards()), EventLog(torch.device("cpu"))
    ddp.launch_order.observe(log)
    overlapped = []
    for _ in range(3):
        log.record_next_step()
        step(ddp)
        overlapped += [launched_before_next_was_ready(times) for times in log.take_sync()]
    # The previous steps learned the order.
    assert overlapped == [[True] * 3] * 2
    assert [group.slots[0].name for group in ddp.bucket_groups] == [f"layers.{i}.weight" for i in (3, 2, 1, 0)]


def test_a_frozen_order_is_that_of_registration():
    ddp, log = wrapped(Backwards()), EventLog(torch.device("cpu"))
    ddp.freeze_order()
    ddp.launch_order.observe(log)
    for _ in range(3):
        log.record_next_step()
        step(ddp)
    # The first group in the order receives its gradient last.
    assert [launched_before_next_was_ready(times) for times in log.take_sync()] == [[False] * 3] * 2


def test_b4_unused_parameters_are_named_once(caplog):
    ddp = wrapped(Backwards())
    with caplog.at_level(logging.WARNING):
        for skip in ((), (1,), (1,), (2,)):
            step(ddp, skip=skip)
            assert [bool(grad.any()) for _, grad in ddp.named_main_grads()] == [i not in skip for i in range(4)]
    named = [record.getMessage() for record in caplog.records]
    expected = [f"no gradient was produced for layers.{i}.weight" for i in (1, 2)]
    assert [message.split(":")[0] for message in named] == expected


def test_a_gradient_after_the_end_and_settings_after_the_start_are_refused():
    ddp = wrapped(Backwards())
    step(ddp)
    with pytest.raises(
        RuntimeError, match=r"layers.\d.weight was produced after finish_grad_sync: call zero_grad_buffer"
    ):
        ddp(torch.ones(1, 2)).backward()
    with pytest.raises(ValueError, match="was added to this launch_order after its first iteration"):
        DistributedDataParallel(ddp.config, ddp.ddp_config, nn.Linear(1, 1), launch_order=ddp.launch_order)
    with pytest.raises(ValueError, match="disable_forward_pre_hook was called without"):
        ddp.disable_forward_pre_hook()
    with pytest.raises(ValueError, match="average_in_collective and calculate_per_token_loss"):
        config = ModelParallelConfig(calculate_per_token_loss=True)
        DistributedDataParallel(config, DistributedDataParallelConfig(average_in_collective=True), nn.Linear(1, 1))


def test_gradients_that_the_caller_adds_count_as_ready():
    ddp = wrapped(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="was given a parameter of another module: must be a parameter of the wrapped"):
        ddp.register_grad_ready(nn.Parameter(torch.ones(2)))
    with pytest.raises(ValueError, match=r"of shape \(2,\) that is not in bucket group .*: must be one of"):
        ddp.bucket_groups[0].register_grad_ready(nn.Parameter(torch.ones(2)))
    for whose in (lambda param: ddp, ddp.param_to_bucket_group.get):
        ddp.zero_grad_buffer()
        for param in ddp.module.parameters():
            param.main_grad.add_(3.0)
            whose(param).register_grad_ready(param)
        launched = [group.grad_state.value for group in ddp.bucket_groups]
        ddp.finish_grad_sync()
        assert all(float(grad.mean()) == 3.0 for _, grad in ddp.named_main_grads())
    assert launched == ["in flight", "in flight"]


@pytest.mark.parametrize("settings", [{}, {"use_distributed_optimizer": True, "overlap_param_gather": True}])
def test_b37_one_rank_alone_and_models_without_trainable_parameters(settings):
    for model in (nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False), nn.Identity()):
        ddp = wrapped(model, **settings)
        ddp.zero_grad_buffer()
        out = ddp(torch.ones(1, 2, requires_grad=True)).sum()
        out.backward()
        ddp.finish_grad_sync()
        ddp.mark_params_stale()
        for group in ddp.bucket_groups:
            group.start_param_sync(force_sync=True)
            group.finish_param_sync(skip_next_bucket_dispatch=True)
        ddp.start_param_sync()
        ddp.finish_param_sync()
        ddp.broadcast_params()
        ddp.scale_gradients(torch.tensor(0.5))
        grads = dict(ddp.named_main_grads())
        assert [float(grad.sum()) for grad in grads.values()] == [2.0, 1.0] * bool(grads)


@pytest.mark.parametrize(
    "others, message",
    [
        (
            lambda: nn.Linear(2, 2, dtype=torch.complex64),
            r"1.weight is torch.complex64 and requires grad: must be one of",
        ),
        (lambda: nn.Linear(2, 2, device="meta"), "1.weight is on meta but 0.weight is on cpu: .* on one device"),
        (lambda: wrapped(nn.Linear(2, 2)).module, r"1.weight is in another .* two chunks cannot share a parameter"),
    ],
)
def test_parameters_that_no_buffer_can_take_are_refused_by_name(others, message):
    with pytest.raises(ValueError, match=message):
        wrapped(nn.Sequential(nn.Linear(2, 2), others()))


def test_parameters_without_memory_are_refused_by_name():
    with pytest.raises(ValueError, match="parameter weight is on the meta device: .* or wrap it in TorchFully"):
        wrapped(nn.Linear(2, 2, device="meta"))


def test_b34_each_type_has_a_buffer_of_its_own():
    model = nn.Sequential(nn.Linear(2, 2).bfloat16(), nn.Linear(2, 2), nn.Linear(2, 2).double())
    ddp = wrapped(model, grad_reduce_in_fp32=True)
    types = [(buffer.param_data.dtype, buffer.grad_data.dtype) for buffer in ddp.buffers]
    assert types == [
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ]


def test_large_gradients_are_named(caplog):
    ddp = wrapped(nn.Linear(2, 2), check_for_large_grads=True)
    for scale in (1.0, 2.0, 1.0, 1.0, 1.0, 11.0, 200.0):
        ddp.zero_grad_buffer()
        (ddp(torch.ones(1, 2)).sum() * scale).backward()
        ddp.finish_grad_sync()
    assert [record.getMessage().split()[3] for record in caplog.records] == ["bias", "weight"]


@pytest.mark.parametrize("checks", [{"check_for_nan_in_grad": True}, {"check_for_large_grads": True}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_finite_gradients_whose_sum_overflows_are_fine_and_others_are_not(dtype, checks):
    ddp = wrapped(nn.Linear(4, 4, dtype=dtype), **checks)
    largest = torch.finfo(dtype).max
    for bad in (largest, -largest, float("nan"), float("inf"), -float("inf")):
        ddp.zero_grad_buffer()
        ddp.module.weight.main_grad.fill_(largest)[1, 2] = bad
        is_found = "check_for_nan_in_grad" in checks and not math.isfinite(bad)
        with pytest.raises(NonFiniteGradientError, match=": weight") if is_found else nullcontext():
            ddp.finish_grad_sync()


@pytest.mark.parametrize("patterns", [[], ["all"]])
def test_gradients_are_scaled_before_and_after_the_end_but_not_while_they_are_on_their_way(patterns):
    names = {"param_name_patterns_for_fp32_local_accumulation": patterns}
    ddp = wrapped(nn.Linear(2, 2, dtype=torch.bfloat16), **names)
    x = torch.ones(1, 2, dtype=torch.bfloat16)
    ddp.zero_grad_buffer()
    with ddp.no_sync():
        ddp(x).sum().backward()
    ddp.scale_gradients(0.25)
    ddp(x).sum().backward()
    ddp.start_grad_sync()
    with pytest.raises(RuntimeError, match="scale_gradients was called while gradients of bias are being reduced"):
        ddp.scale_gradients(3.0)
    ddp.finish_grad_sync()
    ddp.scale_gradients(2.0)
    assert all(bool((grad == 2.5).all()) for _, grad in ddp.named_main_grads())


def test_what_overlap_and_shards_do_not_allow_is_refused():
    with pytest.raises(ValueError, match="enable_forward_pre_hook was called with overlap_param_gather False: set it"):
        wrapped(nn.Linear(2, 2)).enable_forward_pre_hook()
    with pytest.raises(ValueError, match="force_all_reduce and use_distributed_optimizer are both set"):
        wrapped(nn.Linear(2, 2), use_distributed_optimizer=True).finish_grad_sync(force_all_reduce=True)
    with pytest.raises(
        TypeError, match="cannot be copied, because process groups cannot be copied: copy its `module` after"
    ):
        copy.deepcopy(wrapped(nn.Linear(2, 2)))
    with pytest.raises(TypeError, match="config is a DistributedDataParallelConfig: must be a ModelParallelConfig"):
        DistributedDataParallel(DistributedDataParallelConfig(), ModelParallelConfig(), nn.Linear(2, 2))
    with pytest.raises(TypeError, match="module is None: must be a Module"):
        wrapped(None)
    with pytest.raises(ValueError, match=r"\[1\]: must be a list or a tuple of strings"):
        wrapped(nn.Linear(2, 2), param_name_patterns_for_fp32_local_accumulation=[1])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"overlap_grad_reduce": False}, "bucket_size without overlap_grad_reduce"),
        ({"align_param_gather": False}, None),  # the default in code, unlike on the command line
        (
            {"reduce_scatter_with_fp32_accumulation": True, "use_distributed_optimizer": True},
            "reduce_scatter_with_fp32_accumulation with fp32 gradients",
        ),
        ({}, None),
    ],
)
def test_settings_without_effect_are_said_in_the_log(settings, words, caplog):
    wrapped(nn.Linear(2, 2), **settings)
    said = [record.getMessage() for record in caplog.records]
    assert said == ([] if words is None else [f"DistributedDataParallelConfig: {words} has no effect"])
