"""Settings of activation offloading to host memory. activation_offload.py implements it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from megatron.core.config_field import config_field, validate_fields
from megatron.core.model_parallel_config import LayerOffloadConfig

# In execution order within a layer.
OFFLOAD_MODULES = ("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "expert_fc1", "moe_act")
# Parts that only layers with grouped experts have.
EXPERT_MODULES = frozenset({"expert_fc1", "moe_act"})
_MIN_ELEMENTS = 1024 * 1024


@dataclass(kw_only=True)
class OffloadConfig(LayerOffloadConfig):
    """Settings that select the activations to store in host memory between forward and backward."""

    cli_group: ClassVar[str] = "activation offloading"

    fine_grained_activation_offloading: bool = config_field(
        False, help="Store the activations of --offload-modules in host memory between forward and backward."
    )
    offload_modules: list[str] = config_field(
        default_factory=list,
        help="Parts of a layer whose activations are offloaded to host memory.",
        choices=OFFLOAD_MODULES,
        nargs="+",
    )
    activation_offload_fraction: float = config_field(
        1.0,
        help="Fraction of the parts in --offload-modules to offload, over all layers but the last.",
        more_than=0,
        at_most=1,
    )
    min_offloaded_tensor_size: int = config_field(
        _MIN_ELEMENTS,
        help="Minimum number of elements of an offloaded tensor; smaller tensors stay on the device.",
        at_least=0,
    )

    def __post_init__(self) -> None:
        validate_fields(self)


def can_offload(config: OffloadConfig, has_experts: list[int]) -> bool:
    """Returns whether any layer of a model chunk, except the last, contains a part to offload.

    has_experts: for each layer of the chunk, 1 if it has experts, else 0.
    """
    before_last, modules = has_experts[:-1], set(config.offload_modules)
    return 1 in before_last if modules <= EXPERT_MODULES else len(before_last) > 0


def validate_offload(config: OffloadConfig, *, has_experts: list[int], grouped_experts: bool) -> None:
    """Raises ValueError if offloading settings contradict each other or the model.

    has_experts: for each layer, 1 if it has experts, else 0.
    """
    whole, num_layers = config.cpu_offloading_num_layers, len(has_experts)
    if whole and config.fine_grained_activation_offloading:
        raise ValueError(
            f"cpu_offloading_num_layers is {whole} and fine_grained_activation_offloading is set: choose one of them"
        )
    if whole and whole >= num_layers:
        raise ValueError(
            f"cpu_offloading_num_layers is {whole}: must be less than num_layers ({num_layers}), because the "
            "backward of the last layer follows immediately"
        )
    if config.fine_grained_activation_offloading:
        _validate_modules(config, has_experts=has_experts, grouped_experts=grouped_experts)
        return
    for name, default in (("offload_modules", []), ("activation_offload_fraction", 1.0)):
        if vars(config)[name] != default:
            given = vars(config)[name]
            shown = " ".join(given) if isinstance(given, list) else given
            raise ValueError(f"{name} is {shown}: requires fine_grained_activation_offloading")
    if not whole and config.min_offloaded_tensor_size != _MIN_ELEMENTS:
        raise ValueError(
            f"min_offloaded_tensor_size is {config.min_offloaded_tensor_size}: requires "
            "fine_grained_activation_offloading or cpu_offloading_num_layers"
        )


def _validate_modules(config: OffloadConfig, *, has_experts: list[int], grouped_experts: bool) -> None:
    modules = set(config.offload_modules)
    if not modules:
        raise ValueError(
            "fine_grained_activation_offloading is set and offload_modules is empty: name at least one part"
        )
    if len(has_experts) == 1:
        raise ValueError(
            "fine_grained_activation_offloading with num_layers 1 would offload nothing: the last layer is never "
            "offloaded"
        )
    if modules & EXPERT_MODULES and not grouped_experts:
        raise ValueError(
            f"offload_modules contains {min(modules & EXPERT_MODULES)}: requires grouped experts (num_moe_experts "
            "and moe_grouped_gemm); otherwise remove it"
        )
    if not can_offload(config, has_experts):
        raise ValueError(
            f"offload_modules is {' '.join(config.offload_modules)}, but only the last layer, which is never "
            "offloaded, has experts: add parts of dense layers, or disable offloading"
        )
    if "attn_proj" in modules and "core_attn" not in modules:
        raise ValueError(
            "offload_modules contains attn_proj without core_attn: both save the output of core_attn, which would "
            "stay on the device; add core_attn"
        )


def validate_offload_with_recompute(
    config: OffloadConfig, *, recompute_granularity: str | None, recompute_modules: list[str] | None
) -> None:
    """Raises ValueError if activations are both offloaded and recomputed."""
    if recompute_granularity is not None and config.cpu_offloading_num_layers:
        raise ValueError(
            f"cpu_offloading_num_layers is {config.cpu_offloading_num_layers} and recompute_granularity is "
            f"{recompute_granularity}: choose one of them"
        )
    if not config.fine_grained_activation_offloading:
        return
    if recompute_granularity == "full":
        raise ValueError(
            "fine_grained_activation_offloading is set and recompute_granularity is full, which leaves no "
            "activations of a layer to offload: use selective"
        )
    recomputed = recomputed_parts(recompute_modules or [], config.offload_modules)
    if recomputed:
        pairs = ", ".join(f"{inner} (recomputed by {outer})" for inner, outer in recomputed.items())
        raise ValueError(f"offload_modules contains {pairs}: offload or recompute each part, not both")


def recomputed_parts(recompute_modules: Sequence[str], offload_modules: Sequence[str]) -> dict[str, str]:
    """Returns offloaded parts whose saved tensors are recomputed anyway, each with the part that recomputes them."""
    # (recomputed, offloaded) parts. The recomputed part contains the offloaded part or computes its input: qkv_linear
    # saves the output of the norm, and core_attn saves the queries, keys and values.
    pairs = (("moe", "expert_fc1"), ("moe", "moe_act"), ("layernorm", "qkv_linear"), ("mla_up_proj", "core_attn"))
    return {inner: outer for outer, inner in pairs if outer in recompute_modules and inner in offload_modules}
