"""Configurations whose steps can be CUDA graphs, as tools/check_capture.py and the lint behind it say on the CPU."""

import re
from functools import cache

import pytest

from tests.distributed.stash_runs import ROUTER, stash
from tests.distributed.tiny_runs import SHARDED
from tests.functional_tests.case import Flags, command_line, read_bases
from tests.harness import launch_on_ranks, run_on_ranks
from tools.check_capture import breaks_of, main

# Without --deterministic-mode more is left to kernels that are chosen by device and precision.
BASES = {name: flags | {"deterministic-mode": None} for name, flags in read_bases().items()}
DROPLESS: Flags = BASES["moe"] | {"moe-shared-expert-intermediate-size": 32}
STATIC: Flags = DROPLESS | {"moe-expert-rank-capacity-factor": 4}
STASH: Flags = STATIC | stash()
EP: Flags = {"expert-model-parallel-size": 2, "global-batch-size": 8}
ALLTOALL: Flags = {"moe-token-dispatcher-type": "alltoall"}
OPTIMIZER: Flags = {"optimizer-cuda-graph": True}
FULL_RECOMPUTE: Flags = {
    "recompute-granularity": "full",
    "recompute-method": "uniform",
    "recompute-num-layers": 1,
}
SELECTIVE: Flags = {
    "recompute-granularity": "selective",
    "recompute-modules": ["core_attn", "moe_act", "shared_experts", "layernorm"],
}
# Of one rank, then of two.
CAPTURABLE: tuple[dict[str, Flags], dict[str, Flags]] = (
    {
        "dense": BASES["dense"],
        "dense with dropout": BASES["dense"] | BASES["dropout"],
        "llama": BASES["llama"],
        "window": BASES["llama"] | {"window-size": "(4,0)"},
        "fp16": BASES["llama"] | BASES["fp16"],
        "per-token loss": BASES["llama"] | {"calculate-per-token-loss": True},
        "dropless": DROPLESS,
        "static": STATIC,
        "static, deterministic": STATIC | {"deterministic-mode": True},
        "static with every layer recomputed": STATIC | FULL_RECOMPUTE,
        "stash": STASH,
        "stash with dropout": STASH | BASES["dropout"],
        "stash with a router's losses and bias": STASH | ROUTER,
        "stash in bf16, per-token loss": STASH | BASES["bf16"] | {"calculate-per-token-loss": True},
        "stash in fp16": STASH | BASES["fp16"],
        "stash that spills": STATIC | stash(1.0, 3.0),
        "stash that drops": STATIC | stash(1.2),
        "stash with parts recomputed": STASH | SELECTIVE,
        "optimizer": STATIC | OPTIMIZER,
        "optimizer in fp16, counting zeros": BASES["llama"]
        | BASES["fp16"]
        | OPTIMIZER
        | {"log-num-zeros-in-grad": True},
    },
    {
        "sharded": BASES["llama"] | SHARDED,
        "sharded optimizer in bf16": BASES["llama"] | SHARDED | BASES["bf16"] | OPTIMIZER,
        "pipeline": BASES["llama"] | {"pipeline-model-parallel-size": 2},
        "tensor parallel": BASES["llama"] | BASES["dropout"] | {"tensor-model-parallel-size": 2},
        "context parallel": BASES["llama"] | {"context-parallel-size": 2},
        "static": STATIC | EP,
        "stash over all-to-all": STASH | EP | ALLTOALL | SHARDED,
    },
)
# What is named in each case: files of lines, or flags.
REFUSED: tuple[dict[str, tuple[Flags, list[str]]], dict[str, tuple[Flags, list[str]]]] = (
    {
        "recompute with dropout": (
            STATIC | FULL_RECOMPUTE | BASES["dropout"],
            ["--recompute-granularity", "random.py", "fused_bias_dropout.py", "fused_bias_dropout.py"],
        ),
        "packed documents": (
            BASES["llama"] | BASES["borders"] | {"no-create-attention-mask-in-dataloader": True},
            ["--reset-attention-mask", "packed_seq_params.py"],
        ),
    },
    {
        "dropless all-to-all": (DROPLESS | EP | ALLTOALL, ["--num-experts", "dispatch_alltoall.py"]),
        "dropless all-gather": (DROPLESS | EP, ["--num-experts", "capacity.py"]),
    },
)


def breaks_of_each(command_lines: dict[str, list[str]]) -> dict[str, list[str]]:
    return {name: breaks_of(argv) for name, argv in command_lines.items()}


@cache
def breaks(num_ranks: int) -> dict[str, list[str]]:
    """Of all configurations for so many ranks, one after the other in one set of processes."""
    flags = CAPTURABLE[num_ranks - 1] | {name: flags for name, (flags, _) in REFUSED[num_ranks - 1].items()}
    lines = {name: command_line(one) for name, one in flags.items()}
    return run_on_ranks(breaks_of_each, num_ranks, lines, backend=None)[0]


def cases(tables: tuple[dict[str, object], dict[str, object]]) -> list[tuple[int, str]]:
    return [(num_ranks, name) for num_ranks, table in enumerate(tables, 1) for name in table]


@pytest.mark.parametrize(("num_ranks", "name"), cases(CAPTURABLE))
def test_configurations_that_are_called_capturable_are(num_ranks: int, name: str) -> None:
    assert breaks(num_ranks)[name] == []


@pytest.mark.parametrize(("num_ranks", "name"), cases(REFUSED))
def test_what_breaks_a_graph_is_named(num_ranks: int, name: str) -> None:
    _, named = REFUSED[num_ranks - 1][name]
    found = [re.search(r"^(--[\w-]+) is|/([\w]+\.py):\d+ \(", one) for one in breaks(num_ranks)[name]]
    assert [match and (match[1] or match[2]) for match in found] == named


def test_the_tool_prints_its_verdict_and_exits_with_it() -> None:
    graph = ["--cuda-graph-impl", "full_iteration", "--cuda-graph-warmup-steps", "1"]
    (fine,) = launch_on_ranks(main, 1, command_line(BASES["dense"]) + graph, backend=None)
    assert (fine.exit_code, fine.stdout.splitlines()[-1].partition(":")[0]) == (0, "CAPTURABLE")
    (broken,) = launch_on_ranks(main, 1, graph + command_line(REFUSED[0]["packed documents"][0]), backend=None)
    assert broken.exit_code == 1
    verdict, flags, line = broken.stdout.splitlines()[-3:]
    assert verdict.startswith("NOT CAPTURABLE") and flags.startswith("1. --reset-attention-mask")
    assert line.startswith("2. torch.Tensor.tolist at ") and line.endswith("or read it after the replay")
