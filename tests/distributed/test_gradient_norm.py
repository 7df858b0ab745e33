"""TRAPS B18: gradient norm, zero count and parameter norm count each logical element once under any layout.

Users of other trainers met these bugs: experts were left out of the norm, copies were counted once per rank, the norm
was that of stale copies, clipping was skipped, and infinite gradients or ranks without parameters were mishandled.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import pytest
import torch
from torch import Tensor, nn

from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.process_groups_config import ProcessGroupCollection, group_rank, group_size
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.param_attributes import mark_expert, mark_shared
from tests.counts import long_count
from tests.harness import run_on_ranks
from tests.unit_tests.core.optimizer.reference import wrap

Sizes = tuple[int, int, int, int, int]

# Tensor, context, pipeline, expert and expert-tensor sizes; the remaining factor of the 4 ranks is data parallel.
LAYOUTS: list[Sizes] = [(2, 1, 2, 2, 1), (1, 1, 4, 1, 1), (2, 2, 1, 2, 1), (2, 1, 1, 1, 2), (1, 4, 1, 2, 2)]
if long_count(0, soak=1):
    LAYOUTS += [(1, 1, 1, 1, 1), (2, 1, 1, 2, 1), (4, 1, 1, 4, 1), (1, 1, 1, 4, 1), (1, 2, 2, 2, 1), (1, 2, 1, 1, 2)]
EXPERTS, ROWS, WIDTH = 4, 8, 4


@dataclass
class Whole:
    """Gradients and weights of the whole model: three tensors per stage, and one shared by first and last stage.

    sharded: whether data-parallel ranks each update only a shard, which may lie in different parameters on each rank.
    """

    grads: list[Tensor]
    weights: list[Tensor]
    sharded: bool

    def expected(self) -> tuple[float, float, float]:
        """Returns the gradient norm, zero count and parameter norm that one process computes in fp64."""
        grads, weights = (torch.cat([t.flatten() for t in tensors]).double() for tensors in (self.grads, self.weights))
        zeros = float((grads == 0).sum())
        return torch.linalg.vector_norm(grads).item(), zeros, torch.linalg.vector_norm(weights).item()


@pytest.mark.slow
def test_b18_b37_expert_and_split_gradients_count_once_in_norm_zeros_and_parameters_norm() -> None:
    _compare(LAYOUTS, ranks=4)


def test_b18_experts_of_all_ranks_count_where_each_has_all_of_the_dense_layers() -> None:
    _compare([(1, 1, 1, 2, 1)], ranks=2)


def _compare(layouts: Sequence[Sizes], *, ranks: int) -> None:
    for results in run_on_ranks(_measure_layouts, ranks, layouts):
        for layout, (measured, expected) in zip(product(layouts, (False, True)), results, strict=True):
            assert measured == pytest.approx(expected, rel=1e-6), layout


def _measure_layouts(layouts: Sequence[Sizes]) -> list[tuple[tuple[float, ...], tuple[float, ...]]]:
    results = []
    for layout, sharded in product(layouts, (False, True)):
        groups = _groups_of(layout)
        whole = _whole_model(stages=layout[2], sharded=sharded)
        optimizer = _optimizer(groups, whole, clip_grad=1.0)
        before = optimizer.params_norm()
        updated, norm, zeros = optimizer.step()
        assert updated and zeros is not None
        # The norm must be that of the updated weights, not of stale copies.
        assert optimizer.params_norm() != before
        results.append(((norm, zeros, before), whole.expected()))
        _refuses_infinite_gradients(groups, whole)
        _never_clips(groups, whole, norm=norm)
        parallel_state.destroy_model_parallel()
    return results


def _groups_of(layout: Sizes) -> ProcessGroupCollection:
    tensor, context, pipeline, expert, expert_tensor = layout
    parallel_state.initialize_model_parallel(
        tensor,
        pipeline,
        context_parallel_size=context,
        expert_model_parallel_size=expert,
        expert_tensor_parallel_size=expert_tensor,
    )
    return parallel_state.get_process_groups()


def _whole_model(*, stages: int, sharded: bool) -> Whole:
    generator = torch.Generator().manual_seed(11)
    shapes = [(ROWS, 3), (5,), (EXPERTS, WIDTH)] * stages + [(ROWS, 2)]
    weights, grads = ([torch.randn(shape, generator=generator) for shape in shapes] for _ in range(2))
    for grad in grads:
        grad.view(-1)[::3] = 0
    return Whole(grads, weights, sharded)


def _optimizer(groups: ProcessGroupCollection, whole: Whole, *, clip_grad: float) -> MegatronOptimizer:
    """Builds the optimizer of this rank's part of the model, with its gradients filled in."""
    return _build(groups, whole, clip_grad=clip_grad)[1]


def _parts(groups: ProcessGroupCollection, whole: Whole) -> dict[str, tuple[Tensor, Tensor]]:
    """Returns this rank's part of each weight and of its gradient, by name."""
    pairs = list(zip(whole.weights, whole.grads))
    stage, stages = group_rank(groups.pp), group_size(groups.pp)
    split, copied, expert = pairs[3 * stage : 3 * stage + 3]
    # An unusual order, so that owned and unowned parameters are not contiguous.
    parts = {"split": _cut(split, groups.tp, dim=0), "expert": expert, "copied": copied}
    parts["expert"] = _cut(_cut(parts["expert"], groups.ep, dim=0), groups.expt_tp, dim=1)
    if stage in (0, stages - 1):
        parts["tied"] = _cut(pairs[-1], groups.tp, dim=0)
    return parts


def _build(
    groups: ProcessGroupCollection, whole: Whole, *, clip_grad: float
) -> tuple[DistributedDataParallel, MegatronOptimizer]:
    """Builds this rank's part of the model, with its gradients filled in, and its optimizer."""
    model, parts, stage = nn.Module(), _parts(groups, whole), group_rank(groups.pp)
    params = {name: nn.Parameter(weight.clone()) for name, (weight, _) in parts.items()}
    for name, param in params.items():
        set_tensor_model_parallel_attributes(param, name in ("split", "tied"), 0, 1)
        if name == "expert":
            set_tensor_model_parallel_attributes(param, True, 1, 1)
            mark_expert(param)
        if name == "tied":
            mark_shared(param, is_copy=stage > 0)
        model.register_parameter(name, param)
    wrapped = wrap(model, pg_collection=groups, overlap={"use_distributed_optimizer": whole.sharded})
    config = OptimizerConfig(optimizer="sgd", lr=0.5, weight_decay=0.0, clip_grad=clip_grad, log_num_zeros_in_grad=True)
    optimizer = get_megatron_optimizer(config, [wrapped], pg_collection=groups)
    # The wrapper divides each sum by the number of dense replicas, of which only some hold a given expert.
    shares = {"expert": group_size(groups.dp_cp) / group_size(groups.expt_dp)}
    for name, param in params.items():
        (param * parts[name][1] * shares.get(name, 1.0)).sum().backward()
    wrapped.finish_grad_sync()
    return wrapped, optimizer


def _cut(pair: tuple[Tensor, Tensor], group: object, *, dim: int) -> tuple[Tensor, Tensor]:
    weight, grad = (t.chunk(group_size(group), dim)[group_rank(group)].contiguous() for t in pair)  # type: ignore[arg-type]
    return weight, grad


def _refuses_infinite_gradients(groups: ProcessGroupCollection, whole: Whole) -> None:
    """Checks that one infinite element, possibly on a single rank, makes every rank skip the step."""
    grads = [grad.clone() for grad in whole.grads]
    grads[2][-1, -1] = math.inf
    bad = _optimizer(groups, Whole(grads, whole.weights, whole.sharded), clip_grad=1.0)
    before = bad.params_norm()
    assert bad.step()[:2] == (False, math.inf) and bad.params_norm() == before


def _never_clips(groups: ProcessGroupCollection, whole: Whole, *, norm: float) -> None:
    wrapped, free = _build(groups, whole, clip_grad=0.0)
    parts = _parts(groups, whole)
    assert free.step()[:2] == (True, norm)
    for name, param in wrapped.module.named_parameters():
        old, grad = parts[name]
        torch.testing.assert_close(param.detach(), old - 0.5 * grad)


def test_ranks_without_parameters_of_their_own_take_part() -> None:
    # All parameters are replicated, so three of the four tensor-parallel ranks own none.
    norms = run_on_ranks(_norm_of_copies, 4)
    assert norms == [(5.0, 0.0, 5.0)] * 4


def _norm_of_copies() -> tuple[float, float | None, float]:
    groups = _groups_of((4, 1, 1, 1, 1))
    model = nn.Module()
    model.register_parameter("copied", nn.Parameter(torch.tensor([3.0, 4.0])))
    wrapped = wrap(model, pg_collection=ProcessGroupCollection(embd=groups.embd))
    with pytest.raises(ValueError, match="muon with tensor_model_parallel_size 4 .*: both must be 1, because muon"):
        get_megatron_optimizer(OptimizerConfig(optimizer="muon", lr=0.5), [wrapped], pg_collection=groups)
    config = OptimizerConfig(optimizer="sgd", lr=0.5, log_num_zeros_in_grad=True)
    optimizer = get_megatron_optimizer(config, [wrapped], pg_collection=groups)
    (model.copied.square().sum() / 2).backward()  # type: ignore[operator,union-attr]
    wrapped.finish_grad_sync()
    before = optimizer.params_norm()
    _, norm, zeros = optimizer.step()
    return norm, zeros, before
