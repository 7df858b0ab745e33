"""Checks that new adapters start from a checkpoint without adapters in any layout, and are in later checkpoints."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from megatron.training.training import run_step
from tests.distributed.parity import layout
from tests.distributed.tiny_runs import started_run
from tests.functional_tests.case import Flags, command_line, read_bases
from tests.harness import run_on_ranks

BASE: Flags = {**read_bases()["llama"], "eval-iters": 0}
ADAPTERS: Flags = {**BASE, "lora-rank": 2}
SEQUENTIAL: Flags = {**read_bases()["moe"], "eval-iters": 0, "moe-grouped-gemm": None}


@pytest.mark.slow
def test_adapters_begin_beside_the_weights_and_go_on(tmp_path: Path) -> None:
    base, adapted = ({"save": f"{tmp_path}/{name}"} for name in ("base", "adapted"))
    from_base = {"load": base["save"], "finetune": True}
    begun = {**ADAPTERS, **from_base, **adapted}
    run_on_ranks(_losses, 1, command_line({**BASE, **base}), 1)
    [[expected]] = run_on_ranks(_losses, 1, command_line({**BASE, **from_base}), 1)
    [first, second], _ = run_on_ranks(_losses, 2, command_line({**begun, **layout(2)}), 2)
    assert first == pytest.approx(expected, rel=1e-6)
    [[again]] = run_on_ranks(_losses, 1, command_line({**ADAPTERS, "load": adapted["save"]}), 1)
    assert again == pytest.approx(second, rel=1e-6)
    refused = [
        ({**ADAPTERS, "load": base["save"]}, "the checkpoint lacks the adapters of --lora-rank: add --finetune"),
        ({**BASE, "load": adapted["save"]}, "checkpoint with different adapters: --lora-rank"),
        ({**ADAPTERS, "lora-rank": 4, "load": adapted["save"]}, "--lora-rank is 4 here, 2 in the checkpoint"),
        ({**ADAPTERS, "lora-alpha": 4, "load": adapted["save"]}, "--lora-alpha is 4.0 here, 32.0 in the checkpoint"),
    ]
    run_on_ranks(_assert_refused, 1, [(command_line(flags), message) for flags, message in refused])


@pytest.mark.slow
def test_adapters_of_grouped_experts_begin_beside_sequential_ones_and_go_on_with_them(tmp_path: Path) -> None:
    base, adapted = ({"save": f"{tmp_path}/{name}"} for name in ("base", "adapted"))
    from_base = {"load": base["save"], "finetune": True}
    run_on_ranks(_losses, 1, command_line({**SEQUENTIAL, **base}), 1)
    [[expected]] = run_on_ranks(_losses, 1, command_line({**SEQUENTIAL, **from_base}), 1)
    begun = {**SEQUENTIAL, **from_base, **adapted, **layout(ep=2), "moe-grouped-gemm": True, "lora-rank": 4}
    [first, second], _ = run_on_ranks(_losses, 2, command_line(begun), 2)
    assert first == pytest.approx(expected, rel=1e-6)
    [[again]] = run_on_ranks(_losses, 1, command_line({**SEQUENTIAL, "lora-rank": 4, "load": adapted["save"]}), 1)
    assert again == pytest.approx(second, rel=1e-6)


def _assert_refused(cases: Sequence[tuple[Sequence[str], str]]) -> None:
    for argv, message in cases:
        with pytest.raises(ValueError, match=message), started_run(argv):
            pass


def _losses(argv: Sequence[str], steps: int, save_after: int = 1) -> list[float]:
    losses = []
    with started_run(argv) as run:
        for step in range(1, steps + 1):
            losses.append(run_step(run)[0].losses["lm loss"])
            if step == save_after and "--save" in argv:
                run.save_checkpoint()
    return losses
