"""--optimizer-in-backward through the training program (TRAPS B29, B30).

Results are bit-identical to the same mode without the flag in any layout, and each resumes from the other's
checkpoints. test_optimizer_in_backward covers a single wrapped module.
"""

from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.counts import long_count, slow, soak_only
from tests.distributed.layout_runs import (
    BF16,
    EP2,
    FLAGS,
    FP16,
    INTERLEAVED,
    OVERLAPPED,
    RECOMPUTED,
    SHARDED,
    ZERO2,
    Case,
    check_loads_of_the_other,
    train_variants,
)
from tests.distributed.parity import layout
from tests.distributed.tiny_runs import check_relay
from tests.functional_tests.case import Flags, command_line, read_bases
from tests.harness import run_on_ranks

# In the first backward pass the number of gradients per parameter is unknown; from the second on it is known.
STEPS = long_count(3, soak=20)
SMALL: Flags = {"ddp-bucket-size": 1001}
MODES: dict[str, Flags] = {"ddp": {}, "zero1": {**SHARDED, **OVERLAPPED}, "zero2": {**ZERO2, **OVERLAPPED}}
OFF: Flags = {"optimizer-in-backward": True, "clip-grad": 0}
EXACT: Flags = {"optimizer-in-backward": True, "optimizer-in-backward-clip": "exact"}
NORMAL: Flags = {"optimizer-in-backward": None, "optimizer-in-backward-clip": None}
CASES = {
    "dense, 3 ranks, bf16": (Case(3, "dense", {**BF16, "global-batch-size": 6}), (OFF, EXACT)),
    "moe, ep 2": (Case(4, "moe", EP2), (OFF, EXACT)),
    "pp 2, vpp 2, ep 2": (Case(4, "moe", {**INTERLEAVED, **BF16, **EP2}), (OFF, EXACT)),
    "pp 2, tied": (Case(4, "dense", {**layout(pp=2), **BF16, "global-batch-size": 8}), (OFF, EXACT)),
    "pp 2, tied, mtp": (
        Case(4, "dense", {**layout(pp=2), **BF16, "mtp-num-layers": 2, "global-batch-size": 8}),
        (OFF, EXACT),
    ),
    "tp 2, sp": (Case(4, "moe", {**layout(2), "num-query-groups": 2, "global-batch-size": 4}), (OFF, EXACT)),
    "cp 2, recomputed": (Case(2, "llama", {**layout(cp=2), **RECOMPUTED, "global-batch-size": 2}), (OFF, EXACT)),
    "frozen, decoupled": (
        Case(3, "dense", {**BF16, "decoupled-lr": 0.02, "global-batch-size": 6}, frozen="embedding."),
        (OFF, EXACT),
    ),
    "growing batch": (
        Case(3, "dense", {"step-batch-size-schedule": "0:3 96:12 1584:6", "global-batch-size": None}),
        (OFF,),
    ),
    "moe, 3 ranks, fp16": (Case(3, "moe", {**FP16, "global-batch-size": 3}), (EXACT,)),
    "bf16 gradients, per token": (
        Case(2, "llama", {**BF16, "grad-reduce-in-bf16": True, "calculate-per-token-loss": True}),
        (EXACT,),
    ),
}
# Covers every mode and every policy once; `make soak` runs all modes of all cases. Of the omitted cases, "pp 2, vpp 2,
# ep 2" covers bf16 and split experts, and "pp 2, tied, mtp" covers tied tables.
USUAL: dict[tuple[str, str], tuple[Flags, ...]] = {
    ("cp 2, recomputed", "ddp"): (OFF,),
    ("cp 2, recomputed", "zero1"): (EXACT,),
    ("tp 2, sp", "ddp"): (EXACT,),
    ("tp 2, sp", "zero2"): (OFF,),
    ("pp 2, vpp 2, ep 2", "zero1"): (OFF,),
    ("pp 2, vpp 2, ep 2", "zero2"): (EXACT,),
    ("pp 2, tied, mtp", "zero1"): (EXACT,),
    ("moe, 3 ranks, fp16", "zero2"): (EXACT,),
    ("bf16 gradients, per token", "zero1"): (EXACT,),
    ("frozen, decoupled", "zero2"): (OFF,),
    ("growing batch", "ddp"): (OFF,),
}
FAST = ("cp 2, recomputed", "zero1")
CHOSEN = [*USUAL, *(one for one in product(CASES, MODES) if one not in USUAL)]


def _marked(name: str, mode: str) -> Any:
    if (name, mode) == FAST:
        return pytest.param(name, mode)
    return (slow if (name, mode) in USUAL else soak_only)(name, mode)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mode"), [_marked(*one) for one in CHOSEN])
def test_updates_in_backward_have_the_bits_of_the_step_after_it(name: str, mode: str) -> None:
    case, policies = CASES[name]
    if not long_count(0, soak=1):
        policies = USUAL[name, mode]
    flags = {**read_bases()[case.base], **FLAGS, **case.flags, **MODES[mode], **SMALL}
    pairs = [({**flags, **policy, **NORMAL}, {**flags, **policy}) for policy in policies]
    argvs = [command_line(one) for pair in pairs for one in pair]
    for runs in run_on_ranks(train_variants, case.ranks, argvs, case.frozen, STEPS, timeout=60 + 60 * len(argvs)):
        for (reports, weights), (expected, final) in zip(runs[1::2], runs[::2], strict=True):
            for step, reference in zip(reports, expected, strict=True):
                assert step == reference
            assert weights == final
            assert len({step["grad_norm"] for step in reports}) > STEPS // 2


RELAY: Flags = {**read_bases()["moe"], **FLAGS, **BF16, "train-iters": 6, "global-batch-size": 4}
POLICIES = {"clip off": OFF, "exact": EXACT}
RELAYS = [("zero1", "exact"), ("zero2", "clip off")]
# For the other modes, test_optimizer_in_backward exchanges states of a single module in both directions.
MORE_RELAYS = [one for one in product(MODES, POLICIES) if one not in RELAYS]


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "policy"), [slow(*one) for one in RELAYS] + [soak_only(*one) for one in MORE_RELAYS])
def test_b30_runs_go_on_from_each_others_checkpoints_bit_for_bit(mode: str, policy: str, tmp_path: Path) -> None:
    flags = {**RELAY, **MODES[mode], **SMALL, **POLICIES[policy], "overlap-grad-reduce": True}
    argvs = [command_line({**flags, **NORMAL}), command_line(flags)]
    run_on_ranks(check_relay, 2, argvs, [1, 0, 1], str(tmp_path), timeout=300)


# The relay above shows that both kinds of state are equal, and test_zero2_training resumes on other numbers of ranks.
@pytest.mark.soak
def test_b14_any_number_of_ranks_goes_on_from_any_other(tmp_path: Path) -> None:
    flags = {**RELAY, "global-batch-size": 12, **MODES["zero1"], **SMALL, **EXACT}
    argvs = [command_line({**flags, **NORMAL}), command_line(flags)]
    folders = [str(tmp_path / name) for name in ("normal", "in backward")]
    check_loads_of_the_other(argvs, folders, (1, 2, 4))
