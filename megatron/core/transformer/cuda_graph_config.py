"""Selects the parts of a step that run as CUDA graphs, and rejects invalid combinations. The graphs are in
cuda_graphs.py.
"""

from dataclasses import dataclass
from typing import ClassVar

from megatron.core.config_field import config_field, validate_fields

# The default of Megatron-LM's field, the whole layer.
WHOLE_LAYER = "full"
MODULES = ("attn", "mlp", "moe", "moe_router", "moe_preprocess", "experts")
OF_EXPERTS = {"moe", "moe_router", "moe_preprocess", "experts"}


@dataclass(kw_only=True)
class CudaGraphConfig:
    """Parts that are captured once and then launched as a whole."""

    cli_group: ClassVar[str] = "CUDA graphs"

    cuda_graph_impl: str = config_field(
        "none",
        choices=("none", "local", "full_iteration"),
        help="local: forward and backward of --cuda-graph-modules are separate graphs, between eager parts; "
        "full_iteration: all passes of a step are one graph.",
    )
    cuda_graph_modules: list[str] = config_field(
        default_factory=list,
        nargs="+",
        choices=MODULES,
        help="Parts of each layer that --cuda-graph-impl local captures; default: attn, and mlp or moe.",
    )
    cuda_graph_warmup_steps: int = config_field(3, help="Training steps that run eagerly before a capture.", at_least=1)

    def __post_init__(self) -> None:
        validate_fields(self)

    @property
    def captures_experts(self) -> bool:
        """Whether the experts of a layer are captured, separately or together with the layer."""
        return self.cuda_graph_impl == "local" and (
            not self.cuda_graph_modules or bool({"moe", "experts"} & set(self.cuda_graph_modules))
        )


def normalize_graph_modules(config: CudaGraphConfig) -> None:
    """Converts alternative forms used by Megatron's scripts: None, the whole layer, and a single name."""
    modules: object = config.cuda_graph_modules
    if modules is None or modules in (WHOLE_LAYER, [WHOLE_LAYER]):
        config.cuda_graph_modules = []
    elif isinstance(modules, str):
        config.cuda_graph_modules = [modules]
