"""Tests attention over ranks that hold parts of the sequences against the core on whole sequences."""

import re
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.parallel_state import create_hierarchical_groups
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.attention import over_ranks
from megatron.core.transformer.context_parallel import split_sequence
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnBackend
from tests.counts import slow, soak_only
from tests.harness import run_on_ranks
from tests.unit_tests.core.models.small_models import small_config

HEADS, GROUPS, WIDTH, BATCH = 8, 4, 8, 2
# (exchange, window, whether samples are packed)
Case = tuple[str, tuple[int, int] | None, bool]
FEATURES = list(product((None, (5, 0)), (False, True)))
KINDS = ("p2p", "all_gather", "a2a", "a2a+p2p")
# Levels of a2a+p2p by number of ranks: heads are exchanged between two ranks; rings have the remaining size.
LEVELS = {2: (2, 1), 4: (2, 2)}
CASES: list[Case] = [(kind, *feature) for kind in KINDS for feature in FEATURES]
VARIANTS: dict[str, dict[str, Any]] = {
    "auto": {"attention_backend": AttnBackend.auto},
    "unfused": {"attention_backend": AttnBackend.unfused},
    "narrow values": {"attention_backend": AttnBackend.auto, "value_width": WIDTH - 3},
    "wide values": {"attention_backend": AttnBackend.auto, "value_width": WIDTH + 3},
    "unfused, narrow values": {"attention_backend": AttnBackend.unfused, "value_width": WIDTH - 3},
    "bf16": {"params_dtype": torch.bfloat16},
    "sinks": {"softmax_type": "learnable"},
}
EVERY = list(product(CASES, VARIANTS))
# Covers every pair of exchange, window, packing and variant.
PAIRS = [
    ((kind, *FEATURES[(row + column) % len(FEATURES)]), variant)
    for row, variant in enumerate(VARIANTS)
    for column, kind in enumerate(KINDS)
]
LEVEL_PAIRS = [pair for pair in PAIRS if pair[0][0] == "a2a+p2p" and pair[1] != "auto"]


def compare(
    kind: str,
    window: tuple[int, int] | None,
    packed: bool,
    *,
    value_width: int = WIDTH,
    levels: tuple[int, int] | None = None,
    **fields: Any,
) -> list[float]:
    """Returns the largest differences of the output and of the query, key, value and sink gradients from the core's.

    Each is relative to the largest expected value.
    """
    size = dist.get_world_size()
    # On four ranks a chunk is shorter than the window.
    seq, dtype = 8 * size if size == 2 else 4 * size, fields.get("params_dtype", torch.float64)
    shape = {"num_attention_heads": HEADS, "num_query_groups": GROUPS, "kv_channels": WIDTH, "window_size": window}
    shape |= {"context_parallel_size": size, "cp_comm_type": [kind]}
    groups = ProcessGroupCollection(cp=dist.group.WORLD)
    if kind == "a2a+p2p":
        levels = levels or LEVELS[size]
        shape["hierarchical_context_parallel_sizes"] = list(levels)
        groups.hcp = level_groups(levels)
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
    around_core = over_ranks(core, config, kind=config.cp_comm_type_of_layer(1), groups=groups)
    output = around_core(core, *parts, packed_seq_params=segments)
    output.backward(own_part(grad))
    # Each rank computes a share of a parameter's gradient.
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


@cache
def level_groups(levels: tuple[int, ...]) -> list[dist.ProcessGroup]:
    return create_hierarchical_groups(dist.get_rank(), range(dist.get_world_size()), levels)[0]


def own_part(whole: Tensor) -> Tensor:
    return split_sequence(whole.detach(), 0, size=dist.get_world_size(), rank=dist.get_rank())


def difference(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).abs().max() / expected.double().abs().max())


def compare_all(chosen: list[tuple[Case, str]]) -> list[tuple[Case, str, list[float]]]:
    return [(case, variant, compare(*case, **VARIANTS[variant])) for case, variant in chosen]


# "2 ranks" covers each pair of an exchange, a window, packing and a variant; "4 ranks" covers each case and each
# variant of two levels. The other ids repeat these.
@pytest.mark.parametrize(
    ("ranks", "chosen"),
    [(2, PAIRS), (4, [(case, "auto") for case in CASES] + LEVEL_PAIRS), soak_only(2, EVERY), soak_only(4, EVERY)],
    ids=["2 ranks", "4 ranks", "2 ranks, all", "4 ranks, all"],
)
def test_every_exchange_gives_what_one_rank_with_all_tokens_gets(ranks: int, chosen: list[tuple[Case, str]]) -> None:
    for outcomes in run_on_ranks(compare_all, ranks, chosen):
        for case, variant, differences in outcomes:
            assert max(differences) <= (2e-2 if variant == "bf16" else 1e-13), (case, variant, differences)


def refusals_of_levels() -> list[str]:
    shape = {"num_attention_heads": HEADS, "num_query_groups": 2, "context_parallel_size": 4}
    fields = {**shape, "cp_comm_type": "a2a+p2p", "hierarchical_context_parallel_sizes": [2, 2]}
    config = small_config(**fields)
    core, other = DotProductAttention(config, 1), torch.nn.Identity()
    cp, levels = dist.group.WORLD, level_groups((2, 2))
    hcp, swapped = ProcessGroupCollection(cp=cp, hcp=levels), ProcessGroupCollection(cp=cp, hcp=level_groups((4, 1)))
    query, key = torch.zeros(8, 1, HEADS, WIDTH), torch.zeros(8, 1, 1, WIDTH)
    mask = torch.zeros(1, 1, 32, 32, dtype=torch.bool)
    attend = over_ranks(core, config, kind="a2a+p2p", groups=hcp)
    calls: list[Any] = [
        lambda: over_ranks(core, config, kind="a2a+p2p", groups=ProcessGroupCollection(cp=cp)),
        lambda: over_ranks(core, config, kind="a2a+p2p", groups=swapped),
        lambda: over_ranks(other, config, kind="a2a+p2p", groups=hcp),
        lambda: attend(core, query, key, key),
        lambda: attend(core, query, query, query, mask),
    ]
    found = []
    for call in calls:
        with pytest.raises(ValueError) as error:
            call()
        found.append(str(error.value))
    return found


def test_what_two_levels_do_not_have_is_refused_by_name() -> None:
    sizes = r"hierarchical_context_parallel_sizes is \[2, 2\]"
    expected = [
        rf"{sizes}, but the groups of pg_collection.hcp have \[\] ranks",
        rf"{sizes}, but the groups of pg_collection.hcp have \[4, 1\] ranks",
        "cp_comm_type is a2a\\+p2p and the attention core is a Identity: the core must be a DotProductAttention",
        rf"cp_comm_type is a2a\+p2p, {sizes} and a rank has 1 key/value heads: must be divisible by 2",
        r"the attention mask is \[1, 1, 32, 32\] and context_parallel_size is 4: must be causal",
    ]
    for messages in run_on_ranks(refusals_of_levels, 4):
        for message, words in zip(messages, expected, strict=True):
            assert re.match(words, message), message


def compare_levels(levels: tuple[int, int]) -> list[list[float]]:
    return [compare("a2a+p2p", *feature, levels=levels, softmax_type="learnable") for feature in FEATURES]


# With levels of unequal sizes, exchanging a rank's positions on the two levels would be detected.
@pytest.mark.parametrize(
    ("ranks", "levels"), [(4, (1, 4)), (4, (4, 1)), slow(8, (2, 4)), slow(8, (4, 2))], ids=lambda value: str(value)
)
def test_levels_of_any_sizes_give_what_one_rank_with_all_tokens_gets(ranks: int, levels: tuple[int, int]) -> None:
    for differences in run_on_ranks(compare_levels, ranks, levels):
        assert max(map(max, differences)) <= 1e-13, differences
