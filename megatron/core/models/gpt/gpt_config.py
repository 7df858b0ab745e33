"""Settings of GPT models outside of their transformer block: vocabulary, positions and tied weights."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch.nn.functional as F

from megatron.core.activations import quick_gelu, squared_relu
from megatron.core.config_field import config_field, run_checks, validate_fields
from megatron.core.model_parallel_config import XavierUniformInit

POSITION_EMBEDDINGS = ("learned_absolute", "rope", "yarn", "none")
_ROPE_SCALING_FACTOR = 8.0


@dataclass(kw_only=True)
class GPTModelConfig:
    """Command-line settings of GPTModel that are not fields of TransformerConfig."""

    cli_group: ClassVar[str] = "network size"

    group_query_attention: bool = config_field(
        False, help="Share key/value heads among query heads, with --num-query-groups groups."
    )
    max_position_embeddings: int = config_field(
        None,
        filled_in=True,
        help="Maximum sequence length of the model; default: --seq-length, except for learned positions.",
        at_least=1,
    )
    position_embedding_type: str = config_field(
        "learned_absolute",
        help="Type of position embedding; yarn is rope with --rope-type yarn.",
        choices=POSITION_EMBEDDINGS,
    )
    add_position_embedding: bool = config_field(
        True,
        flags=("--no-position-embedding",),
        help="Accepted for older scripts, together with --position-embedding-type rope or none.",
    )
    use_rotary_position_embeddings: bool = config_field(
        False, help="Same as --position-embedding-type rope; overrides that flag."
    )
    rotary_base: int = config_field(10000, help="Base of the rotary frequencies.", at_least=1)
    rotary_percent: float = config_field(
        1.0, help="Fraction of the leading channels of each head to rotate.", more_than=0, at_most=1
    )
    rotary_seq_len_interpolation_factor: int | None = config_field(
        None, help="Divisor of positions before rotation.", at_least=1
    )
    use_rope_scaling: bool = config_field(
        False, help="Reduce low rotary frequencies for longer contexts, as in Llama 3.1."
    )
    rope_scaling_factor: float = config_field(
        _ROPE_SCALING_FACTOR, help="Factor by which --use-rope-scaling divides the lowest frequencies.", at_least=1
    )
    spec: list[str] | None = config_field(
        None,
        nargs="+",
        help="User-defined layers: a Python module, and the name in it of a layer or block spec, or of a function "
        "that returns such a spec for a TransformerConfig.",
    )
    make_vocab_size_divisible_by: int = config_field(
        128, help="Pad the vocabulary with unused rows to a multiple of this value.", at_least=1
    )
    padded_vocab_size: int = config_field(
        None,
        filled_in=True,
        help="Vocabulary size including padding; default: see --make-vocab-size-divisible-by.",
        at_least=1,
    )
    unpadded_vocab_size: int = config_field(None, flags=(), filled_in=True, help="Number of ids of the tokenizer.")
    swiglu: bool = config_field(False, help="Use gated feed-forward layers with SiLU instead of GELU.")
    quick_geglu: bool = config_field(
        False, help="Use gated feed-forward layers with gate x sigmoid(1.702 gate) instead of GELU."
    )
    squared_relu: bool = config_field(False, help="Use feed-forward layers with max(x, 0)^2 instead of GELU.")
    untie_embeddings_and_output_weights: bool = config_field(
        False, help="Use a separate weight for the output layer instead of the word embeddings."
    )

    init_method_xavier_uniform: bool = config_field(
        False,
        help="Initialize matrices uniformly within +-sqrt(6 / (rows + columns)) of the unsplit matrix, regardless of "
        "--init-method-std. This includes embeddings unless --embedding-init-method-std is given.",
    )

    def __post_init__(self) -> None:
        validate_fields(self)
        run_checks(self.validate_spec, self.validate_activation, self.validate_rotation)

    def validate_spec(self) -> None:
        if self.spec is not None and len(self.spec) != 2:
            raise ValueError(f"GPTModelConfig.spec is {self.spec}: must be a Python module and a name in it")

    def validate_activation(self) -> None:
        chosen = [name for name in ("swiglu", "quick_geglu", "squared_relu") if vars(self)[name]]
        if len(chosen) > 1:
            raise ValueError(
                f"GPTModelConfig.{chosen[0]} and GPTModelConfig.{chosen[1]} are both set: feed-forward layers have "
                "only one activation, so remove one of them"
            )

    def validate_rotation(self) -> None:
        """Raises ValueError for rotary settings without rope, and for a position embedding disabled in only one way."""
        problems = []
        if self.rope_scaling_factor != _ROPE_SCALING_FACTOR and not self.use_rope_scaling:
            problems.append("GPTModelConfig.rope_scaling_factor needs use_rope_scaling: add it, or drop the factor")
        if self.position_embedding_type not in ("rope", "yarn"):
            # Old scripts also give --no-position-embedding with rope, where it has no effect.
            if not self.add_position_embedding and self.position_embedding_type != "none":
                problems.append(
                    "--no-position-embedding alone is no longer supported: add --position-embedding-type none"
                )
            given = {
                "rotary_percent": self.rotary_percent != 1,
                "rotary_seq_len_interpolation_factor": self.rotary_seq_len_interpolation_factor is not None,
                "use_rope_scaling": self.use_rope_scaling,
            }
            problems += [
                f"GPTModelConfig.{name} needs position_embedding_type rope: add it, or drop {name}"
                for name, is_given in given.items()
                if is_given
            ]
        if problems:
            raise ValueError("\n".join(problems))


def transformer_fields(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of TransformerConfig that flags of GPTModelConfig imply. arguments: by name."""
    functions: dict[str, Callable[..., Any]] = {
        "swiglu": F.silu,
        "quick_geglu": quick_gelu,
        "squared_relu": squared_relu,
    }
    ffn_hidden_size = arguments["ffn_hidden_size"]
    # Not `or`, because a width of 0 must be rejected, not replaced.
    if ffn_hidden_size is None:
        ffn_hidden_size = default_ffn_hidden_size(arguments["hidden_size"], swiglu=arguments["swiglu"])
    methods = ("init_method", "output_layer_init_method") if arguments["init_method_xavier_uniform"] else ()
    return {
        **dict.fromkeys(methods, XavierUniformInit()),
        "activation_func": next((function for name, function in functions.items() if arguments[name]), F.gelu),
        "gated_linear_unit": arguments["swiglu"] or arguments["quick_geglu"],
        "ffn_hidden_size": ffn_hidden_size,
        # --num-query-groups has no effect without --group-query-attention, as in Megatron-LM.
        "num_query_groups": (arguments["num_query_groups"] or 1) if arguments["group_query_attention"] else None,
    }


def default_ffn_hidden_size(hidden_size: int, *, swiglu: bool) -> int:
    """Returns 4 x hidden_size, or with SwiGLU 2/3 of that, rounded down to a multiple of 64, at least 64."""
    # Gated layers have a third matrix. With 2/3 of the width they have as many weights as ungated layers.
    if not swiglu:
        return 4 * hidden_size
    return max(64, 8 * hidden_size // 3 // 64 * 64)
