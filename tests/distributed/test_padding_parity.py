"""Checks that with padding that routers ignore, training agrees with one process in fp64 under every layout.

tests/unit_tests/core/models/test_padding_mask.py compares one process with plain formulas.
"""

from collections.abc import Iterator
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.training import get_args
from megatron.training.utils import get_batch_on_this_cp_rank
from tests.counts import slow
from tests.distributed.parity import WholeRun, assert_same_run, fp64_forward_step, layout, run_layout
from tests.distributed.tiny_runs import Batch
from tests.functional_tests.case import Flags

MODELS: dict[str, Flags] = {
    "losses": {
        "num-layers": 2,
        "num-query-groups": 4,
        "moe-router-load-balancing-type": ["aux_loss", "seq_aux_loss"],
        "moe-aux-loss-coeff": [0.3, 0.5],
        "moe-z-loss-coeff": 0.2,
        "moe-per-layer-logging": True,
    },
    "bias": {
        "num-layers": 2,
        "num-query-groups": 4,
        "moe-router-score-function": "sigmoid",
        "moe-router-enable-expert-bias": True,
        "moe-router-bias-update-rate": 0.1,
        "moe-z-loss-coeff": 0.2,
    },
    "ahead": {"num-layers": 2, "num-query-groups": 4, "mtp-num-layers": 2, "moe-aux-loss-coeff": 0.3},
}
LAYOUTS: dict[str, tuple[int, Flags]] = {
    "tp2": (2, layout(2)),
    "cp2": (2, layout(cp=2)),
    "pp2, per token": (2, layout(pp=2, calculate_per_token_loss=True)),
    "tp2 x ep2, per token": (2, layout(2, ep=2, calculate_per_token_loss=True)),
    "cp2, per token": (2, layout(cp=2, calculate_per_token_loss=True)),
    "recomputed": (1, layout(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)),
    "parts recomputed": (1, layout(recompute_granularity="selective", recompute_modules=["moe"])),
}


def _padded_step(data_iterator: Iterator[Batch], model: Any) -> tuple[Tensor, Any]:
    """Passes the same padding mask to every stage: the ends of the micro-batch's sequences, of different lengths."""
    args = get_args()
    rows = torch.arange(args.micro_batch_size).unsqueeze(1)
    padding = torch.arange(args.seq_length) >= args.seq_length - 3 - 6 * rows
    own = get_batch_on_this_cp_rank({"padding_mask": padding})
    return fp64_forward_step(data_iterator, partial(model, **own))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "kind"),
    [
        ("losses", "tp2"),
        slow("losses", "cp2"),
        slow("losses", "pp2, per token"),
        slow("losses", "tp2 x ep2, per token"),
        slow("losses", "cp2, per token"),
        slow("losses", "recomputed"),
        slow("losses", "parts recomputed"),
        slow("bias", "tp2"),
        slow("bias", "pp2, per token"),
        slow("ahead", "tp2"),
        slow("ahead", "cp2"),
    ],
)
def test_training_with_padding_agrees_with_one_process(model: str, kind: str) -> None:
    ranks, flags = LAYOUTS[kind]
    run = run_layout("moe", ranks, {**MODELS[model], **flags}, forward_step=_padded_step)
    assert_same_run(run, _reference(model, per_token="calculate-per-token-loss" in flags))


@cache
def _reference(model: str, *, per_token: bool) -> WholeRun:
    flags = {**MODELS[model], "calculate-per-token-loss": per_token}
    return run_layout("moe", 1, flags, forward_step=_padded_step)


@pytest.mark.slow
def test_padding_changes_what_is_learned() -> None:
    padded, whole = _reference("losses", per_token=False), run_layout("moe", 1, MODELS["losses"])
    assert padded.reports[0].losses["lm loss"] == pytest.approx(whole.reports[0].losses["lm loss"], rel=1e-12)
    with pytest.raises(AssertionError):
        assert_same_run(padded, whole)
