"""CudaGraphManager: parts of layers as CUDA graphs of their own, forward and backward, between parts that run eagerly.

Knows callables and memory that stays, no experts; which parts there are is graphed_layers.py's. See graph_capture.py.

[Note: slots] A graph writes to the memory of its capture each time. What forward leaves for backward must wait there
until backward has read it, while other microbatches of a pipeline run forward. So each microbatch in flight has a slot,
a pair of graphs with memory of its own: taken in forward, free again once its backward has run, or once autograd has
let go of a forward that has no backward. All that one graph of a pair leaves to the other, or to the eager parts, is
kept by reference. Graphs may then share the memory that they free inside, and run in any order, one at a time.
"""

import logging
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import record_function
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from megatron.core.agreement import any_rank
from megatron.core.graph_capture import CONSTANTS, CaptureFailedError, Graph, GraphDevice, naming_first_error
from megatron.core.tensor_parallel.param_attributes import has_main_grad
from megatron.core.transformer.layer_parts import Run, run

logger = logging.getLogger(__name__)

# Of one part: shapes, dtypes and layouts of what it is called with. Others run eagerly.
_MAX_SIGNATURES = 4


class PartParticipant(Protocol):
    """Keeps the host's records of what a part does when it runs from graphs; see [Note: graphs]."""

    def prepare(self) -> None:
        """Called before each capture of a slot and each replay of its forward, outside of graphs."""
        ...

    def new_account(self) -> Any:
        """Returns a slot's record for all that follows; called before a capture, outside of it."""
        ...

    def capturing(self, account: Any) -> AbstractContextManager[None]:
        """Surrounds a forward, then its backward, as part of their graphs, as in GraphParticipant."""
        ...

    def replaying(self, account: Any) -> Any:
        """Called after `prepare`, before that forward is replayed; returns the argument of `replaying_backward`."""
        ...

    def replayed(self, account: Any) -> None:
        """Called after that forward was replayed."""
        ...

    def replaying_backward(self, forward: Any) -> None:
        """Called before the backward of a forward is replayed."""
        ...


class CudaGraphManager:
    """Takes the place of the function that get_forward_backward_func returns, with the same keywords; unlike Megatron's
    class of this name, one manages the parts of all layers.

    1. Parts are made before the first step by `graphed`, and called by their layers in place of a plain run.
    2. The first cuda_graph_warmup_steps training steps run eagerly, and so does the step after the fingerprint changed,
       which ends all graphs.
    3. From then on a part that is called with gradients enabled takes a free slot, or captures one, and replays it; see
       [Note: slots]. Calls without gradients, within a backward, and of more than a few shapes run eagerly.
    4. A part that cannot be captured runs eagerly from then on, after one warning. Other ranks need not do the same:
       graphs and eager parts launch the same collectives.
    All passes run on the stream that captures: autograd
    adds a parameter's gradient up on the stream of its first use, and the default stream takes part in no capture.
    fingerprint: what captures take for given, asked before each training step. Not run on a GPU yet.
    """

    # Whether a call may raise CaptureFailedError: nothing is captured as a whole.
    may_break_off = False

    def __init__(
        self,
        forward_backward_func: Callable[..., list[Any]],
        cuda_graph_warmup_steps: int = 1,
        *,
        device: GraphDevice,
        fingerprint: Callable[[], Hashable] = lambda: None,
    ) -> None:
        if cuda_graph_warmup_steps < 1:
            raise ValueError(f"cuda_graph_warmup_steps is {cuda_graph_warmup_steps}: must be at least 1")
        self.device = device
        self.uses_graphs = False
        self._run, self._fingerprint = forward_backward_func, fingerprint
        self._steps_to_warm_up = cuda_graph_warmup_steps
        self._given: Hashable = None  # in the last training step
        self._has_begun = False  # whether that used graphs
        self._parts: list[GraphedRun] = []
        self._warned: set[tuple[str, str]] = set()

    def graphed(
        self, name: str, owner: nn.Module, *, inner: Run = run, participants: Sequence[PartParticipant] = ()
    ) -> "GraphedRun":
        """A run of one part of one layer. owner: has the part's parameters. inner: how it is run where it is captured.

        name: for messages, the kind before the first blank.
        """
        part = GraphedRun(self, name, owner=owner, inner=inner, participants=participants)
        self._parts.append(part)
        return part

    @property
    def num_graphs(self) -> int:
        """Graphs that are kept: two for each slot of each part."""
        return 2 * sum(part.num_slots for part in self._parts)

    @property
    def failure(self) -> str | None:
        """Why a part could not be captured, the first of those that could not; None where all could."""
        return next(iter(self.failures.values()), None)

    @property
    def failures(self) -> dict[str, str]:
        """Names of parts that could not be captured, and the first cause of each."""
        return {part.name: part.failure for part in self._parts if part.failure is not None}

    def __call__(self, *, data_iterator: Any, forward_only: bool = False, **keywords: Any) -> list[Any]:
        """Runs the passes; returns what the losses of the last stage report. Collective where the passes are."""
        if not forward_only:
            self._begin_step()
        try:
            with self.device.on_capture_stream():
                return self._run(data_iterator=data_iterator, forward_only=forward_only, **keywords)
        finally:
            self.uses_graphs = False

    def drop_graphs(self) -> None:
        """Lets go of all graphs and their memory; later steps are captured anew."""
        for part in self._parts:
            part.drop_slots()

    def warn(self, part: "GraphedRun") -> None:
        """Warns that a part could not be captured, once for parts of one kind with the same cause."""
        key = (part.name.partition(" ")[0], part.failure or "")
        if key not in self._warned:
            self._warned.add(key)
            logger.warning(
                "%s could not be captured as a CUDA graph (%s): it runs without one, as do other layers' for this "
                "reason. tools/check_capture.py with these flags names the line",
                part.name,
                part.failure,
            )

    def _begin_step(self) -> None:
        given = self._fingerprint()
        is_stale, self._given = given != self._given, given
        if self._steps_to_warm_up == 0:
            if not self._has_begun:
                # Eager passes may teach a rank alone what no graph has taken for given.
                is_stale = any_rank(is_stale)
            if is_stale:
                self.drop_graphs()
                # In which tables grow and kernels are built for the new sizes.
                self._steps_to_warm_up = 1
        self.uses_graphs = self._has_begun = self._steps_to_warm_up == 0
        self._steps_to_warm_up = max(0, self._steps_to_warm_up - 1)


class GraphedRun:
    """A Run of LayerParts: function(*args, **kwargs) from graphs, wherever its manager uses them.

    The function must do the same with the same arguments each time. Tensors among the arguments, in tuples, lists and
    dicts, are copied into memory that stays; others must be plain constants. Of what it returns, tensors with gradients
    must be in tuples, lists and dicts too; objects of other kinds are those of the capture. The outputs' memory is
    overwritten by a later microbatch, after this one's backward.
    """

    def __init__(
        self,
        manager: CudaGraphManager,
        name: str,
        *,
        owner: nn.Module,
        inner: Run,
        participants: Sequence[PartParticipant],
    ) -> None:
        self.name = name
        self.failure: str | None = None
        self.num_slots = 0
        self._manager, self._owner, self._inner, self._participants = manager, owner, inner, list(participants)
        self._free: dict[Hashable, list[_Slot]] = {}

    def __reduce__(self) -> Any:
        """A copy of a layer has no part in the original's graphs."""
        return _same, (self._inner,)

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """function(*args, **kwargs); tensors of any shape and dtype."""
        # Within a backward a forward runs again, for what it saves.
        if self._manager.uses_graphs and torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:
            call = _Call.of(partial(self._inner, function), args, kwargs=kwargs)
            lease = self._take(call)
            if lease is not None:
                return self._replay(lease, call.tensors)
        return self._inner(function, *args, **kwargs)

    def drop_slots(self) -> None:
        """Lets go of all graphs; those in flight go with what autograd keeps."""
        self._free, self.num_slots = {}, 0

    def _take(self, call: "_Call") -> "_Lease | None":
        """A slot for this call; None if it has to run eagerly."""
        key = None if self.failure is not None else call.signature(self._owner)
        if key is None or (key not in self._free and len(self._free) == _MAX_SIGNATURES):
            return None
        free = self._free.setdefault(key, [])
        if not free:
            try:
                free.append(self._capture(call))
            except CaptureFailedError as error:
                self.failure = str(error)
                self._manager.warn(self)
                return None
            self.num_slots += 1
        return _Lease(free.pop(), free)

    def _replay(self, lease: "_Lease", given: Sequence[Tensor]) -> Any:
        slot = lease.slot
        for participant in self._participants:
            participant.prepare()
        for participant, account in zip(self._participants, slot.accounts):
            lease.before_backward.append(partial(participant.replaying_backward, participant.replaying(account)))
        outputs = _Replay.apply(lease, len(given), *given, *slot.params)
        for participant, account in zip(self._participants, slot.accounts):
            participant.replayed(account)
        return slot.returned(outputs, given)

    @record_function("GraphedRun.capture")
    def _capture(self, call: "_Call") -> "_Slot":
        for participant in self._participants:
            participant.prepare()
        slot = _Slot(call.tensors)
        slot.accounts = [participant.new_account() for participant in self._participants]
        params = [param for param in self._owner.parameters() if param.requires_grad]
        # Neither graph runs before both are there: should one fail, there is nothing to undo.
        with naming_first_error(), self._manager.device.capturing_together():
            with self._capturing(slot) as slot.forward:
                slot.run_forward(call.with_tensors(slot.inputs))
            with self._capturing(slot) as slot.backward:
                slot.run_backward(params)
        return slot

    @contextmanager
    def _capturing(self, slot: "_Slot") -> Iterator[Graph]:
        with self._manager.device.capturing() as graph, naming_first_error(), ExitStack() as stack:
            for participant, account in zip(self._participants, slot.accounts):
                stack.enter_context(participant.capturing(account))
            yield graph


@dataclass(frozen=True)
class _Call:
    """function(*args, **kwargs), of which args and kwargs are taken apart."""

    function: Callable[..., Any]
    leaves: list[Any]
    structure: TreeSpec

    @staticmethod
    def of(function: Callable[..., Any], args: tuple[Any, ...], *, kwargs: dict[str, Any]) -> "_Call":
        return _Call(function, *tree_flatten((args, kwargs)))

    @property
    def tensors(self) -> list[Tensor]:
        return [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]

    def with_tensors(self, tensors: Sequence[Tensor]) -> Callable[[], Any]:
        """Returns the call with other tensors, of any shapes and dtypes."""
        rest = iter(tensors)
        leaves = [next(rest) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        args, kwargs = tree_unflatten(leaves, self.structure)
        return partial(self.function, *args, **kwargs)

    def signature(self, owner: nn.Module) -> Hashable:
        """Returns a key that calls of one graph share; None for calls that no graph can replace."""
        words: list[Hashable] = [self.structure, owner.training]
        for leaf in self.leaves:
            if isinstance(leaf, Tensor):
                words.append((leaf.shape, leaf.dtype, leaf.stride(), leaf.requires_grad, leaf.device))
            elif isinstance(leaf, CONSTANTS):
                words.append(leaf)
            else:
                return None
        params = tuple(param.requires_grad for param in owner.parameters())
        has_gradients = any(params) or any(tensor.requires_grad for tensor in self.tensors)
        return (*words, params) if has_gradients else None


class _From(Enum):
    """The source of a leaf of a part's result."""

    GRAPH = "memory that the graph writes"
    CALL = "the arguments, as they are"
    CAPTURE = "what was returned under capture: a parameter, a constant, an object with tensors that the graph writes"


class _Slot:
    """A pair of graphs, and the memory that they read and write; see [Note: slots].

    memory: of the tensors that the part is called with. produced, plain: tensors that it returns, with a gradient and
    without. params: those that get a gradient from it.
    """

    forward: Graph
    backward: Graph

    def __init__(self, given: Sequence[Tensor]) -> None:
        """given: the tensors of the call that is captured."""
        self.memory = [torch.empty_like(tensor, requires_grad=False).copy_(tensor.detach()) for tensor in given]
        # What capture sees. Not the memory itself, which is written to.
        self.inputs = [
            own.detach().requires_grad_(tensor.requires_grad) for own, tensor in zip(self.memory, given, strict=True)
        ]
        self.produced: list[Tensor] = []
        self.plain: list[Tensor] = []
        self.params: list[nn.Parameter] = []
        self.accounts: list[Any] = []  # of each participant
        self._output_grads: list[Tensor] = []
        self._input_grads: list[Tensor | None] = []
        self._param_grads: list[Tensor] = []
        self._kept: list[Tensor] = []
        self._returned: list[tuple[_From, Any]] = []
        self._structure: TreeSpec | None = None

    # Under capture.

    def run_forward(self, function: Callable[[], Any]) -> None:
        """Runs it, and keeps what it returns and what its backward reads."""
        with saved_tensors_hooks(self._keep, _same):
            leaves, self._structure = tree_flatten(function())
        for leaf in leaves:
            position = next((place for place, own in enumerate(self.inputs) if own is leaf), None)
            if position is not None:
                self._returned.append((_From.CALL, position))
            elif not isinstance(leaf, Tensor) or isinstance(leaf, nn.Parameter):
                self._returned.append((_From.CAPTURE, leaf))
            else:
                written = self.produced if leaf.requires_grad else self.plain
                self._returned.append((_From.GRAPH, (written, len(written))))
                written.append(leaf)
        if not self.produced:
            raise RuntimeError("nothing that it returns has a gradient")
        self._output_grads = [torch.empty_like(output, requires_grad=False) for output in self.produced]

    def run_backward(self, params: Sequence[nn.Parameter]) -> None:
        """Runs backward of what run_forward returned."""
        wanted = [own for own in self.inputs if own.requires_grad]
        grads = torch.autograd.grad(self.produced, [*wanted, *params], self._output_grads, allow_unused=True)
        of_wanted = iter(grads)
        self._input_grads = [next(of_wanted) if own.requires_grad else None for own in self.inputs]
        found = [(param, grad) for param, grad in zip(params, of_wanted, strict=True) if grad is not None]
        self.params, self._param_grads = [param for param, _ in found], [grad for _, grad in found]

    def _keep(self, tensor: Tensor) -> Tensor:
        # Backward frees what autograd saved, under capture too. A leaf must come back as it is; anything else would be
        # kept alive by its own node.
        self._kept.append(tensor if tensor.is_leaf else tensor.detach())
        return self._kept[-1]

    # In a call.

    def replay_forward(self, given: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """given: any shapes and dtypes, as at capture. Returns tensors over the memory of `produced` and `plain`."""
        for own, tensor in zip(self.memory, given, strict=True):
            own.copy_(tensor)
        self.forward.replay()
        return [output.detach() for output in self.produced], [output.detach() for output in self.plain]

    def replay_backward(self, grads: Sequence[Tensor]) -> list[Tensor | None]:
        """grads: of `produced`. Returns those of the inputs and of params, each over memory of the graph."""
        for own, grad in zip(self._output_grads, grads, strict=True):
            own.copy_(grad)
        self.backward.replay()
        # Where another holds the tensor, as this does, autograd clones what it adds up in `.grad`. A data-parallel
        # wrapper moves it on at once, before any graph runs again: it is given a tensor of its own.
        of_params = [
            grad.detach() if has_main_grad(param) else grad for param, grad in zip(self.params, self._param_grads)
        ]
        return [*self._input_grads, *of_params]

    def returned(self, outputs: Sequence[Tensor], given: Sequence[Tensor]) -> Any:
        """Returns the part's result. outputs: those of _Replay; given: the call's tensors; any shapes and dtypes."""
        leaves = []
        for source, value in self._returned:
            if source is _From.GRAPH:
                written, place = value
                leaves.append(outputs[place if written is self.produced else len(self.produced) + place])
            else:
                leaves.append(given[value] if source is _From.CALL else value)
        assert self._structure is not None, "captured"
        return tree_unflatten(leaves, self._structure)


class _Lease:
    """A slot that is in use, until `give_back` or until nobody refers to this."""

    def __init__(self, slot: _Slot, free: list[_Slot]) -> None:
        self.slot = slot
        self.before_backward: list[Callable[[], None]] = []
        self.give_back = weakref.finalize(self, free.append, slot)
        self.give_back.atexit = False


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, lease: _Lease, num_given: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.lease, ctx.num_given = lease, num_given
        produced, plain = lease.slot.replay_forward(tensors[:num_given])
        ctx.mark_non_differentiable(*plain)
        return (*produced, *plain)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        lease: _Lease = ctx.lease
        if not lease.give_back.alive:
            raise RuntimeError("backward came a second time to a part that runs as a CUDA graph: it can run only once")
        for prepare in lease.before_backward:
            prepare()
        found = lease.slot.replay_backward(grads[: len(lease.slot.produced)])
        lease.give_back()
        return None, None, *found


def _same(value: Any) -> Any:
    return value
