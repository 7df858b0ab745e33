"""Traces the megatron.core functions on the paths of a token and of a saved activation. Holds no tests.

`trace_token` runs an expert layer on two gloo ranks, each with half of the experts, with all-to-all dispatch, in fp32.
After a warm-up it traces one forward and backward. With STATIC, buffers have a fixed size. With STASH, rows saved for
backward are also moved to pages; then two layers run, because the rows of the last layer are not moved.
`trace_activation` traces only a stash, on one rank, around functions that are unaware of it.

As a program it prints the paths and their measures. It uses only public names and `expert_step`, so that it also
measures other commits that contain walks.py, given the path of their tree:

    PYTHONPATH=/path/of/a/tree .venv/bin/python tests/distributed/token_walk.py
"""

import enum
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.models.gpt.gpt_layer_specs import get_mlp_module_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.paged_stash import PagedStash, PagePool, PoolLayout
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.distributed.walks import CORE, ROOT, Entered, count_lines, count_statements, lines, paths, traced
from tests.harness import run_on_ranks

RANKS, EXPERTS, HIDDEN, SEQUENCE, BATCH = 2, 4, 32, 8, 2
MOE, STASH_FOLDER = CORE / "transformer" / "moe", CORE / "transformer" / "moe" / "paged_stash"


class Buffers(enum.Enum):
    """How an expert layer stores the rows of its experts."""

    DYNAMIC = "as many rows as come"
    STATIC = "buffers of a fixed size"
    STASH = "buffers of a fixed size whose live rows wait in pages"


def trace_token(buffers: Buffers) -> list[list[Entered]]:
    """Returns the functions that each rank enters in the forward and backward of expert layers."""
    return run_on_ranks(_token_on_rank, RANKS, buffers)


def trace_activation() -> list[Entered]:
    """Returns the functions entered by two expert groups, their backward and the end of a step. See PagedStash."""
    torch.manual_seed(0)
    stash = PagedStash(PagePool("cpu", PoolLayout(page_bytes=4096, device_pages=64)))
    x = torch.randn(16, HIDDEN, requires_grad=True)
    weights = [torch.randn(HIDDEN, HIDDEN, requires_grad=True) for _ in range(2)]

    def step() -> None:
        rows = x
        for number, weight in enumerate(weights):
            with stash.context(f"layer {number}", 12, max_rows=16):
                rows = (rows @ weight).sigmoid()
        rows[:12].sum().backward()
        assert not stash.is_void_sync()
        stash.reset()

    return _traced_after_warm_up(step)


def without_activation(token: Sequence[Entered]) -> list[str]:
    """Returns `file: qualname` of each function on a token's path that is not on a saved activation's path."""
    of_activation = set(lines(trace_activation()))
    return [line for line in lines(token) if line not in of_activation]


def _token_on_rank(buffers: Buffers) -> list[Entered]:
    torch.manual_seed(0)
    fields: dict[str, Any] = {} if buffers is Buffers.DYNAMIC else {"moe_expert_rank_capacity_factor": 2.0}
    config = TransformerConfig(
        num_layers=2,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        ffn_hidden_size=48,
        moe_ffn_hidden_size=48,
        num_moe_experts=EXPERTS,
        moe_router_topk=2,
        moe_router_load_balancing_type="aux_loss",
        moe_aux_loss_coeff=0.01,
        moe_grouped_gemm=True,
        moe_token_dispatcher_type="alltoall",
        expert_model_parallel_size=RANKS,
        activation_func=F.silu,
        gated_linear_unit=True,
        add_bias_linear=False,
        use_cpu_initialization=True,
        **fields,
    )
    world: Any = torch.distributed.group.WORLD
    groups = ProcessGroupCollection(ep=world, tp_ep=world, dp=world, dp_cp=world)
    spec = get_mlp_module_spec(False, EXPERTS, True)
    layers = [build_module(spec, config=config, pg_collection=groups, layer_number=number) for number in (1, 2)]
    x = torch.randn(SEQUENCE, BATCH, HIDDEN, requires_grad=True)
    stash = None
    if buffers is Buffers.STASH:
        pool = PagePool("cpu", PoolLayout(page_bytes=1024, device_pages=256), scratch_pages=64)
        stash = PagedStash(pool, computes_in_pages=True)
        for layer in layers:
            layer.expert_step = layers[0].expert_step
        layers[0].expert_step.stash = stash
    if stash is None:
        layers = layers[:1]

    def step() -> None:
        if layers[0].expert_step is not None:
            layers[0].expert_step.begin()
        hidden: Tensor = x
        for layer in layers:
            hidden = layer(hidden)[0]
        hidden.square().mean().backward()
        if stash is not None:
            assert not stash.is_void_sync()
            stash.reset()

    return _traced_after_warm_up(step)


def _traced_after_warm_up(step: Callable[[], None]) -> list[Entered]:
    for _ in range(2):
        step()
    with traced([CORE]) as entered:
        step()
    return entered


def report(name: str, entered: Sequence[Entered]) -> str:
    """Returns the measures of a walk, followed by its functions, as text."""
    files = paths(entered)
    in_stash = [path for path in files if (ROOT / path).is_relative_to(STASH_FOLDER)]
    of_moe = [path for path in files if (ROOT / path).is_relative_to(MOE) and path not in in_stash]
    return "\n".join(
        [
            f"== {name}: {len(files)} files, {count_lines(ROOT / path for path in files)} lines; "
            f"{len(in_stash)} files of paged_stash, {len(of_moe)} others of moe",
            *(f"   {path}" for path in files),
            "",
            *lines(entered),
            "",
        ]
    )


def sizes() -> str:
    """Returns the numbers of files, lines and statements of the packages that these paths pass through."""
    parts: dict[str, list[Path]] = {
        "transformer/*.py": [*(CORE / "transformer").glob("*.py")],
        "transformer/moe/*.py": [*MOE.glob("*.py")],
        "transformer/moe/static_rows": [*(MOE / "static_rows").rglob("*.py")],
        "transformer/moe/paged_stash": [*STASH_FOLDER.rglob("*.py")],
        "graphs": [*CORE.glob("graph*.py"), CORE / "full_cuda_graph.py", *(CORE / "graphs").rglob("*.py")],
        "device": [*CORE.glob("device.py"), CORE / "cpu_heap.py", *(CORE / "device").rglob("*.py")],
    }
    rows = []
    for name, found in parts.items():
        files = [path for path in found if path.exists()]
        rows.append(
            f"{name:32} {len(files):3} files {count_lines(files):6} lines {count_statements(files):6} statements"
        )
    return "\n".join(rows)


if __name__ == "__main__":
    print(sizes(), end="\n\n")
    for kind in Buffers:
        print(report(f"token, {kind.value}", trace_token(kind)[0]))
    print(report("saved activation", trace_activation()))
