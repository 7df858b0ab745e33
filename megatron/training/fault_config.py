"""Settings of what a run does about faults that show in its numbers; checkpoints and signals are in config.py."""

from dataclasses import dataclass
from typing import ClassVar

from megatron.core.config_field import config_field, validate_fields


@dataclass(kw_only=True)
class FaultConfig:
    """Losses and gradients that are not finite, losses that jump, replicas that differ, ranks that are slow."""

    cli_group: ClassVar[str] = "faults"

    non_finite_policy: str = config_field(
        "stop",
        choices=("stop", "skip", "rewind"),
        help="A step with a loss or gradient that is not finite ends the run; or updates nothing; or the run goes back "
        "to its last checkpoint and leaves out that step's data.",
    )
    loss_spike_rewind: float | None = config_field(
        None,
        help="Go back to the last checkpoint, and leave out the data since, when a loss is more than this many times "
        "the median of the last 100 steps; unset: never.",
        more_than=1,
    )
    max_rewinds: int = config_field(
        3, help="How often a run may go back before the next such step ends it.", at_least=1
    )
    check_weight_hash_across_dp_replicas_interval: int | None = config_field(
        None, help="Steps between comparisons of the weights of all replicas; unset: none.", at_least=1
    )
    log_straggler: bool = config_field(
        False, help="Log ranks that stay slower than others; takes the times of --timing-log-level 1."
    )

    def __post_init__(self) -> None:
        validate_fields(self)
