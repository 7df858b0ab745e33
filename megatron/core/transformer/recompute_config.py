"""Settings of activation recompute. recompute.py derives the plan for each layer."""

from dataclasses import dataclass
from typing import ClassVar

from megatron.core.config_field import config_field, validate_fields

RECOMPUTE_MODULES = ("core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts")


@dataclass(kw_only=True)
class RecomputeConfig:
    """Settings that select the activations to recompute in backward instead of saving them."""

    cli_group: ClassVar[str] = "activation recompute"

    recompute_granularity: str | None = config_field(
        None,
        help="Recompute activations in backward: of whole layers (full) or of parts of each layer (selective).",
        choices=("full", "selective"),
    )
    recompute_method: str | None = config_field(
        None,
        help="With full: recompute all layers in groups of --recompute-num-layers (uniform), or only the first "
        "--recompute-num-layers layers, one by one (block).",
        choices=("uniform", "block"),
    )
    recompute_num_layers: int | None = config_field(
        None, help="Layers per group (uniform), or number of layers to recompute (block).", at_least=1
    )
    recompute_modules: list[str] | None = config_field(
        None,
        help="With selective: the parts of a layer to recompute; default: core_attn. moe_act is accepted; backward "
        "always computes it.",
        choices=RECOMPUTE_MODULES,
        nargs="+",
    )
    recompute_activations: bool = config_field(False, help="Shorthand for --recompute-granularity selective.")
    moe_layer_recompute: bool = config_field(
        False, help="Shorthand for --recompute-granularity selective --recompute-modules moe."
    )

    def __post_init__(self) -> None:
        validate_fields(self)


def resolve_recompute(config: RecomputeConfig) -> None:
    """Expands shorthand flags and the default of recompute_modules. Raises ValueError if the flags conflict."""
    short = "recompute_activations" if config.recompute_activations else "moe_layer_recompute"
    if config.recompute_activations or config.moe_layer_recompute:
        if config.recompute_granularity == "full":
            raise ValueError(f"{short} implies recompute_granularity selective, but it is full: choose one of them")
        config.recompute_granularity = "selective"
    if config.moe_layer_recompute:
        config.recompute_modules = [*dict.fromkeys([*(config.recompute_modules or []), "moe"])]
    if config.recompute_granularity == "selective" and config.recompute_modules is None:
        config.recompute_modules = ["core_attn"]


def validate_recompute(config: RecomputeConfig, *, num_layers: int) -> None:
    """Raises ValueError if the recompute settings contradict each other."""
    granularity, given = config.recompute_granularity, config.recompute_num_layers
    if granularity == "full":
        if config.recompute_method is None or given is None:
            raise ValueError(
                f"recompute_granularity is full with recompute_method {config.recompute_method} and "
                f"recompute_num_layers {given}: set both, for example uniform and 1"
            )
        if given > num_layers:
            raise ValueError(f"recompute_num_layers is {given}: must be at most num_layers ({num_layers})")
    elif config.recompute_method is not None or given is not None:
        name = "recompute_num_layers" if config.recompute_method is None else "recompute_method"
        raise ValueError(
            f"{name} is {vars(config)[name]} and recompute_granularity is {granularity}: {name} requires "
            "recompute_granularity full"
        )
    if config.recompute_modules is not None and granularity != "selective":
        raise ValueError(
            f"recompute_modules is {' '.join(config.recompute_modules)} and recompute_granularity is {granularity}: "
            "recompute_modules requires recompute_granularity selective"
        )


def validate_recompute_modules(
    config: RecomputeConfig,
    *,
    has_experts: list[int],
    grouped_experts: bool,
    shared_experts: bool,
    multi_latent_attention: bool,
) -> None:
    """Raises ValueError if recompute_modules contains a part that no layer of the model has.

    has_experts: for each layer, 1 if it has experts, else 0.
    """
    needs = {
        "mlp": (0 in has_experts, "a dense layer"),
        "mla_up_proj": (multi_latent_attention, "multi_latent_attention"),
        "moe": (1 in has_experts, "a layer with experts (num_moe_experts)"),
        "moe_act": (grouped_experts, "grouped experts (num_moe_experts and moe_grouped_gemm)"),
        "shared_experts": (1 in has_experts and shared_experts, "moe_shared_expert_intermediate_size"),
    }
    for module in config.recompute_modules or []:
        there, what = needs.get(module, (True, ""))
        if not there:
            raise ValueError(f"recompute_modules contains {module}: requires {what}; otherwise remove it")
