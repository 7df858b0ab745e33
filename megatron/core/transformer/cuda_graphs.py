"""CudaGraphManager: runs parts of layers as pairs of CUDA graphs, forward and backward, between eager parts.

moe/expert_step.py performs the host work of experts around replays. graphs/capture.py defines the capture interfaces.

[Note: slots] Every replay of a graph writes to the memory used in its capture. The tensors that a forward saves must
remain intact until its backward has read them, while other microbatches of a pipeline run forward. Each microbatch in
flight therefore uses a separate slot of each part: a pair of graphs. Forward acquires a slot. The slot becomes free
after its backward, or, without a backward, when autograd releases the forward. It references all memory that one graph
of the pair passes to the other graph or to eager parts.

[Note: lanes] Graphs that share a memory pool must be replayed in capture order, see [Note: pools] in
graphs/capture.py. Slots of different microbatches violate this order, because microbatch 1 runs forward before
microbatch 0 runs backward. Slots of different layers within a microbatch follow it: forward runs the layers in capture
order, and when backward reaches a layer, the later layers have finished. A lane is therefore a pool with the slots of
one microbatch in flight, one for each part that its forward step calls. Layers share the temporary memory of the pool.
1. At its first part a forward step takes a lane that is not in use, or creates one. A lane is in use while any of its
   slots is in use.
2. A slot may run forward only while no later slot of its lane is in use. Otherwise, for example if a part is called
   twice or the parts run in a different order, the forward step continues in a different lane.
3. Backward of a slot marks the later slots of its lane that are still in use as overwritten. This happens if branches
   run backward in a different order than autograd would choose. The backward of a marked slot raises an error.
4. Autograd may hold a gradient while graphs of earlier slots run, because it waits for gradients to add. Gradients of
   inputs, and of parameters that several parts use, are therefore copied out of the pool.
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
from torch.autograd.graph import saved_tensors_hooks

from megatron.core.autograd import PlainFunction, first_order
from megatron.core.device.torch_internals import TreeSpec, is_in_backward, tree_flatten, tree_unflatten
from megatron.core.device.trace_ranges import trace_range
from megatron.core.graphs.capture import CONSTANTS, CaptureFailedError, Graph, GraphDevice, naming_first_error
from megatron.core.group_collectives import any_rank_sync
from megatron.core.tensor_parallel.param_attributes import has_main_grad
from megatron.core.transformer.layer_arrangement import use_parts
from megatron.core.transformer.module import Run, is_expert_layer, run
from megatron.core.transformer.transformer_layer import TransformerLayer

logger = logging.getLogger(__name__)

# Maximum number of captured argument signatures (shapes, dtypes, strides) per part. Calls with other signatures run
# eagerly.
_MAX_SIGNATURES = 4

# Waits until a data-parallel wrapper has gathered the given parameters.
WaitForParams = Callable[[Iterable[nn.Parameter]], None]


class PartParticipant:
    """Host-side callbacks around the capture and replay of a part; see [Note: graphs] in graphs/capture.py.

    A participant keeps an account for each slot, its host-side record. The base class does nothing.
    """

    def prepare(self) -> None:
        """Called outside of graphs, before each capture and before each forward replay."""

    def new_account(self) -> Any:
        """Creates the account of a slot. Called once, before the capture of the slot."""
        return None

    def capturing(self, account: Any) -> AbstractContextManager[None]:
        """Returns a context for a capture of forward or backward, like GraphParticipant.capturing."""
        return nullcontext()

    def replaying(self, account: Any) -> Any:
        """Called after `prepare` and before a forward replay. Returns the argument to pass to `replaying_backward`."""
        return None

    def replayed(self, account: Any) -> None:
        """Called after a forward replay."""

    def replaying_backward(self, forward: Any) -> None:
        """Called before a backward replay. forward: the result of `replaying` for its forward."""


@dataclass(frozen=True)
class GraphedPart:
    """A part of a layer that can be captured: its LayerParts name, the module with its parameters, and participants."""

    name: str
    owner: nn.Module
    participants: tuple[PartParticipant, ...] = ()


class CudaGraphManager:
    """Wraps the function returned by get_forward_backward_func, with the same keywords, and runs parts as CUDA graphs.

    Unlike the Megatron class of this name, one manager handles the parts of all layers.

    1. Before the first step, `graph_layers` creates a GraphedRun for each part, which layers call instead of `run`.
    2. The first cuda_graph_warmup_steps training steps run eagerly. A change of the fingerprint drops all graphs, and
       one more step runs eagerly.
    3. Afterwards, a part called with gradients enabled acquires a free slot, or captures one, and replays it; see
       [Note: slots] and [Note: lanes]. Calls without gradients, within backward, or beyond _MAX_SIGNATURES run eagerly.
    4. If the capture of a part fails, the part logs a warning and runs eagerly from then on. Ranks may differ in this,
       because graphs and eager parts launch the same collectives.

    All forward and backward passes run on the capture stream, because autograd accumulates a parameter's gradient on
    the stream of its first use, and the default stream cannot be captured. fingerprint: called before each training
    step; returns a value on which captures depend.
    """

    # Whether a call may raise CaptureFailedError: never, because a part that cannot be captured runs eagerly.
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
        self._given: Hashable = None  # fingerprint of the last training step
        self._has_begun = False  # whether that step used graphs
        self._parts: list[GraphedRun] = []
        self._lanes: list[_Lane] = []
        self._lane: _Lane | None = None  # the lane of the current forward step
        self._num_uses: Counter[nn.Parameter] = Counter()  # number of parts with a parameter
        self._warned: set[tuple[str, str]] = set()

    def graph_layers(self, model: nn.Module, *, modules: Sequence[str], wait_for_params: WaitForParams | None) -> None:
        """Replaces the runners of the named parts in all transformer layers of a model chunk by GraphedRuns.

        modules: names as in --cuda-graph-modules. wait_for_params: called with a part's parameters before each replay,
        because replays do not run the forward hooks of modules; None if parameters are never gathered.
        """
        for layer in model.modules():
            if not isinstance(layer, TransformerLayer):
                continue
            for module, part in _parts_of(layer).items():
                # moe_preprocess already contains the router.
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
        """Creates and registers the GraphedRun of one part of one layer.

        name: used in messages; the first word is the kind of part. owner: the module with the part's parameters. inner:
        the Run that is captured, and that is called for eager runs.
        """
        part = GraphedRun(self, name, owner=owner, inner=inner, participants=participants)
        self._parts.append(part)
        self._num_uses.update(owner.parameters())
        return part

    @property
    def num_graphs(self) -> int:
        """Number of graphs: two for each slot of each part."""
        return 2 * sum(part.num_slots for part in self._parts)

    @property
    def num_pools(self) -> int:
        """Number of memory pools: one for each microbatch in flight in each chunk; see [Note: lanes]."""
        return len(self._lanes)

    @property
    def failure(self) -> str | None:
        """Error of the first part in `failures`; None if no capture has failed."""
        return next(iter(self.failures.values()), None)

    @property
    def failures(self) -> dict[str, str]:
        """Errors of parts that could not be captured, by part name."""
        return {part.name: part.failure for part in self._parts if part.failure is not None}

    def __call__(self, *, data_iterator: Any, forward_only: bool = False, **keywords: Any) -> list[Any]:
        """Runs the wrapped function and returns the loss reports of the last stage. Collective if the function is."""
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
        """Drops all graphs and their memory. Later steps capture new graphs."""
        self._lanes, self._lane = [], None
        for part in self._parts:
            part.drop_slots()

    def lease(self, part: "GraphedRun", signature: Hashable, capture: "Callable[[Any], _Slot]") -> "_Lease":
        """Acquires a free slot of the part for the current forward step, or captures a new slot.

        capture: captures a slot in the given memory pool. Raises CaptureFailedError if the capture fails.
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
        """Returns whether several parts use the parameter."""
        return self._num_uses[param] > 1

    def _in_lane_of_its_own(self, forward_step: Callable[..., Any]) -> Callable[..., Any]:
        def forward_step_in_lane(*args: Any, **kwargs: Any) -> Any:
            self._lane = None
            return forward_step(*args, **kwargs)

        return forward_step_in_lane

    def warn(self, part: "GraphedRun") -> None:
        """Logs that a part could not be captured, once per kind of part and cause."""
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
                # Eager steps may have changed the fingerprint on some ranks only.
                (is_stale,) = any_rank_sync(is_stale)
            if is_stale:
                self.drop_graphs()
                # One eager step grows tables and compiles kernels for the new sizes.
                self._steps_to_warm_up = 1
        self.uses_graphs = self._has_begun = self._steps_to_warm_up == 0
        self._steps_to_warm_up = max(0, self._steps_to_warm_up - 1)


def _parts_of(layer: TransformerLayer) -> dict[str, GraphedPart]:
    """Returns the parts of a layer that can be captured, by their names in --cuda-graph-modules."""
    mlp = layer.mlp.graphed_parts() if is_expert_layer(layer.mlp) else {"mlp": GraphedPart("mlp", layer.mlp)}
    return {"attn": GraphedPart("attn", layer.self_attention), **mlp}


class _GatheredParams(PartParticipant):
    """Waits until the parameters of a part are gathered, before each capture and replay."""

    def __init__(self, wait: WaitForParams, owner: nn.Module) -> None:
        self._wait, self._owner = wait, owner

    def prepare(self) -> None:
        """Waits until the part's parameters are gathered. Collective if a gather is pending."""
        self._wait(self._owner.parameters())


class GraphedRun:
    """A Run that replays graphs of function(*args, **kwargs) while its manager uses graphs, and otherwise runs eagerly.

    The function must depend only on its arguments: tensors, which are copied into static memory, and plain constants,
    both also in tuples, lists and dicts. Outputs with gradients must be tensors or in tuples, lists and dicts. Every
    replay returns the same other objects, as created by the capture. The memory of outputs is overwritten by a later
    microbatch, after the backward of this microbatch.
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
        """Makes copies the eager Run, so that a copied layer shares no graphs with the original."""
        return _same, (self._inner,)

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs function(*args, **kwargs) from a graph or eagerly. args, kwargs: any shape and dtype."""
        # Within backward, a recomputed forward runs eagerly, because autograd must save its tensors.
        if self._manager.uses_graphs and torch.is_grad_enabled() and not is_in_backward():
            call = _Call.of(partial(self._inner, function), args, kwargs=kwargs)
            lease = self._take(call)
            if lease is not None:
                return self._replay(lease, call.tensors)
        return self._inner(function, *args, **kwargs)

    def drop_slots(self) -> None:
        """Drops all graphs. Autograd keeps graphs in flight alive until their backward has run."""
        self._signatures, self.num_slots = set(), 0

    def _take(self, call: "_Call") -> "_Lease | None":
        """Acquires a slot for the call. Returns None if the call must run eagerly."""
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
        # Both graphs are captured before either is replayed, so a failure needs no cleanup.
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
    """A call of function(*args, **kwargs) with flattened arguments."""

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
        """Returns the call with its tensors replaced by `tensors`, any shapes and dtypes."""
        rest = iter(tensors)
        leaves = [next(rest) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        args, kwargs = tree_unflatten(leaves, self.structure)
        return partial(self.function, *args, **kwargs)

    def signature(self, owner: nn.Module) -> Hashable:
        """Returns a key, equal for calls that can share a graph; None if the call cannot run from a graph."""
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
    """Source of a leaf in the result of a replay."""

    GRAPH = "memory that the graph writes"
    CALL = "an argument of the call, unchanged"
    CAPTURE = "the result of the capture: a parameter, a constant, or an object with tensors that the graph writes"


class _Slot:
    """A pair of graphs, and the memory that they read and write; see [Note: slots].

    memory: static memory for the argument tensors. produced, plain: result tensors with and without a gradient. params:
    parameters that receive a gradient. overwritten_by: name of the part whose backward overwrote the memory of this
    slot, see [Note: lanes].
    """

    forward: Graph
    backward: Graph

    def __init__(self, part: GraphedRun, given: Sequence[Tensor]) -> None:
        """Allocates static memory. given: argument tensors of the call to capture."""
        self.part = part
        self.overwritten_by: str | None = None
        self.memory = [torch.empty_like(tensor, requires_grad=False).copy_(tensor.detach()) for tensor in given]
        # Inputs of the capture. They share `memory`, into which autograd must not track copies.
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
        self._are_shared: list[bool] = []  # for each parameter in params, whether other parts use it
        self._kept: list[Tensor] = []
        self._returned: list[tuple[_From, Any]] = []
        self._structure: TreeSpec | None = None

    # During the capture.

    def run_forward(self, function: Callable[[], Any]) -> None:
        """Runs the part, and keeps its result and the tensors that autograd saves for backward."""
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
        """Runs the backward of run_forward. is_shared: returns whether other parts also use a parameter."""
        wanted = [own for own in self.inputs if own.requires_grad]
        grads = torch.autograd.grad(self.produced, [*wanted, *params], self._output_grads, allow_unused=True)
        of_wanted = iter(grads)
        self._input_grads = [next(of_wanted) if own.requires_grad else None for own in self.inputs]
        found = [(param, grad) for param, grad in zip(params, of_wanted, strict=True) if grad is not None]
        self.params, self._param_grads = [param for param, _ in found], [grad for _, grad in found]
        self._are_shared = [is_shared(param) for param in self.params]

    def _keep(self, tensor: Tensor) -> Tensor:
        # Backward releases saved tensors, also during a capture, but replays still read their memory. Leaves are kept
        # as they are, because autograd needs the same object. Other tensors are detached from their nodes.
        self._kept.append(tensor if tensor.is_leaf else tensor.detach())
        return self._kept[-1]

    # During a replay.

    def replay_forward(self, given: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Replays forward for the tensors `given`. Returns new tensors that alias `produced` and `plain`."""
        for own, tensor in zip(self.memory, given, strict=True):
            own.copy_(tensor)
        self.forward.replay()
        return [output.detach() for output in self.produced], [output.detach() for output in self.plain]

    def replay_backward(self, grads: Sequence[Tensor]) -> list[Tensor | None]:
        """Replays backward and returns the gradients of the inputs and of `params`. grads: gradients of `produced`.

        The gradient of a parameter that no other part uses shares the memory of the graph. All others are copies.
        """
        for own, grad in zip(self._output_grads, grads, strict=True):
            own.copy_(grad)
        self.backward.replay()
        # See point 4 of [Note: lanes]. The gradient of a parameter that no other part uses is accumulated before
        # the next graph runs, and need not be copied.
        of_inputs = [None if grad is None else grad.clone() for grad in self._input_grads]
        return [*of_inputs, *map(self._grad_of_param, self.params, self._param_grads, self._are_shared)]

    def _grad_of_param(self, param: nn.Parameter, grad: Tensor, is_shared: bool) -> Tensor:
        if is_shared:
            return grad.clone()
        # Autograd clones a gradient that is also referenced elsewhere, here by the slot, before it becomes `.grad`. A
        # data-parallel wrapper accumulates it immediately, so a new tensor object avoids the clone.
        return grad.detach() if has_main_grad(param) else grad

    def returned(self, outputs: Sequence[Tensor], given: Sequence[Tensor]) -> Any:
        """Returns the result of the part. outputs: results of _Replay. given: argument tensors of the call."""
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
    """A memory pool and its slots, by part and signature, in capture order; see [Note: lanes]."""

    def __init__(self, pool: Any) -> None:
        self.pool = pool
        self.slots: dict[tuple[GraphedRun, Hashable], _Slot] = {}
        self._in_use: list[_Slot] = []

    @property
    def is_in_use(self) -> bool:
        """Whether a forward step is in flight in this lane."""
        return bool(self._in_use)

    def can_run(self, key: tuple[GraphedRun, Hashable]) -> bool:
        """Returns whether the slot of `key`, or a new slot, may run forward.

        No slot of the same part and no later slot may be in use.
        """
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
        """Marks later slots as overwritten, because this slot's backward may write to their memory.

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
        """Returns the slot and all slots captured after it."""
        captured = [*self.slots.values()]
        return captured[captured.index(slot) :]


class _Lease:
    """Keeps a slot in use until `give_back` is called or the lease is garbage-collected."""

    def __init__(self, slot: _Slot, lane: _Lane) -> None:
        self.slot, self.lane = slot, lane
        self.before_backward: list[Callable[[], None]] = []
        lane.take(slot)
        self.give_back = weakref.finalize(self, lane.give_back, slot)
        self.give_back.atexit = False


class _Replay(PlainFunction):
    @staticmethod
    def forward(ctx: Any, lease: _Lease, num_given: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.lease, ctx.num_given = lease, num_given
        produced, plain = lease.slot.replay_forward(tensors[:num_given])
        ctx.mark_non_differentiable(*plain)
        return (*produced, *plain)

    @staticmethod
    @first_order
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
