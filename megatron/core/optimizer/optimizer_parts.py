"""OptimizerParts: everything that a MegatronOptimizer updates and measures, also built from any torch optimizer.

builder.py builds parts for the update rules of adam.py and muon.py. In this file the rule is a torch optimizer built by
a script, whose parameter groups define the parameters to update and their rates. optimizer.py implements the step.
"""

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from megatron.core.dense_memory import check_dense, flat_view, in_order_of, shaped_view
from megatron.core.device import default_device
from megatron.core.distributed.data_parallel_base import _BaseDataParallel
from megatron.core.distributed.layout import BucketLayout, BufferLayout, FlatBuffer, ParamRange, ParamSlot, Span
from megatron.core.logical_tensors import LogicalPiece, model_logical_pieces
from megatron.core.optimizer.adam import GradScale, UpdateRule
from megatron.core.optimizer.attention_logits import AttentionLogits
from megatron.core.optimizer.clip_grads import GradStats, persistent_gradient
from megatron.core.optimizer.flat_params import FlatParamRange, build_ranges
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.optimizer.param_groups import GroupKey, ParamGroupOverride
from megatron.core.optimizer.stored_floats import Plain, Rounded, StoredFloats, full_masters
from megatron.core.parallel_state import existing_process_groups
from megatron.core.tensor_parallel.param_attributes import copy_marks, param_facts, set_main_param

# Megatron's init_state_fn: allocates the state of a torch optimizer that has not stepped yet.
InitStateFn = Callable[..., Any]


@dataclass(frozen=True)
class OptimizerParts:
    """The parts of a MegatronOptimizer. ranges: the flat ranges of all rules. device: the model's device.

    model_chunks: wrapped chunks whose gradients a step resets and whose updates it records; empty if the optimizer was
    built over bare parameters. pieces: the logical pieces of the chunks' parameters, by name. logits: empty unless
    the model's attention computes its largest scores.
    """

    rules: Sequence[UpdateRule]
    ranges: Sequence[FlatParamRange]
    model_chunks: Sequence[_BaseDataParallel]
    grad_stats: GradStats
    device: torch.device
    pieces: Mapping[str, list[LogicalPiece]]
    logits: Sequence[AttentionLogits] = ()


def parts_over_params(
    optimizer: torch.optim.Optimizer, config: OptimizerConfig, init_state_fn: InitStateFn | None, *, masters: bool
) -> OptimizerParts:
    """Builds the parts that update the parameters of a torch optimizer, each of which is whole on this rank.

    masters: whether fp32 copies replace 16-bit parameters in the optimizer's groups and become their `main_param`;
    otherwise 16-bit parameters are rejected. Raises ValueError for a parameter that is sharded, 16-bit without masters,
    or not dense in memory.
    """
    stepped: dict[FlatParamRange, _Stepped] = {}
    for number, group in enumerate(optimizer.param_groups):
        key = _TorchGroup(override=ParamGroupOverride(), number=number)
        for index, param in enumerate(group["params"]):
            name = f"param_groups[{number}]['params'][{index}]"
            _check_param(name, param, masters=masters)
            run = _range_of(name, param, key)
            target = param
            if run.is_copy:
                target = _main_param(run, param)
                group["params"][index] = target
                _move_state(optimizer, param, target)
            stepped[run] = _Stepped(target, number)
    ranges = list(stepped)
    device = next((one.model.device for one in ranges), default_device())
    buffers: list[FlatBuffer] = [one.buffer for one in ranges]
    stats = GradStats(config, existing_process_groups(), buffers, ranges=ranges, logical_pieces={}, device=device)
    return OptimizerParts([TorchRule(optimizer, stepped, init_state_fn)], ranges, [], stats, device, {})


def parts_over_shards(
    optimizer: torch.optim.Optimizer,
    config: OptimizerConfig,
    init_state_fn: InitStateFn | None,
    *,
    model_chunks: Sequence[_BaseDataParallel],
) -> OptimizerParts:
    """Builds the parts that update this rank's shards of wrapped chunks with a torch optimizer over their parameters.

    Replaces the parameters in the optimizer's groups by flat shards, which are fp32 copies for 16-bit parameters. The
    optimizer must therefore update elements independently, as Adam and SGD do. Raises ValueError if a trained parameter
    of the chunks is in no group, or if a parameter in a group is not in the chunks.
    """
    buffers: list[FlatBuffer] = [buffer for chunk in model_chunks for buffer in chunk.all_buffers]
    keys = {
        param: _TorchGroup(override=ParamGroupOverride(), number=number)
        for number, group in enumerate(optimizer.param_groups)
        for param in group["params"]
        if param.requires_grad
    }
    slots = [slot for buffer in buffers for slot in buffer.slots]
    lacking = next((slot.name for slot in slots if slot.param not in keys), None)
    if lacking is not None:
        raise ValueError(f"parameter {lacking} is in no group of the optimizer: every trained parameter must be in one")
    if len(keys) > len(slots):
        raise ValueError(
            f"the optimizer's groups contain {len(keys)} parameters that require grad and the chunks contain "
            f"{len(slots)}: must be the same parameters"
        )
    ranges = build_ranges(buffers, keys)
    stepped = {one: _Stepped(nn.Parameter(one.stepped), keys[one.params[0].param].number) for one in ranges}
    for number, group in enumerate(optimizer.param_groups):
        group["params"] = [one.param for one in stepped.values() if one.number == number]
    optimizer.state.clear()
    pieces = {name: held for chunk in model_chunks for name, held in model_logical_pieces(chunk).items()}
    device = model_chunks[0].device
    groups = model_chunks[0].pg_collection
    stats = GradStats(config, groups, buffers, ranges=ranges, logical_pieces=pieces, device=device)
    return OptimizerParts([TorchRule(optimizer, stepped, init_state_fn)], ranges, model_chunks, stats, device, pieces)


@dataclass(frozen=True)
class _Stepped:
    """The tensor of a range, fp32 or fp64, in group `number` of a torch optimizer."""

    param: nn.Parameter
    number: int


@dataclass(frozen=True, kw_only=True)
class _TorchGroup(GroupKey):
    """Key of a torch parameter group. number: index of the group, whose values are only in torch's dictionary."""

    number: int


class TorchRule:
    """Updates ranges with a torch optimizer whose groups contain one tensor per range.

    stepped: the tensor of each range, and the number of its group. init_state_fn: called with the optimizer if its
    state is required before the first step. State that is still missing is allocated by a step with a learning rate of
    0.
    """

    # One call of torch's step() updates everything.
    is_collective = True

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        stepped: Mapping[FlatParamRange, _Stepped],
        init_state_fn: InitStateFn | None,
    ) -> None:
        self.optimizer, self.ranges = optimizer, list(stepped)
        self._stepped, self._init_state_fn = dict(stepped), init_state_fn

    def refresh_rates(self) -> None:
        """Does nothing, because torch reads its groups in each step."""

    def update(self, scale: GradScale, ranges: Set[FlatParamRange]) -> None:
        """Updates all ranges; a parameter without a gradient remains unchanged, as in torch.

        Raises ValueError if the device decides whether to update, which torch's step() does not support.
        """
        if scale.skip is not None:
            raise ValueError(
                f"step_on_device does not support torch's {type(self.optimizer).__name__}: call step, which "
                "decides on the host, or build the optimizer with get_megatron_optimizer"
            )
        assert all(one in ranges for one in self.ranges), "torch's optimizer updates all its parameters in one call"
        with torch.no_grad():
            before = [(one.param, one.param.grad) for one in self._stepped.values()]
            for one, stepped in self._stepped.items():
                stepped.param.grad = _divided(one, stepped.param, divisor=scale.divisor)
            self.optimizer.step()
            for param, grad in before:
                param.grad = grad
            for one in self.ranges:
                one.write_model()

    def flat_state(self, run: FlatParamRange) -> dict[str, StoredFloats]:
        """Returns torch's state of a range by name; allocates missing state.

        Raises ValueError for state that does not have one number per element.
        """
        self._allocate_state()
        param = self._stepped[run].param
        found: dict[str, StoredFloats] = {}
        for name, value in self.optimizer.state.get(param, {}).items():
            if name == "step" or value is None:
                continue
            if not isinstance(value, torch.Tensor) or value.shape != param.shape:
                raise ValueError(
                    f"state {name} of torch's {type(self.optimizer).__name__} is a {type(value).__name__} without "
                    "one number for each element of its parameter: use torch's state_dict"
                )
            flat = flat_view(value)
            found[name] = Plain(flat) if value.dtype.itemsize >= 4 else Rounded(flat)
        return found

    def settings_in(self, run: FlatParamRange) -> list[tuple[Span, Mapping[str, Any]]]:
        return [(Span(0, run.span.numel), self.optimizer.param_groups[self._stepped[run].number])]

    def step_counts(self) -> list[torch.Tensor]:
        """Returns torch's step counters; none for a rule that has not stepped: [], fp32 each."""
        counts = (self.optimizer.state.get(one.param, {}).get("step") for one in self._stepped.values())
        return [count for count in counts if isinstance(count, torch.Tensor)]

    @torch.no_grad()
    def _allocate_state(self) -> None:
        if self._init_state_fn is not None and self._without_state():
            self._init_state_fn(self.optimizer)
        new = self._without_state()
        if not new:
            return
        # Zero gradients at zero rates change no parameter, and leave zero moments.
        rates: list[dict[str, Any]] = [
            {name: group[name] for name in ("lr", "weight_decay") if name in group} for group in self._groups
        ]
        before = [(one.param, one.param.grad) for one in self._stepped.values()]
        for param, _ in before:
            param.grad = None
        for param in new:
            param.grad = torch.zeros_like(param)
        for group, values in zip(self._groups, rates):
            group.update(dict.fromkeys(values, 0.0))
        self.optimizer.step()
        for group, values in zip(self._groups, rates):
            group.update(values)
        for param, grad in before:
            param.grad = grad
        for param in new:
            count = self.optimizer.state[param].get("step")
            if isinstance(count, torch.Tensor):
                count.zero_()

    @property
    def _groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    def _without_state(self) -> list[nn.Parameter]:
        return [one.param for one in self._stepped.values() if not self.optimizer.state.get(one.param)]


class _ParamBuffer:
    """Presents one parameter, in its existing memory, as a flat buffer. name: used in messages."""

    def __init__(self, name: str, param: nn.Parameter) -> None:
        span = Span(0, param.numel())
        self._param = param
        self.param_data = flat_view(param)
        self.grad_data = self.param_data.to("meta")
        self.layout = BufferLayout((span,), (BucketLayout(0, span, span.numel, (0,)),), num_shards=1)
        self.slots = [ParamSlot(name, param, span, self.grad_data, self.grad_data)]
        self.is_expert, self.is_sharded = param_facts(param).is_expert, False
        self.model_dtype = param.dtype
        self.data_parallel_group: dist.ProcessGroup | None = None

    @property
    def persistent_params(self) -> list[torch.Tensor]:
        """The parameter as a flat tensor in memory order: [N], the parameter's dtype."""
        return [self.param_data]

    @property
    def persistent_grads(self) -> list[torch.Tensor]:
        """Empty list, because gradients belong to autograd or a wrapper."""
        return []

    def owned_spans(self) -> list[Span]:
        return [self.layout.spans[0]]

    def owned_grads(self, slot: ParamSlot) -> list[torch.Tensor]:
        return [self.grad_of(0)]

    def grad_of(self, bucket: int) -> torch.Tensor:
        """Returns the parameter's main_grad, or else its grad, in memory order; empty if it has neither."""
        grad = persistent_gradient(self._param)
        if grad is None:
            return self.param_data[:0]
        if grad.layout is not torch.strided:
            raise ValueError(f"the gradient of {self.slots[0].name} is {grad.layout}: must be a dense tensor")
        return in_order_of(grad.detach(), self._param)

    def is_attached(self, param: nn.Parameter, *, start: int, address: int) -> bool:
        """Returns whether element `start` of the parameter is stored at `address`."""
        return not param.numel() or param.data_ptr() + start * param.element_size() == address


def _range_of(name: str, param: nn.Parameter, key: GroupKey) -> FlatParamRange:
    buffer, span = _ParamBuffer(name, param), Span(0, param.numel())
    model = buffer.param_data
    member = ParamRange(name, param, span, 0)
    return FlatParamRange([member], key, model, full_masters(model), buffer, span, 0, slice(None), buffer.grad_of)


def _main_param(run: FlatParamRange, param: nn.Parameter) -> nn.Parameter:
    main = nn.Parameter(shaped_view(run.stepped, param))
    copy_marks(main, param)
    set_main_param(param, main, is_sharded=False)
    return main


def _move_state(optimizer: torch.optim.Optimizer, param: nn.Parameter, main: nn.Parameter) -> None:
    if param in optimizer.state:
        state = optimizer.state.pop(param)
        optimizer.state[main] = {
            name: value.to(main.dtype) if isinstance(value, torch.Tensor) and value.shape == main.shape else value
            for name, value in state.items()
        }


def _divided(run: FlatParamRange, like: torch.Tensor, *, divisor: float | torch.Tensor) -> torch.Tensor | None:
    """Returns the gradient of a range divided by `divisor`; None if the range has no gradient.

    The result has the shape, dtype and device of `like`, fp32 or fp64.
    """
    flat = run.grad
    if flat.numel() != run.model.numel():
        return None
    # In place if no dtype or device conversion is required, as in a fused kernel.
    moved = flat.to(like)
    if not (isinstance(divisor, float) and divisor == 1.0):
        moved.div_(divisor)
    return shaped_view(moved, like)


def _check_param(name: str, param: nn.Parameter, *, masters: bool) -> None:
    if isinstance(param, DTensor):
        raise ValueError(
            f"{name} is a DTensor: must be a full tensor; for sharded parameters use get_megatron_optimizer"
        )
    if param.dtype.itemsize < 4 and not masters:
        raise ValueError(
            f"{name} is {param.dtype}: must be float32 or float64 without masters; for other dtypes use "
            "Float16OptimizerWithFloat16Params"
        )
    check_dense(name, param)
