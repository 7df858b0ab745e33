"""Causal attention in tiles: splits the attention matrix, computes each tile, and merges the results.

Tiles are computed by torch's flash kernels where supported, otherwise by plain tensor operations. The results differ
only by rounding. context_parallel.py defines which rank holds which part of a sequence.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.packed_seq_params import PackedSeqParams

# Minimum number of rows of a block. With fewer, GEMMs for narrow windows would be too small to be efficient.
MIN_ROWS = 64
_flash_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_flash_gpu = torch.ops.aten._scaled_dot_product_flash_attention
_flash_gpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_backward
# Maximum number of scores in memory at a time, for plain operations.
_MAX_SCORES = 1 << 24


@dataclass(frozen=True)
class Stretch:
    """A range of tokens that is contiguous both in a sequence and in a tensor.

    local_start: index of the first token in the tensor. start, stop: range in the sequence.
    """

    local_start: int
    start: int
    stop: int

    def local(self, start: int, stop: int) -> slice:
        """Converts a range of the sequence to indices of the tensor."""
        return slice(start - self.start + self.local_start, stop - self.start + self.local_start)


@dataclass(frozen=True)
class Tile:
    """A rectangle of the attention matrix. Rows index the tensor of queries, columns the tensor of keys.

    Row i attends to column j if i + first <= j <= i + last; None means no limit. Every row attends to at least one
    column. batch: samples to which the tile applies.
    """

    queries: slice
    keys: slice
    first: int | None = None
    last: int | None = None
    batch: slice = field(default_factory=lambda: slice(None))

    @property
    def is_full(self) -> bool:
        """Whether every row attends to every column."""
        return self.first is None and self.last is None

    @property
    def is_causal_square(self) -> bool:
        """Whether the tile is square and row i attends to columns 0 to i."""
        same = self.queries.stop - self.queries.start == self.keys.stop - self.keys.start
        return self.first is None and self.last == 0 and same


def stretches(chunks: Sequence[slice]) -> list[Stretch]:
    """Returns the stretches of a tensor that concatenates the given chunks of a sequence."""
    found: list[Stretch] = []
    place = 0
    for chunk in chunks:
        found.append(Stretch(place, chunk.start, chunk.stop))
        place += chunk.stop - chunk.start
    return found


def tiles_of_batch(
    queries: Sequence[Stretch], keys: Sequence[Stretch], *, segments: Sequence[Sequence[slice]], window: int | None
) -> list[Tile]:
    """Returns the causal_tiles of all samples. segments: one entry per sample, or a single entry for all samples."""
    if len(segments) == 1:
        return causal_tiles(queries, keys, segments=segments[0], window=window)
    return [
        replace(tile, batch=slice(sample, sample + 1))
        for sample, its_segments in enumerate(segments)
        for tile in causal_tiles(queries, keys, segments=its_segments, window=window)
    ]


def segments_of_samples(packed: PackedSeqParams | None, *, batch: int, seq_length: int) -> list[list[slice]]:
    """Returns the packed segments of each sample as ranges of the sample.

    Without packing, returns a single entry that applies to all samples: the whole sequence.
    """
    if packed is None:
        return [[slice(0, seq_length)]]
    samples: list[list[slice]] = [[] for _ in range(batch)]
    position = 0
    for length in packed.segment_lengths:
        sample, start = divmod(position, seq_length)
        samples[sample].append(slice(start, start + length))
        position += length
    return samples


def causal_tiles(
    queries: Sequence[Stretch], keys: Sequence[Stretch], *, segments: Sequence[slice], window: int | None
) -> list[Tile]:
    """Returns tiles that cover every visible pair of a query and a key exactly once.

    A query sees the keys of its segment up to its own position and, with a window, at most `window` tokens back. A
    stretch of queries must lie completely inside or outside of each stretch of keys. segments: segments of the whole
    sequence, in order.
    """
    found: list[Tile] = []
    for own in queries:
        for segment in segments:
            for begin, end in _row_blocks(max(own.start, segment.start), min(own.stop, segment.stop), window=window):
                for other in keys:
                    start, stop = max(other.start, segment.start), min(other.stop, end)
                    if window is None:
                        found += _before_and_on_diagonal(own, other, rows=(begin, end), columns=(start, stop))
                    else:
                        found += _in_band(
                            own, other, rows=(begin, end), columns=(max(start, begin - window), stop), window=window
                        )
    return _joined(found)


def _row_blocks(start: int, stop: int, *, window: int | None) -> Iterator[tuple[int, int]]:
    # Blocks are about as tall as the window is wide, because most of a taller block would be masked.
    width = stop - start if window is None else max(window + 1, MIN_ROWS)
    return ((begin, min(begin + width, stop)) for begin in range(start, stop, max(width, 1)))


def _before_and_on_diagonal(
    own: Stretch, other: Stretch, *, rows: tuple[int, int], columns: tuple[int, int]
) -> Iterator[Tile]:
    (begin, end), (start, stop) = rows, columns
    if start < min(stop, begin):
        yield Tile(own.local(begin, end), other.local(start, min(stop, begin)))
    if max(start, begin) < stop:
        yield Tile(own.local(begin, end), other.local(begin, end), last=0)


def _in_band(
    own: Stretch, other: Stretch, *, rows: tuple[int, int], columns: tuple[int, int], window: int
) -> Iterator[Tile]:
    start, stop = columns
    # Rows that attend to none of the columns are excluded, because their softmax would be undefined.
    begin, end = max(rows[0], start), min(rows[1], stop + window)
    if start >= stop or begin >= end:
        return
    first = begin - window - start if start < end - 1 - window else None
    last = begin - start if begin < stop - 1 else None
    yield Tile(own.local(begin, end), other.local(start, stop), first=first, last=last)


def _joined(tiles: Sequence[Tile]) -> list[Tile]:
    """Merges adjacent full tiles."""
    joined: list[Tile] = []
    for tile in tiles:
        before = joined[-1] if joined else tile
        if joined and before.is_full and tile.is_full:
            if before.keys == tile.keys and before.queries.stop == tile.queries.start:
                joined[-1] = replace(tile, queries=slice(before.queries.start, tile.queries.stop))
                continue
            if before.queries == tile.queries and before.keys.stop == tile.keys.start:
                joined[-1] = replace(tile, keys=slice(before.keys.start, tile.keys.stop))
                continue
        joined.append(tile)
    return joined


@dataclass(frozen=True)
class TileInputs:
    """Inputs of a tile, or their gradients.

    query: [B, N, Q, D]; key: [B, G, K, D]; value: [B, G, K, E], any float dtype. G divides N. E may differ from D.
    """

    query: Tensor
    key: Tensor
    value: Tensor


@dataclass(frozen=True)
class SoftmaxResult:
    """Attention output and the log-sum-exp of the scores.

    output: [B, N, Q, E], the query's dtype; log_sum: [B, N, Q], fp32, or fp64 for fp64 inputs.
    """

    output: Tensor
    log_sum: Tensor


class TileKernel(ABC):
    """Base class of kernels that compute one tile. scale: factor of the scores."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    @abstractmethod
    def forward(self, inputs: TileInputs, tile: Tile) -> SoftmaxResult:
        """Computes attention, with a softmax over the columns of this tile only."""

    @abstractmethod
    def backward(self, grad: Tensor, inputs: TileInputs, *, result: SoftmaxResult, tile: Tile) -> TileInputs:
        """Computes the tile's contribution to the gradients of its inputs.

        grad: [B, N, Q, E], gradient of the attention output. result: output and log-sum-exp over all columns, not only
        those of the tile. Returns gradients with the shapes of the inputs, and their dtype or fp32.
        """


class PlainKernel(TileKernel):
    """Computes any tile on any device with plain tensor operations in fp32 or fp64, one block of rows at a time."""

    def forward(self, inputs: TileInputs, tile: Tile) -> SoftmaxResult:
        query, key, value = _in_groups(inputs)
        outputs, log_sums = [], []
        for rows in self._row_blocks(inputs):
            scores = self._scores(query[..., rows, :], key, tile=tile, first_row=rows.start)
            log_sums.append(scores.logsumexp(-1))
            outputs.append(torch.exp(scores - log_sums[-1].unsqueeze(-1)) @ value)
        output, log_sum = torch.cat(outputs, -2).flatten(1, 2), torch.cat(log_sums, -1).flatten(1, 2)
        return SoftmaxResult(output.to(inputs.query.dtype), log_sum)

    def backward(self, grad: Tensor, inputs: TileInputs, *, result: SoftmaxResult, tile: Tile) -> TileInputs:
        """Computes gradients one block of rows at a time. grad: [B, N, Q, E], the query's dtype."""
        query, key, value = _in_groups(inputs)
        grad, output = (t.to(query.dtype).unflatten(1, query.shape[1:3]) for t in (grad, result.output))
        log_sum = result.log_sum.unflatten(1, query.shape[1:3]).unsqueeze(-1)
        # The term that the softmax derivative subtracts in every column of a row.
        delta = (grad * output).sum(-1, keepdim=True)
        grad_query, grad_key, grad_value = torch.empty_like(query), torch.zeros_like(key), torch.zeros_like(value)
        for rows in self._row_blocks(inputs):
            probs = self._scores(query[..., rows, :], key, tile=tile, first_row=rows.start)
            probs = probs.sub_(log_sum[..., rows, :]).exp_()
            grad_value += (probs.mT @ grad[..., rows, :]).sum(2, keepdim=True)
            grad_scores = (grad[..., rows, :] @ value.mT).sub_(delta[..., rows, :]).mul_(probs).mul_(self.scale)
            grad_query[..., rows, :] = grad_scores @ key
            grad_key += (grad_scores.mT @ query[..., rows, :]).sum(2, keepdim=True)
        return TileInputs(grad_query.flatten(1, 2), grad_key.squeeze(2), grad_value.squeeze(2))

    def _row_blocks(self, inputs: TileInputs) -> list[slice]:
        batch, heads, rows, _ = inputs.query.shape
        step = max(1, _MAX_SCORES // (batch * heads * inputs.key.shape[2]))
        return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]

    def _scores(self, query: Tensor, key: Tensor, *, tile: Tile, first_row: int) -> Tensor:
        scores = (query @ key.mT).mul_(self.scale)
        if not tile.is_full:
            mask = _allowed(tile, rows=query.shape[-2], columns=key.shape[-2], first_row=first_row, device=query.device)
            scores.masked_fill_(~mask, -torch.inf)
        return scores


class Widened(TileKernel):
    """Pads keys and values to a common width for a kernel that requires equal widths. Zeros change no score."""

    def __init__(self, kernel: TileKernel, *, width: int) -> None:
        super().__init__(kernel.scale)
        self._kernel, self._width = kernel, width

    def forward(self, inputs: TileInputs, tile: Tile) -> SoftmaxResult:
        result = self._kernel.forward(self._widened(inputs), tile)
        return SoftmaxResult(result.output[..., : inputs.value.shape[-1]], result.log_sum)

    def backward(self, grad: Tensor, inputs: TileInputs, *, result: SoftmaxResult, tile: Tile) -> TileInputs:
        """Computes gradients of the padded tensors and drops the padding. grad: [B, N, Q, E], the query's dtype."""
        wide = SoftmaxResult(widened(result.output, self._width), result.log_sum)
        shares = self._kernel.backward(widened(grad, self._width), self._widened(inputs), result=wide, tile=tile)
        width, value_width = inputs.query.shape[-1], inputs.value.shape[-1]
        return TileInputs(shares.query[..., :width], shares.key[..., :width], shares.value[..., :value_width])

    def _widened(self, inputs: TileInputs) -> TileInputs:
        tensors = (inputs.query, inputs.key, inputs.value)
        return TileInputs(*(widened(tensor, self._width) for tensor in tensors))


class FlashOnCpu(TileKernel):
    """Computes tiles with torch's CPU flash kernel, which supports all dtypes, grouped heads and masks."""

    def forward(self, inputs: TileInputs, tile: Tile) -> SoftmaxResult:
        query, key, value = inputs.query, inputs.key, inputs.value
        mask, is_causal = self._mask(inputs, tile)
        return SoftmaxResult(*_flash_cpu(query, key, value, 0.0, is_causal, attn_mask=mask, scale=self.scale))

    def backward(self, grad: Tensor, inputs: TileInputs, *, result: SoftmaxResult, tile: Tile) -> TileInputs:
        """Runs the backward of torch's CPU flash kernel. grad: [B, N, Q, E], the query's dtype."""
        query, key, value = inputs.query, inputs.key, inputs.value
        mask, is_causal = self._mask(inputs, tile)
        return TileInputs(
            *_flash_cpu_backward(
                grad,
                query,
                key,
                value,
                result.output,
                result.log_sum,
                0.0,
                is_causal,
                attn_mask=mask,
                scale=self.scale,
            )
        )

    def _mask(self, inputs: TileInputs, tile: Tile) -> tuple[Tensor | None, bool]:
        if tile.is_full or tile.is_causal_square:
            return None, tile.is_causal_square
        query, rows, columns = inputs.query, inputs.query.shape[2], inputs.key.shape[2]
        allowed = _allowed(tile, rows=rows, columns=columns, first_row=0, device=query.device)
        return query.new_zeros(rows, columns).masked_fill_(~allowed, -torch.inf), False


class FlashOnGpu(PlainKernel):
    """Computes tiles with torch's GPU flash kernel, or with plain operations where it does not support them.

    The kernel does not support fp32 inputs, some head widths, and partly masked tiles other than causal squares.
    """

    def forward(self, inputs: TileInputs, tile: Tile) -> SoftmaxResult:
        if not _gpu_kernel_takes(inputs, tile):
            return super().forward(inputs, tile)
        key, value = _repeated(inputs)
        found = _flash_gpu(inputs.query, key, value, 0.0, tile.is_causal_square, False, scale=self.scale)
        return SoftmaxResult(found[0], found[1])

    def backward(self, grad: Tensor, inputs: TileInputs, *, result: SoftmaxResult, tile: Tile) -> TileInputs:
        """Runs the GPU flash kernel's backward if it supports the tile. grad: [B, N, Q, E], the query's dtype."""
        if not _gpu_kernel_takes(inputs, tile):
            return super().backward(grad, inputs, result=result, tile=tile)
        key, value = _repeated(inputs)
        query, rows, columns = inputs.query, inputs.query.shape[2], inputs.key.shape[2]
        # Placeholders for the random state, which the kernel does not read without dropout.
        unused = torch.empty(0, dtype=torch.uint64, device=query.device)
        grad_query, grad_key, grad_value = _flash_gpu_backward(
            grad,
            query,
            key,
            value,
            result.output,
            result.log_sum.contiguous(),
            None,
            None,
            rows,
            columns,
            0.0,
            tile.is_causal_square,
            unused,
            unused,
            scale=self.scale,
        )
        groups = inputs.key.shape[1]
        of_groups = (t.unflatten(1, (groups, -1)).sum(2, dtype=torch.float32) for t in (grad_key, grad_value))
        return TileInputs(grad_query, *of_groups)


class MergedSoftmax:
    """Merges the results of tiles into one softmax over all of their columns, in fp32 (fp64 for fp64 inputs)."""

    def __init__(self, query: Tensor, *, value_width: int, sink: Tensor | None = None) -> None:
        """Creates an empty result.

        query: [B, N, S, D], any float dtype, the queries that tiles index. sink: [N], any float dtype, scores of an
        additional column whose value is 0; None adds no column.
        """
        self._dtype = query.dtype
        dtype = torch.promote_types(query.dtype, torch.float32)
        batch, heads, seq_length, _ = query.shape
        # Memory order [S, B, N, E], the layout that callers use.
        output = query.new_zeros(seq_length, batch, heads, value_width, dtype=dtype)
        self._output = output.permute(1, 2, 0, 3)
        self._log_sum = torch.full(query.shape[:3], -torch.inf, dtype=dtype, device=query.device)
        if sink is not None:
            self._log_sum.copy_(sink.view(-1, 1))

    def add(self, result: SoftmaxResult, tile: Tile) -> None:
        """Merges a result of TileKernel.forward for `tile` into the softmax."""
        output = self._output[tile.batch, :, tile.queries]
        log_sum = self._log_sum[tile.batch, :, tile.queries]
        total = torch.logaddexp(log_sum, result.log_sum)
        output.mul_((log_sum - total).exp_().unsqueeze(-1))
        output.addcmul_(result.output.to(output.dtype), (result.log_sum - total).exp_().unsqueeze(-1))
        log_sum.copy_(total)

    def result(self) -> SoftmaxResult:
        """Returns the softmax over all tiles added so far. Rows not covered by any tile are 0."""
        return SoftmaxResult(self._output.to(self._dtype), self._log_sum)


def tile_kernel(device: torch.device, *, scale: float, plain: bool, widths: tuple[int, int]) -> TileKernel:
    """Returns the kernel for tiles on `device`. plain: use plain operations. widths: head widths of keys and values."""
    if plain:
        return PlainKernel(scale)
    kernel = FlashOnCpu(scale) if device.type == "cpu" else FlashOnGpu(scale)
    return kernel if widths[0] == widths[1] else Widened(kernel, width=max(widths))


@torch.no_grad()
def largest_scores(query: Tensor, *, key: Tensor, tile: Tile, allowed: Tensor | None = None) -> Tensor:
    """Returns the largest score of each head within a tile, before scaling: [N], fp32 or fp64.

    query: [B, N, Q, D]; key: [B, G, K, D], any float dtype, rows and columns of the tile, where G divides N. allowed:
    bool, broadcastable to [B, 1, Q, K], True where attention is allowed. Scores are rounded to the dtype of the inputs.
    At most _MAX_SCORES of them are in memory at a time. The result is -inf for a head without visible pairs.
    """
    batch, heads, num_rows, _ = query.shape
    columns = key.shape[2]
    found = query.new_full((heads,), -torch.inf, dtype=torch.promote_types(query.dtype, torch.float32))
    grouped, keys = query.unflatten(1, (key.shape[1], -1)), key.unsqueeze(2)
    step = max(1, _MAX_SCORES // max(1, batch * heads * columns))
    for start in range(0, num_rows, step):
        end = min(start + step, num_rows)
        # Skips columns that none of these rows can see, which halves the work of a causal square.
        seen = columns if tile.last is None else max(0, min(columns, end + tile.last))
        scores = (grouped[..., start:end, :] @ keys[..., :seen, :].mT).flatten(1, 2)
        if not tile.is_full:
            mask = _allowed(tile, rows=end - start, columns=seen, first_row=start, device=query.device)
            scores.masked_fill_(~mask, -torch.inf)
        if allowed is not None:
            scores.masked_fill_(
                ~allowed.expand(*allowed.shape[:2], num_rows, columns)[..., start:end, :seen], -torch.inf
            )
        if scores.numel():
            found = torch.maximum(found, scores.amax((0, 2, 3)).to(found.dtype))
    return found


def widened(tensor: Tensor, width: int) -> Tensor:
    """Pads the last dimension with zeros: [*, D], any dtype -> [*, width]. Returns the tensor itself if D == width."""
    return tensor if tensor.shape[-1] == width else F.pad(tensor, (0, width - tensor.shape[-1]))


def _gpu_kernel_takes(inputs: TileInputs, tile: Tile) -> bool:
    half, width = inputs.query.dtype in (torch.float16, torch.bfloat16), inputs.query.shape[-1]
    return half and width % 8 == 0 and width <= 256 and (tile.is_full or tile.is_causal_square)


def _repeated(inputs: TileInputs) -> tuple[Tensor, Tensor]:
    repeats = inputs.query.shape[1] // inputs.key.shape[1]
    key, value = (t.repeat_interleave(repeats, dim=1) for t in (inputs.key, inputs.value))
    return key, value


def _in_groups(inputs: TileInputs) -> tuple[Tensor, Tensor, Tensor]:
    """Reshapes inputs by key/value group, in fp32 or fp64: [B, G, q, Q, D], [B, G, 1, K, D] and [B, G, 1, K, E]."""
    dtype = torch.promote_types(inputs.query.dtype, torch.float32)
    query, key, value = (t.to(dtype) for t in (inputs.query, inputs.key, inputs.value))
    return query.unflatten(1, (key.shape[1], -1)), key.unsqueeze(2), value.unsqueeze(2)


def _allowed(tile: Tile, *, rows: int, columns: int, first_row: int, device: torch.device) -> Tensor:
    """Returns the mask of the tile's rows from first_row on: [rows, columns], bool, True where a row sees a column."""
    ahead = torch.arange(columns, device=device) - torch.arange(first_row, first_row + rows, device=device).unsqueeze(1)
    allowed = torch.ones_like(ahead, dtype=torch.bool)
    if tile.first is not None:
        allowed &= ahead >= tile.first
    if tile.last is not None:
        allowed &= ahead <= tile.last
    return allowed
