"""Balancing of experts over ranks and micro-batches, against one process that computes it from all choices."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import checkpoint
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.utils import unwrap_model
from megatron.training.training import evaluate_validation, run_step
from tests.distributed.tiny_runs import started_run
from tests.functional_tests.case import Flags, command_line, read_bases
from tests.harness import run_on_ranks
from tests.unit_tests.core.models.small_models import LLAMA_LIKE, small_config
from tests.unit_tests.core.transformer.moe import naive_router as naive

RANKS, EXPERTS, RATE = 3, 4, 0.01
BIASED: Flags = {
    "micro-batch-size": 1,
    "global-batch-size": 6,
    "eval-interval": None,
    "moe-router-score-function": "sigmoid",
    "moe-router-enable-expert-bias": True,
    "moe-router-bias-update-rate": RATE,
}
# With a scale of 2**32 every step overflows, so the optimizer skips all steps.
PRECISIONS: dict[str, Flags] = {"fp32": {}, "skipped_fp16": {"fp16": True}}
# Losses over the tokens of one sequence or micro-batch: kind, and name in the log.
CONTEXT_LOSSES = {"aux_loss": "load_balancing_loss", "seq_aux_loss": "seq_load_balancing_loss"}
Choices = list[list[list[int]]]  # by step, then layer: the expert of each slot


@pytest.mark.slow
@pytest.mark.parametrize("precision", PRECISIONS)
def test_bias_follows_the_choices_of_all_ranks_and_microbatches(precision: str) -> None:
    ranks = run_on_ranks(_biased_run, RANKS, command_line({**read_bases()["moe"], **BIASED, **PRECISIONS[precision]}))
    expected = [torch.zeros(EXPERTS) for _ in range(2)]
    for step in range(3):
        for layer in range(2):
            chosen = [expert for choices, _ in ranks for expert in choices[step][layer]]
            loads = [chosen.count(expert) for expert in range(EXPERTS)]
            mean = sum(loads) / EXPERTS
            expected[layer] = expected[layer] + torch.tensor([RATE * ((n < mean) - (n > mean)) for n in loads])
        for _, biases in ranks:
            torch.testing.assert_close(biases[step], expected)
    assert all(bias.any() for bias in expected)


def _biased_run(argv: list[str]) -> tuple[Choices, list[list[Tensor]]]:
    """Runs three steps, each followed by an evaluation; returns the training choices and each step's biases."""
    steps: Choices = []
    with started_run(argv) as run:
        routers: list[Any] = [layer.mlp.router for layer in unwrap_model(run.model)[0].decoder.layers]
        for number, router in enumerate(routers):
            router.register_forward_hook(
                lambda router, _, out, number=number: (
                    steps[-1][number].extend(out.indices.flatten().tolist()) if router.training else None
                )
            )
        biases = []
        for _ in range(3):
            steps.append([[], []])
            run_step(run)
            evaluate_validation(run)
            biases.append([router.expert_bias.clone() for router in routers])
    return steps, biases


# Numbers of tokens of each micro-batch and rank, of 5 positions.
LENGTHS = {
    "equal": [[5, 5, 5], [5, 5, 5]],
    "unequal ranks": [[5, 2, 4], [3, 5, 1]],
    "unequal micro-batches": [[1, 1, 1], [5, 5, 5]],
    "padding alone": [[5, 0, 2], [0, 3, 5]],
}


@pytest.mark.parametrize("is_masked", [False, True])
@pytest.mark.parametrize("kind", LENGTHS)
def test_global_loss_sees_all_ranks_and_the_microbatches_so_far(kind: str, is_masked: bool) -> None:
    """Shares of experts are sums over sums, and each backward repeats the share of its own forward."""
    if kind == "padding alone" and not is_masked:
        return  # a router has tokens
    logits = torch.randn(2, RANKS, 5, EXPERTS, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    config = _global_config()
    counts: list[list[int]] = []
    ranks = run_on_ranks(_route_globally, RANKS, logits, LENGTHS[kind], is_masked)
    for microbatch in range(2):
        rows = logits[microbatch].clone().requires_grad_()
        lengths = LENGTHS[kind][microbatch]
        per_rank = [naive.shares(rows[rank, :length], config) for rank, length in enumerate(lengths)]
        counts += [count for _, count in per_rank]
        total = [sum(column) for column in zip(*counts, strict=True)]
        for rank, (probs, _) in enumerate(per_rank):
            value, grad = ranks[rank][microbatch]
            if not probs:
                assert value == 0 and not grad.any()
                continue
            loss = naive.balancing_loss(probs, total, config)
            (expected,) = torch.autograd.grad(0.5 * loss, rows, retain_graph=True)
            assert value == pytest.approx(loss.item(), rel=1e-6)
            torch.testing.assert_close(grad, expected[rank, : len(grad)])


@pytest.mark.parametrize("kind", CONTEXT_LOSSES)
def test_loss_of_a_sequence_sees_the_tokens_of_all_context_parallel_ranks(kind: str) -> None:
    logits = torch.randn(RANKS, 5, EXPERTS, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected = naive.balancing_loss(*naive.shares(logits.flatten(0, 1), _balanced_config(kind)), _balanced_config(kind))
    # The log contains the mean over ranks.
    assert sum(run_on_ranks(_route_part, RANKS, logits, kind)) / RANKS == pytest.approx(expected.item(), rel=1e-6)


def _route_part(logits: Tensor, kind: str) -> float:
    """Routes this rank's part of one sequence and returns the recorded loss.

    logits: [R, T, E], the parts of all ranks, fp64.
    """
    groups = ProcessGroupCollection(cp=dist.group.WORLD, tp_cp=dist.group.WORLD)
    router = TopKRouter(_balanced_config(kind), groups)
    router.routing(logits[dist.get_rank()].requires_grad_())
    return router.aux_losses.take_totals()[CONTEXT_LOSSES[kind]][0].item()


def _global_config() -> Any:
    return _balanced_config("global_aux_loss")


def _balanced_config(balancing: str) -> Any:
    kind = {"moe_router_load_balancing_type": balancing, "moe_aux_loss_coeff": 0.5}
    return small_config(**LLAMA_LIKE, num_moe_experts=EXPERTS, params_dtype=torch.float64, **kind)


def _route_globally(logits: Tensor, lengths: list[list[int]], is_masked: bool) -> list[tuple[float, Tensor]]:
    """Returns each micro-batch's loss and its gradient, and checks that recomputation records nothing.

    logits: [M, R, T, E], fp64, for M micro-batches of each rank. lengths: numbers of tokens, [M][R]; the others are
    masked or left out.
    """
    router = TopKRouter(_global_config())
    router.aux_losses.groups = ProcessGroupCollection(tp_dp_cp=dist.group.WORLD)
    rank = dist.get_rank()
    values, rows, outputs = [], [], []
    # All forward passes precede the first backward pass, and backward passes run in reverse.
    for microbatch, of_ranks in zip(logits[:, rank], lengths, strict=True):
        mask = torch.arange(len(microbatch)) >= of_ranks[rank]
        rows.append((microbatch if is_masked else microbatch[~mask]).clone().requires_grad_())
        masks = (mask,) if is_masked else ()
        outputs.append(checkpoint(lambda *given: router.routing(*given).weights, False, rows[-1], *masks))
        values.append(router.aux_losses.take_totals()["global_load_balancing_loss"][0].item())
    loads = router.aux_losses.tokens_per_expert.clone()
    for weights in reversed(outputs):
        (weights * 0).sum().backward()
    assert torch.equal(router.aux_losses.tokens_per_expert, loads)
    router.aux_losses.finalize_step(None)
    assert not router.aux_losses.global_tokens_per_expert.any()
    return [(value, grad) for value, grad in zip(values, [one.grad for one in rows], strict=True)]
