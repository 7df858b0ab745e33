"""Seeds of the random-number streams, and functions that are recomputed in backward instead of saving tensors.

The streams themselves are in device/rng.py. transformer/recompute.py selects the parts of a model to recompute.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.distributed import ProcessGroup

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
from megatron.core.parallel_state import existing_process_groups
from megatron.core.process_groups_config import group_rank, group_size

# Large offsets, so that seeds differ from those of neighboring ranks and of the default stream.
_MODEL_PARALLEL_OFFSET, _EXPERT_PARALLEL_OFFSET = 2718, 1024


def get_expert_parallel_rng_tracker_name() -> str:
    """Returns the name of the stream that differs between ranks with different experts."""
    return EXPERT_PARALLEL_RNG


def get_data_parallel_rng_tracker_name() -> str:
    """Returns the name of the stream that is the same on all ranks."""
    return DATA_PARALLEL_RNG


def initialize_rng_tracker(
    use_te_rng_tracker: bool = False,
    inference_rng_tracker: bool = False,
    use_cudagraphable_rng: bool = False,
    force_reset: bool = False,
) -> None:
    """Validates the arguments like get_cuda_rng_tracker; force_reset: removes the streams of the process's tracker."""
    tracker = get_cuda_rng_tracker(use_te_rng_tracker, inference_rng_tracker, use_cudagraphable_rng)
    if force_reset:
        tracker.reset()


def get_all_rng_states() -> RngStates:
    """Returns the states of all named streams, see CudaRNGStatesTracker.get_states. Raises ValueError if there are
    none.
    """
    tracker = get_cuda_rng_tracker()
    if not tracker.is_initialized():
        raise ValueError("there are no random-number streams: call model_parallel_cuda_manual_seed first")
    return tracker.get_states()


def is_graph_safe_cuda_rng_tracker(cuda_rng_tracker: Any) -> bool:
    """Returns whether a tracker's streams may be used in CUDA graphs, which holds for every tracker here."""
    return isinstance(cuda_rng_tracker, CudaRNGStatesTracker)


def convert_cuda_rng_state(state: Tensor | torch.Generator, to_graphable: bool = False) -> Tensor | torch.Generator:
    """Returns a generator's state as bytes, [N], uint8, on the CPU; to_graphable: a generator with that state.

    state: the bytes of a generator on this process's device, or a generator, which is not changed.
    """
    if not isinstance(state, torch.Generator):
        return _generator_of(state, default_device()) if to_graphable else state
    return _generator_of(state.get_state(), state.device) if to_graphable else state.get_state()


def _generator_of(state: Tensor, device: torch.device) -> torch.Generator:
    generator = torch.Generator(device)
    generator.set_state(state)
    return generator


def get_cuda_rng_tracker(
    use_te_rng_tracker: bool = False, inference_rng_tracker: bool = False, use_cudagraphable_rng: bool = False
) -> CudaRNGStatesTracker:
    """Returns the tracker of this process. Its GPU streams can always be used in CUDA graphs.

    Raises ValueError for Megatron's other kinds of trackers, which do not exist here.
    """
    others = {"use_te_rng_tracker": use_te_rng_tracker, "inference_rng_tracker": inference_rng_tracker}
    for name, requested in others.items():
        if requested:
            raise ValueError(f"{name} is True: there is only one kind of random-number streams here, must be False")
    return rng_tracker()


def numbers_of_each_rank(group: ProcessGroup | None, *, dropout: float) -> Callable[[], AbstractContextManager[None]]:
    """Returns a context in which the ranks of a group draw different numbers; a null context without dropout or other
    ranks.

    Outside the context the ranks draw the same numbers, as replicated tensors require.
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
    """Seeds the default stream, identically on the ranks of a tensor-parallel group, and named streams on each rank.

    tp_rank, ep_rank, etp_rank: None means the ranks of parallel_state. force_reset_rng: ignored, because streams are
    always recreated. Raises ValueError for Megatron's other trackers, and for ranks of generalised tensor parallelism.
    """
    require_defaults(
        "model_parallel_cuda_manual_seed",
        "weights are not gathered over a further group",
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
    """Returns function(*args) and saves only the arguments; backward recomputes it. args: any shape and dtype."""
    _refuse_distributed_arguments(distribute_saved_activations)
    return recompute(function, *args)


def _refuse_distributed_arguments(distribute_saved_activations: bool) -> None:
    if distribute_saved_activations:
        raise ValueError("distribute_saved_activations is True: every rank keeps the arguments whole, must be False")


class CheckpointFunction(torch.autograd.Function):
    """The reentrant form of `checkpoint`, for callers that apply it themselves. Its backward runs another backward
    inside.

    At least one tensor argument must require a gradient, and torch.autograd.grad cannot pass through it.
    """

    @staticmethod
    def forward(ctx: Any, run_function: Callable[..., Any], distribute_saved_activations: bool, *args: Any) -> Any:
        """Runs run_function(*args) and returns its result; args: tensors of any shape and dtype, or other objects."""
        _refuse_distributed_arguments(distribute_saved_activations)
        ctx.run_function, ctx.drawn_again = run_function, _RngSnapshot().drawn_again
        ctx.others = [None if isinstance(value, Tensor) else (value,) for value in args]
        tensors = [value for value in args if isinstance(value, Tensor)]
        ctx.needs_grad = [tensor.requires_grad for tensor in tensors]
        ctx.save_for_backward(*tensors)
        with _checkpointing():
            return run_function(*args)

    @staticmethod
    def backward(ctx: Any, *args: Any) -> Any:
        """Recomputes the function and returns the arguments' gradients; args: gradients of the outputs.

        Raises RuntimeError under autograd.grad.
        """
        if not torch.autograd._is_checkpoint_valid():
            raise RuntimeError(
                "CheckpointFunction runs a nested backward: call backward, or use checkpoint for autograd.grad"
            )
        saved = iter([t.detach().requires_grad_(n) for t, n in zip(ctx.saved_tensors, ctx.needs_grad, strict=True)])
        again = [next(saved) if other is None else other[0] for other in ctx.others]
        with ctx.drawn_again(), torch.enable_grad(), _checkpointing():
            outputs = _as_tuple(ctx.run_function(*again))
        pairs = [(out, grad) for out, grad in zip(outputs, args, strict=True) if out.requires_grad]
        torch.autograd.backward([out for out, _ in pairs], [grad for _, grad in pairs])
        return None, None, *(value.grad if isinstance(value, Tensor) else None for value in again)


class _CheckpointDepth:
    """Nesting depth of recomputed functions that are currently running."""

    def __init__(self) -> None:
        self.depth = 0


@functools.cache
def _checkpoint_depth() -> _CheckpointDepth:
    return _CheckpointDepth()


@contextmanager
def _checkpointing() -> Iterator[None]:
    """Marks the block as a run of a recomputed function, for is_checkpointing."""
    running = _checkpoint_depth()
    running.depth += 1
    try:
        yield
    finally:
        running.depth -= 1


def is_checkpointing() -> bool:
    """Returns whether the caller runs inside a recomputed function, in its first or second run."""
    return _checkpoint_depth().depth > 0


def recompute(
    function: Callable[..., Any],
    *args: Any,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    draws_numbers: bool = True,
    **kwargs: Any,
) -> Any:
    """Runs a function like `checkpoint`, with keywords. Dropout draws the same numbers in both runs.

    around: a context for the second run. draws_numbers: False if the function draws no random numbers. Generator states
    are then not read, which takes time and is forbidden during the capture of a CUDA graph. args, kwargs: tensors of
    any shape and dtype, or anything else. As without recompute, the gradient of a parameter is computed once, because
    autograd has one graph, and the second run only provides the saved tensors.
    """
    # Without gradients there is nothing to recompute, and no reason to store states.
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    second_run = _SecondRun(get_cuda_rng_tracker().get_states() if draws_numbers else None, around)
    return torch.utils.checkpoint.checkpoint(
        function,
        *args,
        use_reentrant=False,
        preserve_rng_state=draws_numbers,
        context_fn=lambda: (_checkpointing(), second_run),
        **kwargs,
    )


class CheckpointWithoutOutput:
    """A function whose output is freed after its use, and recomputed for the backward of its consumer.

    1. checkpoint: output = function(*args). Saves only the arguments.
    2. The caller computes a result from the output, which autograd saves.
    3. discard_output_and_register_recompute: frees the memory of the output until the gradient of the result is ready.
    """

    def __init__(
        self,
        fp8: bool = False,
        ckpt_manager: "CheckpointWithoutOutputManager | None" = None,
        retain_input_tensors: bool = False,
        *,
        draws_numbers: bool = True,
    ) -> None:
        """Registers the function with a manager, if one is given.

        ckpt_manager: discards the output together with others, see CheckpointWithoutOutputManager. draws_numbers: see
        `recompute`. fp8, retain_input_tensors: must be False.
        """
        require_defaults("CheckpointWithoutOutput", "8-bit training is not supported", fp8=(bool(fp8), False))
        why = "arguments are freed once the second run has read them"
        require_defaults("CheckpointWithoutOutput", why, retain_input_tensors=(retain_input_tensors, False))
        self._draws_numbers, self._manager = draws_numbers, ckpt_manager
        self._second_run: Callable[[], tuple[Tensor, ...]] | None = None
        self._num_saved = 0
        self._saved: dict[int, Tensor] = {}
        # Storages, because a tensor would reference the graph that references this object, and neither would be freed.
        self._outputs: list[torch.UntypedStorage] = []
        self._output_bytes: list[int] = []

    def checkpoint(self, run_function: Callable[..., Any], *args: Any) -> Any:
        """Runs run_function(*args) and returns one or more tensors, any shape and dtype. args: tensors, or other
        objects.

        Tensors with a graph that the function reads must be arguments, because only arguments are saved for the second
        run.
        """
        if not torch.is_grad_enabled():
            return run_function(*args)
        if self._manager is not None:
            self._manager.add_checkpoint(self)
        drawn_again = _RngSnapshot().drawn_again if self._draws_numbers else nullcontext
        self._second_run = functools.partial(self._run_again, run_function, _Kept(args), drawn_again=drawn_again)
        with torch.autograd.graph.saved_tensors_hooks(self._number, self._take), _checkpointing():
            output = run_function(*args)
        self._outputs = [tensor.untyped_storage() for tensor in _as_tuple(output)]
        self._output_bytes = [storage.nbytes() for storage in self._outputs]
        # Compares storage objects, since the addresses of empty storages are equal.
        arguments = {value.untyped_storage()._cdata for value in args if isinstance(value, Tensor)}
        if any(storage._cdata in arguments for storage in self._outputs):
            # The output shares memory with a saved argument, so there is nothing to free.
            self._outputs, self._output_bytes = [], []
        return output

    def discard_output_and_register_recompute(self, hook_tensor: Tensor) -> None:
        """Frees the output until backward reaches hook_tensor: any shape, float dtype, computed from the output.

        All gradients of the output must flow through hook_tensor, and the output must not be read in between. With a
        manager this does nothing, because the manager discards all outputs together.
        """
        if self._manager is None and self._outputs and hook_tensor.requires_grad:
            self._discard()
            hook_tensor.register_hook(self._refill)

    def _discard(self) -> None:
        for storage in self._outputs:
            storage.resize_(0)

    def _number(self, tensor: Tensor) -> int:
        self._num_saved += 1
        return self._num_saved - 1

    def _take(self, number: int) -> Tensor:
        # If the output was not discarded, the backward of the function runs before any hook.
        self._refill(None)
        if number not in self._saved:
            raise RuntimeError(
                "backward ran a second time through a part that recomputes its output: it can run only once"
            )
        return self._saved.pop(number)

    def _refill(self, grad: Tensor | None) -> None:
        """Recomputes the function: fills `_saved` and the memory of the outputs, and drops everything else."""
        if self._second_run is None:
            return
        second_run, self._second_run = self._second_run, None
        fresh = second_run()
        for storage, num_bytes, tensor in zip(self._outputs, self._output_bytes, fresh):
            if storage.nbytes() == 0:
                storage.resize_(num_bytes)
                # Copies storages, since a write to a tensor would change the version that the consumer saved.
                storage.copy_(tensor.untyped_storage())
        self._outputs, self._output_bytes = [], []

    def _run_again(
        self, function: Callable[..., Any], kept: "_Kept", *, drawn_again: Callable[[], AbstractContextManager[None]]
    ) -> tuple[Tensor, ...]:
        saved: list[Tensor] = []
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor.detach()), _never_unpacked)
        with drawn_again(), torch.enable_grad(), hooks, _checkpointing():
            output = function(*kept.detached())
        assert len(saved) == self._num_saved, f"{len(saved)} tensors saved, but {self._num_saved} in the first run"
        self._saved = dict(enumerate(saved))
        return tuple(tensor.detach() for tensor in _as_tuple(output))


class CheckpointWithoutOutputManager:
    """Several CheckpointWithoutOutputs, in execution order, whose outputs are freed and recomputed together.

    An output may be the argument of a later function, because outputs are recomputed in the order of their first runs.
    """

    def __init__(self) -> None:
        self._parts: list[CheckpointWithoutOutput] = []

    def add_checkpoint(self, ckpt: CheckpointWithoutOutput) -> None:
        """Adds a CheckpointWithoutOutput that has this manager; called by its `checkpoint`."""
        if ckpt not in self._parts:
            self._parts.append(ckpt)

    def discard_all_outputs_and_register_unified_recompute(self, hook_tensor: Tensor) -> None:
        """Frees all outputs until backward reaches hook_tensor: any shape, float dtype, computed from the last.

        All gradients of the outputs must flow through hook_tensor. The manager is then empty and can be reused.
        """
        parts, self._parts = self._parts, []
        if not hook_tensor.requires_grad:
            return
        for part in parts:
            part._discard()

        def refill(grad: Tensor) -> None:
            for part in parts:
                part._refill(grad)

        hook_tensor.register_hook(refill)


class _RngSnapshot:
    """The states of all random-number generators at its creation."""

    def __init__(self) -> None:
        self._default, self._streams = rng_state_bytes(default_device()), get_cuda_rng_tracker().get_states()

    @contextmanager
    def drawn_again(self) -> Iterator[None]:
        """Repeats the random numbers inside the block; afterwards all streams continue from their current state."""
        with _default_stream_kept(), _SecondRun(self._streams, nullcontext):
            set_rng_state_bytes(self._default, default_device())
            yield


class _SecondRun:
    """Context of the second run: the streams of the first run, and the context of the caller. Reusable.

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
            stack.enter_context(_checkpointing())
            self._leave = stack.pop_all()

    def __exit__(self, *error: Any) -> None:
        self._leave.__exit__(*error)


class _Kept:
    """Arguments of a function; tensors are saved by autograd, so hooks on saved tensors may move them."""

    def __init__(self, args: tuple[Any, ...]) -> None:
        anchor = torch.empty(0, dtype=torch.float32, requires_grad=True)
        tensors = [value for value in args if isinstance(value, Tensor)]
        # The node of this output references the tensors, and its backward never runs. In torch 2.11 they would be lost
        # if only the node were kept.
        self._output = _SaveTensors.apply(anchor, *tensors)
        self._others = [None if isinstance(value, Tensor) else (value,) for value in args]
        self._needs_grad = [tensor.requires_grad for tensor in tensors]

    def detached(self) -> list[Any]:
        """Returns the arguments without their graphs: any shape and dtype."""
        saved = (
            value.detach().requires_grad_(needs)
            for value, needs in zip(self._output.grad_fn.saved_tensors, self._needs_grad)
        )
        return [next(saved) if other is None else other[0] for other in self._others]


class _SaveTensors(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return torch.empty(0, dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        raise AssertionError("this node only holds tensors")


def _never_unpacked(_: Any) -> Tensor:
    raise AssertionError("the second run's graph is dropped, not run backward")


@contextmanager
def _default_stream_kept() -> Iterator[None]:
    states = rng_state_bytes(default_device())
    try:
        yield
    finally:
        set_rng_state_bytes(states, default_device())


def _as_tuple(output: Any) -> tuple[Tensor, ...]:
    return (output,) if isinstance(output, Tensor) else tuple(output)
