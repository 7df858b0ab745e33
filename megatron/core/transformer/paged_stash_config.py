"""Settings of the paged stash, and their validation. paged_stash/sizing.py computes the pool sizes."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

import torch

from megatron.core.config_field import config_field, validate_fields
from megatron.core.transformer.moe.paged_stash.page_layout import DEFAULT_PAGE_SIZE, STASH_DTYPES, page_bytes

STASH_COMPUTE = ("pages", "copies")
OVERFLOW_POLICIES = ("recompute", "rerun", "error")
_UNITS = {"": 1, **{f"{name}B": 1000**power for power, name in enumerate(("", "K", "M", "G", "T"))}}
_UNITS |= {f"{name}IB": 1024**power for power, name in enumerate("KMGT", start=1)}


def parse_bytes(text: str, *, field: str = "size") -> int:
    """Parses a size in bytes, such as 1000000, 512MB (1000^2 bytes each) or 2GiB (1024^3 bytes each).

    Raises ValueError naming `field` for any other text.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?) *([A-Za-z]*)", text.strip(), re.ASCII)
    if match is None or match[2].upper() not in _UNITS:
        raise ValueError(
            f"{field} is {text!r}: must be a number of bytes, optionally with a unit, such as 512MB or 2GiB"
        )
    # A Fraction is exact for any number of digits; a float is not.
    return int(Fraction(match[1]) * _UNITS[match[2].upper()])


def _parse_buffer_bytes(text: str) -> int:
    return parse_bytes(text, field="moe_paged_stash_buffer_bytes")


@dataclass(kw_only=True)
class PagedStashConfig:
    """Settings of the page pool that stores the live rows of expert activations until backward."""

    cli_group: ClassVar[str] = "paged stash"

    moe_paged_stash: bool = config_field(
        False,
        help="Save only the live rows of the experts' static buffers for backward, in pages of a shared pool. Memory "
        "use then follows the number of routed rows, while tensor shapes stay independent of the routing.",
    )
    moe_paged_stash_compute: str | None = config_field(
        None,
        help="How the experts' rows get into pages. pages: experts compute in pages, which are allocated before their "
        "forward, and only rows on the host are copied. copies: rows are copied into pages after the forward, and back "
        "before the backward. Omitted: pages on a CPU, copies on a GPU; a plan uses that of MEGATRON_PLAN_DEVICE.",
        choices=STASH_COMPUTE,
    )
    moe_paged_stash_dtype: str | None = config_field(
        None,
        help="Format in which rows of bf16 are stored until backward. mxfp8: e4m3 with a scale for each 32 elements, "
        "about half the bytes. Losses of a step do not change, but gradients are computed from the stored rows, so "
        "training is not bit-identical to that without a stash. Rows are then copied, and nothing is recomputed if "
        "pages run out. Omitted: rows are stored as they are.",
        choices=STASH_DTYPES,
    )
    moe_paged_stash_page_size: int = config_field(
        DEFAULT_PAGE_SIZE,
        help="Rows of hidden size per page. If rows are copied, a power of two. If experts compute in pages on a GPU, "
        "a page holds whole rows of all tensors: the default stands for 128 times the least such size, and other "
        "values must be multiples of that size.",
        at_least=1,
    )
    moe_paged_stash_buffer_size_factor_cuda: float = config_field(
        1.1,
        help="Number of pages on the device, as a multiple of the pages that a perfectly balanced step requires. A "
        "negative value is a multiple of the pages measured in the first step, or in the steps before a "
        "checkpoint. 0 puts all pages on the host.",
    )
    moe_paged_stash_buffer_size_factor_cpu: float = config_field(
        0.0,
        help="Number of pages in pinned host memory, which are used when no device page is free; a multiple of the "
        "same base as the device factor, also if it is negative.",
    )
    moe_paged_stash_buffer_bytes: int | None = config_field(
        None,
        help="Total size of the pages on the device, such as 512MB or 2GiB; overrides the device factor.",
        at_least=1,
        parse=_parse_buffer_bytes,
    )
    moe_paged_stash_prefetch_layers: int = config_field(
        1,
        help="Number of layers whose rows are restored ahead of their backward. Each one occupies full-size buffers. "
        "If experts compute in pages, one layer's rows are restored from the host unless this is 0.",
        at_least=0,
    )
    moe_paged_stash_copy_sms: int = config_field(
        0,
        help="Maximum number of streaming multiprocessors that a copy to or from pages occupies while other kernels "
        "run; 0 means all.",
        at_least=0,
    )
    moe_paged_stash_overflow_policy: str = config_field(
        "recompute",
        help="Action when no page is free. recompute: recompute the activations, and retry the step with more pages "
        "only if even the experts' inputs do not fit. rerun: retry the step with more pages immediately. error: "
        "end the run. If the experts' buffers are too small for the received rows, recompute and rerun retry the "
        "step with larger buffers.",
        choices=OVERFLOW_POLICIES,
    )

    def __post_init__(self) -> None:
        validate_fields(self)

    @property
    def stash_computes_in_pages(self) -> bool:
        """Whether experts compute in the pages of the stash."""
        if self.moe_paged_stash_dtype is not None:
            return False  # rows are encoded when they are copied
        if self.moe_paged_stash_compute is None:
            # The kernels for GPUs have not been measured yet.
            return not torch.cuda.is_available()
        return self.moe_paged_stash_compute == "pages"

    @property
    def stash_recomputes(self) -> bool:
        """Whether gate_up is recomputed if it receives no pages, so that only missing pages for inputs overflow."""
        # A recomputed gate_up would differ from an encoded one, and results would depend on the number of pages.
        return self.moe_paged_stash_overflow_policy == "recompute" and self.moe_paged_stash_dtype is None


def validate_paged_stash(
    config: PagedStashConfig,
    *,
    hidden_size: int,
    itemsize: int,
    is_bf16: bool,
    moe_expert_rank_capacity_factor: float | None,
    has_experts: Sequence[int],
) -> None:
    """Raises ValueError if a prerequisite of the stash is missing or the pool size is invalid.

    itemsize: bytes per element of a parameter. is_bf16: whether experts compute in bf16. has_experts: for each layer, 1
    if it has experts, else 0.
    """
    if not config.moe_paged_stash:
        _refuse_settings_without_stash(config, has_buffers=moe_expert_rank_capacity_factor is not None)
        return
    if 1 not in has_experts:
        raise ValueError("moe_paged_stash is True but no layer has experts: set num_moe_experts, or disable the stash")
    if moe_expert_rank_capacity_factor is None:
        raise ValueError(
            "moe_paged_stash is True but moe_expert_rank_capacity_factor is not set: without it, buffers "
            "are sized to the received rows and a stash saves no memory; set a factor such as 2"
        )
    if config.moe_paged_stash_dtype is not None:
        if not is_bf16:
            raise ValueError(
                f"moe_paged_stash_dtype is {config.moe_paged_stash_dtype!r}, but experts do not compute in bf16, and "
                "only rows of bf16 are encoded: use --bf16, or omit moe_paged_stash_dtype"
            )
        if config.moe_paged_stash_compute == "pages":
            raise ValueError(
                f"moe_paged_stash_compute is 'pages' and moe_paged_stash_dtype is {config.moe_paged_stash_dtype!r}, "
                "but rows are encoded when they are copied into pages: must be 'copies' or omitted"
            )
    size = config.moe_paged_stash_page_size
    if size & (size - 1) and not config.stash_computes_in_pages:
        below = 1 << size.bit_length() - 1
        raise ValueError(f"moe_paged_stash_page_size is {size}: must be a power of two, such as {below} or {2 * below}")
    given = config.moe_paged_stash_buffer_bytes
    device, host = config.moe_paged_stash_buffer_size_factor_cuda, config.moe_paged_stash_buffer_size_factor_cpu
    if device == 0 and host == 0 and given is None:
        raise ValueError(
            "moe_paged_stash_buffer_size_factor_cuda and moe_paged_stash_buffer_size_factor_cpu are both 0: the "
            "pool would have no pages; set one of them, such as 1.1 for the device"
        )
    one_page = page_bytes(size, hidden_size=hidden_size, itemsize=itemsize)
    if given is not None and given < one_page:
        raise ValueError(
            f"moe_paged_stash_buffer_bytes is {given}: must be at least one page, {one_page} bytes "
            f"(moe_paged_stash_page_size {size} x hidden_size {hidden_size} x {itemsize} bytes)"
        )


def validate_stash_with_activation_memory(
    config: PagedStashConfig,
    *,
    has_experts: Sequence[int],
    runs_again: Sequence[bool],
    recompute_modules: Sequence[str],
    offload_modules: Sequence[str],
    offloaded_layers: int,
) -> None:
    """Raises ValueError if recompute or offloading leaves nothing to stash, or would store the same tensors.

    has_experts: for each layer, 1 if it has experts, else 0. runs_again: for each layer, whether it is recomputed as a
    whole. offloaded_layers: number of leading layers that are offloaded as a whole.
    """
    if not config.moe_paged_stash:
        return
    with_experts = [layer for layer, experts in enumerate(has_experts) if experts]
    if all(runs_again[layer] for layer in with_experts):
        raise ValueError(
            "moe_paged_stash is True and recompute_granularity is full for every layer with experts, which leaves "
            "nothing to stash: use recompute_method block for fewer layers, or disable the stash"
        )
    if "moe" in recompute_modules:
        raise ValueError(
            "moe_paged_stash is True and recompute_modules contains moe, which leaves nothing to stash: remove moe, or "
            "disable the stash"
        )
    both = [module for module in offload_modules if module in ("expert_fc1", "moe_act")]
    if both:
        raise ValueError(
            f"moe_paged_stash is True and offload_modules contains {both[0]}, whose rows the stash already "
            "stores: use only one of them; moe_paged_stash_buffer_size_factor_cpu adds stash pages on the host"
        )
    if with_experts[-1] < offloaded_layers:
        raise ValueError(
            f"moe_paged_stash is True and cpu_offloading_num_layers is {offloaded_layers}, which offloads all saved "
            "tensors of every layer with experts: use only one of them; moe_paged_stash_buffer_size_factor_cpu adds "
            "stash pages on the host"
        )


def _refuse_settings_without_stash(config: PagedStashConfig, *, has_buffers: bool) -> None:
    unused = PagedStashConfig()
    # The policy also applies to static buffers, which can overflow without a stash.
    with_buffers = {"moe_paged_stash_overflow_policy"} if has_buffers else set()
    for name in vars(unused):
        if name not in with_buffers and vars(config)[name] != vars(unused)[name]:
            raise ValueError(f"{name} is {vars(config)[name]}: requires moe_paged_stash")
