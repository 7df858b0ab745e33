"""examples/qwen3_moe_hf.py trains a transformers module with the wrapper, the sharded optimizers and the stash."""

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from examples import qwen3_moe_hf
from tests.counts import long_count, soak_only
from tests.harness import launch_on_ranks, run_on_ranks

STEPS = 3
SMALL = ["--sequence", "32", "--steps", str(STEPS)]
OPTIMIZERS = ["zero1", "zero2", "fused_adam"]
STEP = re.compile(r"^step \d+: (loss \S+ grad norm \S+) \|.*?(?:pages: device (\S+) MB, host (\S+) MB)?$", re.M)


def run_all(argvs: Sequence[Sequence[str]]) -> None:
    """Runs the example several times in the process group that the harness created."""
    for argv in argvs:
        qwen3_moe_hf.main(argv)
        print("run ends", flush=True)


def printed(ranks: int, *argvs: Sequence[str]) -> list[str]:
    """Returns the output of rank 0 in each run, and asserts that other ranks print no steps."""
    outcomes = launch_on_ranks(run_all, ranks, [[*SMALL, *argv] for argv in argvs], timeout=240)
    assert [one.exit_code for one in outcomes] == [0] * ranks, [one.stderr for one in outcomes]
    assert all("step" not in one.stdout for one in outcomes[1:])
    return outcomes[0].stdout.split("run ends\n")[: len(argvs)]


# Three ranks train with every optimizer.
@pytest.mark.slow
@pytest.mark.parametrize(
    "ranks, optimizers", [(1, ["fused_adam"]), soak_only(1, OPTIMIZERS), soak_only(2, OPTIMIZERS), (3, OPTIMIZERS)]
)
def test_losses_are_those_of_plain_adamw_and_the_stash_changes_no_bit(ranks: int, optimizers: list[str]) -> None:
    stashed = [["--optimizer", name, "--check"] for name in optimizers]
    plain = [["--optimizer", name, "--no-stash"] for name in optimizers]
    runs = printed(ranks, *stashed, *plain)
    for name, with_stash, without in zip(optimizers, runs, runs[len(optimizers) :], strict=False):
        assert f"All {STEPS} losses agree with plain PyTorch and AdamW within 0.0001." in with_stash, name
        steps = STEP.findall(with_stash)
        assert [step[0] for step in steps] == [step[0] for step in STEP.findall(without)], name
        assert len(steps) == STEPS and all(float(device) > 0 and float(host) > 0 for _, device, host in steps), name
        assert re.search(r"buffers: saves [1-9]\d%", with_stash) and "pages" not in without, name


@pytest.mark.slow
def test_what_was_saved_generates_and_is_trained_further(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    save, further = ["--save", str(folder)], ["--from", str(folder), "--check"]
    saving, going_on = printed(2, [*save, "--steps", "12"], further)
    assert re.search(r"0 to 7 is continued by \[8, 9, 10, 11, 12, 13, 14, 15\]", saving), saving
    losses = [[float(step.split()[1]) for step, _, _ in STEP.findall(run)] for run in (saving, going_on)]
    assert losses[0][-1] < 0.8 * losses[0][0] and max(losses[1]) < losses[0][1]
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    fresh = qwen3_moe_hf.build_model(qwen3_moe_hf.parse_options(["--from", str(folder)]))
    assert all(torch.equal(*pair) for pair in zip(loaded.parameters(), fresh.parameters(), strict=True))


@pytest.mark.slow
def test_bf16_weights_are_stashed_without_a_changed_bit() -> None:
    optimizers = OPTIMIZERS[-long_count(1, soak=2) :]
    words = [["--bf16", "--optimizer", name, *more] for name in optimizers for more in ([], ["--no-stash"])]
    losses = [[step[0] for step in STEP.findall(run)] for run in printed(2, *words)]
    assert len(losses[0]) == STEPS and losses[::2] == losses[1::2]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--batch 9", r"--batch 9 must be a multiple of --micro-batch x processes"),
        ("--check --bf16", r"--check compares in fp32: omit --bf16"),
        ("--from /nowhere", r"--from is /nowhere: must be a folder with a config.json"),
        ("--device-pages 0 --host-pages 0", r"--device-pages 0.0, --host-pages 0.0: "),
        ("--device-pages 0.1 --host-pages 0.1", r"Pages ran out: increase --device-pages or --host-pages"),
    ],
)
def test_what_cannot_be_is_said(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        qwen3_moe_hf.main([*SMALL, *words.split()])
    assert re.search(said, f"{ended.value} {capsys.readouterr().err}")


@pytest.mark.slow
def test_another_model_is_refused(tmp_path: Path) -> None:
    Qwen3MoeConfig().save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace("qwen3_moe", "qwen3"))
    with pytest.raises(SystemExit, match="contains a qwen3 model: must be qwen3_moe"):
        run_on_ranks(qwen3_moe_hf.main, 1, ["--from", str(tmp_path)], backend=None)
