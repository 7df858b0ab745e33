"""Counts a model's parameters and the floating-point operations of its matrix multiplications.

devices.py lists the peaks of devices.
"""

import argparse
import math
from collections.abc import Mapping, Sequence

import torch.distributed as dist
from torch import nn

from megatron.core.datasets.padding import PaddingCount
from megatron.core.dist_checkpointing import model_logical_pieces
from megatron.core.group_collectives import gather_objects
from megatron.core.transformer.moe_config import layers_with_experts
from megatron.core.transformer.mtp_config import with_mtp_layers
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.command_line.config_builder import run_config_of
from megatron.training.config import RunConfig

# A multiply-add is two operations. Backward computes one GEMM for the input, and one for weights that are not frozen.
_FLOPS_PER_MULTIPLY_ADD = 2
_PASSES, _PASSES_OF_FROZEN = 3, 2


def num_floating_point_operations(
    args: argparse.Namespace | RunConfig,
    batch_size: int,
    seqlen_squared_sum_in_batch: float | None = None,
    total_real_tokens_in_batch: float | None = None,
) -> float:
    """Returns the operations of forward and backward over `batch_size` samples, summed over all ranks.

    Counts matrix multiplications, with half of attention's score matrix because of the causal mask. Ignores sliding
    windows, boundaries of packed samples, dropped tokens and recomputation. With --lora-rank, weights have no gradients
    and adapters are ignored. seqlen_squared_sum_in_batch: sum of squared lengths of packed documents, to which the cost
    of attention scores is proportional. total_real_tokens_in_batch: number of tokens without padding. None for either
    means whole samples of --seq-length.
    """
    run_config = run_config_of(args)
    # Not read as areas, because arguments that a script has made may have no others.
    seq_length, vocab_size = run_config.values["seq_length"], run_config.values["padded_vocab_size"]
    tokens: float = batch_size * seq_length
    # The score operations are counted per token of a sample of seq_length.
    scored = tokens if seqlen_squared_sum_in_batch is None else seqlen_squared_sum_in_batch / seq_length
    return model_operations(
        run_config.transformer,
        vocab_size=vocab_size,
        seq_length=seq_length,
        tokens=tokens if total_real_tokens_in_batch is None else total_real_tokens_in_batch,
        scored=scored,
    )


def model_operations(
    config: TransformerConfig, *, vocab_size: int, seq_length: int, tokens: float, scored: float
) -> float:
    """Returns the operations of forward and backward over a number of tokens; see num_floating_point_operations.

    scored: the number of tokens in samples of seq_length whose attention scores have the same cost.
    """
    has_experts = layers_with_experts(config.num_moe_experts, config.moe_layer_freq, num_layers=config.num_layers)
    has_experts = with_mtp_layers(has_experts, config.mtp_num_layers)
    num_layers, moe_layers = len(has_experts), sum(has_experts)
    products = num_layers * _attention_products(config)
    scores = num_layers * _score_products(config, seq_length)
    products += (num_layers - moe_layers) * _mlp_products(config, config.ffn_hidden_size)
    if moe_layers:
        products += moe_layers * _moe_products(config)
    further = num_layers - config.num_layers
    products += (1 + further) * config.hidden_size * vocab_size
    # Multi-token prediction projects concatenated hidden states and embeddings.
    products += further * 2 * config.hidden_size * config.hidden_size
    passes = _PASSES if config.lora_rank is None else _PASSES_OF_FROZEN
    return float(_FLOPS_PER_MULTIPLY_ADD * (tokens * passes * products + scored * _PASSES * scores))


def num_operations_of_samples(run_config: RunConfig, num_samples: int, padding: PaddingCount) -> float:
    """Returns the operations of forward and backward over samples of --seq-length, without those for padding tokens."""
    length = run_config.data.seq_length
    return num_floating_point_operations(
        run_config,
        num_samples,
        seqlen_squared_sum_in_batch=num_samples * length * length - padding.squares,
        total_real_tokens_in_batch=num_samples * length - padding.tokens,
    )


def _score_products(config: TransformerConfig, seq_length: int) -> int:
    """Returns a layer's forward multiply-adds per token for attention scores and values, half of them masked."""
    if config.multi_latent_attention:
        # Keys and values have different widths.
        widths = config.qk_head_dim + config.qk_pos_emb_head_dim + config.v_head_dim
        return int(config.num_attention_heads * widths * seq_length / 2)
    return config.kv_channels * config.num_attention_heads * seq_length


def _attention_products(config: TransformerConfig) -> int:
    """Returns a layer's forward multiply-adds per token for the attention projections."""
    if config.multi_latent_attention:
        return _latent_attention_products(config)
    query = config.kv_channels * config.num_attention_heads
    # Queries, the output's gate if there is one, and the output.
    wide = 3 if config.attention_output_gate else 2
    return config.hidden_size * (wide * query + 2 * config.kv_channels * config.num_query_groups)


def _latent_attention_products(config: TransformerConfig) -> int:
    hidden, heads, value = (
        config.hidden_size,
        config.num_attention_heads,
        config.v_head_dim * config.num_attention_heads,
    )
    query = heads * (config.qk_head_dim + config.qk_pos_emb_head_dim)
    rank, latent = config.q_lora_rank, config.kv_lora_rank
    queries = hidden * query if rank is None else rank * (hidden + query)
    keys = hidden * (latent + config.qk_pos_emb_head_dim) + latent * (heads * config.qk_head_dim + value)
    return queries + keys + value * hidden


def _mlp_products(config: TransformerConfig, width: int) -> int:
    return (3 if config.gated_linear_unit else 2) * config.hidden_size * width


def _moe_products(config: TransformerConfig) -> int:
    assert config.num_moe_experts is not None, "the model has layers with experts"
    routed = config.moe_router_topk * _mlp_products(config, config.moe_ffn_hidden_size)
    shared = _mlp_products(config, config.moe_shared_expert_intermediate_size or 0)
    scores = config.hidden_size * (config.num_moe_experts + config.moe_shared_expert_gate)
    return scores + routed + shared


def count_parameters(
    model: Sequence[nn.Module], config: TransformerConfig, *, mp_group: dist.ProcessGroup | None = None
) -> tuple[int, int]:
    """Returns the number of parameters, and the number that is active per token (top-k routed experts). Collective.

    model: this rank's chunks. mp_group: the ranks that hold the other parts. Vocabulary padding is not counted.
    """
    everyone = gather_objects(parameters_by_key(model), mp_group)
    return count_of({key: size for part in everyone for key, size in part.items()}, config)


def parameters_by_key(model: Sequence[nn.Module]) -> dict[str, int]:
    """Returns the total number of elements of each logical tensor with a shard in these chunks, without padding."""
    # Keyed by logical tensor, so that a tied or sharded weight counts once.
    return {
        piece.key: math.prod(piece.global_shape)
        for chunk in model
        for pieces in model_logical_pieces(chunk).values()
        for piece in pieces
    }


def count_of(sizes: Mapping[str, int], config: TransformerConfig) -> tuple[int, int]:
    """Returns the number of parameters, and the number that is active per token.

    sizes: result of parameters_by_key for the whole model.
    """
    routed = sum(size for key, size in sizes.items() if ".mlp.experts." in key)
    total, num_experts = sum(sizes.values()), config.num_moe_experts
    idle = routed * (num_experts - config.moe_router_topk) // num_experts if num_experts else 0
    return total, total - idle
