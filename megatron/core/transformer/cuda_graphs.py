"""CudaGraphManager: parts of layers as CUDA graphs of their own, forward and backward, between parts that run eagerly.

Knows callables and memory that stays, no experts; which parts there are is graphed_layers.py's. See graphs/capture.py.

[Note: slots] A graph writes to the memory of its capture each time. What forward saves for backward must stay there
until backward has read it, while other microbatches of a pipeline run forward. So each microbatch in flight has a slot
of each part, a pair of graphs: taken in forward, free again once its backward has run, or once autograd has released a
forward that has no backward. All that one graph of a pair leaves to the other, or to the eager parts, is kept by
reference.

[Note: lanes] Graphs of one memory pool must be replayed in the order of their capture: see [Note: pools] in
graphs/capture.py. Slots of different microbatches are not, as microbatch 1 runs forward before microbatch 0 runs
backward. Slots of different layers in one microbatch are: forward runs the layers in the order of their capture, and
when backward comes to a layer, the layers after it are done. So a lane is a pool and the slots of one microbatch in
flight, one for each part that its forward step calls, and layers share the memory that they free inside.
1. A forward step takes a lane that is not in use, or opens one, at its first part. A lane is in use while a slot is.
2. A slot may run forward only where no slot that its lane captured later is in use. Where one is (a part that is called
   twice, another order of parts), the forward step continues in another lane.
3. Backward of a slot makes slots overwritten that its lane captured later and that are still in use: a backward of
   branches in another order than autograd's. Their own backward raises.
4. A gradient may wait in autograd for others that it is added to, while graphs of earlier slots run. So gradients of
   inputs, and of parameters that several parts use, leave the pool as copies.
"""

import logging
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import record_function
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from megatron.core.agreement import any_rank
from megatron.core.graphs.capture import CONSTANTS, CaptureFailedError, Graph, GraphDevice, naming_first_error
from megatron.core.tensor_parallel.param_attributes import has_main_grad
from megatron.core.transformer.module import Run, run

logger = logging.getLogger(__name__)

# Of one part: shapes, dtypes and layouts of what it is called with. Others run eagerly.
_MAX_SIGNATURES = 4


class PartParticipant:
    """Keeps the host's records of what a part does when it runs from graphs; see [Note: graphs] in graphs/capture.py.

    By itself it does nothing. An account is a participant's record of one slot.
    """

    def prepare(self) -> None:
        """Called before each capture of a slot and each replay of its forward, outside of graphs."""

    def new_account(self) -> Any:
        """Returns the account of a slot. Called once, before its capture."""
        return None

    def capturing(self, account: Any) -> AbstractContextManager[None]:
        """Surrounds the capture of a forward, then that of its backward, as GraphParticipant.capturing does."""
        return nullcontext()

    def replaying(self, account: Any) -> Any:
        """Called after `prepare`, before a forward is replayed; returns the argument of `replaying_backward`."""
        return None

    def replayed(self, account: Any) -> None:
        """Called after that forward was replayed."""

    def replaying_backward(self, forward: Any) -> None:
        """Called before the backward of a forward is replayed."""


class CudaGraphManager:
    """Takes the place of the function that get_forward_backward_func returns, with the same keywords; unlike Megatron's
    class of this name, one manages the parts of all layers.

    1. Parts are made before the first step by `graphed`, and called by their layers in place of a plain run.
    2. The first cuda_graph_warmup_steps training steps run eagerly, and so does the step after the fingerprint changed,
       which ends all graphs.
    3. From then on a part that is called with gradients enabled takes a free slot, or captures one, and replays it; see
       [Note: slots] and [Note: lanes]. Calls without gradients, within a backward, and of more than a few shapes run
       eagerly.
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
        self._lanes: list[_Lane] = []
        self._lane: _Lane | None = None  # of the forward step under way
        self._num_uses: Counter[nn.Parameter] = Counter()  # parts that have a parameter
        self._warned: set[tuple[str, str]] = set()

    def graphed(
        self, name: str, owner: nn.Module, *, inner: Run = run, participants: Sequence[PartParticipant] = ()
    ) -> "GraphedRun":
        """A run of one part of one layer. owner: has the part's parameters. inner: how it is run where it is captured.

        name: for messages, the kind before the first blank.
        """
        part = GraphedRun(self, name, owner=owner, inner=inner, participants=participants)
        self._parts.append(part)
        self._num_uses.update(owner.parameters())
        return part

    @property
    def num_graphs(self) -> int:
        """Graphs that are kept: two for each slot of each part."""
        return 2 * sum(part.num_slots for part in self._parts)

    @property
    def num_pools(self) -> int:
        """Memory pools of these graphs: one for each microbatch in flight of each chunk, see [Note: lanes]."""
        return len(self._lanes)

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
        if "forward_step_func" in keywords:
            keywords["forward_step_func"] = self._in_lane_of_its_own(keywords["forward_step_func"])
        try:
            with self.device.on_capture_stream():
                return self._run(data_iterator=data_iterator, forward_only=forward_only, **keywords)
        finally:
            self.uses_graphs, self._lane = False, None

    def drop_graphs(self) -> None:
        """Drops all graphs and their memory; later steps capture new ones."""
        self._lanes, self._lane = [], None
        for part in self._parts:
            part.drop_slots()

    def lease(self, part: "GraphedRun", signature: Hashable, capture: "Callable[[Any], _Slot]") -> "_Lease":
        """Returns a slot of the part for the forward step under way, captured where no lane has a free one.

        capture: given a memory pool. Raises CaptureFailedError.
        """
        key = (part, signature)
        lane = self._lane
        if lane is None or not lane.can_run(key):
            lane = next((one for one in self._lanes if not one.is_in_use and key in one.slots), None)
        lane = lane or _Lane(self.device.new_pool())
        if key not in lane.slots:
            lane.slots[key] = capture(lane.pool)
            part.num_slots += 1
        if lane not in self._lanes:
            self._lanes.append(lane)
        self._lane = lane
        return _Lease(lane.slots[key], lane)

    def is_shared(self, param: nn.Parameter) -> bool:
        """Whether several parts use a parameter, any shape and dtype."""
        return self._num_uses[param] > 1

    def _in_lane_of_its_own(self, forward_step: Callable[..., Any]) -> Callable[..., Any]:
        def forward_step_in_lane(*args: Any, **kwargs: Any) -> Any:
            self._lane = None
            return forward_step(*args, **kwargs)

        return forward_step_in_lane

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
        self._signatures: set[Hashable] = set()

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
        """Forgets all graphs; those in flight are released with what autograd keeps."""
        self._signatures, self.num_slots = set(), 0

    def _take(self, call: "_Call") -> "_Lease | None":
        """A slot for this call; None if it has to run eagerly."""
        signature = None if self.failure is not None else call.signature(self._owner)
        if signature is None or (signature not in self._signatures and len(self._signatures) == _MAX_SIGNATURES):
            return None
        self._signatures.add(signature)
        try:
            return self._manager.lease(self, signature, partial(self._capture, call))
        except CaptureFailedError as error:
            self.failure = str(error)
            self._manager.warn(self)
            return None

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
    def _capture(self, call: "_Call", pool: Any) -> "_Slot":
        for participant in self._participants:
            participant.prepare()
        slot = _Slot(self, call.tensors)
        slot.accounts = [participant.new_account() for participant in self._participants]
        params = [param for param in self._owner.parameters() if param.requires_grad]
        # Neither graph runs before both are there: should one fail, there is nothing to undo.
        with naming_first_error(), self._manager.device.capturing_together():
            with self._capturing(slot, pool) as slot.forward:
                slot.run_forward(call.with_tensors(slot.inputs))
            with self._capturing(slot, pool) as slot.backward:
                slot.run_backward(params, is_shared=self._manager.is_shared)
        return slot

    @contextmanager
    def _capturing(self, slot: "_Slot", pool: Any) -> Iterator[Graph]:
        with self._manager.device.capturing(pool) as graph, naming_first_error(), ExitStack() as stack:
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
    without. params: those that get a gradient from it. overwritten_by: the part whose backward made this one's
    impossible, as [Note: lanes] says.
    """

    forward: Graph
    backward: Graph

    def __init__(self, part: GraphedRun, given: Sequence[Tensor]) -> None:
        """given: the tensors of the call that is captured."""
        self.part = part
        self.overwritten_by: str | None = None
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
        self._are_shared: list[bool] = []  # whether other parts use that parameter too
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

    def run_backward(self, params: Sequence[nn.Parameter], *, is_shared: Callable[[nn.Parameter], bool]) -> None:
        """Runs backward of what run_forward returned. is_shared: whether other parts use a parameter too."""
        wanted = [own for own in self.inputs if own.requires_grad]
        grads = torch.autograd.grad(self.produced, [*wanted, *params], self._output_grads, allow_unused=True)
        of_wanted = iter(grads)
        self._input_grads = [next(of_wanted) if own.requires_grad else None for own in self.inputs]
        found = [(param, grad) for param, grad in zip(params, of_wanted, strict=True) if grad is not None]
        self.params, self._param_grads = [param for param, _ in found], [grad for _, grad in found]
        self._are_shared = [is_shared(param) for param in self.params]

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
        """grads: of `produced`. Returns those of the inputs, copied, and those of params, over memory of the graph
        where no other part uses the parameter.
        """
        for own, grad in zip(self._output_grads, grads, strict=True):
            own.copy_(grad)
        self.backward.replay()
        # Autograd may keep a gradient until others of the same tensor are there, and graphs that run meanwhile may
        # overwrite this one's memory. One of a parameter that no other part uses is consumed before any graph runs.
        of_inputs = [None if grad is None else grad.clone() for grad in self._input_grads]
        return [*of_inputs, *map(self._grad_of_param, self.params, self._param_grads, self._are_shared)]

    def _grad_of_param(self, param: nn.Parameter, grad: Tensor, is_shared: bool) -> Tensor:
        if is_shared:
            return grad.clone()
        # Where another holds the tensor, as this does, autograd clones what it adds up in `.grad`. A data-parallel
        # wrapper moves it on at once: it is given a tensor of its own.
        return grad.detach() if has_main_grad(param) else grad

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


class _Lane:
    """A memory pool and the slots captured in it, by part and signature, in this order; see [Note: lanes]."""

    def __init__(self, pool: Any) -> None:
        self.pool = pool
        self.slots: dict[tuple[GraphedRun, Hashable], _Slot] = {}
        self._in_use: list[_Slot] = []

    @property
    def is_in_use(self) -> bool:
        """Whether a forward step is in flight in this lane."""
        return bool(self._in_use)

    def can_run(self, key: tuple[GraphedRun, Hashable]) -> bool:
        """Whether that slot, or a new one, may run forward: those of the part and those captured later are free."""
        later = self._captured_from(self.slots[key]) if key in self.slots else []
        return not any(slot.part is key[0] or slot in later for slot in self._in_use)

    def take(self, slot: _Slot) -> None:
        """Marks a slot as in use."""
        slot.overwritten_by = None
        self._in_use.append(slot)

    def give_back(self, slot: _Slot) -> None:
        """Marks a slot as free."""
        self._in_use.remove(slot)

    def begin_backward(self, slot: _Slot) -> None:
        """Marks the slots whose memory the backward of this one may overwrite. Raises RuntimeError if one did so."""
        if slot.overwritten_by is not None:
            raise RuntimeError(
                f"backward of {slot.part.name} came after that of {slot.overwritten_by}, whose forward had run first: "
                "their CUDA graphs share memory, so that gradients must be computed in the reverse order of forward; "
                "call backward once for the losses of a forward step, or set --cuda-graph-impl to none"
            )
        for later in self._captured_from(slot)[1:]:
            later.overwritten_by = slot.part.name

    def _captured_from(self, slot: _Slot) -> list[_Slot]:
        """Returns this slot and those captured later."""
        captured = [*self.slots.values()]
        return captured[captured.index(slot) :]


class _Lease:
    """A slot that is in use, until `give_back` or until nobody refers to this."""

    def __init__(self, slot: _Slot, lane: _Lane) -> None:
        self.slot, self.lane = slot, lane
        self.before_backward: list[Callable[[], None]] = []
        lane.take(slot)
        self.give_back = weakref.finalize(self, lane.give_back, slot)
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
        lease.lane.begin_backward(lease.slot)
        for prepare in lease.before_backward:
            prepare()
        found = lease.slot.replay_backward(grads[: len(lease.slot.produced)])
        lease.give_back()
        return None, None, *found


def _same(value: Any) -> Any:
    return value
