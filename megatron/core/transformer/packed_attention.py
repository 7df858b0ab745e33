"""Attention inside the segments of packed sequences: torch's variable-length kernel, or one call a segment.

On the CPU one call a segment is the fastest way there is: it takes less time than attention over the whole sequence
with segments of 8 tokens already, a mask takes more, and nested tensors have no causal kernel (torch 2.13).
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.attention.varlen import varlen_attn

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.tiled_attention import sink_gradient

# Missing in the first torch versions that have this kernel (2.11); keys and values are repeated there.
_TAKES_GROUPS = "enable_gqa" in inspect.signature(varlen_attn).parameters


def has_varlen_kernel(query: Tensor, *, dropout: float) -> bool:
    """Whether torch's variable-length kernel takes such queries: [*, D], any dtype."""
    half, width = query.dtype in (torch.bfloat16, torch.float16), query.shape[-1]
    return query.device.type == "cuda" and half and width % 8 == 0 and width <= 256 and dropout == 0


def attend_varlen(
    query: Tensor,
    *,
    key: Tensor,
    value: Tensor,
    packed: PackedSeqParams,
    scale: float,
    window: tuple[int, int],
    sink: Tensor | None,
) -> Tensor:
    """All segments in one kernel; query: [S, B, N, D]; key, value: [S, B, G, D], bf16 or fp16, on a GPU.

    window: how far a token sees to the left and right, -1 without limit. sink: [N], any float dtype, or None.
    Returns [S, B, N, D], the query's dtype.
    """
    seq_length, batch, num_heads, _ = query.shape
    query, key, value = (t.transpose(0, 1).flatten(0, 1) for t in (query, key, value))  # [B * S, N or G, D]
    options: dict[str, Any] = {}
    if key.shape[1] != num_heads:
        if _TAKES_GROUPS:
            options["enable_gqa"] = True
        else:
            key, value = (t.repeat_interleave(num_heads // t.shape[1], dim=1) for t in (key, value))
    borders, longest = packed.borders_on(query.device), packed.longest
    if sink is None:
        context = varlen_attn(
            query, key, value, borders, borders, longest, longest, scale=scale, window_size=window, **options
        )
    else:
        context = _VarlenWithSink.apply(query, key, value, sink, _Segments(borders, longest, scale, window))
    assert isinstance(context, Tensor)
    return context.unflatten(0, (batch, seq_length)).transpose(0, 1)


@dataclass(frozen=True)
class _Segments:
    """borders: [n + 1], int32, on the device; longest: tokens of the longest one; the others as in attend_varlen."""

    borders: Tensor
    longest: int
    scale: float
    window: tuple[int, int]

    def options(self) -> dict[str, Any]:
        """Returns the arguments of both of the kernel's passes."""
        return {
            "cum_seq_q": self.borders,
            "cum_seq_k": self.borders,
            "max_q": self.longest,
            "max_k": self.longest,
            "dropout_p": 0.0,
            "is_causal": self.window == (-1, 0),
            "scale": self.scale,
            "window_size_left": self.window[0],
            "window_size_right": self.window[1],
        }


class _VarlenWithSink(torch.autograd.Function):
    """query [T, N, D], key and value [T, G, D], sink [N] -> [T, N, D]. See [Note: attention sinks]."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, sink: Tensor, segments: _Segments) -> Tensor:
        # The operator that varlen_attn calls too: its public form has no backward with another log-sum-exp.
        output, log_sum, *_ = torch.ops.aten._flash_attention_forward(
            query, key, value, return_debug_mask=False, **segments.options()
        )
        with_sink = torch.logaddexp(log_sum, sink.float().unsqueeze(1))  # [N, T]
        share = torch.exp(log_sum - with_sink).t().unsqueeze(-1)
        output = (output * share).to(output.dtype)
        ctx.save_for_backward(query, key, value, sink, output, with_sink)
        ctx.segments = segments
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None, None]:
        query, key, value, sink, output, log_sum = ctx.saved_tensors
        segments: _Segments = ctx.segments
        grads = torch.ops.aten._flash_attention_backward(
            grad.contiguous(),
            query,
            key,
            value,
            output,
            log_sum,
            # Not read, as nothing is dropped.
            rng_state=torch.zeros(2, dtype=torch.uint64, device=query.device),
            unused=torch.empty(0, dtype=torch.float32, device=query.device),
            **segments.options(),
        )
        grad_sink = None
        if ctx.needs_input_grad[3]:
            heads_first = (t.transpose(0, 1).unsqueeze(0) for t in (grad, output))
            grad_sink = sink_gradient(*heads_first, log_sum=log_sum.unsqueeze(0), sink=sink)
        return *grads, grad_sink, None


def attend_by_segment(
    query: Tensor, *, key: Tensor, value: Tensor, packed: PackedSeqParams, attend: Callable[..., Tensor]
) -> Tensor:
    """One call of `attend` a segment; query: [S, B, N, D]; key, value: [S, B, G, D], any float dtype.

    attend: (query [1, N, L, D], key=[1, G, L, D], value=...) -> [1, N, L, D]. Returns [S, B, N, D], the query's dtype.
    """
    seq_length, batch = query.shape[:2]
    # Split, not sliced: backward then joins the parts once, without zeros to add.
    queries, keys, values = (t.transpose(0, 1).flatten(0, 1).split(packed.segment_lengths) for t in (query, key, value))
    contexts = []
    for parts in zip(queries, keys, values, strict=True):
        q, k, v = (part.transpose(0, 1).unsqueeze(0) for part in parts)
        contexts.append(attend(q, key=k, value=v).squeeze(0).transpose(0, 1))
    return torch.cat(contexts).unflatten(0, (batch, seq_length)).transpose(0, 1)
