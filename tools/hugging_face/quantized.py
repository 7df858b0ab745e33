"""Dequantizes hub weights to bf16, one tensor at a time.

Supports FP8 with one scale per block of a matrix (DeepSeek-V3), and MXFP4 with one scale per 32 numbers of a row
(gpt-oss). Does not write quantized weights.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.tools.safetensors_files import TensorFiles, TensorKind

QUANTIZATION = "quantization_config"
_FACTORS = "_scale_inv"
_BLOCKS, _SCALES = "_blocks", "_scales"
# Four-bit values: one sign bit, two exponent bits, one fraction bit.
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_EXPONENT_BIAS = 127
# Numbers that share a scale.
_GROUP = 32


def require_known_quantization(config: Mapping[str, Any]) -> None:
    """Raises ValueError naming an unsupported quantization method in a config.json."""
    found = config.get(QUANTIZATION)
    if not found:
        return
    method = found.get("quant_method")
    blocks = found.get("weight_block_size")
    has_blocks = (
        isinstance(blocks, list) and len(blocks) == 2 and all(type(size) is int and size > 0 for size in blocks)
    )
    if method == "mxfp4" or (method == "fp8" and has_blocks):
        return
    raise ValueError(
        f"config.json: {QUANTIZATION} is {method}: weights must be plain numbers, FP8 in blocks, or MXFP4; use the "
        "model in bf16"
    )


class PlainFiles:
    """Dequantized view of tensor files. `kinds` describes the results of `read`. Scales are not exposed."""

    def __init__(self, files: TensorFiles, config: Mapping[str, Any]) -> None:
        """Opens the files. config: contents of config.json.

        Raises ValueError naming scales whose shape does not match their weight.
        """
        found = config.get(QUANTIZATION) or {}
        self.folder, self._files, self.kinds = files.folder, files, dict(files.kinds)
        self._block: list[int] = found.get("weight_block_size") or []
        self._is_mxfp4 = found.get("quant_method") == "mxfp4"
        for name in files.kinds:
            weight = self._weight_of_factors(name)
            if weight is None:
                continue
            del self.kinds[name]
            if self._is_mxfp4:
                del self.kinds[weight + _BLOCKS]
                self.kinds[weight] = self._kind_of_mxfp4(weight)
            else:
                self._check_fp8_factors(weight)
                self.kinds[weight] = replace(files.kinds[weight], dtype=torch.bfloat16)

    def read(self, name: str) -> Tensor:
        """Returns a tensor on the host, any shape, dequantized if necessary; `kinds` has shape and dtype."""
        if name not in self._files.kinds:
            return _from_mxfp4(self._files.read(name + _BLOCKS), self._files.read(name + _SCALES))
        values = self._files.read(name)
        if self._block and name + _FACTORS in self._files.kinds:
            return _from_fp8(values, self._files.read(name + _FACTORS), block=self._block)
        return values

    def file_of(self, name: str) -> Path:
        """Returns the file of a tensor or of its quantized values."""
        return self._files.file_of(name if name in self._files.kinds else name + _BLOCKS)

    def have_same(self, name: str, other: str) -> bool:
        """Returns whether two tensors have the same shape, dtype and bytes."""
        return self._files.have_same(name, other)

    def _kind_of_mxfp4(self, weight: str) -> TensorKind:
        """Returns the shape and dtype of a dequantized MXFP4 weight."""
        blocks, scales = (self._files.kinds[weight + suffix] for suffix in (_BLOCKS, _SCALES))
        wanted = TensorKind((*scales.shape, _GROUP // 2), torch.uint8)
        if len(scales.shape) != 3 or scales.dtype != torch.uint8 or blocks != wanted:
            raise ValueError(
                f"{self.file_of(weight)}: {weight}{_SCALES} is {scales.dtype} {list(scales.shape)} and "
                f"{weight}{_BLOCKS} {blocks.dtype} {list(blocks.shape)}: must be uint8 [experts, rows, groups], and "
                f"{_GROUP // 2} bytes for each of these"
            )
        experts, rows, groups = scales.shape
        # Output before input, unlike plain weights.
        return TensorKind((experts, _GROUP * groups, rows), torch.bfloat16)

    def _check_fp8_factors(self, weight: str) -> None:
        values, found = (self._files.kinds[name].shape for name in (weight, weight + _FACTORS))
        wanted = [math.ceil(size / length) for size, length in zip(values, self._block)]
        if len(values) != len(self._block) or list(found) != wanted:
            raise ValueError(
                f"{self.file_of(weight)}: {weight}{_FACTORS} has shape {list(found)}: must be {wanted}, a factor for "
                f"each block of {self._block} of {weight}, {list(values)}"
            )

    def _weight_of_factors(self, name: str) -> str | None:
        """Returns the name of the weight that a tensor of scales belongs to, or None if it contains no scales."""
        suffix = _SCALES if self._is_mxfp4 else _FACTORS
        known = self._files.kinds
        weight = name.removesuffix(suffix)
        stands_for = weight + _BLOCKS if self._is_mxfp4 else weight
        return weight if (self._is_mxfp4 or self._block) and weight != name and stands_for in known else None


def _from_fp8(values: Tensor, factors: Tensor, *, block: list[int]) -> Tensor:
    """Dequantizes FP8 blocks to bf16.

    values: [R, C], fp8. factors: [blocks of R, blocks of C], fp32. Returns [R, C], bf16.
    """
    rows, columns = block
    result = torch.empty(values.shape, dtype=torch.bfloat16)
    # One row of blocks at a time, because the whole tensor in fp32 would need twice the memory of the result.
    for index, of_row in enumerate(factors):
        part = slice(index * rows, (index + 1) * rows)
        wide = of_row.float().repeat_interleave(columns)[: values.shape[1]]
        result[part] = values[part].float() * wide
    return result


def _from_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Dequantizes MXFP4 blocks to [E, 32 groups, R], bf16.

    blocks: [E, R, groups, 16], uint8, two numbers per byte with the lower half first. scales: [E, R, groups], uint8,
    exponents of powers of two.
    """
    table = torch.tensor([*_FP4, *(-value for value in _FP4)], dtype=torch.bfloat16)
    experts, rows, groups, width = blocks.shape
    result = torch.empty(experts, 2 * groups * width, rows, dtype=torch.bfloat16)
    for expert in range(experts):
        pairs = torch.stack((table[(blocks[expert] & 15).int()], table[(blocks[expert] >> 4).int()]), dim=-1)
        exponents = scales[expert].int() - _EXPONENT_BIAS
        numbers = torch.ldexp(pairs.flatten(-2), exponents.unsqueeze(-1))  # [R, groups, 32]
        result[expert] = numbers.flatten(1).t()
    return result
