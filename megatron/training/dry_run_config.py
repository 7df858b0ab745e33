"""Settings of a plan: what a run would hold, without running it."""

from dataclasses import dataclass
from typing import ClassVar

from megatron.core.config_field import config_field, validate_fields


@dataclass(kw_only=True)
class DryRunConfig:
    """A plan in the place of training."""

    cli_group: ClassVar[str] = "plan"

    dry_run: bool = config_field(
        False, help="Train nothing: print what a rank of each pipeline stage would hold in memory, by kind, and exit."
    )
    world_size: int | None = config_field(
        None, help="Number of ranks that --dry-run plans for; unset: as many as were started.", at_least=1
    )

    def __post_init__(self) -> None:
        validate_fields(self)
