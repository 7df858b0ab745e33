"""DistributedFusedAdam: Adam whose gradients and states are spread over ranks (ZeRO-2), for any PyTorch module.

Its parameters are in fused_adam_params.py, their gradients in fused_adam_grads.py, the update of a shard is in
adam.py. Buffers, and the order of messages, are in megatron/core/distributed.
"""

import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.profiler import record_function

from megatron.core.agreement import all_ranks_agree
from megatron.core.dense_memory import check_apart, check_dense
from megatron.core.distributed.bucket_group import _ParamAndGradBucketGroup
from megatron.core.distributed.bucket_storage import _ParamAndGradBucket
from megatron.core.distributed.forward_waits import ForwardWaits, NoWait
from megatron.core.distributed.iteration import MethodNames
from megatron.core.distributed.launch_sequence import ReduceScope
from megatron.core.distributed.scheduler import CollectiveScheduler
from megatron.core.group_collectives import gather_objects
from megatron.core.optimizer.adam import AdamRates, GradScale, GradUse, adam_step
from megatron.core.optimizer.fused_adam_grads import GradAccumulator, GradMode, ShardScaling, check_free
from megatron.core.optimizer.fused_adam_params import FusedRange, RankGrid, SegmentPlan, ShardedParams, poison
from megatron.core.optimizer.fused_adam_settings import (
    AdamMemory,
    Params,
    as_groups,
    as_params,
    check_capturable,
    check_debug,
    check_group,
    check_scalars,
    check_switches,
    common_device,
)
from megatron.core.optimizer.state_dict import AdamShard, adam_state_dict, gather_torch_state_sync, load_adam_state_dict


class DistributedFusedAdam(torch.optim.Optimizer):
    """A drop-in for torch.optim.AdamW and Adam, also on one rank without torch.distributed. In a step:

    1. backward moves each gradient into the memory of its bucket; as soon as a bucket is full it is reduced, to the
       rank that owns each element, and its memory is freed. Sums of several backwards add up in the shards.
    2. `step` reduces what is left (param.grad set by hand, gradients of no_sync), updates this rank's shard of every
       bucket by fused kernels, and lets all ranks gather the parameters.

    Every rank calls backward outside no_sync, and all methods that reduce, as often as the others; which parameters a
    backward reaches may differ, but for at least one on each rank. Ranks must begin with equal parameters.

    The update. params, lr, betas, eps, weight_decay: as torch.optim.AdamW's; groups may have their own, and
    bias_correction. bias_correction: of both moments. adam_w_mode: False adds the decay to the gradients, as Adam does.
    amsgrad: False.

    Ranks. process_group: all of them; their sizes multiplied: distributed_process_group, which shares each state, and
    redundant_process_group, which holds copies of it. average_grad_sync: the mean over process_group, not the sum.
    device: of the parameters, which is checked.

    Memory. dtype: of states; fp64 parameters have fp64 states. contiguous_param_buffer: parameters become views of flat
    tensors; else they stay in their memory, with copies from messages, and in any case with masters in the states.
    contiguous_grad_buffer: buckets keep their memory, see grad_buffer_view. store_params: masters in `dtype` where the
    parameters are not that themselves; store_param_remainders: instead the half of fp32 that bf16 parameters lack.
    with_scaled_states: 16-bit states with scales.

    What is sent. grad_sync_dtype, param_sync_dtype: in which gradients are added up and parameters are sent; None:
    dtype, and the parameters' own. bucket_cap_mb: MiB of a bucket's gradients, at most, if that is not below 128
    elements. pipeline_size: buckets that may be under way. overlap_grad_sync: reduce during backward; else in grad_sync
    or step, until when all gradients are kept. overlap_param_sync: modules wait for their parameters in forward; other
    code calls wait_params before it reads any. debug: with that, parameters are NaN from the step to their gather.

    capturable: lr is a tensor on the device, and ranks agree on nothing on the host, so that a CUDA graph can hold a
    step: all ranks must then run the same program.

    Raises ValueError where arguments contradict each other, naming them. Follows ZeRO (Rajbhandari et al., 2020), and
    the interface of apex's class of this name.
    """

    # What torch.amp.GradScaler asks: whether it may hand its scale to `step`, which then decides on the device.
    _step_supports_amp_scaling = True
    _custom_amp_unscale_grads = True

    def __init__(
        self,
        params: Params,
        lr: float | torch.Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        dtype: torch.dtype = torch.float32,
        grad_sync_dtype: torch.dtype | None = None,
        param_sync_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        process_group: dist.ProcessGroup | None = None,
        distributed_process_group: dist.ProcessGroup | None = None,
        redundant_process_group: dist.ProcessGroup | None = None,
        average_grad_sync: bool = True,
        overlap_grad_sync: bool = True,
        overlap_param_sync: bool = False,
        bucket_cap_mb: float = 25.0,
        pipeline_size: int = 2,
        contiguous_param_buffer: bool = True,
        contiguous_grad_buffer: bool = False,
        store_params: bool = True,
        store_param_remainders: bool = False,
        with_scaled_states: bool = False,
        capturable: bool = False,
        debug: bool = False,
    ) -> None:
        check_scalars(amsgrad=amsgrad, bucket_cap_mb=bucket_cap_mb, pipeline_size=pipeline_size)
        check_switches(
            adam_w_mode=adam_w_mode,
            average_grad_sync=average_grad_sync,
            overlap_grad_sync=overlap_grad_sync,
            overlap_param_sync=overlap_param_sync,
            capturable=capturable,
            debug=debug,
        )
        check_debug(debug, overlap_param_sync=overlap_param_sync)
        self._memory = AdamMemory(
            dtype=dtype,
            grad_sync_dtype=grad_sync_dtype,
            param_sync_dtype=param_sync_dtype,
            contiguous_param_buffer=contiguous_param_buffer,
            contiguous_grad_buffer=contiguous_grad_buffer,
            store_params=store_params,
            store_param_remainders=store_param_remainders,
            with_scaled_states=with_scaled_states,
        )
        self._memory.check()
        check_capturable(capturable, self._memory)
        grid = RankGrid.of(process_group, distributed=distributed_process_group, redundant=redundant_process_group)
        # Ranks that a graph's replays bring to the same places need not tell each other on the host, and could not.
        order = CollectiveScheduler(
            None if capturable else grid.ranks,
            overlap_grad_reduce=overlap_grad_sync,
            reduce_scope=ReduceScope.ALL,
            max_in_flight=pipeline_size,
            words=MethodNames(zero="zero_grad", finish="grad_sync"),
            sends_over=(grid.ranks, grid.shards, grid.replicas),
        )
        if capturable:
            order.freeze()
        plan = SegmentPlan(grid, bucket_cap_mb * 2**20, average=average_grad_sync, overlap=overlap_grad_sync)
        self._order = order
        self._shards = ShardedParams(plan, order, memory=self._memory, is_captured=capturable)
        self._adam_w_mode, self._capturable, self._ranks = adam_w_mode, capturable, grid.ranks
        groups = as_groups(params)
        self._device = common_device(groups, None if device is None else torch.device(device))
        self._scaling = ShardScaling(grid.shards, self._device)
        self._grads = GradAccumulator(self._shards, order, scaling=self._scaling, overlap=overlap_grad_sync)
        self._pipeline_size, self._debug = pipeline_size, debug
        self._rates: list[torch.Tensor] = []
        defaults = {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps}
        super().__init__(groups, {**defaults, "weight_decay": weight_decay})
        self._forward = None
        if overlap_param_sync:
            self._forward = _ForwardGathers(self._shards.names, self._shards.groups_of, need=self._need)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a parameter group; its trained parameters move into buckets with their first gradients."""
        super().add_param_group(param_group)
        group, key = self.param_groups[-1], len(self.param_groups) - 1
        names = group.get("param_names") or [f"parameter {i} of group {key}" for i in range(len(group["params"]))]
        try:
            check_group(group)
            for name, param in zip(names, group["params"]):
                self._check_param(name, param)
            before = [(name, param) for param, name in self._shards.names.items()]
            check_apart([*before, *zip(names, group["params"])])
        except ValueError:
            # As if it had not been given.
            self.param_groups.pop()
            raise
        for name, param in zip(names, group["params"]):
            self._shards.names[param], self._shards.keys[param] = name, key
            # Else get_state_dict of torch.distributed.checkpoint makes states by a step with zero gradients.
            self.state[param] = {}
            if param.requires_grad:
                self._grads.watch(param)
        # As torch's kernels read it.
        dtype = torch.float64 if self._device.type == "cpu" else torch.float32
        self._rates.append(torch.zeros((), dtype=dtype, device=self._device))
        if self._capturable and not isinstance(group["lr"], torch.Tensor):
            group["lr"] = torch.tensor(group["lr"], dtype=torch.float32, device=self._device)

    # Parameters are taken over.

    def init_params(self, params: nn.Parameter | Iterable[nn.Parameter] | None = None, **memory: Any) -> None:
        """Takes parameters over now, in the order given, not with their first gradients. Collective.

        params: None for all; those that do not require grad, or were taken over before, are left out. They share
        buckets with no others. memory: other values of dtype, grad_sync_dtype, param_sync_dtype, store_params,
        store_param_remainders, with_scaled_states, contiguous_param_buffer or contiguous_grad_buffer for them.
        """
        asked = self._memory.replaced(memory)
        given = [*self._shards.names] if params is None else self._shards.check_own(as_params(params))
        taken = self._shards.groups_of
        self._shards.take_over([param for param in given if param.requires_grad and param not in taken], asked)
        self._shards.move_in()

    def init_params_bucket(self, params: nn.Parameter | Iterable[nn.Parameter], **memory: Any) -> None:
        """Calls init_params: parameters of one call are reduced and gathered together."""
        self.init_params(params, **memory)

    def parameter(self, group: int, index: int) -> nn.Parameter:
        """The parameter at a place of a group of param_groups."""
        found: nn.Parameter = self.param_groups[group]["params"][index]
        return found

    # Gradients.

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets all gradients, and what they were multiplied by; param.grad is None in any case.

        Collective only after an error in a backward.
        """
        self._grads.forget()

    @torch.no_grad()
    def reset_iteration(self, num_backwards: int = 1) -> None:
        """Begins anew after an error, on the ranks that caught it; the others' next collective call raises
        RemoteRankError, and they call this, too. Collective.

        num_backwards: how often ranks without an error run backward outside no_sync until that call, since zero_grad or
        the last step. Errors behind that call, and all with `capturable`, leave the others waiting.
        """
        self._grads.reset(num_backwards)

    @contextmanager
    def no_sync(self, greedy_grad_copy: bool = False) -> Iterator[None]:
        """Defers reduction of the gradients computed inside to the next backward outside, grad_sync or step.

        Until then they add up in param.grad, or with greedy_grad_copy in the memory of buckets.
        """
        with self._grads.mode(GradMode.COPY if greedy_grad_copy else GradMode.KEEP):
            yield

    @record_function("DistributedFusedAdam.grad_sync")
    @torch.no_grad()
    def grad_sync(self) -> None:
        """Reduces what has not been yet, also what was put in param.grad by hand; waits for all sums. Collective."""
        self._grads.finish()

    def grad_buffer_view(self, param: nn.Parameter) -> torch.Tensor:
        """Memory in which kernels accumulate a parameter's gradient themselves: [*its shape], of dtype grad_sync_dtype.

        It is zeros before a backward. The kernels' caller then calls register_grad_ready. Raises ValueError without
        contiguous_grad_buffer.
        """
        self.init_params([param])
        return self._shards.persistent_grad(param)

    def register_grad_ready(self, param: nn.Parameter) -> None:
        """Records, inside a backward, that a gradient, any shape and dtype, was added to its grad_buffer_view."""
        self._grads.grad_added(param)

    @torch.no_grad()
    def grad_norm(
        self,
        parameters: nn.Parameter | Iterable[nn.Parameter] | None = None,
        *,
        norm_type: float = 2.0,
        force: bool = False,
    ) -> torch.Tensor:
        """Norm of the gradients as `step` would take them, over all ranks: [], fp32. Collective.

        parameters: of these alone, any shapes and dtypes. norm_type: a p, or infinity. force: as apex has it, to
        compute it anew, which is done in any case.
        """
        self.grad_sync()
        return self._scaling.norm(self._sums_of(parameters), norm_type)

    @torch.no_grad()
    def clip_grad_norm(
        self,
        max_norm: float,
        parameters: nn.Parameter | Iterable[nn.Parameter] | None = None,
        *,
        norm_type: float = 2.0,
    ) -> torch.Tensor:
        """Scales the gradients to a norm of at most max_norm; returns the norm before: [], fp32. Collective.

        Of all parameters in the pass that `step` makes anyway; of some, any shapes and dtypes, at once.
        """
        if not (isinstance(max_norm, (int, float)) and max_norm >= 0):
            raise ValueError(f"clip_grad_norm: max_norm is {max_norm!r}: must be a number, at least 0")
        self.grad_sync()
        sums = self._sums_of(parameters)
        norm = self._scaling.norm(sums, norm_type)
        self._scaling.clip(max_norm, norm, some=None if parameters is None else sums)
        return norm

    @torch.no_grad()
    def unscale_grads(
        self, inv_scale: torch.Tensor | float | None = None, grad_scaler: "torch.amp.GradScaler | None" = None
    ) -> dict[torch.device, torch.Tensor]:
        """Multiplies the gradients by inv_scale, a number or [], any float dtype, or lets a scaler unscale them.
        Collective.

        Returns whether a gradient of any rank is not finite: [], fp32, 1 or 0, by device. A scaler takes
        note of it, and skips the step.
        """
        if (inv_scale is None) == (grad_scaler is None):
            raise ValueError("unscale_grads: inv_scale and grad_scaler are both given, or neither: must be one of them")
        found_inf = torch.zeros((), dtype=torch.float32, device=self._device)
        if grad_scaler is not None:
            self.grad_sync()
            found_inf = self._grads.any_not_finite()
            grad_scaler.unscale_(self)
        elif inv_scale is not None:
            if not isinstance(inv_scale, torch.Tensor):
                inv_scale = torch.full((), inv_scale, dtype=torch.float32, device=self._device)
            self._grads.unscale(found_inf, inv_scale)
        return {self._device: found_inf}

    # The step.

    def step(self, closure: Callable[[], Any] | None = None, **scaling: Any) -> Any:
        """Updates the parameters from gradients that it reduces first; returns what closure does. Collective.

        grad_scaler: a torch.amp.GradScaler, whose own `step` is called, which comes back here. Gradients stay as they
        were stepped by, for another step, until zero_grad.
        """
        # Not an argument by name: torch's scaler warns optimizers that have one, and hands over its scale otherwise.
        scaler = scaling.pop("grad_scaler", None)
        if scaling:
            raise TypeError(f"step() got {', '.join(scaling)}: takes closure and grad_scaler")
        if scaler is None:
            return self._step() if closure is None else self._step(closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        scaler.step(self)
        return loss

    # torch wraps a `step` without this mark in its hooks, which would run around the scaler's call and inside it.
    step.hooked = True  # type: ignore[attr-defined]

    @torch.optim.Optimizer.profile_hook_step
    @record_function("DistributedFusedAdam.step")
    @torch.no_grad()
    def _step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self._step_supports_amp_scaling:
            self._grads.check_none_left()
        self.grad_sync()
        # torch's scaler leaves them on the optimizer while it steps.
        amp = vars(self)
        if "found_inf" in amp:
            self._grads.check_seen()
        self._update(self._scaling.scale(amp.get("grad_scale"), amp.get("found_inf")))
        return loss

    @torch.no_grad()
    def param_sync(self) -> None:
        """Lets every rank gather all parameters from the ranks that own them, and waits. Collective."""
        self._order.start_param_sync(self._shards.groups, again=True)
        self._order.finish_param_sync(self._shards.groups)

    @torch.no_grad()
    def reload_params(self) -> None:
        """Takes the masters from the parameters, after something else than a step has written to `param.data`.

        The next step would undo that where masters are copies. Other writes count in the version of a parameter, by
        which a step notices them. Collective.
        """
        self._order.finish_param_sync(self._shards.groups)
        for run in self._shards.runs:
            run.take_model()
        self._shards.note_versions()

    def wait_params(self, params: nn.Parameter | Iterable[nn.Parameter]) -> None:
        """Waits until these may be read, any shapes and dtypes: with overlap_param_sync, outside of modules.

        Collective while their gather is due.
        """
        self._need(
            dict.fromkeys(group for param in as_params(params) for group in self._shards.groups_of.get(param, ()))
        )

    # What is saved.

    def state_dict(self, *, state_dict_format: str | int | None = None) -> Any:
        """Moments, masters and step counts by parameter, for torch.distributed.checkpoint or torch.save of each rank.

        Each rank has its shards alone, under the same keys; any number of ranks loads what any other saved; see
        state_dict.py. state_dict_format: "torch" gathers it, on rank 0 of process_group alone, as of
        torch.optim.AdamW, and gives the others None: save the parameters with it. Collective.
        """
        if state_dict_format not in (None, 2, "torch"):
            raise ValueError(f'state_dict_format is {state_dict_format!r}: must be None, 2 (the same), or "torch"')
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        self._shards.take_over_rest()
        shard = self._adam_shard()
        given: Any = gather_torch_state_sync(shard) if state_dict_format == "torch" else None
        if state_dict_format != "torch":
            given = {**adam_state_dict(shard), "order": self._shards.order}
        for after in self._optimizer_state_dict_post_hooks.values() if given is not None else ():
            given = after(self, given) or given
        return given

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes what `state_dict` gave, filled by torch.distributed.checkpoint.load, or a state of torch.optim.AdamW.

        The parameters become what the masters are, where it has any. Collective. Raises ValueError or RemoteRankError,
        with nothing changed, where it does not fit on some rank or ranks give different orders of parameters.
        """
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = before(self, state_dict) or state_dict  # type: ignore[arg-type]  # a mapping suffices
        order = self._agreed_order(state_dict)
        if not self._shards.groups_of:
            # A share that one rank has stored fits its own places alone, which the first backward may have chosen.
            for params in self._shards.in_order(order):
                self.init_params(params)
        self._shards.take_over_rest()
        self._order.finish_param_sync(self._shards.groups)
        load_adam_state_dict(self._adam_shard(), state_dict)
        self._order.mark_stale(self._shards.groups)
        for run in self._shards.runs:
            run.write_model()
        self._order.start_param_sync(self._shards.groups)
        self._order.finish_param_sync(self._shards.groups)
        self._shards.note_versions()
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def release(self) -> None:
        """Takes all hooks off; the parameters have their last values on all ranks then. Collective."""
        self._order.finish_param_sync(self._shards.groups)
        self._grads.release()
        self._order.leave()
        if self._forward is not None:
            self._forward.remove()

    def __getstate__(self) -> NoReturn:
        raise TypeError("a DistributedFusedAdam cannot be pickled, as its process groups cannot: save its state_dict")

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise TypeError("a DistributedFusedAdam cannot be copied, as its process groups cannot: build another")

    # Inside.

    def _check_param(self, name: str, param: nn.Parameter) -> None:
        self._memory.check_param(name, param)
        check_dense(name, param)
        check_free(name, param)
        if param.device != self._device:
            raise ValueError(f"{name} is on {param.device}: must be on {self._device}, as the others")

    def _agreed_order(self, state_dict: Any) -> list[list[int]]:
        """The order of parameters in a state dict, [] if it has none. Collective.

        Raises on all ranks where one is given no dict, or where the orders differ: ranks would take parameters over in
        different orders.
        """
        group = self._ranks
        with all_ranks_agree(group):
            if not isinstance(state_dict, Mapping):
                raise ValueError(f"state_dict is a {type(state_dict).__name__}: must be a dict, on every rank")
            order = state_dict.get("order", [])
            if not isinstance(order, (list, tuple)) or not all(_is_numbers(places) for places in order):
                raise ValueError(f"order of the state dict is {order!r:.80}: must be lists of parameters' numbers")
        orders = gather_objects([list(places) for places in order], group)
        with all_ranks_agree(group):
            others = [rank for rank, theirs in enumerate(orders) if theirs != orders[0]]
            if others:
                raise ValueError(
                    f"order of the state dict differs between rank 0 and ranks {others}: "
                    "give every rank the state dict of one optimizer"
                )
        return orders[0]

    def _adam_shard(self) -> AdamShard:
        return AdamShard(
            self._shards.owned_ranges(),
            self.param_groups,
            self._adam_w_mode,
            self._ranks,
            without_state=self._shards.without_state,
        )

    def _sums_of(self, parameters: nn.Parameter | Iterable[nn.Parameter] | None) -> list[torch.Tensor]:
        return self._shards.sums if parameters is None else self._shards.sums_of(as_params(parameters))

    def _need(self, groups: Iterable[_ParamAndGradBucketGroup]) -> None:
        for group in groups:
            self._order.need(group, prefetch=True)

    def _update(self, scale: GradScale) -> None:
        groups = self._shards.groups
        self._shards.take_changes()
        # First of all: a gather that is still under way would write over what is updated.
        self._order.mark_stale(groups)
        grad_use = self._shards.grad_use
        rates = [self._rates_of(key) for key in range(len(self.param_groups))]
        runs_in: dict[_ParamAndGradBucket, list[FusedRange]] = {}
        for run in self._shards.runs:
            runs_in.setdefault(run.bucket, []).append(run)
        under_way: deque[_ParamAndGradBucketGroup] = deque()
        for group in self._order.gather_order:
            # Each group has one.
            (bucket,) = group.buckets
            if scale.skip is not None and bucket.staged is not None:
                # What a skipped update leaves alone is sent all the same.
                bucket.staged.fill()
            for key, rate in enumerate(rates):
                updates = [run.update() for run in runs_in.get(bucket, ()) if run.key == key]
                adam_step(updates, rate, scale=scale, grads=grad_use)
            if self._forward is None:
                self._order.start_param_sync([group])
                under_way.append(group)
                if len(under_way) > self._pipeline_size:
                    # Each may hold a message of a bucket's size.
                    self._order.need(under_way.popleft(), prefetch=False)
            elif self._debug:
                poison(bucket)
        if grad_use is GradUse.DIVIDE:
            self._scaling.note_divided(scale.skip)
        self._grads.note_step()
        if self._forward is None:
            self._order.note_update()
            self._order.finish_param_sync(groups)
        else:
            self._shards.mark_awaited()
            self._order.note_update()

    def _rates_of(self, key: int) -> AdamRates:
        group, lr = self.param_groups[key], self._rates[key]
        lr.fill_(group["lr"])
        return AdamRates(
            lr,
            betas=tuple(group["betas"]),
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            adam_w_mode=self._adam_w_mode,
            bias_correction=group["bias_correction"],
        )


def _is_numbers(values: Any) -> bool:
    return isinstance(values, (list, tuple)) and all(isinstance(value, int) for value in values)


# Modules wait for their parameters (overlap_param_sync).


class _ForwardGathers:
    """Lets the modules that own parameters wait for their gathers, wherever these modules are.

    An optimizer has parameters, not modules. A hook of all modules finds those that have any of them when they are
    first called; from then on they have hooks of their own. params: whose modules are to be found; groups_of: the
    groups that gather each parameter taken over so far; both may grow. need: waits for groups.
    """

    def __init__(
        self,
        params: Collection[nn.Parameter],
        groups_of: Mapping[nn.Parameter, Sequence[_ParamAndGradBucketGroup]],
        *,
        need: Callable[[Iterable[_ParamAndGradBucketGroup]], None],
    ) -> None:
        self._params, self._groups_of, self._need = params, groups_of, need
        self._num_gathered = len(groups_of)
        self._waits = ForwardWaits(groups_of)
        self._known: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._handles: list[Any] = []
        # Weakly: the hook is of the process, and must not keep an optimizer alive that nobody uses any more.
        attach_new = weakref.WeakMethod(self._attach_new)

        # In a compiled module the graph breaks at these hooks: what to wait for is known when it runs.
        @torch.compiler.disable
        def look(module: nn.Module, *unused: Any) -> None:
            if (method := attach_new()) is not None:
                method(module)

        self._handles.append(register_module_forward_pre_hook(look))
        weakref.finalize(self, self._handles[0].remove)

    def remove(self) -> None:
        """Takes all hooks away."""
        for handle in self._handles:
            handle.remove()

    def _attach_new(self, module: nn.Module) -> None:
        """Registers hooks on modules not seen before; called before each forward."""
        if module in self._known:
            return
        below = list(module.modules())
        new = [part for part in below if part not in self._known]
        self._known.update(below)
        if not any(param in self._params for param in module.parameters()):
            return
        for part in new:
            self._attach(part)
        # Its own hooks come too late for this call.
        self.wait(lambda waits: waits.before(module))

    def _attach(self, module: nn.Module) -> None:
        if any(param in self._params for param in module.parameters()):
            wait = _Wait(self, lambda waits: waits.before(module))
            # Before others of the module, which may read its weights: weight_norm does.
            self._handles.append(module.register_forward_pre_hook(wait, prepend=True))
        if any(param in self._params for param in module.parameters(recurse=False)):
            # Weights are read and written by their names as well, and what was loaded must not be gathered over.
            wait = _Wait(self, lambda waits: waits.own(module))
            self._handles.append(module.register_state_dict_pre_hook(wait))
            self._handles.append(module.register_load_state_dict_pre_hook(wait))

    def wait(self, groups: Callable[[ForwardWaits], Iterable[_ParamAndGradBucketGroup]]) -> None:
        """Waits for groups that are looked up now."""
        if len(self._groups_of) != self._num_gathered:
            # Others are gathered than it has learnt of.
            self._num_gathered = len(self._groups_of)
            self._waits.forget()
        self._need(groups(self._waits))


class _Wait:
    """A hook of a module; weakly, as above, and of a module that is stored or copied it does nothing."""

    def __init__(
        self, gathers: _ForwardGathers, groups: Callable[[ForwardWaits], Iterable[_ParamAndGradBucketGroup]]
    ) -> None:
        self._gathers, self._groups = weakref.ref(gathers), groups

    @torch.compiler.disable
    def __call__(self, *unused: Any) -> None:
        gathers = self._gathers()
        if gathers is not None:
            gathers.wait(self._groups)

    def __reduce__(self) -> tuple[Any, ...]:
        return NoWait, ()
