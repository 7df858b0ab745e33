"""NVIDIA's Transformer Engine as a replacement for local layers: linear layers, norms and the attention core.

    from megatron.core.extensions.transformer_engine import TELinear, TEColumnParallelLinear, TERowParallelLinear
    from megatron.core.extensions.transformer_engine import TENorm, TEDotProductAttention

The classes are created on first access, which requires the package transformer_engine and raises
TransformerEngineMissingError without it. Parameters have the names, shapes, initial values and checkpoint pieces of the
local layers, so that each can load the other's checkpoints. Transformer Engine's additions to state dicts
(`_extra_state`) are omitted. Its API:
https://docs.nvidia.com/deeplearning/transformer-engine/user-guide/api/pytorch.html
"""

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.core.device import default_device
from megatron.core.model_parallel_config import ConstantInit, InitMethod, init_of_matrix
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.parallel_state import existing_process_groups, group_or_existing
from megatron.core.process_groups_config import ProcessGroupCollection, group_size, levels_of_context, or_alone
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    LayerConfig,
    RowParallelLinear,
    empty_values,
    initialize_weight,
    split_size,
)
from megatron.core.tensor_parallel.param_attributes import (
    mark_partial_gradient,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig


class TransformerEngineMissingError(ImportError, ValueError):
    """Error raised if the package transformer_engine cannot be imported."""


def __getattr__(name: str) -> Any:
    """Builds a class of this module on first access, and returns it."""
    if name not in _BUILDERS:
        raise AttributeError(f"{__name__} has no {name!r}: must be one of {', '.join(_BUILDERS)}")
    return _class_of(name, _engine())


def check_supported(config: TransformerConfig) -> None:
    """Raises ValueError for settings that these layers do not support, and if the package is missing."""
    refused = {
        "lora_rank": config.lora_rank is not None,
        "softmax_type": config.softmax_type != "vanilla",
        # Its norms may not support an input wider than their weights.
        "fp32_residual_connection": config.fp32_residual_connection,
        "init_model_with_meta_device": config.init_model_with_meta_device,
    }
    for name, is_set in refused.items():
        if is_set:
            raise ValueError(
                f"{name} is {getattr(config, name)} and transformer_impl is transformer_engine, whose layers do not "
                "support it here: set transformer_impl to local"
            )
    _engine()


def _engine() -> Any:
    try:
        import transformer_engine.pytorch as engine
    except ImportError as error:
        raise TransformerEngineMissingError(
            "transformer_impl is transformer_engine, and the package transformer_engine cannot be imported "
            f"({error}): install transformer-engine[pytorch], which requires a GPU, or set transformer_impl to local"
        ) from error
    return engine


@functools.lru_cache(maxsize=32)
def _class_of(name: str, engine: Any) -> type:
    return _BUILDERS[name](engine)


class _WithoutExtraState:
    """Omits the extra state of Transformer Engine, which only 8-bit formats require."""

    get_extra_state, set_extra_state = nn.Module.get_extra_state, nn.Module.set_extra_state


def _linear(engine: Any) -> type:
    class TELinear(_WithoutExtraState, engine.Linear):
        """Computes y = x W^T (+ b), with W split according to parallel_mode; returns (y, bias or None).

        parallel_mode: "column", "row" or None.
        """

        def __init__(
            self,
            input_size: int,
            output_size: int,
            *,
            config: LayerConfig,
            init_method: InitMethod,
            parallel_mode: str | None = None,
            bias: bool = True,
            skip_bias_add: bool = False,
            is_expert: bool = False,
            tp_comm_buffer_name: str | None = None,
            tp_group: dist.ProcessGroup | None = None,
        ) -> None:
            """Builds the layer.

            skip_bias_add: leaves adding the bias to the caller. tp_group: the ranks that share the layer, as in local
            layers. is_expert: must be False. tp_comm_buffer_name: ignored, because GEMMs are not overlapped with
            communication.
            """
            _require_unset(is_expert=is_expert)
            group = group_or_existing(tp_group)
            ranks = group_size(group)
            split = {"column": output_size, "row": input_size}
            if parallel_mode is not None:
                name = "output_size" if parallel_mode == "column" else "input_size"
                split_size(split[parallel_mode], group, name=name)
            is_partial = config.sequence_parallel and ranks > 1
            super().__init__(
                input_size,
                output_size,
                sequence_parallel=is_partial and parallel_mode is not None,
                # Gradients remain where autograd puts them, because this project's hooks process them there.
                fuse_wgrad_accumulation=False,
                tp_group=group if ranks > 1 else None,
                tp_size=ranks,
                init_method=_left_as_it_is,
                bias=bias,
                return_bias=skip_bias_add,
                params_dtype=config.params_dtype,
                parallel_mode=parallel_mode,
                device=empty_values(0, config=config).device,
            )
            self.input_size, self.output_size = input_size, output_size
            self.init_method = init_of_matrix(init_method, output_size, input_size)
            self.tp_group, self.skip_bias_add, self.stride = group, skip_bias_add, 1
            if not bias:
                # In Transformer Engine, this is a tensor without elements.
                self.bias = None
            self._mark(parallel_mode, is_partial=is_partial)
            drawn_apart = group if parallel_mode is not None else None
            initialize_weight(self.weight, self.init_method, config=config, tp_group=drawn_apart)

        def _mark(self, parallel_mode: str | None, *, is_partial: bool) -> None:
            dim = {"column": 0, "row": 1, None: -1}[parallel_mode]
            set_tensor_model_parallel_attributes(self.weight, dim >= 0, dim, 1)
            mark_partial_gradient(self.weight, partial=is_partial and dim < 0)
            if self.bias is not None:
                self.bias.data.zero_()
                set_tensor_model_parallel_attributes(self.bias, dim == 0, 0 if dim == 0 else -1, 1)
                mark_partial_gradient(self.bias, partial=is_partial and dim != 0)

        def init_methods(self) -> dict[str, InitMethod]:
            """Returns the init methods of the parameters, by name."""
            names = ["weight"] if self.bias is None else ["weight", "bias"]
            return {name: self.init_method if name == "weight" else ConstantInit(0) for name in names}

        def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
            """Computes the layer's output; input_: [*, this rank's input columns], parameter dtype.

            Returns [*, this rank's output columns], same dtype, and the skipped bias.
            """
            output = super().forward(input_)
            if not self.skip_bias_add:
                return output, None
            # If there is no bias, Transformer Engine returns an empty one.
            return output[0], None if self.bias is None else output[1]

    return TELinear


def _column(engine: Any) -> type:
    linear: Any = _class_of("TELinear", engine)

    class TEColumnParallelLinear(linear):
        """ColumnParallelLinear of Transformer Engine, with W's rows split; see megatron.core.tensor_parallel."""

        logical_pieces = ColumnParallelLinear.logical_pieces

        def __init__(self, input_size: int, output_size: int, *, gather_output: bool = False, **settings: Any) -> None:
            """Builds the layer; gather_output: must be False. settings: as in TELinear."""
            _require_unset(gather_output=gather_output)
            super().__init__(input_size, output_size, parallel_mode="column", **settings)

    return TEColumnParallelLinear


def _row(engine: Any) -> type:
    linear: Any = _class_of("TELinear", engine)

    class TERowParallelLinear(linear):
        """RowParallelLinear of Transformer Engine, with W's columns split; see megatron.core.tensor_parallel."""

        logical_pieces = RowParallelLinear.logical_pieces

        def __init__(
            self, input_size: int, output_size: int, *, input_is_parallel: bool = True, **settings: Any
        ) -> None:
            """Builds the layer; input_is_parallel: must be True. settings: as in TELinear."""
            if not input_is_parallel:
                raise ValueError(
                    "input_is_parallel is False: must be True, because TERowParallelLinear accepts only this rank's "
                    "part of the input"
                )
            super().__init__(input_size, output_size, parallel_mode="row", **settings)

    return TERowParallelLinear


def _norm(engine: Any) -> type:
    kinds = {
        name: type(f"TE{name}", (_WithoutExtraState, getattr(engine, name)), {}) for name in ("LayerNorm", "RMSNorm")
    }

    class TENorm:
        """Builds the Transformer Engine norm selected by config.normalization: TENorm(config, hidden_size)."""

        def __new__(cls, config: TransformerConfig, hidden_size: int, *, eps: float = 1e-5) -> Any:
            is_rms = config.normalization == "RMSNorm"
            norm = kinds["RMSNorm" if is_rms else "LayerNorm"](
                hidden_size,
                eps=eps,
                params_dtype=config.params_dtype,
                zero_centered_gamma=config.layernorm_zero_centered_gamma,
                device=empty_values(0, config=config).device,
            )
            for param in norm.parameters():
                set_tensor_model_parallel_attributes(param, False, -1, 1)
                # With sequence parallelism, a rank processes only its part of the tokens.
                mark_partial_gradient(param, partial=config.sequence_parallel)
            scale = ConstantInit(0 if config.layernorm_zero_centered_gamma else 1)
            first = {"weight": scale} if is_rms else {"weight": scale, "bias": ConstantInit(0)}
            norm.init_methods = lambda: first
            return norm

    return TENorm


def _attention(engine: Any) -> type:
    class TEDotProductAttention(_WithoutExtraState, engine.DotProductAttention):
        """DotProductAttention of Transformer Engine, with the interface of the local class.

        Attends over context-parallel ranks. Attention sinks are not supported.
        """

        exchanges_sequences = True

        def __init__(
            self,
            config: TransformerConfig,
            layer_number: int,
            attn_mask_type: AttnMaskType = AttnMaskType.causal,
            attention_type: str = "self",
            attention_dropout: float | None = None,
            softmax_scale: float | None = None,
            k_channels: int | None = None,
            v_channels: int | None = None,
            cp_comm_type: str | None = None,
            pg_collection: ProcessGroupCollection | None = None,
        ) -> None:
            """Builds the attention core.

            k_channels, v_channels: widths of a head's key and value; None means the configured widths. cp_comm_type:
            None means the value configured for the layer.
            """
            groups = pg_collection or existing_process_groups()
            group = or_alone(groups.tp)
            widths = k_channels or config.kv_channels, v_channels or config.kv_channels
            self.cp_size = group_size(groups.cp)
            super().__init__(
                config.num_attention_heads,
                widths[0] if widths[0] == widths[1] else widths,
                num_gqa_groups=(
                    config.num_attention_heads if config.multi_latent_attention else config.num_query_groups
                ),
                attention_type=attention_type,
                **_exchange(groups, config, cp_comm_type or config.cp_comm_type_of_layer(layer_number)),
                attention_dropout=config.attention_dropout if attention_dropout is None else attention_dropout,
                qkv_format="sbhd",
                attn_mask_type=attn_mask_type.name,
                window_size=config.window_of_layer(layer_number),
                sequence_parallel=config.sequence_parallel,
                tp_size=group_size(group),
                get_rng_state_tracker=get_cuda_rng_tracker,
                tp_group=group if group_size(group) > 1 else None,
                layer_number=layer_number,
                softmax_scale=softmax_scale or config.softmax_scale,
            )
            self.mask_name = attn_mask_type.name

        def forward(
            self,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            attention_mask: Tensor | None = None,
            attn_mask_type: AttnMaskType | None = None,
            attention_bias: Tensor | None = None,
            packed_seq_params: PackedSeqParams | None = None,
        ) -> Tensor:
            """Computes attention of `query` over `key` and `value`.

            query: [S, B, N, D]; key: [S, B, G, D]; value: [S, B, G, E], any float dtype; attention_mask: bool, [B, 1,
            S, S], True where attention is forbidden, or None to use the mask type; attention_bias: must be None.
            Returns [S, B, N * E], same dtype. With packed_seq_params, S x B is one dimension of tokens, sample by
            sample. Raises ValueError for packed_seq_params over context-parallel ranks, and with a mask.
            """
            if attention_bias is not None:
                raise ValueError(
                    "attention_bias is given: must be None, because TEDotProductAttention does not support it"
                )
            name = self.mask_name if attn_mask_type is None else attn_mask_type.name
            output: Tensor
            if packed_seq_params is not None:
                output = super().forward(query, key, value, **self._packing(packed_seq_params, query, attention_mask))
                return output
            name = name if attention_mask is None else AttnMaskType.arbitrary.name
            output = super().forward(query, key, value, attention_mask, attn_mask_type=name)
            return output

        def _packing(self, packed: PackedSeqParams, query: Tensor, mask: Tensor | None) -> dict[str, Any]:
            if self.cp_size > 1 or mask is not None or self.mask_name != AttnMaskType.causal.name:
                # Under context parallelism Transformer Engine splits each segment, this project each sample.
                raise ValueError(
                    "packed_seq_params with transformer_impl transformer_engine requires a causal mask type, "
                    f"attention_mask None and context_parallel_size 1 (got {self.mask_name}, "
                    f"{'None' if mask is None else 'a mask'} and {self.cp_size}): set transformer_impl to local"
                )
            borders = packed.borders_on(query.device)
            return {
                "qkv_format": "thd",
                "cu_seqlens_q": borders,
                "cu_seqlens_kv": borders,
                "max_seqlen_q": packed.longest,
                "max_seqlen_kv": packed.longest,
                "attn_mask_type": "padding_causal",
            }

    return TEDotProductAttention


def _exchange(groups: ProcessGroupCollection, config: TransformerConfig, kind: str) -> dict[str, Any]:
    """Returns the context-parallel arguments of Transformer Engine's attention; none for a single rank.

    With a2a+p2p, cp_group consists of two groups: one to exchange heads, and one to pass keys and values around a ring.
    cp_global_ranks always includes the ranks of both levels.
    """
    if group_size(groups.cp) == 1:
        return {}
    assert groups.cp is not None
    ranks = dist.get_process_group_ranks(groups.cp)
    group: Any = groups.cp
    if kind == "a2a+p2p":
        group = [*levels_of_context(groups, config.hierarchical_context_parallel_sizes)]
    return {"cp_group": group, "cp_global_ranks": ranks, "cp_stream": _exchange_stream(), "cp_comm_type": kind}


@functools.cache
def _exchange_stream() -> Any:
    """Returns the stream on which all layers compute half of their exchanged blocks; None without a GPU."""
    return torch.cuda.Stream() if default_device().type == "cuda" else None


def _left_as_it_is(weight: Tensor) -> Tensor:
    # Initialized afterwards, with the generators that local layers use.
    return weight


def _require_unset(**settings: bool) -> None:
    for name, is_set in settings.items():
        if is_set:
            raise ValueError(
                f"{name} is True: must be False, because layers of Transformer Engine do not support it here"
            )


_BUILDERS = {
    "TELinear": _linear,
    "TEColumnParallelLinear": _column,
    "TERowParallelLinear": _row,
    "TENorm": _norm,
    "TEDotProductAttention": _attention,
}
