"""Tests that --ddp-debug accepts correct steps and names each known mistake, reproduced on purpose."""

import re
from contextlib import nullcontext
from itertools import product
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron.core.distributed import (
    CollectiveMismatchError,
    DdpDebugError,
    DistributedDataParallel,
    DistributedDataParallelConfig,
    distributed_data_parallel,
)
from megatron.core.distributed.bucket_group import ParamState
from megatron.core.distributed.bucket_storage import GradState, PersistentGrads
from megatron.core.distributed.ddp_debug import find_coverage_problem
from megatron.core.distributed.launch_sequence import LaunchSequence
from megatron.core.distributed.layout import BufferLayout, Span
from megatron.core.distributed.scheduler import CollectiveScheduler
from megatron.core.model_parallel_config import ModelParallelConfig
from tests.counts import long_count
from tests.distributed import ddp_runs
from tests.distributed.ddp_runs import (
    BOTH,
    GRAD,
    LAYERS,
    WIDTH,
    Layers,
    Run,
    changing_microbatches,
    compare_with_plain,
    order_of_each_rank,
    uses_that_grow_and_shrink,
)
from tests.harness import run_on_ranks


def silent_where_right(cases):
    for settings, case in cases:
        # The number of microbatches changes in the third step.
        with patch.object(ddp_runs, "STEPS", long_count(4, soak=6)):
            compare_with_plain(case, [list(range(LAYERS)), [3, 0, 4, 2, 1]], [{**settings, "ddp_debug": True}])


@pytest.mark.slow
def test_right_steps_have_the_bits_of_those_that_nobody_checks():
    cases = [order_of_each_rank, uses_that_grow_and_shrink, changing_microbatches]
    usual = list(zip((BOTH, BOTH, GRAD), cases))
    run_on_ranks(silent_where_right, 3, list(product((GRAD, BOTH), cases)) if long_count(0, soak=1) else usual)


def step(run, plan, *, microbatches=1):
    run.ddp.zero_grad_buffer()
    for number in range(microbatches):
        with run.ddp.no_sync() if number < microbatches - 1 else nullcontext():
            run.ddp(torch.ones(2, WIDTH, requires_grad=True), plan).sum().backward()
    run.ddp.finish_grad_sync()
    run.update()


EVERY = list(range(LAYERS))


def wait_for_no_gather(run):
    with patch.object(CollectiveScheduler, "need", lambda *_, **__: None):
        step(run, EVERY)


def read_a_weight_outside_its_module(run):
    forward = Layers.forward
    with patch.object(Layers, "forward", lambda self, x, plan: forward(self, x @ self.layers["2"].weight, plan)):
        step(run, EVERY)


def read_a_weight_after_the_step(run):
    nn.functional.linear(torch.ones(1, WIDTH), run.model.layers["2"].weight)
    step(run, EVERY)


def leave_a_gather_of_a_skipped_module(run):
    def launch_rest(self):
        self._launch_gathers()
        self._launch(self._sequence.rest())
        for group in self._groups:
            group.param_state = ParamState.CURRENT

    with patch.object(CollectiveScheduler, "_launch_rest", launch_rest):
        step(run, [0, 1, 3, 4])


def swap_weights_before_the_gather(run):
    run.model.layers["1"].weight.data.copy_(torch.ones(WIDTH, WIDTH))
    step(run, EVERY)


def launch_nothing_that_is_incomplete(run):
    with patch.object(LaunchSequence, "rest", lambda self: []):
        step(run, [0, 1, 3, 4])


accumulate = PersistentGrads.accumulate


def accumulate_in_flight(self, param):
    state, self.state = self.state, GradState.COLLECTING
    accumulate(self, param)
    self.state = state


def add_a_late_gradient_to_a_bucket_under_way(run):
    with patch.object(PersistentGrads, "accumulate", accumulate_in_flight):
        step(run, [0, -1, -1, 2, 3, 4])


def reduce_every_microbatch(run):
    with patch.object(PersistentGrads, "accumulate", accumulate_in_flight):
        with patch.object(DistributedDataParallel, "no_sync", lambda self: nullcontext()):
            step(run, EVERY, microbatches=2)


def reduce_twice(run):
    wait = CollectiveScheduler._wait_for_reductions

    def launch_again(self, late):
        self._launch([group.number for group in self._groups])
        wait(self, late)

    with patch.object(CollectiveScheduler, "_wait_for_reductions", launch_again):
        step(run, EVERY)


def evaluate_without_a_gather(run):
    run.ddp.disable_forward_pre_hook(param_sync=False)
    with torch.no_grad():
        run.ddp.module(torch.ones(2, WIDTH), EVERY)


def scale_after_the_launch(run):
    run.ddp.zero_grad_buffer()
    run.ddp(torch.ones(2, WIDTH, requires_grad=True), EVERY).sum().backward()
    run.ddp.start_grad_sync()
    # Repeats a former mistake of scale_gradients, which now rejects this.
    for buffer in run.ddp.buffers:
        buffer.scale_gradients(0.5)
    run.ddp.finish_grad_sync()


def launch_in_an_order_of_its_own(run):
    start = LaunchSequence.start

    def start_reversed(self):
        self.order.reverse()
        start(self)

    with patch.object(LaunchSequence, "start", start_reversed) if dist.get_rank() == 1 else nullcontext():
        step(run, EVERY)


def zero_nothing(run):
    with patch.object(PersistentGrads, "zero", lambda self: self._with_grad.clear()):
        step(run, EVERY)


def replace_the_data_of_a_parameter(run):
    weight = run.model.layers["0"].weight
    weight.data = weight.data.clone()
    step(run, EVERY)


ON_PARAMETERS = {
    wait_for_no_gather: r"aten.* uses .*layers\.0\.weight.* before the gather",  # B1
    read_a_weight_outside_its_module: r"aten.* uses layers\.2\.weight before the gather",  # B2
    read_a_weight_after_the_step: r"aten.* uses layers\.2\.weight before the gather.*wait_params",  # B2
    # B2: detected when other ranks' elements are written, or else when this rank's elements are marked.
    leave_a_gather_of_a_skipped_module: r"layers\.2\.\w+ (were updated while|before the) .*gather",
    swap_weights_before_the_gather: r"aten\.copy_.* uses layers\.1\.weight before the gather",  # B3
    evaluate_without_a_gather: r"aten.* uses .*layers\.0\.weight.* before the gather",  # B10
}
ON_GRADIENTS = {
    launch_nothing_that_is_incomplete: r"gradients of layers\.\d\.\w+ were reduced 0 times in the iteration",  # B4
    add_a_late_gradient_to_a_bucket_under_way: r"gradient of layers\.1\.\w+ was written after its reduction",  # B5, B6
    reduce_every_microbatch: r"gradient of layers\.\d\.\w+ was written after its reduction",  # B7
    reduce_twice: r"gradients of layers\.\d\.\w+ are reduced twice in one iteration",  # B8
    scale_after_the_launch: r"gradient of layers\.\d\.\w+ was written after its reduction",  # B16
    # B31
    launch_in_an_order_of_its_own: r"differs: ranks 0, 2 launch all-reduce.*layers.*; rank 1 launch all-reduce.*layers",
    zero_nothing: r"gradient of layers\.\d\.\w+ was not exactly zero when the first gradient",  # B17
    replace_the_data_of_a_parameter: r"parameter layers\.0\.weight is no longer a view of its buffer",  # B33
}


def messages_of(mistakes, settings):
    told = []
    for mistake in mistakes:
        run = Run(EVERY, bucket_size=1, ddp_debug=True, **settings)
        for _ in range(2):
            step(run, EVERY)
        with pytest.raises((DdpDebugError, CollectiveMismatchError)) as caught:
            mistake(run)
        told.append(str(caught.value))
        # Otherwise the mistake would be reported when the next wrapper lets this one launch its pending collectives.
        run.ddp.launch_order.leave()
    return told


@pytest.mark.slow
@pytest.mark.parametrize("settings, mistakes", [(BOTH, ON_PARAMETERS), (GRAD, ON_GRADIENTS)], ids=["params", "grads"])
def test_mistakes_are_named_with_the_parameter_on_every_rank(settings, mistakes):
    for told in run_on_ranks(messages_of, 3, list(mistakes), settings):
        for (mistake, expected), message in zip(mistakes.items(), told, strict=True):
            assert re.search(expected, message), f"{mistake.__name__}: {message}"


def wrap_wrongly():
    told = []

    def message(error, target, name, mistake):
        module = Layers(EVERY)
        module.layers["3"].bfloat16()
        with patch.object(target, name, mistake), pytest.raises(error) as caught:
            DistributedDataParallel(
                ModelParallelConfig(), DistributedDataParallelConfig(ddp_debug=True, **BOTH), module
            )
        told.append(str(caught.value))

    def uneven_shards(self, index, rank):  # B15
        size = -(-self.buckets[index].numel_unpadded // self.num_shards)
        return Span(self.buckets[index].span.start + rank * size, size)

    def shards_of_fewer_ranks(self, index, rank):  # B16
        size = self.buckets[index].span.numel // self.num_shards
        return Span(self.buckets[index].span.start + rank // 2 * size, size)

    kind = distributed_data_parallel.buffer_kind(
        nn.Parameter(torch.ones(1)), grad_reduce_in_fp32=True, experts_apart=False
    )
    message(ValueError, BufferLayout, "shard", uneven_shards)
    message(ValueError, BufferLayout, "shard", shards_of_fewer_ranks)
    message(AssertionError, distributed_data_parallel, "buffer_kind", lambda *_, **__: kind)  # B34
    return told


def test_wrong_shards_and_types_are_named_when_a_module_is_wrapped():
    for uneven, fewer, mixed in run_on_ranks(wrap_wrongly, 3):
        assert re.search(r"\(parameter layers\.\d\.\w+\) is in a shard of rank \d, .* not aligned to 64", uneven)
        assert re.search(r"\(parameter layers\.\d\.\w+\) is owned by rank 0 and by rank 1", fewer)
        assert re.search(r"parameter layers\.3\.\w+ is torch.bfloat16", mixed)


@pytest.mark.parametrize(
    "spans, problem",
    [
        ([[(0, 64), (192, 64)], [(64, 128)]], None),
        ([[(0, 64)], [(128, 128)]], (64, "is owned by no rank")),
        ([[(0, 128)], [(64, 192)]], (64, "is owned by rank 0 and by rank 1")),
        ([[(0, 192)], []], (192, "is owned by no rank")),
        ([[(0, 256)], [(256, 64)]], (256, "is past the end")),
    ],
)
def test_coverage_finds_gaps_and_overlaps(spans, problem):
    assert find_coverage_problem([[Span(*one) for one in own] for own in spans], numel=256) == problem
