"""Proves that the programs of all stages can run: order, completeness, and freedom from deadlock by simulation."""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron.core.pipeline_parallel.schedule import Action, Pair, Pipeline, validate_schedule
from megatron.core.pipeline_parallel.transfers import Await, Direction, Post, Program, Transfer

# Maximum number of batches in flight on a stage, which waits for the oldest batch before it posts more; the runner uses
# the same number.
MAX_BATCHES = 2


def validate_programs(programs: Sequence[Program], pipeline: Pipeline) -> None:
    """Raises ValueError, naming stage and step, unless the programs run to completion on the strictest backend.

    On that backend, a stage's batches run one after the other, the next only when the previous one has completed. A
    transfer proceeds when the batches at both its ends run. Awaiting a transfer means awaiting its batch. A stage
    blocks before it posts a batch beyond MAX_BATCHES. Between two stages, transfers match in the order in which they
    are posted.
    """
    for stage, program in enumerate(programs):
        _validate_alone(program, pipeline, stage=stage)
    _validate_transfers(programs, pipeline)
    stages = [_Stage(program) for program in programs]
    # Stages that may now be able to continue.
    awake = list(range(len(stages)))
    while awake:
        index = awake.pop()
        while stages[index].step():
            awake += _complete(stages, index)
    stuck = [f"stage {index} before {stage.next_step()}" for index, stage in enumerate(stages) if not stage.is_done()]
    if stuck:
        raise ValueError(f"schedule deadlocks: {', '.join(stuck)}")


def _validate_alone(program: Program, pipeline: Pipeline, *, stage: int) -> None:
    """Checks one stage's program: inputs are posted, then awaited, then used; outputs are sent once they exist.

    A pair uses both inputs when it starts, and both outputs exist when it has ended.
    """
    validate_schedule([step for step in program if isinstance(step, (Action, Pair))])
    posted: set[Action] = set()
    there: set[Action] = set()
    done: set[Action] = set()
    for step in program:
        if isinstance(step, (Action, Pair)):
            for action in step.passes:
                source = pipeline.source(stage, action)
                is_here = source is None or (source.action in done if source.stage == stage else action in there)
                if not is_here:
                    raise ValueError(f"stage {stage} runs {action} without its input")
            done.update(step.passes)
        elif isinstance(step, Await):
            if step.action not in posted:
                raise ValueError(f"stage {stage} awaits {step.action}, which it has not posted")
            there.add(step.action)
        else:
            for transfer in step.transfers:
                if transfer.direction is Direction.RECEIVE:
                    posted.add(transfer.action)
                elif transfer.action not in done:
                    raise ValueError(f"stage {stage} sends {transfer.action} before running it")
    if posted != there:
        raise ValueError(f"stage {stage} never awaits {', '.join(str(action) for action in posted - there)}")


def _validate_transfers(programs: Sequence[Program], pipeline: Pipeline) -> None:
    """Checks that the required tensors are sent and received between each two stages, in the same order at both."""
    sent: dict[tuple[int, int], list[Action]] = {}
    received: dict[tuple[int, int], list[Action]] = {}
    for stage, transfer in ((s, t) for s, p in enumerate(programs) for t in _transfers(p)):
        if transfer.direction is Direction.SEND:
            target = pipeline.receiver(stage, transfer.action)
            if target is None or target.stage != transfer.peer:
                raise ValueError(f"stage {stage} must not {transfer}: no pass of stage {transfer.peer} receives it")
            sent.setdefault((stage, transfer.peer), []).append(target.action)
        else:
            source = pipeline.sender(stage, transfer.action)
            if source is None or source.stage != transfer.peer:
                raise ValueError(f"stage {stage} must not {transfer}: no pass of stage {transfer.peer} sends it")
            received.setdefault((transfer.peer, stage), []).append(transfer.action)
    for ends in sent.keys() | received.keys():
        if sent.get(ends) != received.get(ends):
            raise ValueError(f"stage {ends[0]} does not send in the order in which stage {ends[1]} receives")


def _transfers(program: Program) -> list[Transfer]:
    return [transfer for step in program if isinstance(step, Post) for transfer in step.transfers]


@dataclass
class _Stage:
    """Progress of a stage in the simulation. batches: posted batches that are not complete."""

    program: Program
    position: int = 0
    batches: deque["_Batch"] = field(default_factory=deque)
    batch_of: dict[Action, "_Batch"] = field(default_factory=dict)

    def is_done(self) -> bool:
        return self.position == len(self.program) and not self.batches

    def next_step(self) -> str:
        return str(self.program[self.position]) if self.position < len(self.program) else "its end"

    def step(self) -> bool:
        """Performs the next step, if it is possible now; returns whether it was performed."""
        if self.position == len(self.program):
            return False
        step = self.program[self.position]
        if isinstance(step, Await) and self.batch_of[step.action].waiting:
            return False
        if isinstance(step, Post):
            if len(self.batches) == MAX_BATCHES:
                return False
            batch = _Batch(Counter([(t.direction, t.peer) for t in step.transfers]))
            self.batches.append(batch)
            self.batch_of.update({t.action: batch for t in step.transfers if t.direction is Direction.RECEIVE})
        self.position += 1
        return True


@dataclass
class _Batch:
    """Transfers posted together. waiting: number of transfers that are not complete, by direction and peer."""

    waiting: dict[tuple[Direction, int], int]


def _complete(stages: Sequence[_Stage], first: int) -> list[int]:
    """Completes transfers that are possible after a step of stage `first`; returns the stages that made progress."""
    changed: list[int] = []
    todo = [first]
    while todo:
        index = todo.pop()
        if not stages[index].batches:
            continue
        own = stages[index].batches[0]
        for direction, peer in list(own.waiting):
            if not stages[peer].batches:
                continue
            other = stages[peer].batches[0]
            back = (Direction.SEND if direction is Direction.RECEIVE else Direction.RECEIVE, index)
            # _validate_transfers has shown that transfers between two stages are in order, so their identity does not
            # matter.
            moved = min(own.waiting[direction, peer], other.waiting.get(back, 0))
            if moved:
                _take(own.waiting, (direction, peer), count=moved)
                _take(other.waiting, back, count=moved)
                if not other.waiting:
                    stages[peer].batches.popleft()
                    changed.append(peer)
                    todo.append(peer)
        if not own.waiting:
            stages[index].batches.popleft()
            changed.append(index)
            todo.append(index)
    return changed


def _take(waiting: dict[tuple[Direction, int], int], key: tuple[Direction, int], *, count: int) -> None:
    waiting[key] -= count
    if not waiting[key]:
        del waiting[key]
