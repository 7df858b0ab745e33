"""How many microbatches make a global batch.

The one holder of module-level state is here because scripts ask through plain functions.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class ConstantNumMicroBatches:
    """A global batch that never changes. Sizes in samples."""

    global_batch_size: int
    micro_batch_size: int
    data_parallel_size: int

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise ValueError(f"{name} is {value}: must be at least 1")
        if self.global_batch_size % self.samples_per_round:
            raise ValueError(
                f"global_batch_size is {self.global_batch_size}: must be a multiple of "
                f"micro_batch_size ({self.micro_batch_size}) x data_parallel_size ({self.data_parallel_size})"
            )

    @property
    def samples_per_round(self) -> int:
        """Samples that all ranks process with one microbatch each."""
        return self.micro_batch_size * self.data_parallel_size

    @property
    def num_microbatches(self) -> int:
        """Microbatches of each rank in one step."""
        return self.global_batch_size // self.samples_per_round


@dataclass
class _Holder:
    calculator: ConstantNumMicroBatches | None = None

    def current(self) -> ConstantNumMicroBatches:
        if self.calculator is None:
            raise RuntimeError("init_num_microbatches_calculator has not been called")
        return self.calculator


_HOLDER = _Holder()


def init_num_microbatches_calculator(
    rank: int,
    rampup_batch_size: list[int] | None,
    global_batch_size: int,
    micro_batch_size: int,
    data_parallel_size: int,
) -> None:
    """Fixes the batch sizes of this process, in samples; raises ValueError where they do not divide."""
    # TODO(#3): ramp up of the batch size.
    if rampup_batch_size is not None:
        raise ValueError(f"rampup_batch_size is {rampup_batch_size}: not yet available")
    # A second run in this process with other sizes would change the first one's.
    if _HOLDER.calculator is not None:
        raise RuntimeError(f"rank {rank}: the number of microbatches is already set; destroy the calculator first")
    _HOLDER.calculator = ConstantNumMicroBatches(global_batch_size, micro_batch_size, data_parallel_size)


def destroy_num_microbatches_calculator() -> None:
    """Forgets the batch sizes, so that another run in this process can set its own."""
    _HOLDER.calculator = None


def get_num_microbatches() -> int:
    """Microbatches of each rank in one step."""
    return _HOLDER.current().num_microbatches


def get_current_global_batch_size() -> int:
    """Samples of one step over all ranks."""
    return _HOLDER.current().global_batch_size


def update_num_microbatches(consumed_samples: int, consistency_check: bool = True) -> None:
    """Recomputes the batch size for `consumed_samples`; a constant batch stays as it is."""
    # Called after each step by loops that know of batch ramp-up.
    del consumed_samples, consistency_check
    _HOLDER.current()
