"""Attention over ranks that hold parts of the sequences, against the core that sees them whole."""

from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.attention import over_ranks
from megatron.core.transformer.context_parallel import split_sequence
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnBackend
from tests.harness import run_on_ranks
from tests.unit_tests.core.models.small_models import small_config

HEADS, GROUPS, WIDTH, BATCH = 8, 4, 8, 2
BACKENDS = (AttnBackend.auto, AttnBackend.unfused)
CASES = list(product(("p2p", "all_gather", "a2a"), (None, (5, 0)), (False, True)))


def compare(
    kind: str, window: tuple[int, int] | None, packed: bool, *, value_width: int = WIDTH, **fields: Any
) -> list[float]:
    """Largest differences of output and gradients of query, key and value from the core's, relative to its largest."""
    group, size = dist.group.WORLD, dist.get_world_size()
    # On four ranks a chunk is shorter than the window.
    seq, dtype = 8 * size if size == 2 else 4 * size, fields.get("params_dtype", torch.float64)
    shape = {"num_attention_heads": HEADS, "num_query_groups": GROUPS, "kv_channels": WIDTH, "window_size": window}
    shape |= {"context_parallel_size": size, "cp_comm_type": [kind]}
    config = small_config(**{"params_dtype": dtype, **shape, **fields})
    core = DotProductAttention(config, 1)
    generator = torch.Generator().manual_seed(3)
    sinks = list(core.parameters())
    for parameter in sinks:
        torch.nn.init.normal_(parameter, generator=generator)
    shapes = ((HEADS, WIDTH), (GROUPS, WIDTH), (GROUPS, value_width))
    whole = [torch.randn(seq, BATCH, *shape, generator=generator).to(dtype) for shape in shapes]
    grad = torch.randn(seq, BATCH, HEADS * value_width, generator=generator).to(dtype)
    borders = torch.tensor([0, 3, 4, seq - 1, seq, seq + 9, 2 * seq], dtype=torch.int32)
    segments = PackedSeqParams(cu_seqlens_q=borders) if packed else None
    parts = [own_part(t).requires_grad_() for t in whole]
    around_core = over_ranks(core, config, layer_number=1, cp_group=group)
    output = around_core(core, *parts, packed_seq_params=segments)
    output.backward(own_part(grad))
    # Ranks have shares of a parameter's gradient.
    of_sinks = [parameter.grad.clone() for parameter in sinks if parameter.grad is not None]
    for share in of_sinks:
        dist.all_reduce(share)
    core.zero_grad()
    leaves = [t.requires_grad_() for t in whole]
    expected = core(*leaves, packed_seq_params=segments)
    expected.backward(grad)
    found = [output, *(part.grad for part in parts)]
    differences = [difference(f, own_part(e)) for f, e in zip(found, [expected, *(leaf.grad for leaf in leaves)])]
    assert len(of_sinks) == len(sinks)
    return differences + [difference(f, p.grad) for f, p in zip(of_sinks, sinks) if p.grad is not None]


def own_part(whole: Tensor) -> Tensor:
    return split_sequence(whole.detach(), 0, size=dist.get_world_size(), rank=dist.get_rank())


def difference(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).abs().max() / expected.double().abs().max())


def compare_all() -> list[tuple[Any, list[float]]]:
    found = [((case, backend), compare(*case, attention_backend=backend)) for case in CASES for backend in BACKENDS]
    widths = ((AttnBackend.auto, WIDTH - 3), (AttnBackend.auto, WIDTH + 3), (AttnBackend.unfused, WIDTH - 3))
    for case, (backend, width) in product(CASES, widths):
        found.append(((case, backend, width), compare(*case, attention_backend=backend, value_width=width)))
    found += [((case, "bf16"), compare(*case, params_dtype=torch.bfloat16)) for case in CASES]
    return found + [((case, "sinks"), compare(*case, softmax_type="learnable")) for case in CASES]


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_exchange_gives_what_one_rank_with_all_tokens_gets(ranks: int) -> None:
    for outcomes in run_on_ranks(compare_all, ranks):
        for case, differences in outcomes:
            assert max(differences) <= (2e-2 if "bf16" in case else 1e-13), (case, differences)
