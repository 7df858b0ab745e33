"""Checks that runs of pretrain_gpt.py on packed data with padding count only real tokens, under every layout."""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.counts import slow
from tests.distributed.parity import STEPS, WholeRun, assert_same_run, fp64_forward_step, layout, run_layout
from tests.functional_tests.case import Flags, command_line, read_bases
from tests.functional_tests.launch import read_log, run_program
from tests.padded_corpus import write_packed

LENGTH, EOD, BATCH, TOPK = 16, 100, 8, 2
LOSSES: Flags = {
    "moe-router-load-balancing-type": ["aux_loss", "seq_aux_loss", "global_aux_loss"],
    "moe-aux-loss-coeff": [0.3, 0.5, 0.2],
    "moe-z-loss-coeff": 0.2,
    "moe-per-layer-logging": True,
}
BIAS: Flags = {
    "moe-router-score-function": "sigmoid",
    "moe-router-enable-expert-bias": True,
    "moe-router-bias-update-rate": 0.1,
    "moe-per-layer-logging": True,
}
MODELS: dict[str, Flags] = {
    "losses": LOSSES,
    # The loss of the global batch depends on the order in which ranks add micro-batches.
    "losses of micro-batches": {
        **LOSSES,
        "moe-router-load-balancing-type": ["aux_loss", "seq_aux_loss"],
        "moe-aux-loss-coeff": [0.3, 0.5],
    },
    "bias": BIAS,
    "ahead": {**LOSSES, "mtp-num-layers": 1},
}
FULL: Flags = {"recompute-granularity": "full", "recompute-method": "uniform", "recompute-num-layers": 1}
STATIC: Flags = {"moe-expert-rank-capacity-factor": 2.0}
LAYOUTS: dict[str, tuple[int, Flags]] = {
    "tp2": (2, layout(2)),
    "cp2": (2, layout(cp=2)),
    "cp2, per token": (2, layout(cp=2, calculate_per_token_loss=True)),
    "ep2, dp2": (2, layout(ep=2)),
    "pp2 with 4 chunks": (2, layout(pp=2, vpp=2)),
    "recomputed": (1, layout() | FULL),
    "static buffers": (1, layout() | STATIC),
    "stash": (1, layout() | STATIC | {"moe-paged-stash": True, "transformer-impl": "local"}),
}


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Documents of one sample each. Some have no padding, some several chats. The filling is the eod."""
    rng = np.random.default_rng(3)
    lengths: list[list[int]] = [[16], [5], [3, 4], [7, 9], [2], [10, 3]]
    lengths += [[int(rng.integers(2, 8)), int(rng.integers(2, 8))] for _ in range(BATCH * STEPS - 5)]
    return write_packed(tmp_path_factory.mktemp("padded") / "a", lengths, length=LENGTH, eod=EOD, fill=EOD)


def _flags(prefix: str, model: str) -> Flags:
    return {
        **MODELS[model],
        "num-layers": 4,
        "num-query-groups": 4,
        "mock-data": None,
        "data-path": prefix,
        "split": "100,0,0",
        "eval-iters": 0,
        "reset-position-ids": True,
        "reset-attention-mask": True,
        "no-create-attention-mask-in-dataloader": True,
    }


@cache
def _reference(prefix: str, model: str, *, per_token: bool) -> WholeRun:
    return run_layout("moe", 1, {**_flags(prefix, model), "calculate-per-token-loss": per_token})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "kind"),
    [
        ("losses", "cp2"),
        ("losses", "pp2 with 4 chunks"),
        slow("losses", "tp2"),
        slow("losses", "cp2, per token"),
        slow("losses of micro-batches", "ep2, dp2"),
        slow("losses", "recomputed"),
        slow("losses", "static buffers"),
        slow("losses", "stash"),
        slow("bias", "cp2"),
        slow("bias", "pp2 with 4 chunks"),
        slow("ahead", "tp2"),
        slow("ahead", "pp2 with 4 chunks"),
    ],
)
def test_runs_on_padded_data_agree_with_one_process(prefix: str, model: str, kind: str) -> None:
    ranks, flags = LAYOUTS[kind]
    run = run_layout("moe", ranks, {**_flags(prefix, model), **flags})
    reference = _reference(prefix, model, per_token="calculate-per-token-loss" in flags)
    assert_same_run(run, reference)
    for report, expected in zip(run.reports, reference.reports, strict=True):
        assert _counts(report) == _counts(expected)


def _counts(report: Any) -> tuple[Any, ...]:
    return report.expert_load, report.tokens, report.padding, report.consumed_padding


@pytest.mark.slow
def test_loads_and_tokens_of_a_run_are_those_of_real_tokens(prefix: str) -> None:
    """A step's tokens, operations and loads are counted from the file of masks, in plain Python."""
    reports = _reference(prefix, "losses", per_token=False).reports
    masks = np.fromfile(f"{prefix}_padding_mask.bin", dtype=np.uint8).reshape(-1, LENGTH)
    total = 0
    for report in reports:
        assert report.expert_load is not None and len(report.expert_load) == 4
        assert {sum(load) for load in report.expert_load.values()} == {TOPK * report.tokens}
        assert report.tokens + report.padding.tokens == BATCH * LENGTH
        total += report.tokens
    # All samples are read once, except that one document is left over.
    padded = sorted(masks.sum(axis=1).tolist())
    left_over = len(masks) * LENGTH - sum(padded) - total
    assert len(masks) == BATCH * STEPS + 1 and LENGTH - left_over in padded
    assert reports[-1].consumed_padding.tokens == BATCH * STEPS * LENGTH - total


def _without_mask(data_iterator: Any, model: Any) -> Any:
    """A forward step in Megatron-LM's form, which passes no padding_mask."""
    return fp64_forward_step(data_iterator, lambda *args, padding_mask=None, **options: model(*args, **options))


@pytest.mark.slow
def test_scripts_that_do_not_pass_the_mask_are_refused(prefix: str) -> None:
    flags = {**_flags(prefix, "losses"), **layout(pp=2)}
    with pytest.raises(ValueError, match="forward_step does not pass it to the model, so routers would count padding"):
        run_layout("moe", 2, flags, forward_step=_without_mask)


@pytest.mark.slow
def test_a_resumed_run_continues_to_count_padding(prefix: str, tmp_path: Path) -> None:
    flags = {**read_bases()["moe"], **_flags(prefix, "losses"), "seq-length": LENGTH, "vocab-size": EOD + 1}
    flags |= {
        "save": tmp_path / "a",
        "save-interval": 1,
        "train-iters": 3,
        "log-progress": True,
        "log-throughput": True,
    }
    assert run_program(command_line(flags), 1, folder=tmp_path / "one").exit_codes == [0]
    whole = read_log(tmp_path / "one")
    again = {**flags, "load": tmp_path / "a", "ckpt-step": 1, "save": tmp_path / "b"}
    assert run_program(command_line(again), 1, folder=tmp_path / "two").exit_codes == [0]
    rest = read_log(tmp_path / "two")
    for line, expected in zip(rest, whole[1:], strict=True):
        for name in ("padding_tokens", "consumed_padding_tokens", "consumed_samples", "lm_loss", "expert_load"):
            assert line[name] == expected[name], name
    total = sum(line["padding_tokens"] for line in whole)
    assert whole[-1]["consumed_padding_tokens"] == total > 0
    for line in whole:
        tokens = line["global_batch_size"] * LENGTH - line["padding_tokens"]
        assert line["tokens_per_second"] == pytest.approx(tokens / line["seconds"], rel=1e-3)
        assert {sum(load) for load in line["expert_load"].values()} == {TOPK * tokens}
    first, second = ((tmp_path / name / "progress.txt").read_text().splitlines()[-1] for name in "ab")
    assert first.partition("Floating-point")[2] == second.partition("Floating-point")[2] != ""
