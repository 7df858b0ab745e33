"""CollectiveScheduler: launches the collectives of a pipeline stage, in the same order on every rank.

[Note: launch order] Ranks must launch matching collectives in the same order. They cannot launch in the order in which
gradients become ready and parameters are needed, because that order may differ between ranks and steps. All gathers and
reductions of a stage therefore have one order, the same on all ranks, with gathers before reductions. It may change
only between iterations. Each rank launches in this order; its gradients and forwards determine only how early. At the
end of an iteration, one small all-reduce tells all ranks whether any rank aborted the iteration, which gradients were
late and whether to change the order to the one that the first rank of the stage observed.

Ranks with different experts may have different groups, because some ranks' experts may be frozen. Therefore every rank
numbers the groups of all ranks.

For gradients that are reduced in each backward, see [Note: backward passes] in launch_sequence.py.

The base class Turns keeps several schedulers over the same process groups in one order.
"""

import logging
import zlib
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch.distributed as dist
from torch import nn

from megatron.core.device.trace_ranges import trace_range
from megatron.core.distributed.bucket_group import BucketObserver, ParamState, Traffic, _ParamAndGradBucketGroup
from megatron.core.distributed.bucket_storage import GradState
from megatron.core.distributed.consistency import GradChecks
from megatron.core.distributed.grad_hooks import GradHookRunner
from megatron.core.distributed.iteration import RESET, CollectiveTrace, Iteration, IterationOutcome, MethodNames
from megatron.core.distributed.launch_sequence import LaunchSequence, ReduceScope, _BackwardPasses
from megatron.core.distributed.turns import Turns
from megatron.core.group_collectives import gather_objects
from megatron.core.process_groups_config import group_rank
from megatron.core.tensor_parallel.weight_grads import WeightGrad

logger = logging.getLogger(__name__)

# States in which a gather was not waited for, so that a forward cannot have read the current parameters.
_UNREAD = (ParamState.STALE, ParamState.IN_FLIGHT)


@dataclass(frozen=True, eq=False)
class ChunkSync:
    """A model chunk from the scheduler's point of view: bucket groups and callbacks.

    module: the wrapped module. find_change: describes a change to the module that invalidates its buffers, or returns
    None. zero_grads: drops the chunk's gradients. checks: applied to gradients before they are reduced. hook_runner:
    releases reduced gradients to hooks. checks and hook_runner may be None.
    """

    groups: Sequence[_ParamAndGradBucketGroup]
    module: nn.Module
    find_change: Callable[[], str | None]
    zero_grads: Callable[[], None]
    checks: GradChecks | None = None
    hook_runner: GradHookRunner | None = None


class CollectiveScheduler(Turns):
    """Launches the collectives of all chunks of a stage; see [Note: launch order].

    stage_group: the ranks that launch collectives in one order, that is, all ranks that share a dense or an expert
    group; None means this rank alone. pp_group: the pipeline ranks that must stop together. stage_host, pp_host: groups
    of the same ranks whose collectives run on the host; without them, each step reads a result from the GPU.
    overlap_grad_reduce: reduces during backward instead of at its end. reduce_scope: the groups that each backward pass
    reduces, see [Note: backward passes]. max_in_flight: maximum number of their reductions that occupy memory at a
    time. trace: records all launches. words: names of the owner's methods, for error messages. sends_over: the process
    groups of all buckets, see [Note: several schedulers] in turns.py.
    """

    def __init__(
        self,
        stage_group: dist.ProcessGroup | None = None,
        *,
        pp_group: dist.ProcessGroup | None = None,
        stage_host: dist.ProcessGroup | None = None,
        pp_host: dist.ProcessGroup | None = None,
        overlap_grad_reduce: bool = False,
        reduce_scope: ReduceScope = ReduceScope.ITERATION,
        max_in_flight: int = 0,
        trace: CollectiveTrace | None = None,
        words: MethodNames | None = None,
        sends_over: Iterable[dist.ProcessGroup | None] = (),
    ) -> None:
        super().__init__(overlaps=overlap_grad_reduce, sends_over=sends_over)
        self.observers = _Observers()
        self.stage_group = stage_group
        self.iteration = Iteration(
            stage_group, pp_group=pp_group, stage_host=stage_host, pp_host=pp_host, trace=trace, words=words
        )
        self.trace = self.iteration.trace
        self._passes = _BackwardPasses(reduce_scope, max_in_flight=max_in_flight)
        # Armed: launches early from the first iteration on, although the first order is a guess. If each backward pass
        # reduces, a gradient that is late because of a wrong guess is reduced by the next pass, or in `finish`.
        self._sequence = LaunchSequence(is_armed=reduce_scope is not ReduceScope.ITERATION)
        self._groups: list[_ParamAndGradBucketGroup] = []
        # This rank's groups; other ranks of the stage may have more.
        self._by_number: dict[int, _ParamAndGradBucketGroup] = {}
        # In the order in which they were attached.
        self._chunks: list[ChunkSync] = []
        self._runner_of: dict[_ParamAndGradBucketGroup, GradHookRunner] = {}
        # Callers of begin_iteration in this iteration.
        self._begun_by: set[Hashable] = set()
        # Launched groups whose second stage may still be started early.
        self._launched: deque[_ParamAndGradBucketGroup] = deque()
        self._warned: set[str] = set()
        # Set by an optimizer: launches the collectives of backward passes that only other ranks have run.
        self.make_up_passes: Callable[[int], None] | None = None

    def attach(self, chunk: ChunkSync) -> None:
        """Registers a model chunk and its bucket groups. Collective.

        The groups, given approximately in the order of their gradients, precede the groups of earlier chunks. Raises
        ValueError after the first iteration.
        """
        if not self.iteration.is_collecting or self._sequence.may_have_begun:
            raise ValueError(
                "a model chunk was added to this launch_order after its first iteration: wrap all chunks of a model "
                "before the first backward"
            )
        names, same_everywhere = _groups_of_stage(chunk.groups, self.stage_group)
        own = {group.name: group for group in chunk.groups}
        numbers = self._sequence.add([name in own for name in names])
        self._passes.add_chunk(numbers)
        for number, group in ((number, own[name]) for number, name in zip(numbers, names) if name in own):
            # Groups that differ between ranks are not recorded, see CollectiveTrace.
            is_everywhere = group.name in same_everywhere
            group.attach(self, number, trace=self.trace if is_everywhere else None)
            self._by_number[number] = group
            if is_everywhere:
                self.trace.name_bucket(group.name, [slot.name for slot in group.slots])
        self._groups += chunk.groups
        self._chunks.append(chunk)
        if chunk.hook_runner is not None:
            self._runner_of.update(dict.fromkeys(chunk.groups, chunk.hook_runner))
        for observer in self.observers.members:
            observer.attach(chunk.groups, chunk.module)

    def observe(self, observer: BucketObserver) -> None:
        """Adds an observer; call between two iterations, on all ranks of the stage."""
        self.observers.add(observer)
        for chunk in self._chunks:
            observer.attach(chunk.groups, chunk.module)

    @property
    def num_chunks(self) -> int:
        """Number of chunks attached so far."""
        return len(self._chunks)

    def freeze(self) -> None:
        """Fixes the launch order, because captured graphs contain it."""
        self._sequence.is_frozen = True

    # Gradients.

    def begin_iteration(self, caller: Hashable) -> None:
        """Begins an iteration and drops earlier gradients.

        caller: identifies the caller; each caller calls once per iteration. Collective if an iteration with overlap was
        in progress, because some ranks may have reduced part of it even if this rank has no gradient yet.
        """
        was_begun = self._passes.may_launch_early(overlap=self._overlaps) and caller in self._begun_by
        if self.iteration.is_collecting and (was_begun or self._sequence.may_have_begun):
            self._abort(RESET)
        begun_by = self._begun_by if self.iteration.is_collecting else set()
        self.iteration.end_finished_sync(is_reset=False)
        self._start()
        self._begun_by = {*begun_by, caller}
        self.open()

    def only_accumulates(self, groups: Sequence[_ParamAndGradBucketGroup]) -> bool:
        """Returns whether the running backward only accumulates gradients of these groups, all of one chunk.

        Nothing then depends on when or in which order gradients become ready: none is counted, observed, late or
        outside an iteration. The caller may therefore accumulate them without this scheduler, until another backward.
        """
        if self.observers.members or not self.iteration.is_collecting or self._sequence.may_have_begun:
            return False
        is_counting = self._overlaps or self._has_chunk_passes
        for group in groups:
            if (is_counting and group.is_last_microbatch) or group.param_state in _UNREAD:
                return False
        self.open()
        return True

    def accumulate(self, group: _ParamAndGradBucketGroup, param: nn.Parameter) -> None:
        """Accumulates `param.grad`, if any, in its bucket, and counts the gradient."""
        self._before_grad(group, param)
        group.accumulate(param)
        for observer in self.observers.members:
            observer.after_grad(group, param)
        self.mark_grad_ready(group, param)

    def add_gradient(self, group: _ParamAndGradBucketGroup, param: nn.Parameter, *, new: WeightGrad) -> None:
        """Computes a deferred weight gradient and adds it to its bucket; `accumulate` must follow and counts it."""
        self._before_grad(group, param)
        group.add(param, new)
        for observer in self.observers.members:
            observer.after_grad(group, param)

    def mark_grad_ready(self, group: _ParamAndGradBucketGroup, param: nn.Parameter) -> None:
        """Counts a gradient that was accumulated, and launches the reductions that are now possible."""
        self._check_collecting(group, param)
        if not group.is_last_microbatch or not (self._overlaps or self._has_chunk_passes):
            return
        self._sequence.count_gradient(group.number, part=self._passes.groups_with(group.number))
        if not self._overlaps:
            return
        self._note_gradient()
        is_complete = group.count_gradient(param) and group.grad_state is GradState.COLLECTING
        if self.is_deferred:
            return
        if is_complete:
            self._launch(self._sequence.mark_ready(group.number))
        self._advance_early()

    def start_grad_sync(self, groups: Sequence[_ParamAndGradBucketGroup]) -> None:
        """Launches the reductions of these groups and of all preceding groups, complete or not.

        Does nothing if reductions are launched in each backward pass.
        """
        for group in groups if self._passes.scope is ReduceScope.ITERATION else ():
            self._launch(self._sequence.up_to(group.number))

    @trace_range("CollectiveScheduler.end_backward_pass")
    def end_backward_pass(self, groups: Sequence[_ParamAndGradBucketGroup]) -> None:
        """Launches the remaining reductions of a backward pass, without waiting; see [Note: backward passes].

        groups: the groups of the chunk whose backward ended. Collective.
        """
        numbers = {group.number for group in groups}
        incomplete = {group.number for group in groups if not group.is_complete}
        self._passes.ended(numbers, seen=self._sequence.seen(incomplete))
        self._launch([number for number in self._sequence.rest() if number in numbers])
        self._sequence.start()
        for group in groups:
            group.learn_counts()
        if any(group.reuses_memory for group in groups):
            # The next backward pass accumulates in the memory of these reductions.
            for number in self._passes.all_in_flight():
                self._by_number[number].settle()

    def resume_accumulation(self) -> None:
        """Allows further gradients to be added to the sums after `finish`."""
        if self.iteration.is_finished:
            self.iteration.resume()
            for group in self._groups:
                group.resume_accumulation()

    @trace_range("CollectiveScheduler.finish")
    def finish(self) -> None:
        """Launches all remaining reductions and waits for them; once per iteration, for all chunks. Collective.

        Raises NonFiniteGradientError on all ranks if a checked gradient is not finite, and RemoteRankError if another
        rank has called `reset`. If this rank's module was changed, it raises ValueError and the others RemoteRankError.
        """
        if self.iteration.is_finished:
            return
        self.iteration.check_usable()
        self.is_open = False
        problem = next((found for chunk in self._chunks if (found := chunk.find_change())), None)
        if not (is_replayed := self.iteration.is_replayed):
            self._launch_last()
        non_finite = [name for chunk in self._chunks if chunk.checks for name in chunk.checks.non_finite_sync()]
        seen = self._seen()
        decides = self._overlaps and group_rank(self.stage_group) == 0
        local = IterationOutcome(
            is_aborted=problem is not None,
            is_non_finite=bool(non_finite),
            is_reordered=decides and self._sequence.wants(seen),
            late=self._late_here(),
        )
        with self.observers.agreeing():
            outcome = self._agree_sync(local)
        if outcome.has_failed:
            self._abandon()
            in_backward = any(hook_runner.consumer is not None for hook_runner in self._hook_runners())
            self.iteration.raise_aborted_sync(outcome, problem=problem, non_finite=non_finite, in_backward=in_backward)
        if not is_replayed:
            self._wait_for_reductions(outcome.late)
            self._warn_of_unused()
            self._learn(seen, is_reordered=outcome.is_reordered)
        self.iteration.finish()
        for group in self._in_order():
            self._release(group)
        for hook_runner in self._hook_runners():
            hook_runner.end_backward()
        self.observers.end_iteration()

    def reset(self) -> None:
        """Aborts the iteration on all ranks after an error, drops all gradients and begins a new one.

        Collective, except after the optimizer's step has begun, or if finish_grad_sync reported another rank's reset.
        Pending gathers are always completed.
        """
        if self.iteration.is_collecting:
            self._abort(RESET)
        self.iteration.end_finished_sync(is_reset=True)
        # Gathers are pending if the error occurred between an optimizer's update and its gathers.
        for group in self.gather_order:
            self.need(group, prefetch=False)
        self._start()
        for chunk in self._chunks:
            chunk.zero_grads()

    def step(self) -> None:
        """Verifies that no rank has reset the iteration. Collective.

        Called once per iteration, between `finish` and the update. If a rank has called `reset` since `finish`, the
        other ranks raise RemoteRankError. Raises RuntimeError if `finish` was not called.
        """
        if self.iteration.is_collecting:
            self._check_no_gradients()
        else:
            self.iteration.step()

    def close(self) -> None:
        """Aborts the current iteration and disables the scheduler, when wrappers are removed. Collective."""
        if self.iteration.is_collecting:
            self._abort("release() was called")
        self.iteration.end_finished_sync(is_reset=False)
        self.iteration.close()
        self.leave()

    # Parameters, gathered in `gather_order`.

    @property
    def gather_order(self) -> list[_ParamAndGradBucketGroup]:
        """All groups, approximately in the order in which forward needs their parameters; the same on all ranks.

        Gathers are launched in this order.
        """
        # LaunchSequence learns the order of reductions, that is, of backward, which is approximately the reverse of
        # forward.
        return self._in_order()[::-1]

    def mark_stale(self, groups: Sequence[_ParamAndGradBucketGroup]) -> None:
        """Marks groups as stale after owners have updated their shards, so that they are gathered before use.

        Must be called for the same groups on all ranks.
        """
        if not all_current(groups):
            self.finish_param_sync(groups)
        for group in groups:
            if group.is_sharded:
                group.param_state = ParamState.STALE
                for observer in self.observers.members:
                    observer.gather_due(group)

    def start_param_sync(self, groups: Sequence[_ParamAndGradBucketGroup], *, again: bool = False) -> None:
        """Launches the gathers of stale parameters, or of all parameters if all groups are current or `again` is set.

        Collective.
        """
        if again or all_current(groups):
            self.mark_stale(groups)
        for group in self.gather_order:
            if group in groups:
                self._launch_gathers(up_to=group)

    def gather_each(self, *, max_in_flight: int | None = None) -> Iterator[_ParamAndGradBucketGroup]:
        """Yields each group in gather_order, for the caller to update it, and then launches its gather. Collective.

        max_in_flight: maximum number of these gathers in flight, each of which may hold a message buffer; None means no
        limit.
        """
        in_flight: deque[_ParamAndGradBucketGroup] = deque()
        for group in self.gather_order:
            yield group
            self.start_param_sync([group])
            in_flight.append(group)
            if max_in_flight is not None and len(in_flight) > max_in_flight:
                self.need(in_flight.popleft(), prefetch=False)

    def finish_param_sync(self, groups: Sequence[_ParamAndGradBucketGroup]) -> None:
        """Launches the remaining gathers and waits for the parameters of `groups`. Collective."""
        for group in self.gather_order:
            if group in groups:
                self.need(group, prefetch=False)
                group.param_state = ParamState.CURRENT

    def need(self, group: _ParamAndGradBucketGroup, *, prefetch: bool) -> None:
        """Waits until a group's parameters may be read.

        Launches the gathers of all stale groups up to this one in gather_order; prefetch: also launches the next one.
        """
        if group.param_state in (ParamState.CURRENT, ParamState.ARRIVED):
            group.arrival.wait()
            return
        self._launch_gathers(up_to=group)
        if prefetch:
            self.prefetch()
        if group.param_state is ParamState.IN_FLIGHT:
            self._wait_for_gather(group)

    def prefetch(self) -> None:
        """Launches the next pending gather, if any."""
        following = next((group for group in self.gather_order if group.param_state is ParamState.STALE), None)
        if following is not None:
            self._launch_gather(following)

    def note_update(self) -> None:
        """Records that an optimizer has updated the parameters. The next agreement detects ranks that did not."""
        self.trace.note("an update of the parameters by the optimizer")
        if self._must_gather_now:
            self.launch_due_gathers()

    # CUDA graphs. All ranks begin and end a capture at the same point of the program.

    @contextmanager
    def captured_iteration(self, gathered: Sequence[_ParamAndGradBucketGroup]) -> Iterator[None]:
        """Returns a context for forward and backward passes that are captured in a CUDA graph.

        All gathers and reductions start and end inside the context. The launch order is frozen. gathered: groups whose
        gathers are captured. The agreement at the end of an iteration is not captured; `finish` must follow each
        replay. Observers are not called. Raises RuntimeError if a gradient becomes ready after its bucket was sent.
        Gradients remain in the state after `finish` until forget_captured is called.
        """
        self.freeze()
        observers, self.observers = self.observers, _Observers()
        for group in self._groups:
            # Events of a gather before the capture cannot be waited for in a graph; the main stream has waited already.
            group.arrival.forget()
        for group in gathered:
            group.param_state = ParamState.STALE
        try:
            yield
            self._launch_rest()
            late = self._late_here()
            if any(late):
                raise RuntimeError("gradients became ready after their bucket was sent: a graph cannot repeat this")
            self._wait_for_reductions(late)
            self.iteration.finish()
        finally:
            self.observers = observers

    def forget_captured(self, gathered: Sequence[_ParamAndGradBucketGroup]) -> None:
        """Begins an iteration after a capture, complete or aborted, because a capture does not run anything."""
        self.iteration.resume()
        self.is_open = False
        self._sequence.start()
        self._launched.clear()
        for group in self._groups:
            group.drop_captured()
        for group in gathered:
            group.param_state = ParamState.STALE

    def note_replayed(self, gathered: Sequence[_ParamAndGradBucketGroup]) -> None:
        """Records that a graph has run a captured iteration; gathered: the groups passed when it was captured."""
        self.iteration.check_usable()
        for group in self._groups:
            group.note_replayed()
        for group in gathered:
            group.param_state = ParamState.CURRENT
        self.iteration.mark_replayed()

    # Among other schedulers, see turns.py.

    def launch_due_gathers(self) -> None:
        self._launch_gathers()

    def _launch_remaining(self) -> None:
        self._launch(self._sequence.rest())

    def _make_up(self, num_backwards: int) -> None:
        if self.make_up_passes is not None:
            self.make_up_passes(num_backwards)
        elif self._has_chunk_passes:
            self._launch_rest()

    def _first_name(self) -> str:
        return next((slot.name for group in self._groups for slot in group.slots), "no parameter")

    @property
    def _may_have_launched(self) -> bool:
        return self._sequence.may_have_begun

    @property
    def _reduces_each_backward(self) -> bool:
        return self._passes.scope is not ReduceScope.ITERATION

    # Internals.

    @property
    def _has_chunk_passes(self) -> bool:
        return self._passes.scope is ReduceScope.CHUNK

    def _before_grad(self, group: _ParamAndGradBucketGroup, param: nn.Parameter) -> None:
        self._check_collecting(group, param)
        self.open()
        if group.param_state in _UNREAD:
            # Its gather was not waited for, so forward read the values from before the optimizer's step.
            raise RuntimeError(
                f"parameter {group.name_of(param)} received a gradient, but forward used its values from before the "
                "last optimizer step, because its gather was not waited for: call the module that owns the parameter, "
                "or call wait_params before reading it"
            )
        for observer in self.observers.members:
            observer.before_grad(group, param)

    def _check_collecting(self, group: _ParamAndGradBucketGroup, param: nn.Parameter) -> None:
        if not self.iteration.is_collecting:
            self.iteration.refuse_gradient(f"the gradient of {group.name_of(param)}")

    def _check_no_gradients(self) -> None:
        """Raises RuntimeError on all ranks before a step, if gradients of this iteration were not reduced.

        The step is allowed if there is no gradient at all, because a caller may have set gradients itself.
        """
        problem = (
            "optimizer.step() was called before finish_grad_sync(): call finish_grad_sync() first to reduce gradients"
        )
        if self._has_chunk_passes or (self._overlaps and self._sequence.is_armed):
            # Ranks may have launched different prefixes.
            self._abort(problem)
            raise RuntimeError(problem)
        self._launch_gathers()
        has_gradients = any(len(group.missing()) < len(group.slots) for group in self._groups)
        if self.iteration.highest_sync(int(has_gradients)):
            raise RuntimeError(problem)

    def _start(self) -> None:
        self.iteration.begin()
        self.is_open = False
        self._begun_by = set()
        self._sequence.start()
        self._launched.clear()
        self._passes.begin()
        for group in self._groups:
            group.reset()
        for chunk in self._chunks:
            if chunk.checks is not None:
                chunk.checks.forget()
            if chunk.hook_runner is not None:
                chunk.hook_runner.begin()
        for observer in self.observers.members:
            observer.begin_iteration()

    def _in_order(self) -> list[_ParamAndGradBucketGroup]:
        return [self._by_number[number] for number in self._sequence.order if number in self._by_number]

    def _late_here(self) -> list[bool]:
        late = {group.number for group in self._groups if group.is_late}
        return [number in late for number in range(len(self._sequence.order))]

    def _launch_gathers(self, *, up_to: _ParamAndGradBucketGroup | None = None) -> None:
        for group in self.gather_order:
            if group.param_state is ParamState.STALE:
                self._launch_gather(group)
            if group is up_to:
                return

    def _launch_gather(self, group: _ParamAndGradBucketGroup) -> None:
        with self.observers.launching(Traffic.GATHER, group):
            group.launch_gathers()

    def _wait_if_skipped(self, group: _ParamAndGradBucketGroup) -> None:
        # Forward skipped the group's modules, and the optimizer is about to write to the memory of its gather.
        if group.param_state is ParamState.IN_FLIGHT:
            self._wait_for_gather(group)

    def _wait_for_gather(self, group: _ParamAndGradBucketGroup) -> None:
        with self.observers.waiting(Traffic.GATHER, group):
            group.complete_gathers()

    def _launch(self, numbers: Sequence[int]) -> None:
        if numbers:
            # Gathers precede reductions in the common order, see [Note: launch order].
            self._launch_gathers()
        for group in (self._by_number[due] for due in self._sequence.take(numbers) if due in self._by_number):
            with self.observers.launching(Traffic.REDUCE, group):
                group.launch_reductions()
            self._launched.append(group)
            number = self._passes.launched(group.number)
            if number is not None:
                oldest = self._by_number[number]
                with self.observers.waiting(Traffic.REDUCE, oldest):
                    oldest.settle()
                if oldest.can_be_released:
                    self._wait_if_skipped(oldest)
                    self._release(oldest)

    def _release(self, group: _ParamAndGradBucketGroup) -> None:
        if group in self._runner_of:
            self._runner_of[group].release(group)

    def _hook_runners(self) -> list[GradHookRunner]:
        return [chunk.hook_runner for chunk in self._chunks if chunk.hook_runner is not None]

    def _advance_early(self) -> None:
        # In launch order, so that second stages match although ranks start them at different times.
        while self._launched and self._launched[0].advance_early():
            self._launched.popleft()

    def _seen(self) -> list[int]:
        incomplete = {group.number for group in self._groups if not group.is_complete}
        return self._passes.order_seen(self._sequence, incomplete=incomplete)

    def _launch_last(self) -> None:
        """Launches the remaining collectives of an iteration.

        With ReduceScope.ALL it launches only gathers, because remaining gradients are treated as late.
        """
        if self._passes.scope is ReduceScope.ALL:
            self._end_gathers()
        else:
            self._launch_rest()

    def _launch_rest(self) -> None:
        self._launch_gathers()
        self._launch(self._passes.rest(self._sequence))
        self._end_gathers()

    def _end_gathers(self) -> None:
        self._launch_gathers()
        for group in self.gather_order:
            self._wait_if_skipped(group)
            group.param_state = ParamState.CURRENT

    def _wait_for_reductions(self, late: list[bool]) -> None:
        in_order = self._in_order()
        for group in in_order:
            if late[group.number]:
                with self.observers.launching(Traffic.LATE, group):
                    group.launch_second_round()
                if (oldest := self._passes.launched(group.number)) is not None:
                    self._by_number[oldest].settle()
        traffic = {group.number: Traffic.LATE if late[group.number] else Traffic.REDUCE for group in in_order}
        for group in in_order:
            with self.observers.waiting(traffic[group.number], group):
                group.advance()
        # After all first rounds, because ranks may have advanced different first rounds early.
        for group in (group for group in in_order if late[group.number]):
            with self.observers.waiting(Traffic.LATE, group):
                group.advance_second_round()
        for group in in_order:
            with self.observers.waiting(traffic[group.number], group):
                group.complete_reductions()
        self._passes.all_settled()

    def _warn_of_unused(self) -> None:
        unused = [name for group in self._groups for name in group.missing() if name not in self._warned]
        if unused:
            self._warned.update(unused)
            logger.warning("no gradient was produced for %s: zeros are reduced instead", ", ".join(unused))

    def _learn(self, seen: list[int], *, is_reordered: bool) -> None:
        if not self._overlaps:
            return
        self._sequence.learn(seen)
        for group in self._groups:
            group.learn_counts()
        if is_reordered:
            self._sequence.adopt(self.iteration.first_ranks_order_sync(seen))

    def _agree_sync(self, local: IterationOutcome) -> IterationOutcome:
        is_checked = any(chunk.checks for chunk in self._chunks)
        return self.iteration.agree_sync(local, of_all_stages=is_checked)

    def _abort(self, reason: str) -> None:
        """Aborts the iteration on all ranks. Collective."""
        for hook_runner in self._hook_runners():
            hook_runner.stop()
        self.catch_up_earlier()
        if self._passes.scope is ReduceScope.ALL and not self._sequence.may_have_begun:
            self._launch_last()
        else:
            self._launch_rest()
        self._catch_up_later()
        late = [False] * len(self._sequence.order)
        self._agree_sync(IterationOutcome(is_aborted=True, is_non_finite=False, is_reordered=False, late=late))
        self._abandon()
        self.iteration.abort_sync(reason)

    def _abandon(self) -> None:
        for group in self._in_order():
            group.abandon()
        self._passes.all_settled()


class _Observers:
    """The observers of one scheduler, called in the order in which they were added."""

    def __init__(self) -> None:
        self.members: list[BucketObserver] = []

    def add(self, observer: BucketObserver) -> None:
        """Adds an observer."""
        self.members.append(observer)

    def end_iteration(self) -> None:
        """Calls end_iteration of every observer."""
        for observer in self.members:
            observer.end_iteration()

    @contextmanager
    def agreeing(self) -> Iterator[None]:
        """Wraps the agreement between ranks; notifies every observer before and after it."""
        for observer in self.members:
            observer.before_agreement()
        yield
        for observer in self.members:
            observer.after_agreement()

    @contextmanager
    def launching(self, traffic: Traffic, group: _ParamAndGradBucketGroup) -> Iterator[None]:
        """Wraps the launch of a group's collectives; notifies every observer before and after it."""
        for observer in self.members:
            observer.before_launch(traffic, group)
        yield
        for observer in self.members:
            observer.after_launch(traffic, group)

    @contextmanager
    def waiting(self, traffic: Traffic, group: _ParamAndGradBucketGroup) -> Iterator[None]:
        """Wraps the wait for a group's collectives; notifies every observer before and after it."""
        for observer in self.members:
            observer.before_wait(traffic, group)
        yield
        for observer in self.members:
            observer.after_wait(traffic, group)


def all_current(groups: Iterable[_ParamAndGradBucketGroup]) -> bool:
    """Returns whether all ranks have gathered the parameters of all groups; the result is the same on all ranks."""
    return all(group.param_state is ParamState.CURRENT for group in groups)


def _groups_of_stage(
    groups: Sequence[_ParamAndGradBucketGroup], stage_group: dist.ProcessGroup | None
) -> tuple[list[str], frozenset[str]]:
    """Returns the names of a chunk's groups over all ranks of the stage, and of identical groups. Collective.

    A group is listed if any rank has it, in the order of the first rank that has it. A group is identical if all ranks
    have it with the same buckets and parameters.
    """
    per_rank = gather_objects([(group.name, _fingerprint(group)) for group in groups], stage_group)
    names = dict.fromkeys(name for of_rank in per_rank for name, _ in of_rank)
    same = frozenset.intersection(*(frozenset(of_rank) for of_rank in per_rank))
    return list(names), frozenset(name for name, _ in same)


def _fingerprint(group: _ParamAndGradBucketGroup) -> int:
    buckets = [
        (bucket.layout.span.numel, str(bucket.grad_data.dtype), [slot.name for slot in bucket.slots])
        for bucket in group.buckets
    ]
    return zlib.crc32(repr(buckets).encode())
