"""DistributedFusedAdam: Adam with gradients and states sharded over ranks (ZeRO-2), for any PyTorch module.

fused_adam_params.py handles its parameters, fused_adam_grads.py their gradients, and adam.py updates a shard. Buffers
and the order of collectives are in megatron/core/distributed.

[Note: registered parameters] A parameter is registered when it is assigned a place in a bucket, after which its states
are allocated. Unless `init_params` registers it, this happens when the first gradient is reduced, so that buckets
follow the order of gradients. Each call registers one segment, whose parameters share no buckets with other segments.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn, cast

import torch
import torch.distributed as dist
from torch import nn

from megatron.core.dense_memory import check_apart, check_dense
from megatron.core.device.trace_ranges import trace_range
from megatron.core.distributed.bucket_group import _ParamAndGradBucketGroup
from megatron.core.distributed.forward_waits import ForwardWaits
from megatron.core.distributed.iteration import MethodNames
from megatron.core.distributed.launch_sequence import ReduceScope
from megatron.core.distributed.scheduler import CollectiveScheduler
from megatron.core.group_collectives import all_ranks_agree, gather_objects
from megatron.core.optimizer.adam import AdamRates, GradScale, GradUse, adam_step
from megatron.core.optimizer.fused_adam_grads import GradAccumulator, GradMode, ShardScaling, check_free
from megatron.core.optimizer.fused_adam_params import RankGrid, SegmentPlan, ShardedParams, poison
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
from megatron.core.process_groups_config import group_rank, group_size


class DistributedFusedAdam(torch.optim.Optimizer):
    """A drop-in replacement for torch.optim.AdamW and Adam that also runs without torch.distributed. In a step:

    1. Backward moves each gradient into the memory of its bucket. A full bucket is reduced to the ranks that own its
       elements, and its memory is freed. Sums of several backward passes accumulate in the shards.
    2. `step` reduces remaining gradients (set manually, or from no_sync), updates this rank's shard of every bucket
       with fused kernels, and gathers the parameters on all ranks.

    All ranks must begin with equal parameters. They must make the same number of backward passes outside no_sync, and
    call each method that reduces equally often. Different ranks may reach different parameters in a backward pass, but
    each rank must reach at least one.

    The update. params, lr, betas, eps, weight_decay: as in torch.optim.AdamW; groups may override them and
    bias_correction. bias_correction: corrects both moments. adam_w_mode: False adds the decay to the gradients, as Adam
    does. amsgrad: must be False.

    Ranks. process_group: all ranks of the optimizer. They form a grid of distributed_process_group, over which each
    state is sharded, and redundant_process_group, whose ranks hold copies of the same shard. average_grad_sync:
    averages gradients over process_group instead of summing. device: must be the device of the parameters; None means
    the device of the first parameter.

    Memory. dtype: dtype of states; fp64 parameters have fp64 states. contiguous_param_buffer: makes parameters views of
    flat tensors. Without it they keep their memory, gathered values are copied into it, and states always have masters.
    contiguous_grad_buffer: makes the gradient memory of buckets persistent, see grad_buffer_view. store_params: stores
    masters in `dtype` unless the parameters have that dtype. store_param_remainders: stores only the lower halves of
    fp32 masters of bf16 parameters instead. with_scaled_states: stores 16-bit states with scales.

    Communication. grad_sync_dtype: dtype in which gradients accumulate and are reduced; None means `dtype`.
    param_sync_dtype: all-gather dtype; None means the parameters' dtype, and an integer dtype sends the raw bits.
    bucket_cap_mb: upper limit of a bucket's gradients in MiB, but at least 128 elements. pipeline_size: number of
    buckets that may be in flight. overlap_grad_sync: reduces during backward; without it, grad_sync or step reduces,
    and all gradients are kept until then. overlap_param_sync: modules wait for their parameters in forward; other code
    must call wait_params before it reads parameters. debug: fills parameters with NaN from the step to their gather;
    requires overlap_param_sync.

    capturable: stores lr as a tensor on the device and never communicates on the host, so that a CUDA graph can capture
    a step. All ranks must then run the same program.

    Attributes named like arguments are read-only. state["step"] counts the updates, [], int64, on the device, where a
    loss scaler may skip one; states of parameters are in state_dict.

    Raises ValueError, naming the arguments, for invalid or contradictory arguments. Follows ZeRO (Rajbhandari et al.,
    2020) and the interface of apex's class of this name.
    """

    # Tells torch.amp.GradScaler that `step` accepts its scale, and decides on the device whether to update.
    _step_supports_amp_scaling = True
    # Tells the GradScaler of NeMo to call unscale_grads.
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
        # Replays of a graph launch the same collectives on all ranks and cannot communicate on the host.
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
        self._scaling = ShardScaling(grid.shards, self._device, is_captured=capturable)
        self._grads = GradAccumulator(self._shards, order, scaling=self._scaling, overlap=overlap_grad_sync)
        self._pipeline_size, self._debug = pipeline_size, debug
        self._rates: list[torch.Tensor] = []
        defaults = {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps}
        super().__init__(groups, {**defaults, "weight_decay": weight_decay})
        # Stored under a string key among the states of parameters, as in apex.
        self._count = torch.zeros((), dtype=torch.int64, device=self._device)
        cast(dict[Any, Any], self.state)["step"] = self._count
        self._set_attributes_of_apex(
            grid,
            average=average_grad_sync,
            overlap=(overlap_grad_sync, overlap_param_sync),
            bucket_cap_mb=bucket_cap_mb,
        )
        self._forward = None
        if overlap_param_sync:
            self._forward = ForwardWaits(order, self._shards.names, self._shards.groups_of, prefetch=True)
            self._forward.attach_when_called()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a parameter group; its trained parameters move into buckets with their first gradients.

        Raises ValueError, and changes nothing, for invalid hyperparameters and for parameters that are on a different
        device, are invalid for the optimizer's dtypes, overlap in memory or already belong to an optimizer or wrapper.
        """
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
            # Removed, so that the failed call has no effect.
            self.param_groups.pop()
            raise
        for name, param in zip(names, group["params"]):
            self._shards.names[param], self._shards.keys[param] = name, key
            # Otherwise get_state_dict of torch.distributed.checkpoint would create states by a step with zero
            # gradients.
            self.state[param] = {}
            if param.requires_grad:
                self._grads.watch(param)
        # The dtype that torch's kernels expect.
        dtype = torch.float64 if self._device.type == "cpu" else torch.float32
        self._rates.append(torch.zeros((), dtype=dtype, device=self._device))
        if self._capturable and not isinstance(group["lr"], torch.Tensor):
            group["lr"] = torch.tensor(group["lr"], dtype=torch.float32, device=self._device)

    # Registration of parameters, see [Note: registered parameters].

    def init_params(self, params: nn.Parameter | Iterable[nn.Parameter] | None = None, **memory: Any) -> None:
        """Registers parameters now, in the order given, instead of with their first gradients. Collective.

        See [Note: registered parameters]. params: None means all; parameters that do not require grad or are already
        registered are skipped. memory: settings for these parameters that override dtype, grad_sync_dtype,
        param_sync_dtype, store_params, store_param_remainders, with_scaled_states, contiguous_param_buffer or
        contiguous_grad_buffer. Raises ValueError for parameters that are not in param_groups or differ between ranks,
        and for contradictory values; TypeError for other names.
        """
        asked = self._memory.replaced(memory)
        given = [*self._shards.names] if params is None else self._shards.check_own(as_params(params))
        taken = self._shards.groups_of
        self._shards.register([param for param in given if param.requires_grad and param not in taken], asked)
        self._shards.move_in()

    def init_params_bucket(self, params: nn.Parameter | Iterable[nn.Parameter], **memory: Any) -> None:
        """Calls init_params; the parameters of one call are reduced and gathered together."""
        self.init_params(params, **memory)

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yields all parameters in the order of param_groups."""
        return (param for group in self.param_groups for param in group["params"])

    def parameter(self, group: int, index: int) -> nn.Parameter:
        """Returns param_groups[group]["params"][index]."""
        found: nn.Parameter = self.param_groups[group]["params"][index]
        return found

    # Gradients.

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops all gradients and pending unscale or clip factors; sets param.grad to None regardless of set_to_none.

        Collective only after an error in a backward pass.
        """
        self._grads.forget()

    @torch.no_grad()
    def reset_iteration(self, num_backwards: int = 1) -> None:
        """Discards the iteration after an error and begins a new one. Collective.

        Must be called on the ranks that caught the error. The next collective call of the other ranks raises
        RemoteRankError, and these ranks must then call reset_iteration as well. num_backwards: number of backward
        passes outside no_sync, since zero_grad or the last step, that ranks without an error run before that call.
        Later errors, and any error with `capturable`, leave the other ranks waiting.
        """
        self._grads.reset(num_backwards)

    @contextmanager
    def no_sync(self, greedy_grad_copy: bool = False) -> Iterator[None]:
        """Defers reductions inside the context to the next backward pass outside it, grad_sync or step.

        Until then gradients accumulate in param.grad, or with greedy_grad_copy in the buckets' memory.
        """
        with self._grads.mode(GradMode.COPY if greedy_grad_copy else GradMode.KEEP):
            yield

    @trace_range("DistributedFusedAdam.grad_sync")
    @torch.no_grad()
    def grad_sync(self) -> None:
        """Reduces all remaining gradients, including gradients set manually in param.grad, and waits. Collective."""
        self._grads.finish()

    def grad_buffer_view(self, param: nn.Parameter) -> torch.Tensor:
        """Returns memory to which kernels may add a parameter's gradient: [*parameter shape], dtype grad_sync_dtype.

        It is zero before a backward pass. register_grad_ready must be called after adding a gradient. Raises ValueError
        without contiguous_grad_buffer, and for a parameter that is not in param_groups.
        """
        self.init_params([param])
        return self._shards.persistent_grad(param)

    def register_grad_ready(self, param: nn.Parameter) -> None:
        """Records, during backward, that a gradient was added to the parameter's grad_buffer_view."""
        self._grads.grad_added(param)

    @torch.no_grad()
    def grad_norm(
        self,
        parameters: nn.Parameter | Iterable[nn.Parameter] | None = None,
        *,
        norm_type: float = 2.0,
        force: bool = False,
    ) -> torch.Tensor:
        """Returns the norm over all ranks of the gradients that `step` would use: [], fp32. Collective.

        parameters: restricts the norm to these parameters. norm_type: order of the norm, above 0, possibly infinity;
        other values raise ValueError. force: has no effect; apex returns a cached norm without it.
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
        """Scales the gradients to a norm of at most max_norm; returns the previous norm: [], fp32. Collective.

        Without `parameters` the factor is applied in the update of `step`; gradients of given parameters are scaled
        immediately. Raises ValueError if max_norm is not a number of at least 0.
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
        """Multiplies the gradients by inv_scale, or lets a scaler unscale them. Collective.

        inv_scale: a number or [], any float dtype. Returns, by device, 1 if a gradient of any rank is not finite, else
        0: [], fp32. A scaler records this value and then skips the step. Raises ValueError unless exactly one of
        inv_scale and grad_scaler is given.
        """
        if (inv_scale is None) == (grad_scaler is None):
            raise ValueError(
                "unscale_grads: inv_scale and grad_scaler are both given, or neither: pass exactly one of them"
            )
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
        """Reduces remaining gradients and updates the parameters; returns the closure's result. Collective.

        grad_scaler: a torch.amp.GradScaler, whose `step` is called and calls this method. Until zero_grad the gradients
        remain as used by the update, divided by the loss scale and clipped, so a further step may reuse them. Raises
        RuntimeError if a scaler checked gradients for infinities before they were reduced.
        """
        # Not a named argument, because torch's scaler warns about an argument grad_scaler of `step`. Without it, the
        # scaler sets its scale as an attribute of the optimizer.
        scaler = scaling.pop("grad_scaler", None)
        if scaling:
            raise TypeError(
                f"step() got unexpected arguments {', '.join(scaling)}: accepts only closure and grad_scaler"
            )
        if scaler is None:
            return self._step() if closure is None else self._step(closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        scaler.step(self)
        return loss

    # Without this mark torch wraps `step` in its hooks, which would run twice with a scaler.
    step.hooked = True  # type: ignore[attr-defined]

    @torch.optim.Optimizer.profile_hook_step
    @trace_range("DistributedFusedAdam.step")
    @torch.no_grad()
    def _step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self._step_supports_amp_scaling:
            self._grads.check_none_left()
        self.grad_sync()
        # torch's scaler sets grad_scale and found_inf as attributes of the optimizer during a step.
        amp = vars(self)
        if "found_inf" in amp:
            self._grads.check_seen()
        self._update(self._scaling.scale(amp.get("grad_scale"), amp.get("found_inf")))
        return loss

    @torch.no_grad()
    def param_sync(self) -> None:
        """Gathers all parameters from the ranks that own them, and waits. Collective."""
        self._order.start_param_sync(self._shards.groups, again=True)
        self._order.finish_param_sync(self._shards.groups)

    @torch.no_grad()
    def reload_params(self) -> None:
        """Copies the parameters to the masters after other code has written to `param.data`. Collective.

        Without this call, the next step would undo the write if masters are copies. Writes to the parameter itself are
        detected by its version counter.
        """
        self._order.finish_param_sync(self._shards.groups)
        for one in self._shards.states:
            one.take_model()
        self._shards.note_written()

    def wait_params(self, params: nn.Parameter | Iterable[nn.Parameter]) -> None:
        """Waits until parameters may be read outside their modules; for overlap_param_sync.

        Collective while their gather is pending.
        """
        found = (group for param in as_params(params) for group in self._shards.groups_of.get(param, ()))
        for group in dict.fromkeys(found):
            self._order.need(group, prefetch=True)

    # State dicts.

    def state_dict(self, *, state_dict_format: str | int | None = None, gather_on_root: bool | None = None) -> Any:
        """Returns moments, masters and step counts by parameter. Collective.

        The result is intended for torch.distributed.checkpoint, or torch.save on each rank. Each rank's result contains
        only its shards, under the same keys as on the other ranks, and can be loaded on any number of ranks; see
        state_dict.py. state_dict_format: "torch" gathers a state of torch.optim.AdamW on rank 0 of process_group and
        returns None on the other ranks; the parameters should be saved with it. gather_on_root: True means the format
        "torch", False each rank's shards, None defers to state_dict_format. Raises ValueError for other formats, or if
        the two contradict each other.
        """
        if state_dict_format not in (None, 2, "torch"):
            raise ValueError(
                f'state_dict_format is {state_dict_format!r}: must be None or 2, which are equivalent, or "torch"'
            )
        if gather_on_root is not None:
            wanted = "torch" if gather_on_root else 2
            if state_dict_format not in (None, wanted):
                raise ValueError(
                    f"gather_on_root is {gather_on_root} with state_dict_format {state_dict_format!r}: omit "
                    f"gather_on_root, or set the format to {wanted!r}"
                )
            state_dict_format = wanted
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        self._grads.register_rest()
        shard = self._adam_shard()
        given: Any = gather_torch_state_sync(shard) if state_dict_format == "torch" else None
        if state_dict_format != "torch":
            given = {**adam_state_dict(shard), "order": self._shards.order}
        for after in self._optimizer_state_dict_post_hooks.values() if given is not None else ():
            given = after(self, given) or given
        return given

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads a result of `state_dict`, filled by torch.distributed.checkpoint.load, or a state of torch.optim.AdamW.

        Parameters are set to the loaded masters, if there are any. Collective. Raises ValueError or RemoteRankError,
        and changes nothing, if the state is incompatible on a rank or ranks have different orders of parameters.
        """
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = before(self, state_dict) or state_dict  # type: ignore[arg-type]  # a mapping suffices
        order = self._agreed_order(state_dict)
        if not self._shards.groups_of:
            # A shard saved by one rank fits only the layout it was saved with, which the first backward determined.
            for params in self._shards.in_order(order):
                self.init_params(params)
        self._grads.register_rest()
        self._order.finish_param_sync(self._shards.groups)
        load_adam_state_dict(self._adam_shard(), state_dict)
        self._order.mark_stale(self._shards.groups)
        for one in self._shards.states:
            one.write_model()
        self._order.start_param_sync(self._shards.groups)
        self._order.finish_param_sync(self._shards.groups)
        self._shards.note_written()
        steps = [int(state.step) for state in self._shards.states.values()]
        # A rank may own no state.
        self._count.fill_(max(gather_objects(max(steps, default=0), self._ranks)))
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def release(self) -> None:
        """Gathers the final values of all parameters, removes all hooks and disables the optimizer. Collective."""
        self._order.finish_param_sync(self._shards.groups)
        self._grads.release()
        self._order.leave()
        if self._forward is not None:
            self._forward.detach()

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            "a DistributedFusedAdam cannot be pickled, because process groups cannot be pickled: save its "
            "state_dict instead"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise TypeError(
            "a DistributedFusedAdam cannot be copied, because process groups cannot be copied: build a new one"
        )

    # Inside.

    def _set_attributes_of_apex(
        self, grid: RankGrid, *, average: bool, overlap: tuple[bool, bool], bucket_cap_mb: float
    ) -> None:
        """Sets the attributes that scripts written for apex read; they are unused here."""
        memory, first = self._memory, next(self.parameters(), None)
        self.process_group, self.process_group_size = grid.ranks, group_size(grid.ranks)
        self.distributed_process_group, self.redundant_process_group = grid.shards, grid.replicas
        self.distributed_rank, self.distributed_size = group_rank(grid.shards), group_size(grid.shards)
        self.redundant_size = group_size(grid.replicas)
        self.device, self.dtype = self._device, memory.dtype
        self.grad_sync_dtype = memory.grad_sync_dtype or memory.dtype
        self.param_sync_dtype = memory.param_sync_dtype or (memory.dtype if first is None else first.dtype)
        self.adam_w_mode, self.capturable, self.average_grad_sync = self._adam_w_mode, self._capturable, average
        self.overlap_grad_sync, self.overlap_param_sync = overlap
        self.bucket_cap_mb, self.pipeline_size = bucket_cap_mb, self._pipeline_size
        self.contiguous_param_buffer = memory.contiguous_param_buffer
        self.contiguous_grad_buffer = memory.contiguous_grad_buffer
        self.store_params, self.store_param_remainders = memory.store_params, memory.store_param_remainders
        self.with_scaled_states = memory.with_scaled_states

    def _check_param(self, name: str, param: nn.Parameter) -> None:
        self._memory.check_param(name, param)
        check_dense(name, param)
        check_free(name, param)
        if param.device != self._device:
            raise ValueError(f"{name} is on {param.device}: must be on {self._device} like the other parameters")

    def _agreed_order(self, state_dict: Any) -> list[list[int]]:
        """Returns the parameter order of a state dict, [] if it has none. Collective.

        Raises on all ranks if any rank has no dict, or if orders differ, because ranks would then register parameters
        in different orders.
        """
        group = self._ranks
        with all_ranks_agree(group):
            if not isinstance(state_dict, Mapping):
                raise ValueError(f"state_dict is a {type(state_dict).__name__}: must be a dict, on every rank")
            order = state_dict.get("order", [])
            if not isinstance(order, (list, tuple)) or not all(_is_numbers(places) for places in order):
                raise ValueError(f"order of the state dict is {order!r:.80}: must be lists of parameter indices")
        orders = gather_objects([list(places) for places in order], group)
        with all_ranks_agree(group):
            others = [rank for rank, theirs in enumerate(orders) if theirs != orders[0]]
            if others:
                raise ValueError(
                    f"order of the state dict differs between rank 0 and ranks {others}: load the state dict of the "
                    "same optimizer on every rank"
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

    def _update(self, scale: GradScale) -> None:
        groups = self._shards.groups
        self._shards.take_changes()
        # Must come first, because a gather in flight would overwrite updated parameters.
        self._order.mark_stale(groups)
        grad_use = self._shards.grad_use
        rates = [self._rates_of(key) for key in range(len(self.param_groups))]
        gathers_now = self._forward is None
        for group in self._order.gather_each(max_in_flight=self._pipeline_size) if gathers_now else groups:
            self._update_group(group, scale=scale, rates=rates, grads=grad_use)
        if not gathers_now:
            self._shards.mark_awaited()
        self._count.add_(1 if scale.skip is None else scale.skip == 0)
        if grad_use is GradUse.DIVIDE:
            self._scaling.note_divided(scale.skip)
        self._grads.note_step()
        self._order.note_update()
        if gathers_now:
            self._order.finish_param_sync(groups)

    def _update_group(
        self, group: _ParamAndGradBucketGroup, *, scale: GradScale, rates: list[AdamRates], grads: GradUse
    ) -> None:
        # Each group has exactly one bucket.
        (bucket,) = group.buckets
        if scale.skip is not None and bucket.staged is not None:
            # A skipped update does not write to the message, which is still sent.
            bucket.staged.fill()
        for key, updates in self._shards.updates_in(bucket).items():
            adam_step(updates, rates[key], scale=scale, grads=grads)
        if self._debug:
            poison(bucket)

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
