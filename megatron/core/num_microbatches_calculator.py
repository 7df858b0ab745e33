"""Global batch sizes over a run, and the number of microbatches that each data-parallel rank computes in a step.

BatchSchedule maps consumed samples to a global batch size, and NumMicroBatches divides it over ranks. Both are
immutable. The functions at the end share the batch sizes of a process, because Megatron scripts call plain functions.
"""

import bisect
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest

# Units of token thresholds: "60B" is 60e9 tokens.
_TOKEN_UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


@dataclass(frozen=True)
class BatchSchedule:
    """Global batch sizes of a run as a function of the consumed samples.

    starts: number of consumed samples from which each size applies; begins with 0 and never decreases. sizes: global
    batch sizes in samples. setting: name of the field that the user set, for error messages.
    """

    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    setting: str = "global_batch_size"

    def size_at(self, consumed_samples: int) -> int:
        """Returns the batch size of the step that begins after `consumed_samples`."""
        return self.sizes[bisect.bisect_right(self.starts, consumed_samples) - 1]

    @property
    def final_size(self) -> int:
        """Batch size at the end of the schedule."""
        return self.sizes[-1]

    def rounded_down(self, multiple: int) -> "BatchSchedule":
        """Returns the schedule with each size rounded down to a multiple of `multiple`."""
        return replace(self, sizes=tuple(size // multiple * multiple for size in self.sizes))

    def samples_after(self, iterations: int, *, consumed: int = 0) -> int:
        """Returns the number of consumed samples `iterations` steps after `consumed` samples."""
        for size, steps in self._phases(consumed):
            taken = iterations if steps is None else min(steps, iterations)
            consumed += taken * size
            iterations -= taken
        return consumed

    def iterations_within(self, samples: int, *, consumed: int = 0) -> int:
        """Returns the number of whole steps that fit between `consumed` and `samples` consumed samples."""
        iterations = 0
        for size, steps in self._phases(consumed):
            fitting = max(0, samples - consumed) // size
            if steps is None or fitting < steps:
                return iterations + fitting
            iterations += steps
            consumed += steps * size
        raise AssertionError("the last phase has no end")

    def _phases(self, consumed: int = 0) -> Iterator[tuple[int, int | None]]:
        """Yields (size, number of steps after `consumed` samples) pairs; None steps for the last, unlimited size."""
        for size, following in zip_longest(self.sizes, self.starts[1:]):
            # Zero steps if a larger batch has already passed the whole phase.
            steps = None if following is None else max(0, -(-(following - consumed) // size))
            yield size, steps
            consumed += size * (steps or 0)


def build_batch_schedule(
    global_batch_size: int | None,
    *,
    rampup_batch_size: Sequence[int] | None = None,
    step_batch_size_schedule: str | None = None,
    seq_length: int | None = None,
) -> BatchSchedule:
    """Builds a ramp-up, a step schedule or a constant schedule. It must end with the global batch size.

    seq_length: tokens per sample, required by step_batch_size_schedule. Raises ValueError for invalid or conflicting
    settings.
    """
    if rampup_batch_size is not None and step_batch_size_schedule is not None:
        raise ValueError("rampup_batch_size and step_batch_size_schedule are both given: choose only one schedule")
    if step_batch_size_schedule is None:
        if global_batch_size is None:
            raise ValueError("global_batch_size is None: must be set, or step_batch_size_schedule must be set")
        return ramp_up(rampup_batch_size, global_batch_size) if rampup_batch_size else constant_batch(global_batch_size)
    schedule = parse_step_schedule(step_batch_size_schedule, seq_length=seq_length)
    if global_batch_size not in (None, schedule.final_size):
        raise ValueError(
            f"global_batch_size is {global_batch_size}: must be omitted or be the last batch size of "
            f"step_batch_size_schedule, {schedule.final_size}"
        )
    return schedule


def constant_batch(global_batch_size: int) -> BatchSchedule:
    """Returns a schedule with the same batch size in all steps."""
    return BatchSchedule((0,), (global_batch_size,))


def ramp_up(rampup_batch_size: Sequence[int], global_batch_size: int) -> BatchSchedule:
    """Returns a schedule that reaches the global batch size in equal increments.

    rampup_batch_size: [start, increment, samples]. Raises ValueError if the increments do not end exactly at the global
    batch size.
    """
    shown = f"rampup_batch_size is {' '.join(map(str, rampup_batch_size))}"
    if len(rampup_batch_size) != 3:
        raise ValueError(f"{shown}: must be three numbers: START INCREMENT SAMPLES")
    # Command lines of Megatron-LM pass words.
    start, increment, samples = map(int, rampup_batch_size)
    if start < 1 or increment < 1 or samples < 0:
        raise ValueError(f"{shown}: START and INCREMENT must be at least 1, SAMPLES at least 0")
    if start > global_batch_size or (global_batch_size - start) % increment:
        raise ValueError(
            f"{shown}: START plus a multiple of INCREMENT must equal global_batch_size, which is {global_batch_size}"
        )
    count = (global_batch_size - start) // increment
    # Increment k applies after k / count of the samples, rounded up to whole samples.
    starts = [-(-samples * k // count) if k else 0 for k in range(count + 1)]
    return BatchSchedule(tuple(starts), tuple(start + increment * k for k in range(count + 1)), "rampup_batch_size")


def parse_step_schedule(text: str, *, seq_length: int | None) -> BatchSchedule:
    """Parses a schedule "THRESHOLD:BATCH_SIZE ...", in which each batch size applies from its threshold on.

    As in Megatron-LM, a threshold counts tokens, with or without a suffix K, M, B or T (10^3 .. 10^12), and starts at
    threshold // seq_length samples. Pairs are separated by spaces or commas. Raises ValueError unless thresholds start
    at 0 and increase, in samples.
    """
    shown = f"step_batch_size_schedule is {text!r}"
    if seq_length is None:
        raise ValueError(f"seq_length is None: must be set, because thresholds count tokens ({shown})")
    words = re.findall(r"[^\s,]+", text)
    entries = [found for word in words if (found := re.fullmatch(r"(\d+(?:\.\d+)?)([KMBT]?):(\d+)", word, re.I))]
    if not words or len(entries) < len(words):
        raise ValueError(
            f'{shown}: must be THRESHOLD:BATCH_SIZE pairs separated by spaces or commas, such as "0:256 2B:512"; '
            "thresholds count tokens"
        )
    pairs = [(_threshold(entry[1], entry[2], seq_length=seq_length), int(entry[3])) for entry in entries]
    starts, sizes = zip(*pairs)
    if float(entries[0][1]) > 0 or any(a >= b for a, b in zip(starts, starts[1:])):
        raise ValueError(
            f"{shown}: thresholds must start at 0 and increase; they count tokens, and in samples of seq_length "
            f"({seq_length}) they are {list(starts)}"
        )
    if min(sizes) < 1:
        raise ValueError(f"{shown}: batch sizes must be at least 1")
    return BatchSchedule(starts, sizes, "step_batch_size_schedule")


def _threshold(number: str, unit: str, *, seq_length: int) -> int:
    # Integer arithmetic, since floats cannot represent 10^16 tokens exactly.
    whole, _, fraction = number.partition(".")
    if fraction and not unit:
        raise ValueError(
            f"step_batch_size_schedule: threshold {number} has no unit: must be an integer number of tokens, or have "
            "the suffix K, M, B or T"
        )
    tokens = int(whole + fraction) * _TOKEN_UNITS[unit.upper()]
    return tokens // (10 ** len(fraction) * seq_length)


@dataclass(frozen=True)
class NumMicroBatches:
    """Batch sizes of one run, in samples, and how they divide into microbatches.

    schedule: the requested sizes. Each size must be a multiple of micro_batch_size x data_parallel_size, unless
    decrease_if_needed rounds it down to a multiple. running: the sizes used in training.
    """

    schedule: BatchSchedule
    micro_batch_size: int
    data_parallel_size: int
    decrease_if_needed: bool = False
    running: BatchSchedule = field(init=False)

    def __post_init__(self) -> None:
        for name in ("micro_batch_size", "data_parallel_size"):
            if vars(self)[name] < 1:
                raise ValueError(f"{name} is {vars(self)[name]}: must be at least 1")
        for size in self.schedule.sizes:
            self._check_size(size)
        # A frozen dataclass does not allow plain assignment.
        object.__setattr__(self, "running", self.schedule.rounded_down(self.samples_per_round))

    def _check_size(self, size: int) -> None:
        wanted = f"micro_batch_size ({self.micro_batch_size}) x data-parallel size ({self.data_parallel_size})"
        setting = self.schedule.setting
        which = "global_batch_size is" if setting == "global_batch_size" else f"{setting}: the batch size becomes"
        if size < 1 or (self.decrease_if_needed and size < self.samples_per_round):
            raise ValueError(f"{which} {size}: must be at least {wanted if size >= 1 else 1}")
        if size % self.samples_per_round and not self.decrease_if_needed:
            above = -(-size // self.samples_per_round) * self.samples_per_round
            near = " or ".join(str(one) for one in (above - self.samples_per_round, above) if one)
            raise ValueError(
                f"{which} {size}: must be a multiple of {wanted}, such as {near}; or set decrease_batch_size_if_needed"
            )

    @property
    def samples_per_round(self) -> int:
        """Number of samples in one microbatch, summed over all data-parallel ranks."""
        return self.micro_batch_size * self.data_parallel_size

    def num_microbatches(self, consumed_samples: int) -> int:
        """Returns the number of microbatches per rank in the step that begins after `consumed_samples`."""
        return self.running.size_at(consumed_samples) // self.samples_per_round

    @property
    def final_num_microbatches(self) -> int:
        """Number of microbatches per rank at the final batch size, which evaluation always uses."""
        return self.running.final_size // self.samples_per_round


@dataclass
class _Holder:
    """The batch sizes of this process, and the number of samples consumed before its next step."""

    batches: NumMicroBatches | None = None
    consumed_samples: int = 0

    def get(self) -> NumMicroBatches:
        if self.batches is None:
            raise RuntimeError("init_num_microbatches_calculator has not been called")
        return self.batches


_HOLDER = _Holder()


def init_num_microbatches_calculator(
    rank: int,
    rampup_batch_size: list[int] | None = None,
    global_batch_size: int | None = None,
    micro_batch_size: int | None = None,
    data_parallel_size: int | None = None,
    decrease_batch_size_if_needed: bool = False,
    step_batch_size_schedule: str | None = None,
    seq_length: int | None = None,
) -> NumMicroBatches:
    """Sets the batch sizes of this process, in samples.

    Raises ValueError if a size is missing or not divisible, and RuntimeError if the batch sizes are already set.
    """
    # A second run in this process would change the batch sizes of the first.
    if _HOLDER.batches is not None:
        raise RuntimeError(f"rank {rank}: the number of microbatches is already set; destroy the calculator first")
    if micro_batch_size is None or data_parallel_size is None:
        missing = "micro_batch_size" if micro_batch_size is None else "data_parallel_size"
        raise ValueError(f"{missing} is None: must be set, because it determines the number of microbatches")
    schedule = build_batch_schedule(
        global_batch_size,
        rampup_batch_size=rampup_batch_size,
        step_batch_size_schedule=step_batch_size_schedule,
        seq_length=seq_length,
    )
    batches = NumMicroBatches(schedule, micro_batch_size, data_parallel_size, decrease_batch_size_if_needed)
    _HOLDER.batches, _HOLDER.consumed_samples = batches, 0
    return batches


def destroy_num_microbatches_calculator() -> None:
    """Discards the batch sizes, so that a later run in this process can set new ones."""
    _HOLDER.batches = None


def get_num_microbatches() -> int:
    """Returns the number of microbatches per rank in the next step."""
    return _HOLDER.get().num_microbatches(_HOLDER.consumed_samples)


def get_current_global_batch_size() -> int:
    """Returns the global batch size that the schedule requests for the next step, in samples."""
    return _HOLDER.get().schedule.size_at(_HOLDER.consumed_samples)


def update_num_microbatches(consumed_samples: int, consistency_check: bool = True, verbose: bool = False) -> None:
    """Selects the batch size of the step that begins after `consumed_samples`.

    consistency_check, verbose: unused, accepted for Megatron scripts. All sizes are checked at construction.
    """
    _HOLDER.get()
    _HOLDER.consumed_samples = consumed_samples
