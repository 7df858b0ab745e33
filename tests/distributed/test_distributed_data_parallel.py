"""Tests that overlapped reductions and gathers are bitwise equal to runs without overlap, in any order of modules."""

import random
import re
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron.core.distributed import (
    CollectiveScheduler,
    DistributedDataParallel,
    DistributedDataParallelConfig,
    NonFiniteGradientError,
)
from megatron.core.distributed.bucket_group import BucketObserver, Traffic
from megatron.core.group_collectives import RemoteRankError
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.process_groups_config import ALONE
from megatron.core.tensor_parallel import ColumnParallelLinear
from tests.counts import soak_only
from tests.distributed.ddp_runs import (
    BOTH,
    GRAD,
    LAYERS,
    WIDTH,
    ZERO,
    Run,
    changing_microbatches,
    compare_with_plain,
    every_layer,
    is_sometimes_late,
    late_on_one_rank,
    order_of_each_rank,
    random_order,
    unused_somewhere,
    uses_that_grow_and_shrink,
)
from tests.harness import run_on_ranks
from tests.unit_tests.core.models.small_models import small_config


class Column(ColumnParallelLinear):
    """A linear layer that accumulates its weight gradient directly into the gradient buffer."""

    def __init__(self, inputs, outputs):
        config = small_config()
        super().__init__(inputs, outputs, config=config, init_method=config.init_method, tp_group=ALONE)

    def forward(self, x):
        return super().forward(x)[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        every_layer,
        random_order,  # B1
        order_of_each_rank,  # B1, B31
        unused_somewhere,  # B4
        uses_that_grow_and_shrink,  # B5, B6
        late_on_one_rank,  # B6
        changing_microbatches,  # B7, B8, B17
    ],
)
def test_overlap_changes_no_bit(case):
    shuffled = [list(range(LAYERS)), [3, 0, 4, 2, 1]]
    settings = [BOTH, {**GRAD, "bucket_size": 40}, GRAD, BOTH, {**ZERO, "bucket_size": None, "num_buckets": 2}]
    for early, late in run_on_ranks(compare_with_plain, 3, case, shuffled, settings):
        if case is every_layer:
            assert all(early)
        # With a bucket for each parameter, some bucket is in flight when the late gradient becomes ready.
        assert not is_sometimes_late(case) or late[0]


@pytest.mark.slow
@pytest.mark.parametrize("linear", [nn.Linear, Column])
def test_late_gradients_are_added_where_sums_cannot_be_repeated(linear):
    settings = [GRAD, BOTH, {**BOTH, "ddp_debug": True}]
    for early, late in run_on_ranks(
        compare_with_plain, 3, late_on_one_rank, [list(range(LAYERS))], settings, False, linear
    ):
        assert all(early) and all(late)


def messages_of_second_rounds(deterministic):
    """Trains with late gradients; returns the number of collectives that observers saw in each second round."""
    found = []

    def count(traffic, group):
        if traffic is Traffic.LATE:
            found.append(len(group.works(traffic)))

    run, rng = Run(range(LAYERS), deterministic=deterministic, **GRAD, bucket_size=40), random.Random(0)
    run.ddp.launch_order.observe(Mock(spec=BucketObserver, before_wait=count))
    for step in range(4):
        run.step(late_on_one_rank(rng, step, dist.get_rank()), dist.get_rank(), step)
    return found


@pytest.mark.parametrize("deterministic", [False, True])
def test_observers_see_the_messages_of_a_second_round(deterministic):
    for found in run_on_ranks(messages_of_second_rounds, 2, deterministic):
        assert found and all(found)


def backward_after_release():
    run = Run(range(LAYERS), deterministic=False, linear=Column)
    plan, x = list(range(LAYERS)), torch.ones(3, WIDTH)
    run.step([plan], dist.get_rank(), 0)
    module = run.ddp.release()
    module(x, plan).sum().backward()
    return [name for name, param in module.named_parameters() if param.grad is None]


def test_after_release_fused_weight_gradients_go_to_autograd():
    assert run_on_ranks(backward_after_release, 1) == [[]]


def change_parameters(rank, change):
    """Changes the module on one rank; returns the class and message of the error that each rank raises."""
    run = Run(range(LAYERS), overlap_grad_reduce=True, bucket_size=1)
    layers = run.model.layers
    for step in range(3):
        if step == 2 and rank == 1:
            if change == "added":
                layers["2"].extra = nn.Parameter(torch.zeros(1))
            elif change == "replaced":
                layers["2"].weight = nn.Parameter(torch.zeros(WIDTH, WIDTH))
            elif change == "removed":
                del layers["2"]
            elif change == "frozen":
                layers["2"].weight.requires_grad_(False)
            else:
                layers["2"].weight.data = layers["2"].weight.detach().clone()
        try:
            run.step([[0, 1, *([2] if change != "removed" else []), 3]], rank, step)
        except (ValueError, RemoteRankError) as error:
            return type(error).__name__, str(error)
    return None


CHANGES = ("added", "replaced", "removed", "frozen", "moved, converted or assigned other data")


def changes():
    return [change_parameters(dist.get_rank(), change) for change in CHANGES]


@pytest.mark.slow
def test_b24_b33_parameters_that_change_after_wrapping_are_named_on_all_ranks():
    others, changed, _ = run_on_ranks(changes, 3)
    for change, (kind, text), (remote, told) in zip(CHANGES, changed, others, strict=True):
        assert kind == "ValueError" and remote == "RemoteRankError" and text in told
        assert re.search(rf"parameter layers\.2\.(extra|weight) was {change} after the module was wrapped", text)


# The difference on rank 2, and the beginning of the error that every rank raises.
DIFFERENCES = {
    "shape": r"parameter 1.weight is \[5, 3\] torch.float32, requires grad on ranks 0, 1 and \[4, 3\] torch",
    "name": "parameter 1.extra is no such parameter on ranks 0, 1 and .* on rank 2",
    "frozen": "parameter 0.bias is .*, requires grad on ranks 0, 1 and .*, requires no grad on rank 2",
    "allreduce": "parameter 0.bias is .* on ranks 0, 1 and .*, requires grad, marked allreduce=False on rank 2",
    "shared_embedding": "parameter 0.bias is .* on ranks 0, 1 and .*, requires grad, marked shared_embedding on rank 2",
    "ddp_debug": "DistributedDataParallelConfig.ddp_debug is False on ranks 0, 1 and True on rank 2: must be the same",
    "deterministic_mode": "ModelParallelConfig.deterministic_mode is False on ranks 0, 1 and True on rank 2",
    "calculate_per_token_loss": "ModelParallelConfig.calculate_per_token_loss is False on ranks 0, 1 and True",
    "disable_bucketing": "disable_bucketing is False on ranks 0, 1 and True on rank 2",
}


def wrap_other(difference):
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4 if difference == "shape" else 5))
    if difference == "name":
        model[1].extra = nn.Parameter(torch.ones(1))
    model[0].bias.requires_grad_(difference != "frozen")
    if difference in ("allreduce", "shared_embedding"):
        vars(model[0].bias)[difference] = difference != "allreduce"
    flags = ("deterministic_mode", "calculate_per_token_loss")
    config = ModelParallelConfig(**{name: name == difference for name in flags})
    settings = DistributedDataParallelConfig(**BOTH, bucket_size=1, ddp_debug=difference == "ddp_debug")
    return DistributedDataParallel(config, settings, model, difference == "disable_bucketing")


def refused_wraps():
    told = []
    for difference in DIFFERENCES:
        with pytest.raises(ValueError) as caught:
            wrap_other(difference if dist.get_rank() == 2 else None)
        told.append(str(caught.value))
    wrap_other(None)
    return told


def test_replicas_that_differ_are_refused_by_the_same_error_on_all_ranks():
    first, *others = run_on_ranks(refused_wraps, 3)
    assert others == [first, first]
    for text, expected in zip(first, DIFFERENCES.values(), strict=True):
        assert re.match(expected, text), text


def nan_on_one_rank(settings):
    run = Run(range(LAYERS), bucket_size=1, check_for_nan_in_grad=True, **settings)
    for step in range(4):
        bad = step == 2 and dist.get_rank() == 1
        factors = iter([1.0, float("nan"), 1.0])
        hook = run.model.layers["1"].weight.register_hook(lambda grad, f=factors: grad * next(f)) if bad else None
        try:
            run.step([[0, 1, 2]] * 3, dist.get_rank(), step)
        except NonFiniteGradientError as error:
            message = str(error)
        if hook is not None:
            hook.remove()
    return message, bool(run.params().isfinite().all())


@pytest.mark.parametrize("settings", [{}, {**BOTH, "ddp_debug": True}], ids=["plain", "debug"])
def test_b23_a_nan_is_reported_on_all_ranks_with_its_rank_and_parameter_and_training_goes_on(settings):
    when = " (since microbatch 1, counted from 0, of 3)" if settings else ""
    expected = f"gradient is not finite on rank 1: layers.1.weight{when}. The model was not updated"
    assert run_on_ranks(nan_on_one_rank, 3, settings) == [(expected, True)] * 3


def read_outside():
    """Reads a weight by name, swaps weights and skips a module in forward while gathers are pending."""
    run, plain = (Run(range(LAYERS), **chosen) for chosen in ({**BOTH, "bucket_size": 1}, {}))
    rank = dist.get_rank()
    for step in range(6):
        for each in (run, plain):
            each.step([[0, 1, 2] if step % 2 else [3]], rank, step)
        weight = run.model.layers["1"].weight
        run.ddp.wait_params([weight])
        assert torch.equal(weight, plain.model.layers["1"].weight)
        if step == 3:
            kept = {name: value.clone() for name, value in run.model.state_dict().items()}
            run.model.load_state_dict({name: torch.zeros_like(value) for name, value in kept.items()})
            assert not run.ddp(torch.ones(1, WIDTH), [0, 1]).any()
            run.model.load_state_dict(kept)
        if step == 4:
            run.ddp.disable_forward_pre_hook()
            assert all(torch.equal(a, b) for a, b in zip(run.model.parameters(), plain.model.parameters()))
            run.ddp.enable_forward_pre_hook()
    assert torch.equal(run.params(), plain.params())


def test_b2_b3_reads_outside_modules_get_new_weights():
    run_on_ranks(read_outside, 3)


class OddSizes(nn.Module):
    """Parameters of various sizes around multiples of 64, including an empty one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.params = nn.ParameterList(nn.Parameter(torch.randn(size)) for size in (1, 7, 63, 64, 65, 129, 0))

    def forward(self, scale):
        return sum((param * scale).square().sum() for param in self.params)


def odd_sizes():
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for bucket_size in (1, 100, None):
        settings = DistributedDataParallelConfig(**ZERO, bucket_size=bucket_size)
        ddp = DistributedDataParallel(ModelParallelConfig(), settings, OddSizes())
        reference = OddSizes()
        for _ in range(2):
            ddp.zero_grad_buffer()
            ddp(float(rank)).backward()
            ddp.finish_grad_sync()
        mean = sum(r * r for r in range(ranks)) / ranks
        for buffer in ddp.buffers:
            assert sum(span.numel for span in buffer.owned_spans()) * ranks == buffer.numel
            for slot, param in zip(buffer.slots, reference.params):
                for span in buffer.owned_spans():
                    part = slot.span.intersection(span)
                    own = param.detach()[part.start - slot.span.start :][: part.numel] * 2 * mean
                    torch.testing.assert_close(buffer.grad_data[part.start : part.end], own)


@pytest.mark.parametrize("ranks", [5, soak_only(3), soak_only(7)])
def test_b15_odd_numbers_of_ranks_and_elements(ranks):
    run_on_ranks(odd_sizes, ranks)


def chunks_with_one_order():
    """Trains two chunks as one model, with the later chunk's backward first, and returns the launched buckets."""
    config, settings = ModelParallelConfig(deterministic_mode=True), {**GRAD, "bucket_size": 1}
    order = CollectiveScheduler(dist.group.WORLD, overlap_grad_reduce=True)
    torch.manual_seed(0)
    parts = [nn.Linear(3, 3), nn.Linear(3, 3)]
    chunks = [
        DistributedDataParallel(config, DistributedDataParallelConfig(**settings), part, launch_order=order)
        for part in parts
    ]
    launched = []
    record = order.trace.record
    order.trace.record = lambda **slot: (launched.append(slot["bucket"]), record(**slot))
    for _ in range(3):
        launched.clear()
        for chunk in chunks:
            chunk.zero_grad_buffer()
        x = torch.full((1, 3), float(dist.get_rank()))
        chunks[1](chunks[0](x)).sum().backward()
        for chunk in chunks:
            chunk.finish_grad_sync()
    grads = [grad.clone() for chunk in chunks for _, grad in chunk.named_main_grads()]
    expected = torch.autograd.grad(
        sum(parts[1](parts[0](torch.full((1, 3), float(rank)))).sum() for rank in range(3)) / 3,
        [param for part in parts for param in part.parameters()],
    )
    for grad, other in zip(grads, expected):
        torch.testing.assert_close(grad, other)
    return launched


def test_chunks_of_a_stage_are_reduced_in_one_order():
    first, *others = run_on_ranks(chunks_with_one_order, 3)
    assert all(other == first for other in others)
    assert [name.split()[1] for name in first] == ["1", "1", "0", "0"]
