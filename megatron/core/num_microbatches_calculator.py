"""How many microbatches make a global batch.

The one holder of module-level state is here because scripts ask through plain functions. How the global batch grows is
batch_schedule.py.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from megatron.core.batch_schedule import BatchSchedule, build_batch_schedule


@dataclass(frozen=True)
class NumMicroBatches:
    """Batch sizes of one run, in samples.

    schedule: what is asked for. Each size must be a multiple of micro_batch_size x data_parallel_size, unless
    decrease_if_needed rounds it down to one: `running` has the sizes that are trained with.
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
        # Frozen: this is how a derived field is set.
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
                f"{which} {size}: must be a multiple of {wanted}, as {near}; or give decrease_batch_size_if_needed"
            )

    @property
    def samples_per_round(self) -> int:
        """Samples that all ranks process with one microbatch each."""
        return self.micro_batch_size * self.data_parallel_size

    def num_microbatches(self, consumed_samples: int) -> int:
        """Microbatches of each rank in the step that begins after `consumed_samples`."""
        return self.running.size_at(consumed_samples) // self.samples_per_round

    @property
    def final_num_microbatches(self) -> int:
        """Microbatches of each rank once the batch has its final size; evaluation always uses that."""
        return self.running.final_size // self.samples_per_round


@dataclass
class _Holder:
    calculator: NumMicroBatches | None = None
    consumed_samples: int = 0

    def ask(self, question: Callable[[NumMicroBatches, int], int]) -> int:
        if self.calculator is None:
            raise RuntimeError("init_num_microbatches_calculator has not been called")
        return question(self.calculator, self.consumed_samples)


_HOLDER = _Holder()


def init_num_microbatches_calculator(
    rank: int,
    rampup_batch_size: list[int] | None,
    global_batch_size: int | None,
    micro_batch_size: int,
    data_parallel_size: int,
    decrease_batch_size_if_needed: bool = False,
    *,
    step_batch_size_schedule: str | None = None,
    seq_length: int | None = None,
) -> NumMicroBatches:
    """Fixes the batch sizes of this process, in samples; raises ValueError where they do not divide."""
    # A second run in this process with other sizes would change the first one's.
    if _HOLDER.calculator is not None:
        raise RuntimeError(f"rank {rank}: the number of microbatches is already set; destroy the calculator first")
    schedule = build_batch_schedule(
        global_batch_size,
        rampup_batch_size=rampup_batch_size,
        step_batch_size_schedule=step_batch_size_schedule,
        seq_length=seq_length,
    )
    _HOLDER.calculator = NumMicroBatches(schedule, micro_batch_size, data_parallel_size, decrease_batch_size_if_needed)
    _HOLDER.consumed_samples = 0
    return _HOLDER.calculator


def destroy_num_microbatches_calculator() -> None:
    """Forgets the batch sizes, so that another run in this process can set its own."""
    _HOLDER.calculator = None


def get_num_microbatches() -> int:
    """Microbatches of each rank in the next step."""
    return _HOLDER.ask(NumMicroBatches.num_microbatches)


def get_current_global_batch_size() -> int:
    """Samples over all ranks that the schedule wants of the next step."""
    return _HOLDER.ask(lambda calculator, consumed: calculator.schedule.size_at(consumed))


def get_current_running_global_batch_size() -> int:
    """Samples over all ranks of the next step: less than wanted where --decrease-batch-size-if-needed rounds down."""
    return _HOLDER.ask(lambda calculator, consumed: calculator.running.size_at(consumed))


def update_num_microbatches(consumed_samples: int, consistency_check: bool = True, verbose: bool = False) -> None:
    """Moves to the batch size of the step that begins after `consumed_samples`.

    consistency_check, verbose: for scripts; every size of the schedule was checked at the start.
    """
    del consistency_check, verbose
    _HOLDER.consumed_samples = consumed_samples
