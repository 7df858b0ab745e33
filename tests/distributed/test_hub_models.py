"""Checks that converted transformers models compute the same in the training program as in transformers.

Compares logits and gradients in several layouts and with a paged stash, and the losses of AdamW steps.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.tools.hugging_face.convert import from_hub
from megatron.tools.hugging_face.names import hub_tensors
from megatron.tools.hugging_face.settings import family_of_config, settings_of_config
from tests.counts import long_count, slow, soak_only
from tests.distributed.hub_runs import RankStep, first_steps, losses_of_run
from tests.distributed.parity import Box, layout, put_together, relative_errors
from tests.distributed.stash_runs import stash
from tests.distributed.tiny_runs import Batch
from tests.functional_tests.case import Flags, command_line
from tests.harness import run_on_ranks
from tests.unit_tests.tools.hugging_face.small_hub import (
    HAS_EXPERTS,
    SMALL,
    VOCABULARY,
    hub_gradients,
    saved,
    small_model,
    small_settings,
)

STEPS = long_count(8, soak=20)
LOGITS, GRADIENTS, LOSSES = 1e-4, 1e-3, 1e-4
LR, DECAY = 1e-3, 0.1
FLAGS: Flags = {
    "use-checkpoint-args": True,
    "mock-data": True,
    "tokenizer-type": "NullTokenizer",
    "vocab-size": VOCABULARY,
    "seq-length": 32,
    "micro-batch-size": 2,
    "train-iters": STEPS,
    "lr": LR,
    "lr-decay-style": "constant",
    "weight-decay": DECAY,
    "clip-grad": 0,
    "hidden-dropout": 0.0,
    "attention-dropout": 0.0,
    "eval-iters": 0,
    "num-workers": 0,
}
EXPERTS: Flags = {"moe-grouped-gemm": True, "moe-router-dtype": "fp32", "moe-token-dispatcher-type": "alltoall"}
# Ways to split a model over two ranks; the second table is for models with experts.
DENSE_LAYOUTS = {"tp 2": layout(2), "pp 2": layout(pp=2)}
EXPERT_LAYOUTS = {
    "ep 2": layout(ep=2),
    "stash": {**layout(ep=2), **stash(8), "moe-expert-rank-capacity-factor": 8},
}

# These models run every layout and several updates. Other families, and further sizes of the same family, run the first
# step in one layout. Together, the tests of WHOLE cover each layout; `make soak` runs all pairs.
WHOLE = ("llama3.2-1b", "gpt-oss-20b", "deepseek-v3")
NAMES = [name if name == WHOLE[0] else slow(name) for name in SMALL]
UPDATED = [slow(name) if name in WHOLE else soak_only(name) for name in SMALL]


def layouts_of(name: str) -> dict[str, Flags]:
    """Returns the layouts in which the first step of a model is compared."""
    experts = EXPERT_LAYOUTS if name in HAS_EXPERTS else {}
    if name in WHOLE or long_count(0, soak=1):
        return {**DENSE_LAYOUTS, **experts}
    return {"ep 2": experts["ep 2"]} if experts else {"tp 2": DENSE_LAYOUTS["tp 2"]}


@pytest.fixture
def run_folder(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """Saves a run checkpoint converted from the test's small model, and returns its folder."""
    hub = saved(small_model(request.node.callspec.params["name"]), tmp_path / "hub")
    from_hub(hub, tmp_path / "run")
    return tmp_path / "run"


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_logits_and_gradients_agree_under_layouts(name: str, run_folder: Path) -> None:
    layouts = layouts_of(name)
    argvs = [_argv(name, run_folder, flags) for flags in layouts.values()]
    by_rank: list[list[RankStep]] = run_on_ranks(first_steps, 2, argvs, timeout=240)
    for kind, ranks in zip(layouts, zip(*by_rank), strict=True):
        replicas = kind in EXPERT_LAYOUTS
        model = small_model(name)
        expected = [_losses_of(model, rank.batch) for rank in ranks[: 2 if replicas else 1]]
        torch.stack([loss for loss, _ in expected]).mean().backward()
        found = _logits(ranks, replicas=replicas)
        assert len(found) == len(expected)
        for logits, (_, wanted) in zip(found, expected, strict=True):
            assert ((logits - wanted).abs().max() / wanted.abs().max()).item() <= LOGITS, kind
        grads = put_together([box for rank in ranks for box in rank.grads])
        errors = relative_errors(grads, _hub_boxes(name, model))
        wrong = {key: error for key, error in errors.items() if not error <= GRADIENTS}
        assert not wrong, f"{kind}: {wrong}"


@pytest.mark.slow
@pytest.mark.parametrize("name", UPDATED)
def test_steps_of_adamw_agree(name: str, run_folder: Path) -> None:
    ((batches, losses),) = run_on_ranks(losses_of_run, 1, _argv(name, run_folder, {}), STEPS)
    model = small_model(name).train()
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": DECAY},
        # Norms and biases have no weight decay.
        {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.999), eps=1e-8)
    expected = []
    for batch in batches:
        optimizer.zero_grad()
        loss, _ = _losses_of(model, batch)
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    assert len(losses) == STEPS and losses == pytest.approx(expected, rel=LOSSES)
    untrained, _ = _losses_of(small_model(name), batches[-1])
    assert abs(untrained.item() - expected[-1]) > 100 * LOSSES, "updates hardly changed the loss"


def _argv(name: str, folder: Path, flags: Flags) -> list[str]:
    experts = EXPERTS if name in HAS_EXPERTS else {}
    if small_settings(name)["model_type"] in ("glm4_moe", "deepseek_v3"):
        # transformers does not update the router bias.
        experts = {**experts, "moe-router-bias-update-rate": 0.0}
    dense = {key: value for key, value in flags.items() if experts or "expert" not in key}
    return command_line({**FLAGS, **experts, **dense, "load": str(folder)})


def _losses_of(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """Returns the mean loss [] and the logits [B, S, V] of the transformers model, fp32."""
    logits = model(batch["tokens"]).logits
    losses = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="none")
    mask = batch["loss_mask"].flatten()
    return (losses * mask).sum() / mask.sum(), logits.detach()


def _logits(ranks: Sequence[RankStep], *, replicas: bool) -> list[Tensor]:
    """Returns logits [B, S, V] of each data-parallel replica, or the joined vocabulary parts of all ranks."""
    parts = [rank.logits for rank in ranks if rank.logits is not None]
    whole = parts if replicas else [torch.cat(parts, dim=-1)]
    return [logits.transpose(0, 1)[..., :VOCABULARY] for logits in whole]


def _hub_boxes(name: str, model: Any) -> dict[str, Tensor]:
    """Returns the gradients of the transformers model by checkpoint key, of any shape, fp32."""
    config, grads = small_settings(name), hub_gradients(model)
    # Transformers models have no multi-token prediction layers.
    settings = {**settings_of_config(config), "mtp_num_layers": None}
    return put_together(
        [
            Box(piece.key, piece.global_shape, piece.global_offset, piece.view_of(grads[tensor.name]))
            for tensor in hub_tensors(family_of_config(config), settings)
            for piece in tensor.pieces
            # An expert bias is updated without a gradient.
            if not piece.key.endswith("expert_bias")
        ]
    )
