"""Seeding of the random-number streams, and activation recompute with the same random numbers.

device/rng.py implements the streams. transformer/recompute.py selects the parts of a model to recompute.

[Note: values of a forward]
A forward may depend on state that has changed by the time backward recomputes it: the experts that a router replays, or
counts accumulated over micro-batches. Such values are passed through `remembered`, which stores them with the forward
of the recomputed function and returns them in each later run of it. They therefore belong to their forward, whatever
the order of forwards and backwards, and are freed with its graph. Statistics must be recorded in one run alone, which
`is_recomputing` decides. The first run of a reentrant checkpoint has no gradients, so its second run records them.
"""

import functools
import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.core.autograd import PlainFunction
from megatron.core.config_field import require_defaults
from megatron.core.device import (
    DATA_PARALLEL_RNG,
    EXPERT_PARALLEL_RNG,
    MODEL_PARALLEL_RNG,
    CudaRNGStatesTracker,
    RngStates,
    default_device,
    rng_state_bytes,
    rng_tracker,
    set_rng_state_bytes,
)
from megatron.core.device.torch_internals import active_hooks, current_backward_id, storage_id
from megatron.core.parallel_state import existing_process_groups
from megatron.core.process_groups_config import group_rank, group_size

# Large offsets, so that seeds differ from the seeds of neighboring ranks and of the default stream.
_MODEL_PARALLEL_OFFSET, _EXPERT_PARALLEL_OFFSET = 2718, 1024
_Value = TypeVar("_Value")


def get_expert_parallel_rng_tracker_name() -> str:
    """Returns the name of the stream that differs between ranks with different experts."""
    return EXPERT_PARALLEL_RNG


def get_data_parallel_rng_tracker_name() -> str:
    """Returns the name of the stream that is the same on all ranks."""
    return DATA_PARALLEL_RNG


def get_all_rng_states() -> RngStates:
    """Returns the states of all named streams. Raises ValueError if there are no streams."""
    tracker = get_cuda_rng_tracker()
    if not tracker.is_initialized():
        raise ValueError("there are no random-number streams: call model_parallel_cuda_manual_seed first")
    return tracker.get_states()


def get_cuda_rng_tracker(
    use_te_rng_tracker: bool = False, inference_rng_tracker: bool = False, use_cudagraphable_rng: bool = False
) -> CudaRNGStatesTracker:
    """Returns the tracker of this process. Its GPU streams can always be used in CUDA graphs.

    Raises ValueError for the Transformer Engine and inference trackers of Megatron, which do not exist here.
    """
    others = {"use_te_rng_tracker": use_te_rng_tracker, "inference_rng_tracker": inference_rng_tracker}
    for name, requested in others.items():
        if requested:
            raise ValueError(f"{name} is True: must be False, because there is only one kind of random-number tracker")
    return rng_tracker()


def numbers_of_each_rank(group: ProcessGroup | None, *, dropout: float) -> Callable[[], AbstractContextManager[None]]:
    """Returns a context factory; inside the context, each rank of the group draws different random numbers.

    Outside the context the ranks draw the same numbers, as replicated tensors require. Returns nullcontext if dropout
    is 0 or the group has one rank.
    """
    return get_cuda_rng_tracker().fork if dropout > 0 and group_size(group) > 1 else nullcontext


def model_parallel_cuda_manual_seed(
    seed: int,
    te_rng_tracker: bool = False,
    inference_rng_tracker: bool = False,
    use_cudagraphable_rng: bool = False,
    tp_rank: int | None = None,
    ep_rank: int | None = None,
    etp_rank: int | None = None,
    gtp_remat_rank: int | None = None,
    egtp_remat_rank: int | None = None,
    force_reset_rng: bool = False,
    gtp_remat_world_size: int | None = None,
    egtp_remat_world_size: int | None = None,
) -> None:
    """Seeds the default stream with `seed`, and creates the named streams with seeds for this rank.

    tp_rank, ep_rank, etp_rank: None means the ranks of parallel_state. force_reset_rng: ignored, because streams are
    always recreated. Raises ValueError for other trackers of Megatron, and for ranks of generalized tensor parallelism.
    """
    require_defaults(
        "model_parallel_cuda_manual_seed",
        "generalized tensor parallelism is not supported",
        gtp_remat_rank=(gtp_remat_rank, None),
        egtp_remat_rank=(egtp_remat_rank, None),
        gtp_remat_world_size=(gtp_remat_world_size, None),
        egtp_remat_world_size=(egtp_remat_world_size, None),
    )
    tracker = get_cuda_rng_tracker(te_rng_tracker, inference_rng_tracker, use_cudagraphable_rng)
    groups = existing_process_groups()
    tp_rank = group_rank(groups.tp) if tp_rank is None else tp_rank
    ep_rank = group_rank(groups.ep) if ep_rank is None else ep_rank
    etp_rank = group_rank(groups.expt_tp) if etp_rank is None else etp_rank
    tracker.reset()
    torch.manual_seed(seed)
    tracker.add(DATA_PARALLEL_RNG, seed)
    tracker.add(MODEL_PARALLEL_RNG, seed + _MODEL_PARALLEL_OFFSET + tp_rank)
    tracker.add(EXPERT_PARALLEL_RNG, seed + _EXPERT_PARALLEL_OFFSET + 100 * ep_rank + etp_rank)


def checkpoint(function: Callable[..., Any], distribute_saved_activations: bool, *args: Any) -> Any:
    """Runs function(*args) and saves only the arguments for recompute in backward. args: any shape and dtype."""
    _refuse_distributed_arguments(distribute_saved_activations)
    return recompute(function, *args)


def _refuse_distributed_arguments(distribute_saved_activations: bool) -> None:
    if distribute_saved_activations:
        raise ValueError(
            "distribute_saved_activations is True: must be False, because every rank saves whole arguments"
        )


class CheckpointFunction(PlainFunction):
    """The reentrant form of `checkpoint`, for scripts that call it directly. Its backward runs a nested backward.

    At least one tensor argument must require a gradient. torch.autograd.grad is not supported.
    """

    @staticmethod
    def forward(ctx: Any, run_function: Callable[..., Any], distribute_saved_activations: bool, *args: Any) -> Any:
        """Returns run_function(*args). args: tensors of any shape and dtype, or other objects."""
        _refuse_distributed_arguments(distribute_saved_activations)
        ctx.run_function, ctx.drawn_again = run_function, _RngSnapshot().drawn_again
        ctx.values = _ForwardValues()
        ctx.others = [None if isinstance(value, Tensor) else (value,) for value in args]
        tensors = [value for value in args if isinstance(value, Tensor)]
        ctx.needs_grad = [tensor.requires_grad for tensor in tensors]
        ctx.save_for_backward(*tensors)
        with ctx.values.first_run():
            return run_function(*args)

    @staticmethod
    def backward(ctx: Any, *args: Any) -> Any:
        """Recomputes the function and returns the gradients of its arguments. args: gradients of the outputs.

        Raises RuntimeError under torch.autograd.grad.
        """
        if not torch.autograd._is_checkpoint_valid():
            raise RuntimeError(
                "CheckpointFunction does not support torch.autograd.grad: call backward, or use checkpoint instead"
            )
        saved = iter([t.detach().requires_grad_(n) for t, n in zip(ctx.saved_tensors, ctx.needs_grad, strict=True)])
        again = [next(saved) if other is None else other[0] for other in ctx.others]
        with ctx.drawn_again(), torch.enable_grad(), ctx.values.later_run():
            outputs = _as_tuple(ctx.run_function(*again))
        pairs = [(out, grad) for out, grad in zip(outputs, args, strict=True) if out.requires_grad]
        torch.autograd.backward([out for out, _ in pairs], [grad for _, grad in pairs])
        return None, None, *(value.grad if isinstance(value, Tensor) else None for value in again)


class _ForwardValues:
    """Values that one forward of a recomputed function has determined. See [Note: values of a forward].

    draws_numbers: whether later runs restore the states of random-number generators.
    """

    def __init__(self, *, draws_numbers: bool = True) -> None:
        self.draws_numbers = draws_numbers
        self._values: dict[Hashable, list[Any]] = {}
        self._taken: dict[Hashable, int] | None = None  # None in the first run, else the values taken in this run
        # Whether a run has recorded statistics, which needs gradients: a reentrant first run has none.
        self.is_recorded = False

    @contextmanager
    def first_run(self) -> Iterator[None]:
        """Context of the first run, which determines the values."""
        with self._running():
            yield
            self.is_recorded = torch.is_grad_enabled()

    @contextmanager
    def later_run(self) -> Iterator[None]:
        """Context of a later run, which repeats the values. There may be several, and each may end early."""
        self._taken = {}
        try:
            with self._running():
                yield
        finally:
            self.is_recorded = True

    @contextmanager
    def _running(self) -> Iterator[None]:
        running = _running()
        running.append(self)
        try:
            yield
        finally:
            running.remove(self)

    @property
    def is_later(self) -> bool:
        """Whether this is a later run."""
        return self._taken is not None

    def has_next(self, key: Hashable) -> bool:
        """Returns whether an earlier run has determined the value of this run's next call with this key."""
        return self._taken is not None and self._taken.get(key, 0) < len(self._values.get(key, ()))

    def take(self, key: Hashable) -> Any:
        """Returns the next value of an earlier run."""
        assert self._taken is not None, "the first run determines the values"
        self._taken[key] = self._taken.get(key, 0) + 1
        return self._values[key][self._taken[key] - 1]

    def add(self, key: Hashable, value: Any) -> None:
        """Stores a value that this run has determined."""
        self._values.setdefault(key, []).append(value)
        if self._taken is not None:
            self._taken[key] = self._taken.get(key, 0) + 1


class _RunningFunctions(threading.local):
    """Recomputed functions that a thread is running, the outermost first."""

    def __init__(self) -> None:
        self.stack: list[_ForwardValues] = []


@functools.cache
def _running_functions() -> _RunningFunctions:
    return _RunningFunctions()


def _running() -> list[_ForwardValues]:
    return _running_functions().stack


def is_recomputing() -> bool:
    """Returns whether the caller repeats a forward whose statistics an earlier run has recorded.

    Also recognizes later runs of torch.utils.checkpoint, except reentrant ones, whose first run records nothing.
    """
    if current_backward_id() == -1:
        return False
    later = _innermost_later_run()
    return _is_in_torch_checkpoint() if later is None else later.is_recorded


def redraws_numbers() -> bool:
    """Returns whether the caller recomputes a forward, perhaps with the random numbers of its first run.

    The states of the generators then belong to that forward, so that no other forward may draw numbers now.
    """
    if current_backward_id() == -1:
        return False
    later = [one for one in _running() if one.is_later]
    # A forward that another function repeats in backward, such as torch.utils.checkpoint, has enabled gradients.
    return any(one.draws_numbers for one in later) if later else torch.is_grad_enabled()


def remembered(compute: Callable[[], _Value], *, key: Hashable) -> _Value:
    """Returns compute(), and the same value again in later runs of the recomputed function that makes this call.

    See [Note: values of a forward]. key: identifies the caller; its values are repeated in the order of its calls.
    Outside of recomputed functions this only calls `compute`. Raises RuntimeError in a later run of a function that
    torch.utils.checkpoint runs without reentry, which does not store the values of its first run.
    """
    later = _innermost_later_run()
    if later is None and current_backward_id() != -1 and _is_in_torch_checkpoint():
        raise RuntimeError(
            "a layer whose forward depends on state, such as the counts of global_aux_loss or replayed experts, is "
            "recomputed by torch.utils.checkpoint, which does not store that state: use "
            "megatron.core.tensor_parallel.checkpoint, or recompute_granularity"
        )
    is_known = later is not None and later.has_next(key)
    value: _Value = later.take(key) if later is not None and is_known else compute()
    # A function that runs for the first time inside a later run of another one must repeat the value as well.
    for one in _running():
        if not one.is_later or (one is later and not is_known):
            one.add(key, value)
    return value


def _innermost_later_run() -> _ForwardValues | None:
    return next((one for one in reversed(_running()) if one.is_later), None)


def _is_in_torch_checkpoint() -> bool:
    hooks = active_hooks()
    return hooks is not None and getattr(hooks[0], "__module__", None) == "torch.utils.checkpoint"


def recompute(
    function: Callable[..., Any],
    *args: Any,
    draws_numbers: bool = True,
    **kwargs: Any,
) -> Any:
    """Runs a function like `checkpoint`, with keyword arguments. Dropout draws the same numbers in both runs.

    args, kwargs: tensors of any shape and dtype, or other objects. draws_numbers: pass False if the function draws no
    random numbers, to skip reading generator states, which takes time and is forbidden during CUDA graph capture. The
    gradient of a parameter is computed once, as without recompute, because the second run only provides saved tensors
    to the graph of the first run.
    """
    # Without gradients nothing is saved, so there is nothing to recompute.
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    values = _ForwardValues(draws_numbers=draws_numbers)
    second_run = _SecondRun(get_cuda_rng_tracker().get_states() if draws_numbers else None, values.later_run)
    return torch.utils.checkpoint.checkpoint(
        function,
        *args,
        use_reentrant=False,
        preserve_rng_state=draws_numbers,
        context_fn=lambda: (values.first_run(), second_run),
        **kwargs,
    )


class CheckpointWithoutOutput:
    """Runs a function whose output is freed after use, and recomputed for the backward of its consumer.

    1. `checkpoint` computes output = function(*args) and saves only the arguments.
    2. The caller computes a result from the output. Autograd saves the output for the backward of this computation.
    3. `discard_output_and_register_recompute` frees the memory of the output. It is recomputed when the gradient of the
       result is ready.
    """

    def __init__(
        self,
        fp8: bool = False,
        ckpt_manager: None = None,
        retain_input_tensors: bool = False,
        *,
        draws_numbers: bool = True,
    ) -> None:
        """Creates the object for one call of `checkpoint`.

        draws_numbers: see `recompute`. fp8, retain_input_tensors: must be False. ckpt_manager: must be None.
        """
        require_defaults("CheckpointWithoutOutput", "8-bit training is not supported", fp8=(bool(fp8), False))
        why = "arguments are freed once the second run has read them"
        require_defaults("CheckpointWithoutOutput", why, retain_input_tensors=(retain_input_tensors, False))
        why = "each output is freed and recomputed by its own object"
        require_defaults("CheckpointWithoutOutput", why, ckpt_manager=(ckpt_manager, None))
        self._draws_numbers = draws_numbers
        self._second_run: Callable[[], tuple[Tensor, ...]] | None = None
        self._num_saved = 0
        self._saved: dict[int, Tensor] = {}
        # Storages, because tensors would reference the graph, which references this object. Neither would be freed.
        self._outputs: list[torch.UntypedStorage] = []
        self._output_bytes: list[int] = []

    def checkpoint(self, run_function: Callable[..., Any], *args: Any) -> Any:
        """Returns run_function(*args): one or more tensors, any shape and dtype. args: tensors or other objects.

        Every tensor with a graph that the function reads must be an argument, because the second run receives only the
        saved arguments.
        """
        if not torch.is_grad_enabled():
            return run_function(*args)
        drawn_again = _RngSnapshot().drawn_again if self._draws_numbers else nullcontext
        values = _ForwardValues(draws_numbers=self._draws_numbers)
        self._second_run = functools.partial(
            self._run_again, run_function, _Kept(args), drawn_again=drawn_again, values=values
        )
        with torch.autograd.graph.saved_tensors_hooks(self._number, self._take), values.first_run():
            output = run_function(*args)
        self._outputs = [tensor.untyped_storage() for tensor in _as_tuple(output)]
        self._output_bytes = [storage.nbytes() for storage in self._outputs]
        # Compares storage objects, because all empty storages have the same address.
        arguments = {storage_id(value.untyped_storage()) for value in args if isinstance(value, Tensor)}
        if any(storage_id(storage) in arguments for storage in self._outputs):
            # The output shares memory with a saved argument, so freeing it would free the argument.
            self._outputs, self._output_bytes = [], []
        return output

    def discard_output_and_register_recompute(self, hook_tensor: Tensor) -> None:
        """Frees the output, and recomputes it when backward reaches hook_tensor.

        hook_tensor: any shape, float dtype, computed from the output. All gradients of the output must flow through it,
        and the output must not be read in between.
        """
        if self._outputs and hook_tensor.requires_grad:
            for storage in self._outputs:
                storage.resize_(0)
            hook_tensor.register_hook(self._refill)

    def _number(self, tensor: Tensor) -> int:
        self._num_saved += 1
        return self._num_saved - 1

    def _take(self, number: int) -> Tensor:
        # If the output was not freed, no hook has recomputed the function yet.
        self._refill(None)
        if number not in self._saved:
            raise RuntimeError(
                "backward ran a second time through a part that recomputes its output: it can run only once"
            )
        return self._saved.pop(number)

    def _refill(self, grad: Tensor | None) -> None:
        """Recomputes the function once. Fills `_saved` and the memory of the outputs, and drops other references."""
        if self._second_run is None:
            return
        second_run, self._second_run = self._second_run, None
        fresh = second_run()
        for storage, num_bytes, tensor in zip(self._outputs, self._output_bytes, fresh):
            if storage.nbytes() == 0:
                storage.resize_(num_bytes)
                # Copies storages, because a write to the tensor would change its version, which autograd checks.
                storage.copy_(tensor.untyped_storage())
        self._outputs, self._output_bytes = [], []

    def _run_again(
        self,
        function: Callable[..., Any],
        kept: "_Kept",
        *,
        drawn_again: Callable[[], AbstractContextManager[None]],
        values: _ForwardValues,
    ) -> tuple[Tensor, ...]:
        saved: list[Tensor] = []
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor.detach()), _never_unpacked)
        with drawn_again(), torch.enable_grad(), hooks, values.later_run():
            output = function(*kept.detached())
        assert len(saved) == self._num_saved, f"{len(saved)} tensors saved, but {self._num_saved} in the first run"
        self._saved = dict(enumerate(saved))
        return tuple(tensor.detach() for tensor in _as_tuple(output))


class _RngSnapshot:
    """The states of all random-number generators at the time of construction."""

    def __init__(self) -> None:
        self._default, self._streams = rng_state_bytes(default_device()), get_cuda_rng_tracker().get_states()

    @contextmanager
    def drawn_again(self) -> Iterator[None]:
        """Context that restores the stored states. All streams continue from their current states afterwards."""
        with _default_stream_kept(), _SecondRun(self._streams, nullcontext):
            set_rng_state_bytes(self._default, default_device())
            yield


class _SecondRun:
    """Reusable context of the second run: restores the streams of the first run, and enters the caller's context.

    streams: None leaves the streams unchanged.
    """

    def __init__(self, streams: RngStates | None, around: Callable[[], AbstractContextManager[Any]]) -> None:
        self._streams, self._around = streams, around

    def __enter__(self) -> None:
        tracker = get_cuda_rng_tracker()
        with ExitStack() as stack:
            if self._streams is not None:
                stack.callback(tracker.set_states, tracker.get_states())
                tracker.set_states(self._streams)
            stack.enter_context(self._around())
            self._leave = stack.pop_all()

    def __exit__(self, *error: Any) -> None:
        self._leave.__exit__(*error)


class _Kept:
    """Saved arguments of a function. Autograd saves the tensors, so hooks on saved tensors may offload them."""

    def __init__(self, args: tuple[Any, ...]) -> None:
        anchor = torch.empty(0, dtype=torch.float32, requires_grad=True)
        tensors = [value for value in args if isinstance(value, Tensor)]
        # The autograd node of this output references the tensors. Its backward never runs. In torch 2.11, keeping only
        # the node would lose them.
        self._output = _SaveTensors.apply(anchor, *tensors)
        self._others = [None if isinstance(value, Tensor) else (value,) for value in args]
        self._needs_grad = [tensor.requires_grad for tensor in tensors]

    def detached(self) -> list[Any]:
        """Returns the arguments, with tensors detached from their graphs: any shape and dtype."""
        saved = (
            value.detach().requires_grad_(needs)
            for value, needs in zip(self._output.grad_fn.saved_tensors, self._needs_grad)
        )
        return [next(saved) if other is None else other[0] for other in self._others]


class _SaveTensors(PlainFunction):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return torch.empty(0, dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        raise AssertionError("this node only stores tensors; its backward must not run")


def _never_unpacked(_: Any) -> Tensor:
    raise AssertionError("the graph of the second run is discarded; its backward must not run")


@contextmanager
def _default_stream_kept() -> Iterator[None]:
    states = rng_state_bytes(default_device())
    try:
        yield
    finally:
        set_rng_state_bytes(states, default_device())


def _as_tuple(output: Any) -> tuple[Tensor, ...]:
    return (output,) if isinstance(output, Tensor) else tuple(output)
