"""Tests which configurations can be captured in CUDA graphs, by tools/check_capture.py and its linter, on the CPU."""

import re
from functools import cache
from unittest.mock import patch

import pytest

from megatron.core.transformer.mlp import MLP
from megatron.tools.capture_configurations import CONFIGURATIONS, DENSE, words_of
from megatron.tools.check_capture import breaks_of, main
from megatron.tools.write_capture_table import PAGE, Verdict, documented, measure, names_of, row, table
from tests.counts import long_count
from tests.harness import launch_on_ranks, run_on_ranks

RECOMPUTED = ["--recompute-granularity", "random.py", "fused_bias_dropout.py", "fused_bias_dropout.py"]
# The graph breaks that are named in each case: the file of a line, or a flag.
NAMED = {
    "recompute with dropout": RECOMPUTED,
    "packed documents": ["--reset-attention-mask", "packed_seq_params.py"],
    "dropless over ranks, all-to-all": ["--expert-model-parallel-size", "dispatch_alltoall.py"],
    "dropless over ranks, all-gather": ["--expert-model-parallel-size", "permutation.py"],
}
# These cover every kind of graph break and every module that can be captured. test_capture_replay.py checks graphs of a
# stash over ranks and of models with all features of published ones. test_module_graphs.py checks graphs of modules
# with a stash whose tensors are recomputed.
USUAL = [
    *NAMED,
    "layers kept on the host",
    "activations kept on the host",
    "Muon in the graph",
    "the same in the graph",
    "the same in fp16",
    "experts that drop over capacity",
    "stash that drops to recompute",
    "stash, optimizer in the graph",
    "ZeRO-1 in bf16, optimizer in the graph",
    "the same with dropout",
    "pipeline of virtual stages",
    "symmetric memory",
    "DeepEP",
]
LOOKED_AT = [name for name in CONFIGURATIONS if name in USUAL or long_count(0, soak=1)]


@cache
def verdicts(ranks: int) -> dict[str, Verdict]:
    """Measures the configurations for this number of ranks, one after the other in one set of processes."""
    names = [name for name in names_of(ranks) if name in LOOKED_AT]
    found: dict[str, Verdict] = run_on_ranks(measure, ranks, names, backend=None, timeout=300)[0]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", LOOKED_AT)
def test_each_configuration_can_be_captured_as_promised_and_documented(name: str) -> None:
    promised, found = CONFIGURATIONS[name], verdicts(CONFIGURATIONS[name].ranks)[name]
    assert (found.whole == []) == promised.is_whole, found.whole
    assert promised.needs_gpu or found.modules == promised.modules.split(), found.parts
    assert row(name, found) in PAGE.read_text(encoding="ascii"), "run `python -m tools.write_capture_table`"


def test_the_documented_table_names_every_configuration_once_and_in_order() -> None:
    rows = [line.split(" | ") for line in documented(PAGE.read_text(encoding="ascii")).splitlines()]
    assert [one[0].removeprefix("| ") for one in rows[3:-1]] == list(CONFIGURATIONS)


@pytest.mark.soak
def test_the_documented_table_is_what_is_found_now() -> None:
    """Compares the whole table; without soak, the tests above compare some rows and all names."""
    assert documented(PAGE.read_text(encoding="ascii")) == table(verdicts(1) | verdicts(2))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMED)
def test_what_breaks_a_graph_is_named(name: str) -> None:
    whole = verdicts(CONFIGURATIONS[name].ranks)[name].whole
    found = [re.search(r"^(--[\w-]+) is|/([\w]+\.py):\d+ \(", one) for one in whole]
    assert [match and (match[1] or match[2]) for match in found] == NAMED[name]


def breaks_of_reading_layers(modules: list[str]) -> list[str]:
    forward = MLP.forward

    def reads(mlp: MLP, *args: object) -> object:
        for parameter in mlp.parameters():
            parameter.sum().item()
        return forward(mlp, *args)

    with patch.object(MLP, "forward", reads):
        return breaks_of([*words_of(DENSE), "--cuda-graph-impl", "local", "--cuda-graph-modules", *modules])


@pytest.mark.slow
def test_what_breaks_a_part_is_named_where_the_part_is_captured() -> None:
    (found,) = run_on_ranks(breaks_of_reading_layers, 1, ["attn", "mlp"], backend=None)
    assert [line.partition(" at ")[0] for line in found] == ["torch.Tensor.item"]
    assert f"{__file__}:" in found[0]
    assert run_on_ranks(breaks_of_reading_layers, 1, ["attn"], backend=None) == [[]]


@pytest.mark.slow
def test_the_tool_prints_its_verdict_and_exits_with_it() -> None:
    graph = ["--cuda-graph-impl", "full_iteration", "--cuda-graph-warmup-steps", "1"]
    (fine,) = launch_on_ranks(main, 1, words_of(DENSE) + graph, backend=None)
    assert (fine.exit_code, fine.stdout.splitlines()[-1].partition(":")[0]) == (0, "CAPTURABLE")
    (broken,) = launch_on_ranks(main, 1, graph + CONFIGURATIONS["packed documents"].argv, backend=None)
    assert broken.exit_code == 1
    verdict, flags, line = broken.stdout.splitlines()[-3:]
    assert verdict.startswith("NOT CAPTURABLE") and flags.startswith("1. --reset-attention-mask")
    assert line.startswith("2. torch.Tensor.tolist at ") and line.endswith("or read it after the replay")
