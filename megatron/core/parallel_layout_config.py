"""How a model is laid out over ranks: the sizes of the rank grid's axes; process groups are parallel_state.py's."""

from dataclasses import dataclass
from typing import ClassVar

from megatron.core.config_field import config_field, validate_fields


@dataclass(kw_only=True)
class ParallelLayoutConfig:
    """Into how many parts weights, layers, sequences and experts are cut; the ranks that are left hold copies.

    virtual_pipeline_model_parallel_size: chunks of layers per stage; unset: one.
    """

    cli_group: ClassVar[str] = "parallel layout"

    tensor_model_parallel_size: int = config_field(1, help="Ranks that share the weights of each layer.", at_least=1)
    sequence_parallel: bool = config_field(
        False,
        help="Cut activations between the layers that tensor-parallel ranks share along the sequence; experts need it.",
    )
    pipeline_model_parallel_size: int = config_field(
        1, help="Stages that consecutive layers are spread over.", at_least=1
    )
    virtual_pipeline_model_parallel_size: int | None = None
    context_parallel_size: int = config_field(1, help="Ranks that share each sequence.", at_least=1)
    expert_model_parallel_size: int = config_field(
        1, help="Ranks that the experts of a layer are spread over; they are taken from all but the stages.", at_least=1
    )
    expert_tensor_parallel_size: int | None = config_field(
        None, help="Ranks that share the weights of each expert; unset: as many as of other layers.", at_least=1
    )

    def __post_init__(self) -> None:
        validate_fields(self)


def validate_parallel_layout(config: ParallelLayoutConfig) -> None:
    """Raises ValueError for virtual stages without stages."""
    virtual, stages = config.virtual_pipeline_model_parallel_size, config.pipeline_model_parallel_size
    if virtual is not None and (virtual < 1 or virtual > 1 and stages == 1):
        raise ValueError(
            f"virtual_pipeline_model_parallel_size is {virtual}: must be 1 with pipeline_model_parallel_size {stages}"
        )


def check_multiple(name: str, value: int, *, of: str, size: int) -> None:
    """ValueError, naming both fields and values, unless `size` divides `value`."""
    if value % size:
        raise ValueError(f"{name} is {value}: must be a multiple of {of} ({size})")
