"""Kernels that normalize and rotate queries and keys agree with the CPU operators and with separate functions in fp64."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core import transformer
from megatron.core.transformer import rope
from megatron.core.transformer.norms import one_plus, rms_norm
from megatron.core.transformer.rope import HeadNorms, RotaryEmbedding, apply_rotary_pos_emb, split_and_rotate

HALF = (torch.bfloat16, torch.float16)
EPS = 1e-3


@dataclass(frozen=True)
class Heads:
    """Sizes of a qkv projection's output: [seq, batch, groups, queries + gates + 2, width]."""

    seq: int
    batch: int
    groups: int
    queries: int
    width: int
    gates: int = 0
    rotated: float = 1.0
    interleaved: bool = False

    def mixed(self, dtype: torch.dtype, *, seed: int = 0) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        shape = (self.seq, self.batch, self.groups, self.queries + self.gates + 2, self.width)
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    def table(self, dtype: torch.dtype) -> rope.RotaryTable:
        embedding = RotaryEmbedding(
            self.width, self.seq, rotary_percent=self.rotated, rotary_interleaved=self.interleaved, dtype=dtype
        )
        return embedding(self.seq)

    def weights(self, dtype: torch.dtype) -> list[Tensor]:
        generator = torch.Generator().manual_seed(7)
        return [torch.randn(self.width, generator=generator, dtype=torch.float64).to(dtype) for _ in range(2)]

    def grads(self, dtype: torch.dtype) -> list[Tensor | None]:
        """Returns gradients of query, key, value and gate. Heads are the outer dimension, as attention kernels do."""
        generator = torch.Generator().manual_seed(3)
        counts = self.groups * self.queries, self.groups, self.groups
        of_heads = [
            torch.randn(self.batch, count, self.seq, self.width, generator=generator, dtype=torch.float64)
            .to(dtype)
            .permute(2, 0, 1, 3)
            for count in counts
        ]
        if not self.gates:
            return [*of_heads, None]
        shape = (self.seq, self.batch, self.groups, self.gates, self.width)
        return [*of_heads, torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)]


SIZES = {
    "one token": Heads(1, 1, 1, 1, 2),
    "several samples": Heads(5, 3, 2, 4, 16),
    "odd pairs": Heads(7, 2, 3, 1, 6),
    "odd width, part rotated": Heads(9, 1, 1, 3, 13, rotated=0.5),
    "a quarter rotated, gates": Heads(4, 2, 2, 3, 24, gates=3, rotated=0.25),
    "interleaved": Heads(6, 2, 2, 2, 20, interleaved=True),
    "interleaved, part rotated, gates": Heads(3, 2, 2, 2, 10, gates=2, rotated=0.6, interleaved=True),
    "many tiles": Heads(40, 2, 2, 5, 128),
}
EACH_SIZE = pytest.mark.parametrize("heads", SIZES.values(), ids=SIZES)


@pytest.fixture
def kernels(interpreted: Callable[..., ModuleType], monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = interpreted("triton_rope", of=transformer.__name__)
    # So few that programs process several tiles.
    monkeypatch.setattr(module, "_GRAD_PROGRAMS", 5)
    return module


def run(module: Any, heads: Heads, dtype: torch.dtype, *, norms: str | None, mixed: Tensor | None = None) -> list[Tensor]:
    """Runs both operators of a module. Returns query, key, the gradient of the projection, and those of the weights."""
    wide = torch.promote_types(dtype, torch.float32)
    table = heads.table(wide)
    mixed = heads.mixed(dtype) if mixed is None else mixed
    weights = [None, None] if norms is None else heads.weights(dtype)
    options = {"eps": EPS, "zero_centered": norms == "zero-centered", "interleaved": heads.interleaved}
    rotated = module.rotate_qkv(mixed, table.cos, table.sin, *weights, gates=heads.gates, **options)
    kept = None if norms is None else mixed
    back = module.rotate_qkv_grads(*heads.grads(dtype), kept, table.cos, table.sin, *weights, **options)
    return [*rotated, *back]


def separately(heads: Heads, dtype: torch.dtype, *, norms: str | None) -> list[Tensor]:
    """Computes the results of `run` from slices, norms and plain complex arithmetic, in fp64 from rounded operands."""
    mixed = heads.mixed(dtype).double().requires_grad_()
    weights = [weight.double().requires_grad_() for weight in heads.weights(dtype)]
    table = heads.table(torch.promote_types(dtype, torch.float32))
    query, gate, key, value = torch.split(mixed, [heads.queries, heads.gates, 1, 1], dim=3)
    results = []
    for part, weight in ((query.flatten(2, 3), weights[0]), (key.squeeze(3), weights[1])):
        if norms is not None:
            scale = 1 + weight if norms == "zero-centered" else weight
            part = part / (part.square().mean(-1, keepdim=True) + EPS).sqrt() * scale
        half = table.cos.shape[1]
        turned, others = part[..., : 2 * half], part[..., 2 * half :]
        angle = torch.complex(table.cos.double(), table.sin.double())[:, None, None, :]
        if heads.interleaved:
            product = torch.complex(turned[..., ::2], turned[..., 1::2]) * angle
            turned = torch.stack((product.real, product.imag), dim=-1).flatten(-2)
        else:
            product = torch.complex(turned[..., :half], turned[..., half:]) * angle
            turned = torch.cat((product.real, product.imag), dim=-1)
        results.append(torch.cat((turned, others), dim=-1))
    outputs = [*results, value.squeeze(3), *([gate] if heads.gates else [])]
    upstream = [grad.double() for grad in heads.grads(dtype) if grad is not None]
    wanted = [mixed] if norms is None else [mixed, *weights]
    grads = torch.autograd.grad(outputs, wanted, upstream)
    return [*results, grads[0], mixed.new_empty(0) if norms is None else torch.stack(grads[1:])]


@EACH_SIZE
@pytest.mark.parametrize("norms", [None, "plain", "zero-centered"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, *HALF], ids=str)
def test_a_kernel_agrees_with_separate_functions_in_fp64(
    kernels: ModuleType, heads: Heads, norms: str | None, dtype: torch.dtype
) -> None:
    found, expected = run(kernels, heads, dtype, norms=norms), separately(heads, dtype, norms=norms)
    # One rounding of each result. Only sums of terms with both signs are less accurate.
    eps = torch.finfo(dtype).eps
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == dtype and one.shape == other.shape and one.is_contiguous()
        computed = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
        torch.testing.assert_close(one.double(), other, rtol=0.51 * eps + 8 * computed, atol=200 * computed)
