"""Tests that the flex dispatcher's backends, emulated on the CPU, are bitwise equal to torch's collectives."""

import math
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core import parallel_state
from megatron.core.transformer.moe import dispatch_flex
from megatron.core.transformer.moe.dispatch_flex import (
    MoEDeepEPTokenDispatcher,
    MoESymmetricTokenDispatcher,
    SymmetricTransport,
    deep_ep_buffer,
)
from megatron.core.transformer.moe.dispatch_static import (
    MoEStaticAllGatherTokenDispatcher,
    MoEStaticAlltoAllTokenDispatcher,
    MoEStaticTokenDispatcher,
)
from tests.counts import soak_only
from tests.distributed.expert_choices import EXPERTS, ROUTINGS, TOKENS, TOPK, chosen_experts
from tests.distributed.expert_layers import ALLTOALL, KINDS, build_layer, rank_inputs, run_layer
from tests.harness import run_on_ranks
from tests.unit_tests.core.models.small_models import small_config

# The row size in bytes is a multiple of 16, as deep_ep requires.
WIDTH = 8
FIELDS = {
    "hidden_size": WIDTH,
    "num_attention_heads": 1,
    "num_moe_experts": EXPERTS,
    "moe_router_topk": TOPK,
    "moe_grouped_gemm": True,
    "add_bias_linear": False,
    "moe_expert_rank_capacity_factor": 1.0,
}


class SharedFiles:
    """Emulates torch's symmetric memory with files mapped by all ranks; rank 0 reads and writes slowly."""

    def __init__(self, folder: str, num_bytes: int) -> None:
        self.rank = dist.get_rank()
        names = [f"{folder}/{rank}" for rank in range(dist.get_world_size())]
        self.files = [torch.from_file(name, shared=True, size=num_bytes, dtype=torch.uint8) for name in names]

    def get_buffer(self, rank: int, sizes: torch.Size, dtype: torch.dtype, storage_offset: int = 0) -> Tensor:
        if self.rank == 0:
            time.sleep(0.002)
        start = storage_offset * dtype.itemsize
        return self.files[rank][start : start + math.prod(sizes) * dtype.itemsize].view(dtype).view(sizes)

    def barrier(self, channel: int = 0, timeout_ms: int = 0) -> None:
        dist.barrier()


class GlooBuffer:
    """Emulates deep_ep.Buffer of deep_ep 1.0.0: its signatures and the checks of its arguments."""

    def __init__(self, group, num_nvl_bytes=0, num_rdma_bytes=0, low_latency_mode=False, num_qps_per_rank=1):
        assert (num_nvl_bytes, num_rdma_bytes) == (2 * WIDTH * group.size(), 5)
        self.group = group

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Any:
        assert num_ranks in (2, 4), f"Unsupported number of EP ranks: {num_ranks}"
        return SimpleNamespace(get_nvl_buffer_size_hint=lambda size, ranks: size * ranks, get_rdma_buffer_size_hint=min)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Any:
        return SimpleNamespace(get_nvl_buffer_size_hint=min, get_rdma_buffer_size_hint=lambda size, ranks: 5)

    def get_dispatch_layout(self, topk_idx, num_experts, previous_event=None, async_finish=False, on_comm=False):
        assert topk_idx.dtype == torch.int64 and topk_idx.is_contiguous()
        ranks = topk_idx // (num_experts // self.group.size())
        is_in_rank = torch.stack([(ranks == rank).any(1) for rank in range(self.group.size())], dim=1)
        counts = topk_idx.flatten().bincount(minlength=num_experts)
        return is_in_rank.sum(0).int(), None, counts.int(), is_in_rank, "event"

    def dispatch(
        self,
        x,
        handle=None,
        num_tokens_per_rank=None,
        num_tokens_per_rdma_rank=None,
        is_token_in_rank=None,
        num_tokens_per_expert=None,
        topk_idx=None,
        topk_weights=None,
        expert_alignment=1,
        config=None,
    ):
        assert x.dtype == torch.bfloat16 and x.dim() == 2 and x.is_contiguous()
        if handle is not None:
            assert topk_idx is None and topk_weights is None
            return self._gather(x)[handle[0]], None, None, None, None, "event"
        assert topk_weights.dtype == torch.float32 and topk_weights.is_contiguous()
        assert num_tokens_per_rank.dtype == num_tokens_per_expert.dtype == torch.int32
        chosen = self._gather(is_token_in_rank)[:, self.group.rank()].nonzero().view(-1)
        share = len(num_tokens_per_expert) // self.group.size()
        experts = self._gather(topk_idx)[chosen] - self.group.rank() * share
        is_here = (experts >= 0) & (experts < share)
        weights = self._gather(topk_weights)[chosen].where(is_here, math.nan)
        counts = experts[is_here].bincount(minlength=share).tolist()
        return self._gather(x)[chosen], experts.where(is_here, -1), weights, counts, (chosen, len(x)), "event"

    def combine(self, x, handle, topk_weights=None, config=None):
        assert x.dtype == torch.bfloat16 and x.is_contiguous() and len(x) == len(handle[0])
        return self._sum(x, handle), None if topk_weights is None else self._sum(topk_weights, handle), "event"

    def _gather(self, tensor: Tensor) -> Tensor:
        parts: list[Any] = [None] * self.group.size()
        dist.all_gather_object(parts, tensor, group=self.group)
        return torch.cat(parts)

    def _sum(self, x: Tensor, handle: tuple[Tensor, int]) -> Tensor:
        chosen, num_tokens = handle
        whole = torch.zeros(self.group.size() * num_tokens, x.shape[1])
        whole[chosen] = x.float()
        dist.all_reduce(whole, group=self.group)
        return whole[self.group.rank() * num_tokens :][:num_tokens].to(x.dtype)


@contextmanager
def stand_ins(folder: str) -> Iterator[None]:
    """Provides emulations of both libraries inside the context."""
    files = SharedFiles(folder, 1 << 20)
    with (
        patch.object(SymmetricTransport, "workspace", lambda self, num_bytes: files),
        patch.dict("sys.modules", deep_ep=SimpleNamespace(Buffer=GlooBuffer)),
    ):
        yield


def step(dispatcher: MoEStaticTokenDispatcher, routing: str, factor: float) -> list[Tensor]:
    """Returns received and lost rows, the output and both gradients.

    The values are small integers, so sums are exact in any order.
    """
    generator = torch.Generator().manual_seed(dist.get_rank())
    integers = partial(torch.randint, -2, 3, (TOKENS, WIDTH), generator=generator)
    tokens = integers().bfloat16().requires_grad_()
    probs = (torch.randint(1, 5, (TOKENS, TOPK), generator=generator) / 4).requires_grad_()
    dispatcher.set_capacity_factor(factor)
    ready = dispatcher.dispatch_preprocess(tokens, chosen_experts(dist.get_rank(), routing), probs)
    rows, counts, weights = dispatcher.dispatch_postprocess(*dispatcher.token_dispatch(*ready))
    weighted = dispatcher.combine_preprocess(rows * weights.bfloat16().unsqueeze(1))
    output = dispatcher.combine_postprocess(dispatcher.token_combine(weighted))
    output.backward(integers().bfloat16())
    live = [rows[: counts.sum()], weights[: counts.sum()]]
    found = dispatcher.take_demand()
    demand = [found.rows_missing, found.factor_needed]
    return [tensor.detach() for tensor in (output, tokens.grad, probs.grad, counts, *live, *demand)]


def on_rank(layout: tuple[int, int], folder: str) -> None:
    parallel_state.initialize_model_parallel(
        expert_model_parallel_size=layout[0], expert_tensor_parallel_size=layout[1]
    )
    groups, share = parallel_state.get_process_groups(), EXPERTS // layout[0]
    config = small_config(**FIELDS, expert_model_parallel_size=layout[0], expert_tensor_parallel_size=layout[1])
    local = range(EXPERTS)[dist.get_rank() // layout[1] * share :][:share]
    # Fills uninitialized memory with NaN.
    torch.use_deterministic_algorithms(True, warn_only=True)
    with stand_ins(folder):
        for ours, reference in (
            (MoEDeepEPTokenDispatcher, MoEStaticAllGatherTokenDispatcher),
            (MoESymmetricTokenDispatcher, MoEStaticAlltoAllTokenDispatcher),
        ):
            kinds = [
                kind(share, local, config=config, pg_collection=groups, row_alignment=4) for kind in (ours, reference)
            ]
            lost = torch.zeros(1, dtype=torch.int64)
            for case in [(routing, factor) for routing in ROUTINGS for factor in (1.0, 8.0)]:
                found, wanted = (step(kind, *case) for kind in kinds)
                for number, (one, same) in enumerate(zip(found, wanted, strict=True)):
                    assert one.isfinite().all() and torch.equal(one, same), (ours, case, number, one, same)
                lost += found[-2]
            dist.all_reduce(lost)
            assert lost > 0, "some cases must exceed the capacity"


# (2, 2) splits across experts and within them; the others split only across experts.
@pytest.mark.slow
@pytest.mark.parametrize("layout", [soak_only((2, 1)), soak_only((4, 1)), (2, 2)])
def test_back_ends_give_what_the_collectives_give_with_rows_lost_too(layout: tuple[int, int]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run_on_ranks(on_rank, layout[0] * layout[1], layout, folder)


def layer_on_rank(folder: str) -> None:
    parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
    build = partial(build_layer, parallel_state.get_process_groups())
    flex = {**KINDS["static"], "moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "symm_mem"}
    with pytest.raises(ValueError, match="requires a CUDA device .the current device is cpu.: use .*alltoall"):
        build(**flex)
    with stand_ins(folder):
        with patch.object(dispatch_flex, "default_device", lambda: torch.device("cuda")):
            layer = build(**flex)
        assert isinstance(layer.token_dispatcher.transport, SymmetricTransport)
        runs = [run_layer(one, *rank_inputs(dist.get_rank())) for one in (layer, build(**KINDS["static"], **ALLTOALL))]
    for found, wanted in zip(*(([output, x_grad, *grads.values()]) for output, x_grad, grads in runs), strict=True):
        assert torch.equal(found, wanted)


def test_a_layer_uses_the_back_end_that_is_there_and_refuses_one_that_is_not() -> None:
    with tempfile.TemporaryDirectory() as folder:
        run_on_ranks(layer_on_rank, 2, folder)


def test_a_number_of_ranks_that_deep_ep_cannot_serve_is_named() -> None:
    with patch.dict("sys.modules", deep_ep=SimpleNamespace(Buffer=GlooBuffer)):
        with pytest.raises(ValueError, match="(?s)deepep with 1 expert-parallel ranks: Unsupported.*alltoall"):
            deep_ep_buffer(None, 16)


def test_gpus_that_share_no_memory_are_refused_before_the_first_step() -> None:
    config = small_config(**FIELDS)
    with patch.object(SymmetricTransport, "workspace", side_effect=RuntimeError("no peer access")):
        with pytest.raises(ValueError, match="symm_mem, but the GPUs .*no peer access.*alltoall"):
            MoESymmetricTokenDispatcher(EXPERTS, range(EXPERTS), config=config)


def grow_on_rank() -> list[int]:
    """Exchanges several sizes before, during and after a capture; returns the sizes of the buffers used."""
    sizes = list[int]()

    class Buffer:
        rank = dist.get_rank()

        def get_buffer(self, rank: int, shape: Any, dtype: torch.dtype, storage_offset: int = 0) -> Tensor:
            return torch.zeros(shape, dtype=dtype)

        def barrier(self) -> None:
            pass

    def workspace(self: SymmetricTransport, num_bytes: int) -> Buffer:
        sizes.append(max(num_bytes, *sizes, 0))
        return Buffer()

    def exchange(num_rows: int, *, is_captured: bool = False) -> None:
        with patch.object(dispatch_flex, "is_capturing", lambda device: is_captured):
            transport.launch([torch.zeros(2 * num_rows, 4, dtype=torch.bfloat16)], send=None, receive=None)

    with patch.object(SymmetricTransport, "workspace", workspace):
        transport = SymmetricTransport(dist.group.WORLD)
        transport.reserve(160)
        exchange(10)
        exchange(20)
        with pytest.raises(
            RuntimeError, match=r"symm_mem: an exchange of 336 .* than the 320 bytes that CUDA graphs use"
        ):
            exchange(21, is_captured=True)
        # The capture failed, so the step can run eagerly.
        exchange(21)
        exchange(20, is_captured=True)
        with pytest.raises(RuntimeError, match="cannot grow while graphs exist: .*--cuda-graph-impl none"):
            exchange(30)
        # Reserving no more than the current size leaves the graphs valid.
        transport.reserve(320)
        exchange(5)
        with pytest.raises(RuntimeError, match="an exchange of 480 bytes"):
            exchange(30)
        transport.reserve(480)
        exchange(30)
    return sizes


def test_the_buffer_of_symmetric_memory_does_not_grow_under_a_graph() -> None:
    assert run_on_ranks(grow_on_rank, 2, timeout=60) == 2 * [[160, 160, 320, 336, 336, 336, 480, 480]]


def test_the_buffer_of_symmetric_memory_is_reserved_for_the_largest_exchange() -> None:
    config = small_config(**FIELDS)
    with patch.object(SymmetricTransport, "workspace"), patch.object(SymmetricTransport, "reserve") as reserved:
        dispatcher = MoESymmetricTokenDispatcher(EXPERTS, range(EXPERTS), config=config)
        for factor in (0.5, 1.0):
            dispatcher.set_capacity_factor(factor)
            dispatcher.reserve(TOKENS, row_bytes=2 * WIDTH)
    balanced = 2 * WIDTH * TOKENS * TOPK
    assert [call.args[0] for call in reserved.call_args_list] == [balanced // 2, balanced]


@pytest.mark.parametrize("backend", ["deepep", "symm_mem"])
def test_a_back_end_is_refused_for_what_it_lacks_and_for_nothing_else(backend: str) -> None:
    flex = {**FIELDS, "moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": backend}
    devices, packages = (torch.device("cuda"), torch.device("cpu")), (object(), None)
    for device, package, dtype in product(devices, packages, (torch.bfloat16, torch.float32)):
        lacks = ["a CUDA device"] * (device.type == "cpu")
        if backend == "deepep":
            lacks += ["the package deep_ep"] * (package is None) + ["--bf16"] * (dtype is torch.float32)
        config = small_config(**flex, params_dtype=dtype)
        with (
            patch.object(dispatch_flex, "default_device", lambda device=device: device),
            patch("importlib.util.find_spec", lambda name, package=package: package),
            pytest.raises(ValueError, match=f"which requires {'.*, '.join(lacks)}") if lacks else nullcontext(),
        ):
            dispatch_flex.require_flex_backend(config)
