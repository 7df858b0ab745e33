"""Settings that select the parts of a step to run as CUDA graphs. The graphs are in cuda_graphs.py."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from megatron.core.config_field import config_field, validate_fields

# Default of this field in Megatron-LM, the whole layer.
WHOLE_LAYER = "full"
MODULES = ("attn", "mlp", "moe", "moe_router", "moe_preprocess", "experts")
OF_EXPERTS = {"moe", "moe_router", "moe_preprocess", "experts"}


@dataclass(kw_only=True)
class CudaGraphConfig:
    """Settings that select the parts of a step to capture as CUDA graphs."""

    cli_group: ClassVar[str] = "CUDA graphs"

    cuda_graph_impl: str = config_field(
        "none",
        choices=("none", "local", "full_iteration"),
        help="local: capture forward and backward of --cuda-graph-modules as separate graphs, between eager parts. "
        "full_iteration: capture all forward and backward passes of a step as one graph.",
    )
    cuda_graph_modules: list[str] = config_field(
        default_factory=list,
        nargs="+",
        choices=MODULES,
        help="Parts of each layer to capture with --cuda-graph-impl local; default: attn, and mlp or moe.",
    )
    cuda_graph_warmup_steps: int = config_field(
        3, help="Number of eager training steps before the capture.", at_least=1
    )

    def __post_init__(self) -> None:
        validate_fields(self)

    @property
    def captures_experts(self) -> bool:
        """Whether experts are captured, either separately or as a part of their layer."""
        return self.cuda_graph_impl == "local" and (
            not self.cuda_graph_modules or bool({"moe", "experts"} & set(self.cuda_graph_modules))
        )


def graphed_modules(given: Sequence[str], has_experts: Sequence[int]) -> Sequence[str]:
    """Returns the parts of layers that cuda_graph_impl "local" captures: by default attention and feed-forward layers.

    given: cuda_graph_modules. has_experts: 1 for each layer of the model with experts, and 0 for each dense layer.
    """
    feed_forward = [name for name, kind in (("mlp", 0), ("moe", 1)) if kind in has_experts]
    return given or ["attn", *feed_forward]


def normalize_graph_modules(config: CudaGraphConfig) -> None:
    """Converts the forms that scripts of Megatron use (None, `full`, and a single name) to a list of names."""
    modules: object = config.cuda_graph_modules
    if modules is None or modules in (WHOLE_LAYER, [WHOLE_LAYER]):
        config.cuda_graph_modules = []
    elif isinstance(modules, str):
        config.cuda_graph_modules = [modules]
