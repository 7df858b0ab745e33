"""Runs of a rank that owns any part of a buffer: which elements they cover, and that shards step like the whole."""

from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from megatron.core.distributed.bucket_storage import BufferSettings, PersistentGrads
from megatron.core.distributed.layout import Span
from megatron.core.distributed.param_and_grad_buffer import BOTH, BufferKind, _ParamAndGradBuffer
from megatron.core.optimizer import OptimizerConfig, adam, flat_params
from megatron.core.optimizer.adam import FusedRule, GradScale
from megatron.core.optimizer.flat_params import FlatParamRange, build_ranges
from megatron.core.optimizer.param_groups import ParamGrouping
from megatron.core.optimizer.stored_floats import (
    Plain,
    StoredFloats,
    WithRemainder,
    full_masters,
    remainder_masters,
)
from tests.unit_tests.core.optimizer.reference import assert_same_parameters, tiny_model

GRID = 64


class Shard(_ParamAndGradBuffer):
    """A buffer of which this rank owns only some spans."""

    def __init__(self, model: nn.Module, owned: list[Span] | None = None):
        named = list(model.named_parameters())
        kind = BufferKind(named[0][1].dtype, torch.float32, is_expert=False)
        self._build(kind, named, BufferSettings(group=None, bucket_size=None), PersistentGrads, BOTH)
        self.owned = owned or super().owned_spans()
        generator = torch.Generator().manual_seed(5)
        for slot in self.slots:
            slot.main_grad.copy_(torch.randn(slot.main_grad.shape, generator=generator))

    def owned_spans(self) -> list[Span]:
        return self.owned

    def grad_of(self, bucket: int) -> torch.Tensor:
        return self.grad_data[self.owned[bucket].start : self.owned[bucket].end]

    def runs(self, config: OptimizerConfig) -> list[FlatParamRange]:
        keys = {slot.param: ParamGrouping(config).key_of(slot.name, slot.param) for slot in self.slots}
        return build_ranges([self], keys, host_fraction=config.host_fraction)


@given(st.integers(0, 2**32))
@settings(max_examples=30)
def test_runs_of_all_owned_spans_hold_every_parameter_element_once(seed: int) -> None:
    random = Random(seed)
    sizes = [random.choice([0, 1, 7, 63, 64, 65, 129, 300]) for _ in range(random.randint(1, 6))]
    model = nn.ParameterList(torch.zeros((n, 1) if random.random() < 0.5 else (n,)) for n in sizes)
    total = Shard(model).numel // GRID
    cuts = sorted({0, total, *(random.randint(0, total) for _ in range(3))})
    buffer = Shard(model, [Span(a * GRID, (b - a) * GRID) for a, b in zip(cuts, cuts[1:], strict=False)])
    buffer.param_data.zero_()
    for run in buffer.runs(OptimizerConfig(lr=0.1)):
        assert run.model.numel() == run.grad.numel() == run.main.numel and run.model.numel() % GRID == 0
        run.check_attached()
        for member in run.params:
            member.view_of(run.model).add_(torch.arange(1, member.span.numel + 1) + member.start)
        assert len({run.group for _ in run.params}) == 1
    for parameter in model:
        assert torch.equal(parameter.flatten(), torch.arange(1, parameter.numel() + 1).float())
    # Runs cover padding too, which belongs to no parameter.
    assert buffer.param_data.count_nonzero() == sum(sizes)


@pytest.mark.parametrize(
    "dtype, settings",
    [
        (torch.float32, {}),
        (torch.bfloat16, {}),
        (torch.bfloat16, {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "fp16"}),
    ],
)
def test_a_step_of_all_shards_is_a_step_of_the_whole_bit_for_bit(dtype: torch.dtype, settings: dict) -> None:
    config = OptimizerConfig(lr=0.1, use_precision_aware_optimizer=bool(settings), **settings)
    whole = tiny_model(dtype)
    _step(Shard(whole), config)
    total = Shard(tiny_model(dtype)).numel
    # Shards of one, two and five grid cells. Their boundaries lie inside parameters and groups.
    for size in (GRID, 2 * GRID, 5 * GRID):
        model = tiny_model(dtype)
        _step(Shard(model, [Span(a, min(size, total - a)) for a in range(0, total, size)]), config)
        assert_same_parameters(model, whole)


@pytest.mark.parametrize("overlap", [False, True])
def test_what_is_stepped_in_other_memory_comes_back(overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulates host masters of GPU parameters with separate copies on the CPU."""
    monkeypatch.setattr(adam, "HOST_CHUNK", GRID)
    monkeypatch.setattr(flat_params, "host_masters", lambda model: Plain(model.float().clone()))
    for dtype in (torch.float32, torch.bfloat16):
        whole, model = tiny_model(dtype), tiny_model(dtype)
        _step(Shard(whole), OptimizerConfig(lr=0.1))
        config = OptimizerConfig(
            lr=0.1,
            optimizer_cpu_offload=True,
            optimizer_offload_fraction=0.6,
            overlap_cpu_optimizer_d2h_h2d=overlap,
        )
        runs = _step(buffer := Shard(model), config)
        assert_same_parameters(model, whole)
        assert {run.is_copy for run in runs} == ({True, False} if dtype == torch.float32 else {True})
        if dtype == torch.float32:
            assert sum(run.main.numel for run in runs if run.is_copy) == int(0.6 * buffer.numel) // GRID * GRID
        before = [run.main.read(0, run.main.numel).clone() for run in runs]
        for run, main in zip(runs, before):
            run.model.mul_(2)
            run.take_model()
            assert torch.equal(run.main.read(0, run.main.numel), main.to(dtype).float() * 2)


def _step(buffer: Shard, config: OptimizerConfig) -> list[FlatParamRange]:
    runs = buffer.runs(config)
    rule = FusedRule(config, runs, groups=list(dict.fromkeys(run.group for run in runs)))
    grads = buffer.grad_data.clone()
    for _ in range(3):
        buffer.grad_data.copy_(grads)  # an update may have changed them
        rule.update(GradScale(1.7), set(runs))
    return runs


@pytest.mark.parametrize("main_of", [full_masters, remainder_masters])
@pytest.mark.parametrize("sent", [torch.bfloat16, torch.float32])
def test_parameters_are_written_as_a_step_rounds_them(
    main_of: Callable[[torch.Tensor], StoredFloats], sent: torch.dtype
) -> None:
    # Includes ties halfway between two bf16 values.
    values = (
        (torch.randint(-(2**31), 2**31 - 2**25, (64 * 1025,)) | 0x8000).int().view(torch.float32).nan_to_num(0, 0, 0)
    )
    param = nn.Parameter(torch.zeros(values.numel(), dtype=torch.bfloat16))
    kind = BufferKind(param.dtype, torch.float32, is_expert=False)
    wire = BufferSettings(group=None, bucket_size=None, comm_dtype=sent)
    buffer = _ParamAndGradBuffer.of_kind(kind, [("weight", param)], settings=wire)
    (run,) = build_ranges(
        [buffer], {param: ParamGrouping(OptimizerConfig(lr=0.1)).key_of("weight", param)}, main_of=main_of
    )
    run.main.write(0, values)
    if isinstance(run.main, WithRemainder):
        # The parameters already are the values that the remainders refer to.
        assert run.target is None
        run.write_model()
        assert torch.equal(run.model, run.main.upper.view(torch.bfloat16))
        assert torch.equal(run.main.read(0, run.main.numel), values)
    else:
        run = replace(run, staged=buffer.buckets[0].staged)
        run.write_model()
        assert run.target is not None and run.target.dtype == sent
        assert torch.equal(run.target, values.to(sent))
