"""Rotary position embedding: tables of cosines and sines, and their application to queries and keys.

Queries and keys may be normalized per head before they are rotated. Each operator has a CPU version at the end of this
file and a Triton kernel in triton_rope.py.

[Note: rounding of rotated heads] The kernels compute norm and rotation in fp32 registers (fp64 in fp64 models) and
round once, when they store the result. The CPU versions round half precision between norm and rotation, in forward and
backward, as separate functions would.

[Note: YaRN] YaRN (Peng et al., 2023) extends a model to contexts longer than it was trained for. It reduces low
frequencies and scales rotated queries and keys. The weights mscale and mscale_all_dim come from DeepSeek-V2.
"""

import importlib.util
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.core.autograd import PlainFunction, first_order
from megatron.core.device import default_device
from megatron.core.operator_library import operator
from megatron.core.process_groups_config import group_rank, group_size
from megatron.core.tensor_parallel.kept_dtypes import KeepsDtypes, mark_kept_dtype
from megatron.core.transformer.context_parallel import split_sequence
from megatron.core.transformer.norms import inverse_rms, narrower, one_plus, plain_rms_norm, plain_rms_norm_grads
from megatron.core.transformer.yarn_config import YarnConfig

# Launchers, which have the operators' names.
_LAUNCHERS: tuple[Callable[..., Any], ...] = ()
if importlib.util.find_spec("triton") is not None:
    from megatron.core.transformer import triton_rope

    _LAUNCHERS = (triton_rope.rotate_qkv, triton_rope.rotate_qkv_grads, triton_rope.rotate)


class RotaryTable(NamedTuple):
    """Cosines and sines of the rotation angles of each position.

    cos, sin: [S, D_rot / 2], fp32 (fp64 in fp64 models), contiguous, on the device. They may include a common factor,
    which then scales the rotated channels. interleaved: whether channels 2 i and 2 i + 1 form a pair, instead of
    channels i and i + D_rot / 2.
    """

    cos: Tensor
    sin: Tensor
    interleaved: bool = False


class RotaryEmbedding(KeepsDtypes):
    """Computes the tables for max_sequence_length positions once. A call with a length returns that many rows."""

    cos: Tensor
    sin: Tensor

    def __init__(
        self,
        kv_channels: int,
        max_sequence_length: int,
        *,
        rotary_percent: float = 1.0,
        rotary_base: float = 10000,
        rotary_interleaved: bool = False,
        seq_len_interpolation_factor: float | None = None,
        rope_scaling_factor: float | None = None,
        yarn: YarnConfig | None = None,
        cp_group: ProcessGroup | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Computes the tables on the CPU and moves them to the device.

        kv_channels: head width, of which the leading fraction rotary_percent is rotated. seq_len_interpolation_factor:
        divisor of positions. rope_scaling_factor: see scaled_frequencies. yarn: settings with rope_type yarn, see
        [Note: YaRN]. cp_group: ranks over which sequences are split. dtype: dtype of the tables. Raises ValueError for
        an odd number of rotated channels, a factor that is not positive, or contradictory settings.
        """
        super().__init__()
        self.interleaved, self.cp_group = rotary_interleaved, cp_group
        rotated = int(kv_channels * rotary_percent)
        if rotated % 2 or not 0 < rotated <= kv_channels:
            raise ValueError(
                f"kv_channels {kv_channels} x rotary_percent {rotary_percent} is {rotated}: "
                f"must be even, from 2 to {kv_channels}"
            )
        factors = {"seq_len_interpolation_factor": seq_len_interpolation_factor, "rotary_base": rotary_base}
        for name, factor in {**factors, "rope_scaling_factor": rope_scaling_factor}.items():
            if factor is not None and factor <= 0:
                raise ValueError(f"{name} is {factor}: must be above 0")
        frequencies = rotary_base ** -(torch.arange(0, rotated, 2, dtype=torch.float64, device="cpu") / rotated)
        if rope_scaling_factor is not None and yarn is not None:
            raise ValueError(
                f"rope_scaling_factor is {rope_scaling_factor} and rope_type is yarn: choose only one way to scale "
                "frequencies"
            )
        if rope_scaling_factor is not None:
            frequencies = scaled_frequencies(frequencies, factor=rope_scaling_factor)
        # fp64, because position times frequency is too inaccurate in fp32 for long sequences.
        positions = torch.arange(max_sequence_length, dtype=torch.float64, device="cpu")
        if seq_len_interpolation_factor is not None:
            positions /= seq_len_interpolation_factor
        scale = 1.0
        if yarn is not None:
            frequencies = yarn_frequencies(frequencies, base=rotary_base, config=yarn)
            scale = yarn_table_scale(yarn)
        angles = torch.outer(positions, frequencies)
        device = default_device()
        for name, table in (("cos", angles.cos()), ("sin", angles.sin())):
            self.register_buffer(name, mark_kept_dtype(table.mul_(scale).to(dtype).to(device)), persistent=False)

    def forward(self, max_seq_len: int) -> RotaryTable:
        """Returns the rows for positions 0 to max_seq_len - 1, or with a cp_group for this rank's max_seq_len tokens.

        Raises ValueError if the whole sequence is longer than the tables.
        """
        size, rank = group_size(self.cp_group), group_rank(self.cp_group)
        whole = max_seq_len * size
        if whole > self.cos.shape[0]:
            raise ValueError(f"the sequence has {whole} positions: the model was built for {self.cos.shape[0]}")
        cos, sin = (split_sequence(table[:whole], 0, size=size, rank=rank) for table in (self.cos, self.sin))
        return RotaryTable(cos, sin, self.interleaved)


def scaled_frequencies(frequencies: Tensor, *, factor: float) -> Tensor:
    """Scales frequencies, [D_rot / 2], fp64, for contexts `factor` times as long, as in Llama 3.1.

    Frequencies with more than 4 turns within 8,192 tokens are unchanged. Frequencies with less than one turn are
    divided by `factor`. In between, the result is interpolated linearly in the number of turns.
    """
    turns = frequencies * 8192 / (2 * math.pi)
    kept = ((turns - 1) / (4 - 1)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / factor)


def yarn_frequencies(frequencies: Tensor, *, base: float, config: YarnConfig) -> Tensor:
    """Divides low frequencies by rotary_scaling_factor. frequencies: [D_rot / 2], fp64.

    Frequencies with more than beta_fast turns within the original context are unchanged. Frequencies with fewer than
    beta_slow turns are divided. In between, the result is interpolated linearly in the channel. config: settings with
    rope_type yarn. Raises ValueError for a base of 1, with which all channels have the same frequency.
    """
    if base <= 1:
        raise ValueError(f"rotary_base is {base} and rope_type is yarn: must be more than 1")
    assert config.beta_fast is not None and config.beta_slow is not None, "set by resolve_yarn"
    assert config.original_max_position_embeddings is not None, "set by resolve_yarn"
    width = 2 * len(frequencies)
    # Fractional indices of the channel pairs that make beta_fast and beta_slow turns within the original context.
    first, last = (
        width * math.log(config.original_max_position_embeddings / (turns * 2 * math.pi), base) / 2
        for turns in (config.beta_fast, config.beta_slow)
    )
    if config.yarn_correction_range_round_to_int:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, width - 1)
    # For an empty range the ramp is a step. A small length avoids a division by 0.
    length = last - first if last != first else 0.001
    channels = torch.arange(len(frequencies), dtype=frequencies.dtype, device=frequencies.device)
    slowed = ((channels - first) / length).clamp(0, 1)
    return frequencies * (1 - slowed + slowed / config.rotary_scaling_factor)


def yarn_table_scale(config: YarnConfig) -> float:
    """Returns the factor of cosines and sines, whose square scales the scores of rotated channels."""
    return _magnitude(config, config.mscale) / _magnitude(config, config.mscale_all_dim)


def yarn_score_scale(config: YarnConfig) -> float:
    """Returns the factor by which latent attention multiplies all scores."""
    return _magnitude(config, config.mscale_all_dim) ** 2


def _magnitude(config: YarnConfig, weight: float) -> float:
    # Called m(weight) in the help of mscale. It is 1 for a scaling factor of 1.
    return 1 + 0.1 * weight * math.log(config.rotary_scaling_factor)


# --- Application to queries and keys ---


class HeadNorms(NamedTuple):
    """RMSNorms of the heads of queries and keys.

    query, key: [D], weights, same dtype. eps: added to the mean square of a head. zero_centered: whether heads are
    multiplied by 1 + weight.
    """

    query: Tensor
    key: Tensor
    eps: float
    zero_centered: bool


def split_and_rotate(
    mixed_qkv: Tensor, table: RotaryTable, *, gates: int = 0, norms: HeadNorms | None = None
) -> tuple[Tensor, Tensor, Tensor] | tuple[Tensor, Tensor, Tensor, Tensor]:
    """Splits the output of the qkv projection into queries, keys and values; normalizes and rotates queries and keys.

    mixed_qkv: [S, B, G, q + gates + 2, D], any float dtype; each group consists of q queries, its gates, a key and a
    value. norms: None rotates without norms. Returns query [S, B, G * q, D], key [S, B, G, D] and value [S, B, G, D];
    with gates also gate [S, B, G, gates, D]. Value and gate are views. Query and key have the narrower dtype of
    mixed_qkv and the weights.
    """
    query_weight, key_weight, eps, zero_centered = norms or (None, None, 0.0, False)
    cos, sin, interleaved = table
    return _SplitAndRotate.apply(mixed_qkv, cos, sin, query_weight, key_weight, gates, eps, zero_centered, interleaved)


def apply_rotary_pos_emb(t: Tensor, table: RotaryTable, *, first: int = 0) -> Tensor:
    """Rotates the channel pairs of each head. t: [S, B, N, D], any float dtype. Returns a new tensor.

    first: index of the first rotated channel, 0 or D - D_rot. The other channels are copied.
    """
    return _Rotate.apply(t, table.cos, table.sin, first, table.interleaved)


class _Rotate(PlainFunction):
    @staticmethod
    def forward(ctx: Any, t: Tensor, cos: Tensor, sin: Tensor, first: int, interleaved: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.options = {"first": first, "interleaved": interleaved}
        rotated: Tensor = ops.rotate(t, cos, sin, inverse=False, **ctx.options)
        return rotated

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        cos, sin = ctx.saved_tensors
        return ops.rotate(grad, cos, sin, inverse=True, **ctx.options), None, None, None, None


class _SplitAndRotate(PlainFunction):
    """Splits, normalizes and rotates in one function, whose backward fills one buffer with all gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        mixed_qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        query_weight: Tensor | None,
        key_weight: Tensor | None,
        gates: int,
        eps: float,
        zero_centered: bool,
        interleaved: bool,
    ) -> tuple[Tensor, ...]:
        # Without norms, the gradient does not depend on the input. With norms, backward computes the statistics again:
        # it reads the input anyway.
        ctx.save_for_backward(None if query_weight is None else mixed_qkv, cos, sin, query_weight, key_weight)
        ctx.options = {"eps": eps, "zero_centered": zero_centered, "interleaved": interleaved}
        query, key = ops.rotate_qkv(mixed_qkv, cos, sin, query_weight, key_weight, gates=gates, **ctx.options)
        value = mixed_qkv[..., -1, :]
        return (query, key, value, mixed_qkv[..., -2 - gates : -2, :]) if gates else (query, key, value)

    @staticmethod
    @first_order
    def backward(
        ctx: Any, grad_query: Tensor, grad_key: Tensor, grad_value: Tensor, grad_gate: Tensor | None = None
    ) -> tuple[Tensor | None, ...]:
        mixed_qkv, cos, sin, query_weight, key_weight = ctx.saved_tensors
        grad, grad_weights = ops.rotate_qkv_grads(
            grad_query,
            grad_key,
            grad_value,
            grad_gate,
            mixed_qkv,
            cos,
            sin,
            query_weight,
            key_weight,
            **ctx.options,
        )
        of_query, of_key = (None, None) if query_weight is None else grad_weights.unbind()
        return grad, None, None, of_query, of_key, None, None, None, None


# --- Operators, as ops.<name> ---

ops = torch.ops.rope

_NAMESPACE = "rope"


def _new_query_and_key(
    mixed_qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    query_weight: Tensor | None,
    key_weight: Tensor | None,
    *,
    gates: int,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    seq, batch, groups, parts, width = mixed_qkv.shape
    dtype = mixed_qkv.dtype if query_weight is None else narrower(mixed_qkv.dtype, query_weight.dtype)
    # Queries are contiguous, so that groups and heads can be flattened into one dimension without a copy.
    query = mixed_qkv.new_empty(seq, batch, groups * (parts - gates - 2), width, dtype=dtype)
    return query, mixed_qkv.new_empty(seq, batch, groups, width, dtype=dtype)


@operator(
    _NAMESPACE,
    "(Tensor mixed_qkv, Tensor cos, Tensor sin, Tensor? query_weight, Tensor? key_weight, *, int gates, float eps, "
    "bool zero_centered, bool interleaved) -> (Tensor query, Tensor key)",
    cuda=_LAUNCHERS,
    fake=_new_query_and_key,
)
def rotate_qkv(
    mixed_qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    query_weight: Tensor | None,
    key_weight: Tensor | None,
    *,
    gates: int,
    eps: float,
    zero_centered: bool,
    interleaved: bool,
) -> tuple[Tensor, Tensor]:
    """Normalizes (if there are weights) and rotates the queries and keys of the qkv projection's output.

    mixed_qkv: [S, B, G, q + gates + 2, D], any float dtype and strides; cos, sin: as in RotaryTable, contiguous;
    query_weight, key_weight: [D], any float dtype, or None. Returns query [S, B, G * q, D] and key [S, B, G, D],
    contiguous, in the narrower dtype of mixed_qkv and the weights.
    """
    query, key = _new_query_and_key(mixed_qkv, cos, sin, query_weight, key_weight, gates=gates)
    sources = mixed_qkv[..., : mixed_qkv.shape[3] - gates - 2, :], mixed_qkv[..., -2, :]
    results = query.view(sources[0].shape), key
    for source, weight, out in zip(sources, (query_weight, key_weight), results, strict=True):
        if weight is not None:
            source, _ = plain_rms_norm(source, _scale(weight, zero_centered), eps=eps, dtype=out.dtype)
        _rotate(source, cos=cos, sin=sin, interleaved=interleaved, out=out)
    return query, key


def _new_qkv_grads(
    grad_query: Tensor,
    grad_key: Tensor,
    grad_value: Tensor,
    grad_gate: Tensor | None,
    mixed_qkv: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    query_weight: Tensor | None,
    key_weight: Tensor | None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    seq, batch, groups, width = grad_key.shape
    parts = grad_query.shape[2] // groups + (0 if grad_gate is None else grad_gate.shape[3]) + 2
    # The value is a view of the projection's output and has its dtype.
    grad = grad_value.new_empty(seq, batch, groups, parts, width)
    return grad, grad.new_empty(0) if query_weight is None else query_weight.new_empty(2, width)


@operator(
    _NAMESPACE,
    "(Tensor grad_query, Tensor grad_key, Tensor grad_value, Tensor? grad_gate, Tensor? mixed_qkv, Tensor cos, "
    "Tensor sin, Tensor? query_weight, Tensor? key_weight, *, float eps, bool zero_centered, bool interleaved) -> "
    "(Tensor grad_mixed_qkv, Tensor grad_weights)",
    cuda=_LAUNCHERS,
    fake=_new_qkv_grads,
)
def rotate_qkv_grads(
    grad_query: Tensor,
    grad_key: Tensor,
    grad_value: Tensor,
    grad_gate: Tensor | None,
    mixed_qkv: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    query_weight: Tensor | None,
    key_weight: Tensor | None,
    *,
    eps: float,
    zero_centered: bool,
    interleaved: bool,
) -> tuple[Tensor, Tensor]:
    """Computes the gradients of the qkv projection's output and of the norms' weights.

    grad_query: [S, B, G * q, D]; grad_key, grad_value: [S, B, G, D]; grad_gate: [S, B, G, gates, D] or None;
    mixed_qkv: the input of rotate_qkv, or None without norms; all of any strides. Returns grad_mixed_qkv
    [S, B, G, q + gates + 2, D], contiguous, in grad_value's dtype, and grad_weights: [2, D], of query_weight and
    key_weight in their dtype, or [0] without norms.
    """
    gates = 0 if grad_gate is None else grad_gate.shape[3]
    grad, grad_weights = _new_qkv_grads(
        grad_query, grad_key, grad_value, grad_gate, mixed_qkv, cos, sin, query_weight, key_weight
    )
    queries, groups = grad.shape[3] - gates - 2, grad.shape[2]
    # The inverse rotation has the negative angle.
    table: dict[str, Any] = {"cos": cos, "sin": -sin, "interleaved": interleaved}
    parts = (
        (grad_query.unflatten(2, (groups, -1)), query_weight, slice(queries)),
        (grad_key.unsqueeze(3), key_weight, slice(-2, -1)),
    )
    for index, (given, weight, part) in enumerate(parts):
        out = grad[..., part, :]
        if weight is None or mixed_qkv is None:
            _rotate(given, **table, out=out)
            continue
        source, scale = mixed_qkv[..., part, :], _scale(weight, zero_centered)
        turned = _rotate(given, **table, out=torch.empty_like(given))
        of_source, of_scale = plain_rms_norm_grads(turned, source, scale, inverse_rms=inverse_rms(source, eps))
        out.copy_(of_source)
        grad_weights[index] = of_scale
    grad[..., -1, :] = grad_value
    if grad_gate is not None:
        grad[..., queries:-2, :] = grad_gate
    return grad, grad_weights


def _new_rotated(t: Tensor, cos: Tensor, sin: Tensor, **_: Any) -> Tensor:
    return torch.empty_like(t, memory_format=torch.contiguous_format)


@operator(
    _NAMESPACE,
    "(Tensor t, Tensor cos, Tensor sin, *, int first, bool interleaved, bool inverse) -> Tensor",
    cuda=_LAUNCHERS,
    fake=_new_rotated,
)
def rotate(t: Tensor, cos: Tensor, sin: Tensor, *, first: int, interleaved: bool, inverse: bool) -> Tensor:
    """Rotates each head of t, or rotates it back; t: [S, B, N, D], any float dtype and strides.

    first: index of the first rotated channel, 0 or D - D_rot. Returns a contiguous tensor of t's shape and dtype.
    """
    out = _new_rotated(t, cos, sin)
    rotated = t[..., first:] if first else t
    _rotate(rotated, cos=cos, sin=-sin if inverse else sin, interleaved=interleaved, out=out[..., first:])
    if first:
        out[..., :first] = t[..., :first]
    return out


def _scale(weight: Tensor, zero_centered: bool) -> Tensor:
    return one_plus(weight) if zero_centered else weight


def _rotate(t: Tensor, *, cos: Tensor, sin: Tensor, interleaved: bool, out: Tensor) -> Tensor:
    """Maps each pair of channels (a, b) to (a cos - b sin, b cos + a sin); t, out: [S, B, ..., D]."""
    half = cos.shape[-1]
    # [S, 1, ..., D_rot / 2]
    shape = (cos.shape[0],) + (1,) * (t.dim() - 2) + (half,)
    cos, sin = cos.view(shape), sin.view(shape)
    # Half precision is computed in fp32 and rounded once.
    result = out if t.dtype == cos.dtype else torch.empty(t.shape, dtype=cos.dtype, device=t.device)
    source = t.to(cos.dtype)
    a, b = (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if interleaved else (slice(half), slice(half, 2 * half))
    first, second = source[..., a], source[..., b]
    torch.mul(first, cos, out=result[..., a]).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=result[..., b]).addcmul_(first, sin)
    if 2 * half < t.shape[-1]:
        result[..., 2 * half :] = source[..., 2 * half :]
    if result is not out:
        out.copy_(result)
    return out
