"""BatchSchedule: the global batch size as a function of the samples that a run has consumed. Pure.

How a process splits a batch into microbatches is num_microbatches_calculator.py.
"""

import bisect
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

# Of token thresholds: "60B" is 60e9 tokens.
_TOKEN_UNITS = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


@dataclass(frozen=True)
class BatchSchedule:
    """Batch sizes in samples, each from a number of consumed samples on: starts[0] is 0, starts never fall.

    setting: what the user gave, for messages.
    """

    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    setting: str = "global_batch_size"

    def size_at(self, consumed_samples: int) -> int:
        """Samples of the step that begins after `consumed_samples`."""
        return self.sizes[bisect.bisect_right(self.starts, consumed_samples) - 1]

    @property
    def final_size(self) -> int:
        """The batch size that the schedule ends with."""
        return self.sizes[-1]

    def rounded_down(self, multiple: int) -> "BatchSchedule":
        """The same schedule with each size a multiple of `multiple`."""
        return replace(self, sizes=tuple(size // multiple * multiple for size in self.sizes))

    def samples_after(self, iterations: int) -> int:
        """Samples consumed by the first `iterations` steps."""
        consumed = 0
        for size, steps in self._stretches():
            taken = iterations if steps is None else min(steps, iterations)
            consumed += taken * size
            iterations -= taken
        return consumed

    def iterations_within(self, samples: int, *, consumed: int = 0) -> int:
        """Steps that fit into `samples` after the first `consumed`: a last batch that would need more is not taken."""
        iterations = 0
        for size, steps in self._stretches(consumed):
            fitting = max(0, samples - consumed) // size
            if steps is None or fitting < steps:
                return iterations + fitting
            iterations += steps
            consumed += steps * size
        raise AssertionError("the last stretch has no end")

    def _stretches(self, consumed: int = 0) -> Iterator[tuple[int, int | None]]:
        """Each size and the number of steps with it from `consumed` on; None for the last, which has no end."""
        for size, following in zip_longest(self.sizes, self.starts[1:]):
            # A large batch may step over a whole phase: no steps then.
            steps = None if following is None else max(0, -(-(following - consumed) // size))
            yield size, steps
            consumed += size * (steps or 0)


def constant_batch(global_batch_size: int) -> BatchSchedule:
    """One batch size from the first step to the last."""
    return BatchSchedule((0,), (global_batch_size,))


def ramp_up(rampup_batch_size: Sequence[int], global_batch_size: int) -> BatchSchedule:
    """[start, increment, samples]: from `start` to the global batch size in equal steps over `samples`.

    Raises ValueError where the increments do not lead to the global batch size.
    """
    shown = f"rampup_batch_size is {' '.join(map(str, rampup_batch_size))}"
    if len(rampup_batch_size) != 3:
        raise ValueError(f"{shown}: must be three numbers: START INCREMENT SAMPLES")
    start, increment, samples = rampup_batch_size
    if start < 1 or increment < 1 or samples < 0:
        raise ValueError(f"{shown}: START and INCREMENT must be at least 1, SAMPLES at least 0")
    if start > global_batch_size or (global_batch_size - start) % increment:
        raise ValueError(
            f"{shown}: START plus a number of INCREMENTs must give global_batch_size, which is {global_batch_size}"
        )
    count = (global_batch_size - start) // increment
    # The k-th increment comes once k / count of the samples are consumed, rounded up to whole samples.
    starts = [-(-samples * k // count) if k else 0 for k in range(count + 1)]
    return BatchSchedule(tuple(starts), tuple(start + increment * k for k in range(count + 1)), "rampup_batch_size")


def parse_step_schedule(text: str, *, seq_length: int) -> BatchSchedule:
    """The schedule "THRESHOLD:BATCH_SIZE ...": each batch size from its threshold on.

    A threshold is a number of samples or, with K, M, B or T behind it (10^3 .. 10^12), of tokens, rounded up to whole
    samples of `seq_length` tokens. Raises ValueError unless thresholds start at 0 and rise.
    """
    shown = f"step_batch_size_schedule is {text!r}"
    entries = [re.fullmatch(r"(\d+(?:\.\d+)?)([KMBT]?):(\d+)", word) for word in text.split()]
    if not entries or None in entries:
        raise ValueError(f'{shown}: must be THRESHOLD:BATCH_SIZE pairs with spaces between, such as "0:256 2B:512"')
    pairs = [(_threshold(entry[1], entry[2], seq_length=seq_length), int(entry[3])) for entry in entries if entry]
    starts, sizes = zip(*pairs)
    if starts[0] != 0 or any(a >= b for a, b in zip(starts, starts[1:])):
        raise ValueError(f"{shown}: thresholds must start at 0 and rise; in samples they are {list(starts)}")
    if min(sizes) < 1:
        raise ValueError(f"{shown}: batch sizes must be at least 1")
    return BatchSchedule(starts, sizes, "step_batch_size_schedule")


def _threshold(number: str, unit: str, *, seq_length: int) -> int:
    # In whole numbers: a float has no 10^16 tokens to the digit.
    whole, _, fraction = number.partition(".")
    if not unit:
        if fraction:
            raise ValueError(f"step_batch_size_schedule: {number} samples: must be whole, or tokens with K, M, B or T")
        return int(whole)
    tokens = int(whole + fraction) * _TOKEN_UNITS[unit]
    return -(-tokens // (10 ** len(fraction) * seq_length))


def build_batch_schedule(
    global_batch_size: int | None,
    *,
    rampup_batch_size: Sequence[int] | None = None,
    step_batch_size_schedule: str | None = None,
    seq_length: int | None = None,
) -> BatchSchedule:
    """The schedule of at most one of the two settings, which must end at the global batch size.

    seq_length: tokens per sample, for thresholds in tokens.
    """
    if rampup_batch_size is not None and step_batch_size_schedule is not None:
        raise ValueError("rampup_batch_size and step_batch_size_schedule are both given: choose one schedule")
    if step_batch_size_schedule is None:
        assert global_batch_size is not None, "only a step schedule says how it ends"
        return ramp_up(rampup_batch_size, global_batch_size) if rampup_batch_size else constant_batch(global_batch_size)
    schedule = parse_step_schedule(step_batch_size_schedule, seq_length=seq_length or 1)
    if global_batch_size not in (None, schedule.final_size):
        raise ValueError(
            f"global_batch_size is {global_batch_size}: must be left out or be the last batch size of "
            f"step_batch_size_schedule, {schedule.final_size}"
        )
    return schedule
