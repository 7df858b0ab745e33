"""CudaGraphManager: runs parts of layers as pairs of CUDA graphs, forward and backward, between parts that run eagerly.

moe/expert_step.py handles experts during replays. The interfaces of a capture are in graphs/capture.py.

[Note: slots] A graph writes to the memory of its capture in each replay. Tensors that a forward saves must stay intact
until its backward has read them, while other microbatches of a pipeline run forward. Each microbatch in flight
therefore uses its own slot of each part, a pair of graphs. Forward acquires a slot. It is free again after its
backward, or after autograd has released a forward without a backward. The slot references all memory that one graph of
the pair passes to the other, or to eager parts.

[Note: lanes] Graphs of one memory pool must be replayed in the order of their capture: see [Note: pools] in
graphs/capture.py. Slots of different microbatches are not, because microbatch 1 runs forward before microbatch 0 runs
backward. Slots of different layers in one microbatch are: forward runs the layers in the order of their capture, and
when backward reaches a layer, the later layers have finished. A lane is therefore a pool with the slots of one
microbatch in flight, one for each part that its forward step calls. Layers share the temporary memory of the pool.
1. At its first part a forward step takes a lane that is not in use, or creates one. A lane is in use while one of its
   slots is.
2. A slot may run forward only while no later slot of its lane is in use. Otherwise, if a part is called twice or the
   parts run in another order, the forward step continues in another lane.
3. Backward of a slot marks later slots of its lane that are still in use as overwritten. This happens if branches run
   backward in another order than autograd's. The backward of a marked slot raises.
4. Autograd may hold a gradient until it can add others to it, while graphs of earlier slots run. Gradients of inputs,
   and of parameters that several parts use, are therefore copied out of the pool.
"""

import logging
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from megatron.core.device.trace_ranges import trace_range
from megatron.core.graphs.capture import CONSTANTS, CaptureFailedError, Graph, GraphDevice, naming_first_error
from megatron.core.group_collectives import any_rank_sync
from megatron.core.tensor_parallel.param_attributes import has_main_grad
from megatron.core.transformer.layer_arrangement import use_parts
from megatron.core.transformer.module import Run, is_expert_layer, run
from megatron.core.transformer.transformer_layer import TransformerLayer

logger = logging.getLogger(__name__)

# Limit per part for combinations of shapes, dtypes and layouts of its arguments. Calls with further combinations run
# eagerly.
_MAX_SIGNATURES = 4

# Waits until parameters of a data-parallel wrapper are gathered.
WaitForParams = Callable[[Iterable[nn.Parameter]], None]


class PartParticipant:
    """Maintains the host-side records of a part that runs from graphs; see [Note: graphs] in graphs/capture.py.

    The base class does nothing. An account is a participant's record of one slot.
    """

    def prepare(self) -> None:
        """Called before each capture of a slot and each replay of its forward, outside of graphs."""

    def new_account(self) -> Any:
        """Creates the account of a slot. Called once, before its capture."""
        return None

    def capturing(self, account: Any) -> AbstractContextManager[None]:
        """Wraps the capture of a forward, then of its backward, like GraphParticipant.capturing."""
        return nullcontext()

    def replaying(self, account: Any) -> Any:
        """Called after `prepare`, before a forward is replayed; returns the argument of `replaying_backward`."""
        return None

    def replayed(self, account: Any) -> None:
        """Called after that forward was replayed."""

    def replaying_backward(self, forward: Any) -> None:
        """Called before the backward of a forward is replayed."""


@dataclass(frozen=True)
class GraphedPart:
    """A part of a layer that can be captured: its name in LayerParts and the owner of its parameters."""

    name: str
    owner: nn.Module
    participants: tuple[PartParticipant, ...] = ()


class CudaGraphManager:
    """A replacement for the function that get_forward_backward_func returns, with the same keywords.

    Unlike Megatron's class of this name, one manager handles the parts of all layers.

    1. `graph_layers` creates a run for each part before the first step. Layers call it instead of the plain run.
    2. The first cuda_graph_warmup_steps training steps run eagerly, as does the step after a change of the fingerprint,
       which drops all graphs.
    3. From then on a part that is called with gradients enabled acquires a free slot, or captures one, and replays it;
       see [Note: slots] and [Note: lanes]. Calls without gradients or within a backward run eagerly, as do calls beyond
       _MAX_SIGNATURES.
    4. A part whose capture failed runs eagerly from then on, after one warning. Ranks may differ in this, because
       graphs and eager parts launch the same collectives.

    All passes run on the capture stream. Autograd accumulates a parameter's gradient on the stream of its first use,
    and the default stream cannot be captured. fingerprint: called before each training step; captures depend on its
    value.
    """

    # Whether a call may raise CaptureFailedError. A part that cannot be captured runs eagerly instead.
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
        self._given: Hashable = None  # the fingerprint of the last training step
        self._has_begun = False  # whether that step used graphs
        self._parts: list[GraphedRun] = []
        self._lanes: list[_Lane] = []
        self._lane: _Lane | None = None  # the lane of the current forward step
        self._num_uses: Counter[nn.Parameter] = Counter()  # number of parts with a parameter
        self._warned: set[tuple[str, str]] = set()

    def graph_layers(self, model: nn.Module, *, modules: Sequence[str], wait_for_params: WaitForParams | None) -> None:
        """Makes the named parts of all transformer layers of a model chunk run from graphs.

        modules: names of --cuda-graph-modules. wait_for_params: called with a part's parameters before each replay,
        because a replay runs no forward hooks of the modules inside; None if parameters are never gathered.
        """
        for layer in model.modules():
            if not isinstance(layer, TransformerLayer):
                continue
            for module, part in _parts_of(layer).items():
                # The part moe_preprocess contains the router.
                is_inside = module == "moe_router" and "moe_preprocess" in modules
                if module not in modules or is_inside:
                    continue
                gathered = () if wait_for_params is None else (_GatheredParams(wait_for_params, part.owner),)
                graphed = self.graphed(
                    f"{module} of layer {layer.layer_number}",
                    part.owner,
                    inner=vars(layer.parts)[part.name],
                    participants=(*gathered, *part.participants),
                )
                use_parts(layer, replace(layer.parts, **{part.name: graphed}))

    def graphed(
        self, name: str, owner: nn.Module, *, inner: Run = run, participants: Sequence[PartParticipant] = ()
    ) -> "GraphedRun":
        """Returns the run of one part of one layer.

        name: used in messages; the text before the first blank is the kind of part. owner: the module with the part's
        parameters. inner: the run that is captured, and that runs eagerly.
        """
        part = GraphedRun(self, name, owner=owner, inner=inner, participants=participants)
        self._parts.append(part)
        self._num_uses.update(owner.parameters())
        return part

    @property
    def num_graphs(self) -> int:
        """Number of graphs, two for each slot of each part."""
        return 2 * sum(part.num_slots for part in self._parts)

    @property
    def num_pools(self) -> int:
        """Number of memory pools, one for each microbatch in flight of each chunk; see [Note: lanes]."""
        return len(self._lanes)

    @property
    def failure(self) -> str | None:
        """Reason why the first part of `failures` could not be captured; None if no capture has failed."""
        return next(iter(self.failures.values()), None)

    @property
    def failures(self) -> dict[str, str]:
        """Names of parts that could not be captured, with the cause of each."""
        return {part.name: part.failure for part in self._parts if part.failure is not None}

    def __call__(self, *, data_iterator: Any, forward_only: bool = False, **keywords: Any) -> list[Any]:
        """Runs the passes and returns the loss reports of the last stage. Collective if the passes are."""
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
        """Returns a free slot of the part for the current forward step, or captures one.

        capture: called with a memory pool. Raises CaptureFailedError.
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
        """Returns whether several parts use a parameter, any shape and dtype."""
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
                "%s could not be captured as a CUDA graph (%s): it runs eagerly, as do parts of other layers with "
                "the same cause. tools/check_capture.py with these flags reports the line",
                part.name,
                part.failure,
            )

    def _begin_step(self) -> None:
        given = self._fingerprint()
        is_stale, self._given = given != self._given, given
        if self._steps_to_warm_up == 0:
            if not self._has_begun:
                # Eager passes may have changed the fingerprint on some ranks only.
                (is_stale,) = any_rank_sync(is_stale)
            if is_stale:
                self.drop_graphs()
                # One warm-up step grows tables and compiles kernels for the new sizes.
                self._steps_to_warm_up = 1
        self.uses_graphs = self._has_begun = self._steps_to_warm_up == 0
        self._steps_to_warm_up = max(0, self._steps_to_warm_up - 1)


def _parts_of(layer: TransformerLayer) -> dict[str, GraphedPart]:
    """Returns the parts of a layer that can be captured, by the names of --cuda-graph-modules."""
    mlp = layer.mlp.graphed_parts() if is_expert_layer(layer.mlp) else {"mlp": GraphedPart("mlp", layer.mlp)}
    return {"attn": GraphedPart("attn", layer.self_attention), **mlp}


class _GatheredParams(PartParticipant):
    """Waits for the parameter gathers of a part before each capture and replay."""

    def __init__(self, wait: WaitForParams, owner: nn.Module) -> None:
        self._wait, self._owner = wait, owner

    def prepare(self) -> None:
        """Waits until the part's parameters are gathered. Collective if a gather is pending."""
        self._wait(self._owner.parameters())


class GraphedRun:
    """A Run of LayerParts that replays graphs of function(*args, **kwargs) whenever its manager uses graphs.

    The function must depend only on its arguments. Tensors among them, also in tuples, lists and dicts, are copied into
    static memory; other values must be plain constants. Tensors with gradients in the result must also be in tuples,
    lists and dicts, and each replay returns the remaining objects of the capture. A later microbatch overwrites the
    memory of the outputs, after the backward of this one.
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
        """Makes a copy a plain run, so that a copied layer shares no graphs with the original."""
        return _same, (self._inner,)

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs function(*args, **kwargs), with tensors of any shape and dtype, from a graph or eagerly."""
        # Within a backward, recompute runs the forward eagerly to save its tensors.
        if self._manager.uses_graphs and torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:
            call = _Call.of(partial(self._inner, function), args, kwargs=kwargs)
            lease = self._take(call)
            if lease is not None:
                return self._replay(lease, call.tensors)
        return self._inner(function, *args, **kwargs)

    def drop_slots(self) -> None:
        """Drops all graphs. Autograd keeps the ones in flight until their backward has run."""
        self._signatures, self.num_slots = set(), 0

    def _take(self, call: "_Call") -> "_Lease | None":
        """Returns a slot for this call; None if it must run eagerly."""
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

    @trace_range("GraphedRun.capture")
    def _capture(self, call: "_Call", pool: Any) -> "_Slot":
        for participant in self._participants:
            participant.prepare()
        slot = _Slot(self, call.tensors)
        slot.accounts = [participant.new_account() for participant in self._participants]
        params = [param for param in self._owner.parameters() if param.requires_grad]
        # Both graphs are captured before either is replayed, so a failure leaves nothing to undo.
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
    """A call function(*args, **kwargs), with its arguments flattened."""

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
        """Returns the call with its tensors replaced, of any shapes and dtypes."""
        rest = iter(tensors)
        leaves = [next(rest) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        args, kwargs = tree_unflatten(leaves, self.structure)
        return partial(self.function, *args, **kwargs)

    def signature(self, owner: nn.Module) -> Hashable:
        """Returns a key that is equal for calls of one graph; None for calls that cannot run from a graph."""
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
    CALL = "an argument of the call, unchanged"
    CAPTURE = "the result of the capture: a parameter, a constant, or an object with tensors that the graph writes"


class _Slot:
    """A pair of graphs, and the memory that they read and write; see [Note: slots].

    memory: static memory for the tensors of a call. produced, plain: the tensors of the result, with and without a
    gradient. params: the parameters that receive a gradient. overwritten_by: the part whose backward overwrote this
    slot's memory; see [Note: lanes].
    """

    forward: Graph
    backward: Graph

    def __init__(self, part: GraphedRun, given: Sequence[Tensor]) -> None:
        """Allocates static memory; given: the tensors of the call that is captured."""
        self.part = part
        self.overwritten_by: str | None = None
        self.memory = [torch.empty_like(tensor, requires_grad=False).copy_(tensor.detach()) for tensor in given]
        # The inputs of the capture. They share the memory, and autograd must not track the copies into it.
        self.inputs = [
            own.detach().requires_grad_(tensor.requires_grad) for own, tensor in zip(self.memory, given, strict=True)
        ]
        self.produced: list[Tensor] = []
        self.plain: list[Tensor] = []
        self.params: list[nn.Parameter] = []
        self.accounts: list[Any] = []  # one per participant
        self._output_grads: list[Tensor] = []
        self._input_grads: list[Tensor | None] = []
        self._param_grads: list[Tensor] = []
        self._are_shared: list[bool] = []  # for each of params, whether other parts use it
        self._kept: list[Tensor] = []
        self._returned: list[tuple[_From, Any]] = []
        self._structure: TreeSpec | None = None

    # During the capture.

    def run_forward(self, function: Callable[[], Any]) -> None:
        """Runs the part. Keeps its result and the tensors that autograd saves for backward."""
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
            raise RuntimeError("no tensor in its result has a gradient")
        self._output_grads = [torch.empty_like(output, requires_grad=False) for output in self.produced]

    def run_backward(self, params: Sequence[nn.Parameter], *, is_shared: Callable[[nn.Parameter], bool]) -> None:
        """Runs backward of the result of run_forward. is_shared: whether other parts also use a parameter."""
        wanted = [own for own in self.inputs if own.requires_grad]
        grads = torch.autograd.grad(self.produced, [*wanted, *params], self._output_grads, allow_unused=True)
        of_wanted = iter(grads)
        self._input_grads = [next(of_wanted) if own.requires_grad else None for own in self.inputs]
        found = [(param, grad) for param, grad in zip(params, of_wanted, strict=True) if grad is not None]
        self.params, self._param_grads = [param for param, _ in found], [grad for _, grad in found]
        self._are_shared = [is_shared(param) for param in self.params]

    def _keep(self, tensor: Tensor) -> Tensor:
        # Backward releases saved tensors, also during a capture, but replays read them. Autograd must receive a leaf
        # itself. Any other tensor is detached, because it would otherwise keep its own node alive.
        self._kept.append(tensor if tensor.is_leaf else tensor.detach())
        return self._kept[-1]

    # During a replay.

    def replay_forward(self, given: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Replays forward; returns new tensors over the memory of `produced` and `plain`. given: as in the capture."""
        for own, tensor in zip(self.memory, given, strict=True):
            own.copy_(tensor)
        self.forward.replay()
        return [output.detach() for output in self.produced], [output.detach() for output in self.plain]

    def replay_backward(self, grads: Sequence[Tensor]) -> list[Tensor | None]:
        """Replays backward and returns the gradients of the inputs and of `params`. grads: gradients of `produced`.

        A gradient of a parameter that no other part uses shares memory of the graph. The others are copies.
        """
        for own, grad in zip(self._output_grads, grads, strict=True):
            own.copy_(grad)
        self.backward.replay()
        # See point 4 of [Note: lanes]. The gradient of a parameter that no other part uses is accumulated before
        # another graph runs.
        of_inputs = [None if grad is None else grad.clone() for grad in self._input_grads]
        return [*of_inputs, *map(self._grad_of_param, self.params, self._param_grads, self._are_shared)]

    def _grad_of_param(self, param: nn.Parameter, grad: Tensor, is_shared: bool) -> Tensor:
        if is_shared:
            return grad.clone()
        # Autograd clones a gradient that is referenced elsewhere, as by this slot, before it becomes `.grad`. A
        # data-parallel wrapper accumulates it immediately, so a new tensor object avoids the clone.
        return grad.detach() if has_main_grad(param) else grad

    def returned(self, outputs: Sequence[Tensor], given: Sequence[Tensor]) -> Any:
        """Returns the part's result. outputs: the results of _Replay. given: the tensors of the call."""
        leaves = []
        for source, value in self._returned:
            if source is _From.GRAPH:
                written, place = value
                leaves.append(outputs[place if written is self.produced else len(self.produced) + place])
            else:
                leaves.append(given[value] if source is _From.CALL else value)
        assert self._structure is not None, "set by run_forward"
        return tree_unflatten(leaves, self._structure)


class _Lane:
    """A memory pool and its slots by part and signature, in the order of their capture; see [Note: lanes]."""

    def __init__(self, pool: Any) -> None:
        self.pool = pool
        self.slots: dict[tuple[GraphedRun, Hashable], _Slot] = {}
        self._in_use: list[_Slot] = []

    @property
    def is_in_use(self) -> bool:
        """Whether a forward step is in flight in this lane."""
        return bool(self._in_use)

    def can_run(self, key: tuple[GraphedRun, Hashable]) -> bool:
        """Returns whether that slot, or a new one, may run forward: no slot of its part and no later slot is in use."""
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
        """Marks the slots whose memory the backward of this one may overwrite.

        Raises RuntimeError if the memory of this slot was overwritten.
        """
        if slot.overwritten_by is not None:
            raise RuntimeError(
                f"backward of {slot.part.name} ran after the backward of {slot.overwritten_by}, whose forward had "
                "run first: their CUDA graphs share memory, so gradients must be computed in the reverse order of "
                "forward; call backward once for the losses of a forward step, or set --cuda-graph-impl to none"
            )
        for later in self._captured_from(slot)[1:]:
            later.overwritten_by = slot.part.name

    def _captured_from(self, slot: _Slot) -> list[_Slot]:
        """Returns this slot and the slots captured after it."""
        captured = [*self.slots.values()]
        return captured[captured.index(slot) :]


class _Lease:
    """Keeps a slot in use until `give_back` is called, or until the lease itself is freed."""

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
            raise RuntimeError("backward ran a second time for a part that runs as a CUDA graph: it can run only once")
        lease.lane.begin_backward(lease.slot)
        for prepare in lease.before_backward:
            prepare()
        found = lease.slot.replay_backward(grads[: len(lease.slot.produced)])
        lease.give_back()
        return None, None, *found


def _same(value: Any) -> Any:
    return value
