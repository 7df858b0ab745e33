"""Causal attention as rectangles: which rows see which columns, what is computed of one, and how they merge.

torch's flash kernels compute a tile where they take it, else plain tensor operations; both give the same to rounding.
Who holds which part of a sequence is context_parallel.py's.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.packed_seq_params import PackedSeqParams

# Rows of a block for narrow windows: fewer would make matrix products too small.
MIN_ROWS = 64
_flash_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_flash_gpu = torch.ops.aten._scaled_dot_product_flash_attention
_flash_gpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_backward
# Elements of scores that plain operations hold at once.
_MAX_SCORES = 1 << 24


@dataclass(frozen=True)
class Stretch:
    """Neighbouring tokens of a sequence that also lie side by side in a tensor: places in tensor and sequence."""

    local_start: int
    start: int
    stop: int

    def local(self, start: int, stop: int) -> slice:
        """Where the tokens from `start` to `stop` of the sequence lie in the tensor."""
        return slice(start - self.start + self.local_start, stop - self.start + self.local_start)


@dataclass(frozen=True)
class Tile:
    """Rows of queries against columns of keys, in their own tensors; each row sees at least one of the columns.

    Row i sees column j if i + first <= j <= i + last, None being no limit. batch: of these samples.
    """

    queries: slice
    keys: slice
    first: int | None = None
    last: int | None = None
    batch: slice = field(default_factory=lambda: slice(None))

    @property
    def is_full(self) -> bool:
        """Whether every row sees every column."""
        return self.first is None and self.last is None

    @property
    def is_causal_square(self) -> bool:
        """Whether row i sees columns 0 to i, of as many as there are rows."""
        same = self.queries.stop - self.queries.start == self.keys.stop - self.keys.start
        return self.first is None and self.last == 0 and same


def stretches(chunks: Sequence[slice]) -> list[Stretch]:
    """The chunks of a sequence as they lie one behind the other in a tensor."""
    found: list[Stretch] = []
    place = 0
    for chunk in chunks:
        found.append(Stretch(place, chunk.start, chunk.stop))
        place += chunk.stop - chunk.start
    return found


def tiles_of_batch(
    queries: Sequence[Stretch], keys: Sequence[Stretch], *, segments: Sequence[Sequence[slice]], window: int | None
) -> list[Tile]:
    """causal_tiles of each sample, for as many samples as `segments` has entries; a single entry holds for all."""
    if len(segments) == 1:
        return causal_tiles(queries, keys, segments=segments[0], window=window)
    return [
        replace(tile, batch=slice(sample, sample + 1))
        for sample, its_segments in enumerate(segments)
        for tile in causal_tiles(queries, keys, segments=its_segments, window=window)
    ]


def segments_of_samples(packed: PackedSeqParams | None, *, batch: int, seq_length: int) -> list[list[slice]]:
    """The segments of each sample by their places in it; without borders one entry for all, the whole sequence."""
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
    """Each pair of tokens that see each other in exactly one tile: of one segment, the key not behind the query and,
    where there is a window, at most `window` tokens before it.

    A stretch of keys must hold all of a stretch of queries, or none of it. segments: of the whole sequence, in order.
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
    # Of about the window's width: most of a wider block would be masked.
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
    # Only rows that see something: the others would have a softmax over nothing.
    begin, end = max(rows[0], start), min(rows[1], stop + window)
    if start >= stop or begin >= end:
        return
    first = begin - window - start if start < end - 1 - window else None
    last = begin - start if begin < stop - 1 else None
    yield Tile(own.local(begin, end), other.local(start, stop), first=first, last=last)


def _joined(tiles: Sequence[Tile]) -> list[Tile]:
    """Merges full neighbouring tiles into one."""
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
    """The inputs of a tile: query [B, N, Q, D]; key [B, G, K, D]; value [B, G, K, E], where E may be D.

    G divides N, any float dtype.
    """

    query: Tensor
    key: Tensor
    value: Tensor


@dataclass(frozen=True)
class SoftmaxResult:
    """output: [B, N, Q, E], the query's dtype; log_sum: [B, N, Q], fp32 or more, of the exponentials of the scores."""

    output: Tensor
    log_sum: Tensor


class TileKernel:
    """Base class of the kernels that compute tiles; `scale` multiplies the scores."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def forward(self, inputs: TileInputs, tile: Tile) -> SoftmaxResult:
        """Returns the softmax over this tile's columns alone."""
        raise NotImplementedError

    def backward(self, grad: Tensor, inputs: TileInputs, *, result: SoftmaxResult, tile: Tile) -> TileInputs:
        """Returns the tile's share of the gradients; grad: [B, N, Q, E], of the whole softmax, as is `result`.

        Gradients have their inputs' shapes, and their dtype or fp32.
        """
        raise NotImplementedError


class PlainKernel(TileKernel):
    """Plain operations in fp32 or more, block by block of rows; on any device, any tile."""

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
        """Computes the tile's gradients block by block of rows; grad: [B, N, Q, E], the query's dtype."""
        query, key, value = _in_groups(inputs)
        grad, output = (t.to(query.dtype).unflatten(1, query.shape[1:3]) for t in (grad, result.output))
        log_sum = result.log_sum.unflatten(1, query.shape[1:3]).unsqueeze(-1)
        # What the softmax's own derivative takes off every score of a row.
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
    """A kernel for keys and values of one width, given others: zeros fill them up, which changes no score."""

    def __init__(self, kernel: TileKernel, *, width: int) -> None:
        super().__init__(kernel.scale)
        self._kernel, self._width = kernel, width

    def forward(self, inputs: TileInputs, tile: Tile) -> SoftmaxResult:
        result = self._kernel.forward(self._widened(inputs), tile)
        return SoftmaxResult(result.output[..., : inputs.value.shape[-1]], result.log_sum)

    def backward(self, grad: Tensor, inputs: TileInputs, *, result: SoftmaxResult, tile: Tile) -> TileInputs:
        """Computes the gradients of widened tensors and narrows them; grad: [B, N, Q, E], the query's dtype."""
        wide = SoftmaxResult(widened(result.output, self._width), result.log_sum)
        shares = self._kernel.backward(widened(grad, self._width), self._widened(inputs), result=wide, tile=tile)
        pairs = zip(vars(shares).values(), vars(inputs).values(), strict=True)
        return TileInputs(*(share[..., : given.shape[-1]] for share, given in pairs))

    def _widened(self, inputs: TileInputs) -> TileInputs:
        return TileInputs(*(widened(tensor, self._width) for tensor in vars(inputs).values()))


class FlashOnCpu(TileKernel):
    """torch's flash kernel of the CPU, which takes every dtype, groups of heads and masks."""

    def forward(self, inputs: TileInputs, tile: Tile) -> SoftmaxResult:
        query, key, value = inputs.query, inputs.key, inputs.value
        mask, is_causal = self._mask(inputs, tile)
        return SoftmaxResult(*_flash_cpu(query, key, value, 0.0, is_causal, attn_mask=mask, scale=self.scale))

    def backward(self, grad: Tensor, inputs: TileInputs, *, result: SoftmaxResult, tile: Tile) -> TileInputs:
        """Runs the backward of torch's CPU flash kernel; grad: [B, N, Q, E], the query's dtype."""
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
    """torch's flash kernel of GPUs where it takes the tile, plain operations for windows and for fp32."""

    def forward(self, inputs: TileInputs, tile: Tile) -> SoftmaxResult:
        if not _gpu_kernel_takes(inputs, tile):
            return super().forward(inputs, tile)
        key, value = _repeated(inputs)
        found = _flash_gpu(inputs.query, key, value, 0.0, tile.is_causal_square, False, scale=self.scale)
        return SoftmaxResult(found[0], found[1])

    def backward(self, grad: Tensor, inputs: TileInputs, *, result: SoftmaxResult, tile: Tile) -> TileInputs:
        """Runs torch's GPU flash backward where it takes the tile; grad: [B, N, Q, E], the query's dtype."""
        if not _gpu_kernel_takes(inputs, tile):
            return super().backward(grad, inputs, result=result, tile=tile)
        key, value = _repeated(inputs)
        query, rows, columns = inputs.query, inputs.query.shape[2], inputs.key.shape[2]
        # Not read, as nothing is dropped.
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
    """The softmax over the columns of several tiles, one after the other, in fp32 (fp64 for fp64)."""

    def __init__(self, query: Tensor, *, value_width: int, sink: Tensor | None = None) -> None:
        """query: [B, N, S, D], any float dtype, of which tiles take rows; sink: [N], any float dtype, the score of one
        more column whose value is 0; None: there is none.
        """
        self._dtype = query.dtype
        dtype = torch.promote_types(query.dtype, torch.float32)
        batch, heads, seq_length, _ = query.shape
        # In memory [S, B, N, E], as the caller goes on.
        output = query.new_zeros(seq_length, batch, heads, value_width, dtype=dtype)
        self._output = output.permute(1, 2, 0, 3)
        self._log_sum = torch.full(query.shape[:3], -torch.inf, dtype=dtype, device=query.device)
        if sink is not None:
            self._log_sum.copy_(sink.view(-1, 1))

    def add(self, result: SoftmaxResult, tile: Tile) -> None:
        """Merges the result of TileKernel.forward for `tile`."""
        output = self._output[tile.batch, :, tile.queries]
        log_sum = self._log_sum[tile.batch, :, tile.queries]
        total = torch.logaddexp(log_sum, result.log_sum)
        output.mul_((log_sum - total).exp_().unsqueeze(-1))
        output.addcmul_(result.output.to(output.dtype), (result.log_sum - total).exp_().unsqueeze(-1))
        log_sum.copy_(total)

    def result(self) -> SoftmaxResult:
        """Returns the softmax over all tiles added so far; rows that no tile covered are 0."""
        return SoftmaxResult(self._output.to(self._dtype), self._log_sum)


def tile_kernel(device: torch.device, *, scale: float, plain: bool, widths: tuple[int, int]) -> TileKernel:
    """Returns the kernel for tiles on `device`; plain: the reference on any device. widths: of keys and values."""
    if plain:
        return PlainKernel(scale)
    kernel = FlashOnCpu(scale) if device.type == "cpu" else FlashOnGpu(scale)
    return kernel if widths[0] == widths[1] else Widened(kernel, width=max(widths))


def widened(tensor: Tensor, width: int) -> Tensor:
    """[*, D] with zeros behind, any dtype -> [*, width]; itself where it is that wide already."""
    return tensor if tensor.shape[-1] == width else F.pad(tensor, (0, width - tensor.shape[-1]))


def _gpu_kernel_takes(inputs: TileInputs, tile: Tile) -> bool:
    half, width = inputs.query.dtype in (torch.float16, torch.bfloat16), inputs.query.shape[-1]
    return half and width % 8 == 0 and width <= 256 and (tile.is_full or tile.is_causal_square)


def _repeated(inputs: TileInputs) -> tuple[Tensor, Tensor]:
    repeats = inputs.query.shape[1] // inputs.key.shape[1]
    key, value = (t.repeat_interleave(repeats, dim=1) for t in (inputs.key, inputs.value))
    return key, value


def _in_groups(inputs: TileInputs) -> tuple[Tensor, Tensor, Tensor]:
    """query [B, G, q, Q, D], key and value [B, G, 1, K, D], in fp32 or more."""
    dtype = torch.promote_types(inputs.query.dtype, torch.float32)
    query, key, value = (t.to(dtype) for t in (inputs.query, inputs.key, inputs.value))
    return query.unflatten(1, (key.shape[1], -1)), key.unsqueeze(2), value.unsqueeze(2)


def _allowed(tile: Tile, *, rows: int, columns: int, first_row: int, device: torch.device) -> Tensor:
    """[rows, columns], bool: the tile's pairs from row `first_row` on."""
    ahead = torch.arange(columns, device=device) - torch.arange(first_row, first_row + rows, device=device).unsqueeze(1)
    allowed = torch.ones_like(ahead, dtype=torch.bool)
    if tile.first is not None:
        allowed &= ahead >= tile.first
    if tile.last is not None:
        allowed &= ahead <= tile.last
    return allowed
