"""RunStates: what an optimizer keeps of the parameters of a bucket, for hooks on reduced gradients.

How numbers are kept is stored_floats.py's; when a hook is called, the data-parallel wrapper's.
"""

from collections.abc import Iterator, Sequence

from megatron.core.distributed.grad_hooks import ReleasedBucket, RunState
from megatron.core.distributed.layout import Span
from megatron.core.optimizer.param_runs import ParamRun
from megatron.core.optimizer.update_rules import UpdateRule


class RunStates:
    """Says it bucket by bucket; rules: those of the optimizer, which share its runs."""

    def __init__(self, rules: Sequence[UpdateRule]) -> None:
        # By what wrappers know of a run: its buffer, the very object, and the place of its bucket there.
        self._found: dict[tuple[object, int], list[tuple[UpdateRule, ParamRun]]] = {}
        for rule in rules:
            for run in rule.runs:
                self._found.setdefault((run.buffer, run.bucket), []).append((rule, run))
        for pairs in self._found.values():
            pairs.sort(key=lambda pair: pair[1].span.start)

    def states(self, place: ReleasedBucket) -> Sequence[RunState]:
        """What is kept of a bucket, in the order of places: fp32 or fp64, views of what is kept so, else copies."""
        start = place.buffer.owned_spans()[place.layout.index].start
        found = self._found.get((place.buffer, place.layout.index), [])
        return [state for rule, run in found for state in _states_of(run, rule, bucket_start=start)]


def _states_of(run: ParamRun, rule: UpdateRule, *, bucket_start: int) -> Iterator[RunState]:
    moments = rule.flat_state(run)
    for part, settings in rule.settings_in(run):
        yield RunState(
            Span(run.span.start - bucket_start + part.start, part.numel),
            settings,
            run.main.read(part.start, part.end),
            {name: stored.read(part.start, part.end) for name, stored in moments.items()},
        )
