"""pretrain() as user scripts call it: a custom model, several runs in one process, evaluation without training."""

import io
import os
import re
import signal
from collections.abc import Iterator
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

import pretrain_gpt
from megatron.core.enums import ModelType
from megatron.core.transformer.module import MegatronModule
from megatron.training import get_args, pretrain
from megatron.training.arguments import core_transformer_config_from_args
from megatron.training.callbacks import Callback, EvaluationReport, StepReport
from megatron.training.meters import memory as memory_figures
from tests.harness import run_on_ranks

FLAGS = """
--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --max-position-embeddings 8 --mock-data
--tokenizer-type NullTokenizer --vocab-size 32 --micro-batch-size 2 --global-batch-size 8 --num-workers 0
--lr 1e-2 --train-iters 3 --eval-iters 1
"""


class Bigram(MegatronModule):
    """Predicts the next token from the current one. Has no layers and no auxiliary losses."""

    def __init__(self) -> None:
        super().__init__(core_transformer_config_from_args(get_args()))
        self.table = nn.Embedding(get_args().padded_vocab_size, get_args().padded_vocab_size)
        nn.init.zeros_(self.table.weight)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Returns the logits. tokens: [B, S], int64 -> [B, S, V], fp32."""
        return self.table(tokens)


def bigram_step(data_iterator: Iterator[dict[str, torch.Tensor]], model: nn.Module) -> Any:
    """Forward step whose loss function returns (mean, report), the older of the two supported forms."""
    batch = next(data_iterator)
    loss = partial(nn.functional.cross_entropy, target=batch["labels"].flatten())
    return model(batch["tokens"]), lambda logits: (
        (value := loss(logits.flatten(0, 1))),
        {"lm loss": value.detach(), "accuracy": (logits.argmax(-1) == batch["labels"]).float().mean()},
    )


class Record(Callback):
    """Records the losses of steps and evaluations."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.evaluated: list[tuple[str, float]] = []

    def on_step_end(self, report: StepReport) -> None:
        self.losses.append(report.losses["lm loss"])

    def on_evaluation_end(self, report: EvaluationReport) -> None:
        self.evaluated.append((report.split, report.losses["lm loss"]))


def run(extra: str, *, own_model: bool, record: Record | None = None) -> Record:
    record = record or Record()
    datasets, kind, argv = pretrain_gpt.train_valid_test_datasets_provider, ModelType.encoder_or_decoder, FLAGS + extra
    provider = (lambda pre_process, post_process: Bigram()) if own_model else pretrain_gpt.model_provider
    step = bigram_step if own_model else pretrain_gpt.forward_step
    pretrain(datasets, provider, kind, step, callbacks=[record], argv=argv.split())
    return record


class SignalAfter(Record):
    """Sends the exit signal to this process after step `last`."""

    def __init__(self, last: int) -> None:
        super().__init__()
        self.last = last

    def on_step_end(self, report: StepReport) -> None:
        super().on_step_end(report)
        if report.iteration == self.last:
            os.kill(os.getpid(), signal.SIGTERM)


def evaluated_runs(folder: str) -> list[Record]:
    """Runs with an evaluation per step: a whole run, one that a signal stops in evaluation 2, and its continuation."""
    every_step = "--eval-interval 1 --train-iters 5 --exit-signal-handler"
    saved = f"{every_step} --save {folder} --load {folder}"
    return [
        run(every_step, own_model=False),
        run(saved, own_model=False, record=SignalAfter(2)),
        run(saved, own_model=False),
    ]


def several_runs(folder: str) -> list[Record]:
    """Runs, in one process, a custom model, GPT twice, and an evaluation of the saved GPT without training."""
    save = f"--save {folder} --load {folder}"
    return [
        run("", own_model=True),
        run("", own_model=False),
        run(save, own_model=False),
        run(f"{save} --skip-train", own_model=False),
    ]


@pytest.mark.slow
def test_runs_in_one_process_leave_nothing_behind(tmp_path: Path) -> None:
    for own, first, second, evaluated in run_on_ranks(several_runs, 2, str(tmp_path), backend=None):
        assert own.losses[0] > own.losses[-1] and len(own.evaluated) == 2
        assert first.losses == second.losses and first.evaluated == second.evaluated
        assert evaluated.losses == []
        # The test split restarts at each evaluation, so the saved weights must give the identical loss.
        assert evaluated.evaluated[-1] == second.evaluated[-1]


def verdicts_of_starts(flags: str) -> list[str]:
    """Returns the memory verdicts of starts on machines with ample, barely enough, and too little memory."""
    record = HeldBytes()
    first = io.StringIO()
    with redirect_stdout(first):
        run(flags, own_model=False, record=record)
    said = [first.getvalue()]
    for share in (1.05, 0.9):
        memory = int(share * record.bytes) * int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        out = io.StringIO()
        with redirect_stdout(out), patch.object(memory_figures, "total_memory_bytes", return_value=memory):
            again = run(flags, own_model=False)
        said.append(out.getvalue())
        assert again.losses == record.losses
    return [line.strip() for text in said for line in text.splitlines() if "per rank" in line]


class HeldBytes(Record):
    """Records the persistent bytes of the fullest rank."""

    bytes = 0

    def on_step_end(self, report: StepReport) -> None:
        super().on_step_end(report)
        if report.held is not None:
            self.bytes = sum(report.held["max"][kind] for kind in ("parameters", "gradients", "masters", "moments"))


@pytest.mark.slow
@pytest.mark.parametrize("flags", ["--hidden-size 64 --bf16 --use-distributed-optimizer"])
def test_the_start_says_whether_what_stays_fits(flags: str) -> None:
    first, others = run_on_ranks(verdicts_of_starts, 2, flags, backend=None)
    assert others == []
    fits, closely, not_at_all = (re.sub(r"[\d.]+ of [\d.]+", "X of Y", line) for line in first)
    what, more = "for weights, gradients and optimizer states", "--dry-run --world-size 2"
    assert fits == f"fits this machine: X of Y GiB per rank {what}, without activations; see {more}"
    assert closely == fits
    advice = f"run with {more} to find flags that fit"
    assert not_at_all == f"does NOT fit this machine: X of Y GiB per rank {what}; {advice}"


@pytest.mark.slow
def test_a_signal_costs_no_evaluation(tmp_path: Path) -> None:
    for whole, stopped, rest in run_on_ranks(evaluated_runs, 2, str(tmp_path), backend=None):
        assert (len(stopped.losses), len(rest.losses)) == (2, 3)
        # The continuation begins with the interrupted evaluation.
        assert len(stopped.evaluated) == 1
        assert stopped.evaluated + rest.evaluated == whole.evaluated


def test_a_script_without_a_planner_refuses_a_dry_run() -> None:
    with pytest.raises(ValueError, match="--dry-run is given, but .* print_plan=megatron.planner.print_plan"):
        run("--dry-run", own_model=True)
