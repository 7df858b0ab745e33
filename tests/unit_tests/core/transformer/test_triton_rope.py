"""Kernels that normalize and rotate queries and keys agree with the CPU operators and with plain fp64 arithmetic."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core import transformer
from megatron.core.transformer import rope
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.rope import RotaryEmbedding, RotaryTable
from tests.counts import slow
from tests.unit_tests.core.models.small_models import LLAMA_LIKE, small_config, small_model

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

    def mixed(self, dtype: torch.dtype) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        shape = (self.seq, self.batch, self.groups, self.queries + self.gates + 2, self.width)
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    def table(self, dtype: torch.dtype) -> RotaryTable:
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
    "many tiles": Heads(14, 2, 2, 5, 128),
}
LARGEST = "many tiles"
EACH_SIZE = pytest.mark.parametrize("size", [*list(SIZES)[:-1], slow(LARGEST)])


@pytest.fixture
def kernels(interpreted: Callable[..., ModuleType], monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = interpreted("triton_rope", of=transformer.__name__)
    # Programs process several tiles, and sums several partial sums.
    monkeypatch.setattr(module, "_GRAD_PROGRAMS", 5)
    monkeypatch.setattr(module, "_SUM", {"PARTS": 2, "COLUMNS": 16})
    return module


def run(module: Any, heads: Heads, dtype: torch.dtype, *, norms: str | None, strided: bool = False) -> list[Tensor]:
    """Runs both operators of a module. Returns query, key, the gradient of the projection, and those of the weights."""
    table = heads.table(torch.promote_types(dtype, torch.float32))
    mixed, grads = heads.mixed(dtype), heads.grads(dtype)
    if strided:
        mixed, grads = with_gaps(mixed), [None if grad is None else with_gaps(grad) for grad in grads]
    weights = [None, None] if norms is None else heads.weights(dtype)
    options = {"eps": EPS, "zero_centered": norms == "zero-centered", "interleaved": heads.interleaved}
    rotated = module.rotate_qkv(mixed, table.cos, table.sin, *weights, gates=heads.gates, **options)
    kept = None if norms is None else mixed
    return [*rotated, *module.rotate_qkv_grads(*grads, kept, table.cos, table.sin, *weights, **options)]


def with_gaps(t: Tensor) -> Tensor:
    """Returns the same values in memory in which neither channels nor tokens are adjacent."""
    wide = t.new_full((*t.shape[:2], *(2 * size + 1 for size in t.shape[2:])), torch.nan)
    view = wide[(slice(None), slice(None), *(slice(1, None, 2) for _ in t.shape[2:]))]
    return view.copy_(t)


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
    kernels: ModuleType, size: str, norms: str | None, dtype: torch.dtype
) -> None:
    heads = SIZES[size]
    found, expected = run(kernels, heads, dtype, norms=norms), separately(heads, dtype, norms=norms)
    # One rounding of each result. Only sums of terms with both signs are less accurate.
    eps = torch.finfo(dtype).eps
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == dtype and one.shape == other.shape and one.is_contiguous()
        computed = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
        torch.testing.assert_close(one.double(), other, rtol=0.51 * eps + 8 * computed, atol=200 * computed)


@EACH_SIZE
@pytest.mark.parametrize("norms", [None, "plain"])
def test_a_kernel_reads_any_strides(kernels: ModuleType, size: str, norms: str | None) -> None:
    heads = SIZES[size]
    found, expected = (run(kernels, heads, torch.float32, norms=norms, strided=strided) for strided in (True, False))
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_expanded_gradients_and_frozen_strides_are_read(kernels: ModuleType) -> None:
    heads = SIZES["several samples"]
    table = heads.table(torch.float32)
    shapes = [(heads.seq, heads.batch, count, heads.width) for count in (heads.groups * heads.queries, 2, 2)]
    options = {"eps": EPS, "zero_centered": False, "interleaved": False}
    # The gradient of a sum.
    grads = [torch.tensor(1.5).expand(shape) for shape in shapes]
    args = (None, heads.mixed(torch.float32), *table[:2], *heads.weights(torch.float32))
    found, expected = (module.rotate_qkv_grads(*grads, *args, **options) for module in (kernels, rope))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_the_narrower_dtype_of_input_and_weights_is_that_of_the_result(kernels: ModuleType) -> None:
    heads = SIZES["several samples"]
    table, options = heads.table(torch.float32), {"eps": EPS, "zero_centered": False, "interleaved": False}
    for of_input, of_weights in ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)):
        mixed, weights = heads.mixed(of_input), heads.weights(of_weights)
        grads = [*heads.grads(torch.bfloat16)[:2], heads.grads(of_input)[2], None]
        results = []
        for module in (kernels, rope):
            rotated = module.rotate_qkv(mixed, *table[:2], *weights, gates=0, **options)
            back = module.rotate_qkv_grads(*grads, mixed, *table[:2], *weights, **options)
            results.append([*rotated, *back])
            dtypes = [torch.bfloat16, torch.bfloat16, of_input, of_weights]
            assert [one.dtype for one in results[-1]] == dtypes
        for one, other in zip(*results, strict=True):
            assert (one.double() - other.double()).norm() <= 1e-2 * other.double().norm()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("heads", "width", "half", "first"),
    [(1, 4, 2, 0), (3, 10, 5, 0), (2, 13, 4, 0), (2, 13, 4, 5), (5, 192, 32, 128)],
)
def test_heads_are_rotated_and_rotated_back(
    kernels: ModuleType, heads: int, width: int, half: int, first: int, interleaved: bool, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(1)
    # A slice of wider rows, as the queries of latent attention are.
    t = torch.randn(7, 2, heads, width + 3, generator=generator, dtype=torch.float64).to(dtype)[..., 3:]
    table = RotaryEmbedding(2 * half, 7, dtype=torch.promote_types(dtype, torch.float32))(7)
    for inverse in (False, True):
        options = {"first": first, "interleaved": interleaved, "inverse": inverse}
        found, expected = (module.rotate(t, *table[:2], **options) for module in (kernels, rope))
        assert found.dtype == dtype and found.is_contiguous() and expected.is_contiguous()
        torch.testing.assert_close(found, expected, rtol=2 * torch.finfo(dtype).eps, atol=torch.finfo(dtype).eps)


def test_no_tokens_launch_no_rotation(kernels: ModuleType) -> None:
    empty = replace(SIZES["several samples"], batch=0)
    query, key, grad, grad_weights = run(kernels, empty, torch.float32, norms="plain")
    assert query.numel() == key.numel() == grad.numel() == 0
    assert torch.equal(grad_weights, torch.zeros(2, empty.width))
    assert kernels.rotate(query, *empty.table(torch.float32)[:2], first=0, interleaved=False, inverse=False).shape == (
        query.shape
    )


@pytest.mark.parametrize("tiles", [(1, 1, 1, 0), (8192, 512, 512, 0), (3, 1, 1, 3), (100_000, 1, 1, 100_000)])
def test_programs_cover_each_kind_of_head_within_a_limit(tiles: tuple[int, int, int, int]) -> None:
    triton_rope = pytest.importorskip("megatron.core.transformer.triton_rope")
    programs = triton_rope._programs(tiles)
    assert all((number > 0) == (count > 0) and number <= count for number, count in zip(programs, tiles, strict=True))
    assert sum(programs) <= triton_rope._GRAD_PROGRAMS + len(tiles)


@EACH_SIZE
@pytest.mark.parametrize("norms", [None, "plain", "zero-centered"])
def test_the_operators_fit_what_torch_asks_of_them(size: str, norms: str | None) -> None:
    heads = SIZES[size]
    table, mixed = heads.table(torch.float32), heads.mixed(torch.float32)
    weights = [None, None] if norms is None else heads.weights(torch.float32)
    options = {"eps": EPS, "zero_centered": norms == "zero-centered", "interleaved": heads.interleaved}
    cos_sin = table[:2]
    torch.library.opcheck(
        torch.ops.rope.rotate_qkv.default, (mixed, *cos_sin, *weights), {"gates": heads.gates, **options}
    )
    given = (*heads.grads(torch.float32), None if norms is None else mixed, *cos_sin, *weights)
    torch.library.opcheck(torch.ops.rope.rotate_qkv_grads.default, given, options)
    turn = {"first": 0, "interleaved": heads.interleaved, "inverse": True}
    torch.library.opcheck(torch.ops.rope.rotate.default, (given[0], *cos_sin), turn)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "fields",
    [
        {"qk_layernorm": True},
        {"qk_layernorm": True, "layernorm_zero_centered_gamma": True},
        {"qk_layernorm": True, "attention_output_gate": True, "rotary_interleaved": True},
        {"attention_output_gate": True},
        {},
    ],
    ids=str,
)
def test_attention_has_the_bits_of_norms_and_rotations_as_modules(fields: dict[str, Any], dtype: torch.dtype) -> None:
    config = small_config(**LLAMA_LIKE, num_query_groups=2, params_dtype=dtype, **fields)
    model = small_model(config, rotary_percent=0.5)
    attention = model.decoder.layers[0].self_attention
    assert isinstance(attention, SelfAttention) and attention.has_fused_norms
    torch.manual_seed(1)
    for name, param in attention.named_parameters():
        if "norm" in name:
            param.data.uniform_(-1, 1)
    x = torch.randn(16, 2, 32).to(dtype)
    table, results = model.rotary_pos_emb(16), []
    for is_fused in (True, False):
        attention.has_fused_norms = is_fused
        given = x.clone().requires_grad_()
        output, _ = attention(given, rotary_pos_emb=table)
        wanted = [given, *attention.parameters()]
        results.append([output, *torch.autograd.grad(output.float().square().sum(), wanted)])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_other_norms_run_as_modules() -> None:
    config = small_config(**{**LLAMA_LIKE, "normalization": "LayerNorm"}, qk_layernorm=True)
    attention = small_model(config).decoder.layers[0].self_attention
    assert isinstance(attention, SelfAttention) and not attention.has_fused_norms


def test_a_layer_launches_one_kernel_forward_and_one_backward() -> None:
    pytest.importorskip("triton")
    from benchmarks.kernel_launches import Heads as LaunchedHeads
    from benchmarks.kernel_launches import launches

    for norms, sums in ((None, []), ("plain", ["sum_partials_kernel"])):
        launched = launches("heads", LaunchedHeads("bf16", 128, 64, norms=norms).launch)
        assert [one.kernel_name for one in launched] == ["rotate_kernel", "rotate_grads_kernel", *sums]
