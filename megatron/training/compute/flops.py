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

# A multiply-add is two operations. Backward computes one GEMM for the input, and one for weights that are not frozen.
_FLOPS_PER_MULTIPLY_ADD = 2
_PASSES, _PASSES_OF_FROZEN = 3, 2


def num_floating_point_operations(
    args: argparse.Namespace,
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
    has_experts = layers_with_experts(args.num_experts, args.moe_layer_freq, num_layers=args.num_layers)
    has_experts = with_mtp_layers(has_experts, args.mtp_num_layers)
    num_layers, moe_layers = len(has_experts), sum(has_experts)
    products = num_layers * _attention_products(args)
    scores = num_layers * _score_products(args)
    products += (num_layers - moe_layers) * _mlp_products(args, args.ffn_hidden_size)
    if moe_layers:
        products += moe_layers * _moe_products(args)
    further = num_layers - args.num_layers
    products += (1 + further) * args.hidden_size * args.padded_vocab_size
    # Multi-token prediction projects concatenated hidden states and embeddings.
    products += further * 2 * args.hidden_size * args.hidden_size
    passes = _PASSES if args.lora_rank is None else _PASSES_OF_FROZEN
    tokens: float = batch_size * args.seq_length
    # The score operations are counted per token of a sample of seq_length.
    scored = tokens if seqlen_squared_sum_in_batch is None else seqlen_squared_sum_in_batch / args.seq_length
    if total_real_tokens_in_batch is not None:
        tokens = total_real_tokens_in_batch
    return float(_FLOPS_PER_MULTIPLY_ADD * (tokens * passes * products + scored * _PASSES * scores))


def num_operations_of_samples(args: argparse.Namespace, num_samples: int, padding: PaddingCount) -> float:
    """Returns the operations of forward and backward over samples of --seq-length, without those for padding tokens."""
    length = args.seq_length
    return num_floating_point_operations(
        args,
        num_samples,
        seqlen_squared_sum_in_batch=num_samples * length * length - padding.squares,
        total_real_tokens_in_batch=num_samples * length - padding.tokens,
    )


def _score_products(args: argparse.Namespace) -> int:
    """Returns a layer's forward multiply-adds per token for attention scores and values, half of them masked."""
    if args.multi_latent_attention:
        # Keys and values have different widths.
        widths = args.qk_head_dim + args.qk_pos_emb_head_dim + args.v_head_dim
        return int(args.num_attention_heads * widths * args.seq_length / 2)
    return int(args.kv_channels * args.num_attention_heads * args.seq_length)


def _attention_products(args: argparse.Namespace) -> int:
    """Returns a layer's forward multiply-adds per token for the attention projections."""
    if args.multi_latent_attention:
        return _latent_attention_products(args)
    query = args.kv_channels * args.num_attention_heads
    groups = args.num_query_groups if args.group_query_attention else args.num_attention_heads
    # Queries, the output's gate if there is one, and the output.
    wide = 3 if args.attention_output_gate else 2
    return int(args.hidden_size * (wide * query + 2 * args.kv_channels * groups))


def _latent_attention_products(args: argparse.Namespace) -> int:
    hidden, heads, value = args.hidden_size, args.num_attention_heads, args.v_head_dim * args.num_attention_heads
    query = heads * (args.qk_head_dim + args.qk_pos_emb_head_dim)
    rank, latent = args.q_lora_rank, args.kv_lora_rank
    queries = hidden * query if rank is None else rank * (hidden + query)
    keys = hidden * (latent + args.qk_pos_emb_head_dim) + latent * (heads * args.qk_head_dim + value)
    return int(queries + keys + value * hidden)


def _mlp_products(args: argparse.Namespace, width: int) -> int:
    return int((3 if args.swiglu or args.quick_geglu else 2) * args.hidden_size * width)


def _moe_products(args: argparse.Namespace) -> int:
    routed = args.moe_router_topk * _mlp_products(args, args.moe_ffn_hidden_size or args.ffn_hidden_size)
    shared = _mlp_products(args, args.moe_shared_expert_intermediate_size or 0)
    scores = args.hidden_size * (args.num_experts + args.moe_shared_expert_gate)
    return int(scores + routed + shared)


def count_parameters(
    model: Sequence[nn.Module], args: argparse.Namespace, *, mp_group: dist.ProcessGroup | None = None
) -> tuple[int, int]:
    """Returns the number of parameters, and the number that is active per token (top-k routed experts). Collective.

    model: this rank's chunks. mp_group: the ranks that hold the other parts. Vocabulary padding is not counted.
    """
    everyone = gather_objects(parameters_by_key(model), mp_group)
    return count_of({key: size for part in everyone for key, size in part.items()}, args)


def parameters_by_key(model: Sequence[nn.Module]) -> dict[str, int]:
    """Returns the total number of elements of each logical tensor with a shard in these chunks, without padding."""
    # Keyed by logical tensor, so that a tied or sharded weight counts once.
    return {
        piece.key: math.prod(piece.global_shape)
        for chunk in model
        for pieces in model_logical_pieces(chunk).values()
        for piece in pieces
    }


def count_of(sizes: Mapping[str, int], args: argparse.Namespace) -> tuple[int, int]:
    """Returns the number of parameters, and the number that is active per token.

    sizes: result of parameters_by_key for the whole model.
    """
    routed = sum(size for key, size in sizes.items() if ".mlp.experts." in key)
    total = sum(sizes.values())
    idle = routed * (args.num_experts - args.moe_router_topk) // args.num_experts if args.num_experts else 0
    return total, total - idle
