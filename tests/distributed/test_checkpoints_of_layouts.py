"""Tests that a checkpoint of any layout loads bitwise in any other: weights and optimizer state by logical name.

It follows a chain of layouts that mainly split experts. test_any_layout_to_any covers random pairs.
"""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from megatron.training.training import run_step
from tests.counts import long_count
from tests.distributed.pair_runs import PAIRS
from tests.distributed.parity import Box, boxes_of_state, layout, put_together
from tests.distributed.tiny_runs import check_relay, started_run
from tests.functional_tests.case import Flags, command_line, read_bases
from tests.harness import run_on_ranks

RANKS = 8
# fp32 master weights of bf16 weights, a tied embedding with padding rows, dense and expert layers.
MODEL: Flags = {
    **read_bases()["moe"],
    "num-layers": 4,
    "num-attention-heads": 8,
    "num-query-groups": 4,
    "num-experts": 8,
    "moe-layer-freq": "[0,1,1,1]",
    "moe-router-score-function": "sigmoid",
    "moe-router-enable-expert-bias": True,
    "untie-embeddings-and-output-weights": None,
    "bf16": True,
    "vocab-size": 60,
    "padded-vocab-size": 128,
    "make-vocab-size-divisible-by": 1,
    "micro-batch-size": 1,
    "global-batch-size": RANKS,
}
ALLTOALL: Flags = {"moe-token-dispatcher-type": "alltoall"}
ZBV: Flags = {"pipeline-schedule": "zbv"}
DUALPIPEV: Flags = {"pipeline-schedule": "dualpipev", **PAIRS, **ALLTOALL}
LAYOUTS: list[Flags] = [
    layout(2, pp=2, vpp=2, ep=2),
    layout(ep=8),
    {**layout(2, pp=2, ep=2), **ZBV},
    layout(4, ep=2, etp=4),
    {**layout(pp=2, ep=4), **DUALPIPEV},
    layout(cp=2, pp=4, etp=2),
    layout(2, 2, 2, ep=4),
    layout(),
][: long_count(4, soak=8)]
# Covers loads from sharded states to sharded and unsharded ones, and from unsharded states to sharded ones.
SHARDED = (0, 1, 2, 4, 5, 6)


@pytest.mark.slow
def test_a_checkpoint_of_any_layout_loads_in_any_other(tmp_path: Path) -> None:
    # Each run loads the checkpoint of the previous one and saves it again, ending with a single process.
    argvs = []
    for number, sizes in enumerate([*LAYOUTS, {}]):
        flags: Flags = {**MODEL, **sizes, "save": tmp_path / f"{number}", "ckpt-format": "torch_dist"}
        flags["use-distributed-optimizer"] = True if sizes and number in SHARDED else None
        if number > 0:
            flags["load"] = tmp_path / f"{number - 1}"
        argvs.append(command_line(flags))
    by_rank = [*run_on_ranks(_states, RANKS, argvs[:-1], timeout=300), *run_on_ranks(_states, 1, argvs[-1:])]
    states = [put_together([box for own in rank for box in own]) for rank in zip(*by_rank[:-1])]
    states.append(put_together(by_rank[-1][0]))
    trained = states[0]
    assert any(".exp_avg" in name or "exp_avg" in name for name in trained)
    for sizes, state in zip([*LAYOUTS[1:], "one process"], states[1:]):
        assert state.keys() == trained.keys()
        different = [name for name in state if not torch.equal(state[name], trained[name])]
        assert not different, f"{sizes}: {different}"


def _states(argvs: Sequence[Sequence[str]]) -> list[list[Box]]:
    """Returns the state of each run in turn; a run without a checkpoint to load trains first."""
    states = []
    for argv in argvs:
        with started_run(argv) as run:
            if "--load" not in argv:
                for _ in range(2):
                    run_step(run)
            run.save_checkpoint()
            states.append(boxes_of_state(run))
    return states


RELAY: Flags = {**MODEL, **ALLTOALL, "train-iters": 8, "mtp-num-layers": 1, "use-distributed-optimizer": True}


@pytest.mark.slow
def test_runs_go_on_from_checkpoints_of_other_placements_bit_for_bit(tmp_path: Path) -> None:
    plain, virtual = layout(pp=2, ep=2), layout(pp=2, vpp=2, ep=2)
    argvs = [command_line({**RELAY, **flags}) for flags in (plain, {**plain, **ZBV}, virtual, {**plain, **DUALPIPEV})]
    run_on_ranks(check_relay, 4, argvs, [1, 2, 3, 0], str(tmp_path), timeout=300)
