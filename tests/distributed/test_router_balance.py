"""Balancing of experts over ranks and micro-batches, against one process that computes it from all choices."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.distributed import finalize_model_grads
from megatron.core.group_collectives import gather_objects
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import checkpoint
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.utils import unwrap_model
from megatron.training.training import evaluate_validation, run_step
from tests.distributed.fsdp2_runs import wrap_net
from tests.distributed.tiny_runs import started_run
from tests.functional_tests.case import Flags, command_line, read_bases
from tests.harness import run_on_ranks
from tests.unit_tests.core.models.custom_models import Layers, Loads
from tests.unit_tests.core.models.small_models import LLAMA_LIKE, small_config
from tests.unit_tests.core.optimizer.reference import wrap
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


@pytest.mark.parametrize("sharding", ["none", "optimizer", "fully"])
def test_biases_of_a_custom_model_follow_the_choices_of_all_ranks(sharding: str) -> None:
    biases = run_on_ranks(_custom_loop, 2, sharding)
    assert biases[0] == biases[1]


def _custom_loop(sharding: str) -> list[list[float]]:
    """Trains a model that has no finalize_step, and compares its biases with a count over both ranks."""
    model, rank = Layers(), dist.get_rank()
    loads = Loads(model)
    if sharding == "fully":
        wrapped: Any = wrap_net(model)
    else:
        overlap = {"use_distributed_optimizer": True} if sharding == "optimizer" else {}
        everyone = ProcessGroupCollection(dp_cp=dist.group.WORLD, expt_dp=dist.group.WORLD)
        wrapped = wrap(model, overlap=overlap, pg_collection=everyone)
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=1e-2), [wrapped])
    for step in range(3):
        optimizer.zero_grad()
        wrapped(2 * step + rank).backward()
        finalize_model_grads([wrapped])
        optimizer.step()
        of_ranks = gather_objects(loads.counts, dist.group.WORLD)
        for number, counts in enumerate(zip(*of_ranks, strict=True)):
            loads.counts[number] = [sum(expert) for expert in zip(*counts, strict=True)]
        loads.end_step()
    loads.check()
    return [router.expert_bias.tolist() for router in loads.routers]


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


# Numbers of tokens, of 4 positions, of each sequence on each context-parallel rank, by micro-batch; whether losses are
# summed over tokens.
PARTS: dict[str, tuple[list[list[list[int]]], bool]] = {
    "whole": ([[[4, 4], [4, 4], [4, 4]]], False),
    "ends masked": ([[[4, 4], [4, 3], [1, 0]]], False),
    "ends masked, per token": ([[[4, 4], [4, 3], [1, 0]]], True),
    "one rank": ([[[0, 0], [3, 1], [0, 0]], [[4, 4], [0, 0], [0, 0]]], False),
    "one rank, per token": ([[[0, 0], [3, 1], [0, 0]], [[4, 4], [0, 0], [0, 0]]], True),
    "an empty sequence": ([[[4, 0], [2, 0], [1, 0]], [[1, 2], [4, 1], [0, 3]]], False),
    "an empty micro-batch": ([[[1, 4], [2, 2], [4, 0]], [[0, 0], [0, 0], [0, 0]], [[2, 0], [1, 1], [0, 3]]], False),
    "an empty micro-batch, per token": ([[[0, 0], [0, 0], [0, 0]], [[2, 0], [1, 1], [0, 3]]], True),
    "one token": ([[[0, 0], [0, 1], [0, 0]], [[4, 4], [4, 4], [4, 4]]], False),
    "three to all": ([[[1, 0], [0, 1], [1, 0]], [[4, 4], [4, 4], [4, 4]], [[0, 2], [3, 0], [1, 1]]], True),
}
ALL_LOSSES = {
    "load_balancing_loss": 0.3,
    "seq_load_balancing_loss": 0.5,
    "global_load_balancing_loss": 0.7,
    "z_loss": 0.2,
}


def _parts_config(per_token: bool) -> Any:
    fields: dict[str, Any] = {
        "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss", "global_aux_loss"],
        "moe_aux_loss_coeff": [*ALL_LOSSES.values()][:3],
        "moe_z_loss_coeff": ALL_LOSSES["z_loss"],
        "calculate_per_token_loss": per_token,
    }
    return small_config(**LLAMA_LIKE, num_moe_experts=EXPERTS, params_dtype=torch.float64, **fields)


def _part_logits(name: str) -> Tensor:
    """Returns the logits of all micro-batches and ranks: [M, R, 4, 2, E], fp64."""
    generator = torch.Generator().manual_seed(len(name))
    return torch.randn(len(PARTS[name][0]), RANKS, 4, 2, EXPERTS, dtype=torch.float64, generator=generator)


def test_context_parallel_ranks_with_unequal_tokens_have_the_losses_of_whole_sequences() -> None:
    ranks = run_on_ranks(_route_parts, RANKS)
    for name, (microbatches, per_token) in PARTS.items():
        config, totals, sums = _parts_config(per_token), [0] * EXPERTS, dict.fromkeys(ALL_LOSSES, 0.0)
        found = [rank[name] for rank in ranks]
        for number, lengths in enumerate(microbatches):
            logits = _part_logits(name)[number].requires_grad_()
            sequences = [torch.cat([logits[r, : lengths[r][b], b] for r in range(RANKS)]) for b in range(2)]
            sequences = [one for one in sequences if len(one)]
            losses = dict.fromkeys(ALL_LOSSES, logits.sum() * 0)
            if sequences:
                probs, counts = naive.shares(torch.cat(sequences), config)
                totals = [one + other for one, other in zip(totals, counts, strict=True)]
                alone = [naive.balancing_loss(*naive.shares(one, config), config) for one in sequences]
                whole = naive.balancing_loss(probs, counts, config), sum(alone) / len(alone)
                z_loss = torch.cat(sequences).logsumexp(1).square().mean()
                losses = dict(zip(losses, (*whole, naive.balancing_loss(probs, totals, config), z_loss), strict=True))
            sums = {loss: value + losses[loss].item() for loss, value in sums.items()}
            factor = sum(map(len, sequences)) if per_token else 1
            (grad,) = torch.autograd.grad(
                factor * sum(ALL_LOSSES[loss] * value for loss, value in losses.items()), logits
            )
            for rank, (grads, _, _) in enumerate(found):
                # Gradients are averaged over the ranks, or summed with per-token loss.
                own = grads[number] / (1 if per_token else RANKS)
                torch.testing.assert_close(own, grad[rank], rtol=1e-11, atol=1e-14, msg=name)
        for loss, value in sums.items():
            total, count = sum(of_rank[loss] for _, of_rank, _ in found).tolist()
            assert total / count == pytest.approx(value / len(microbatches), rel=1e-6), (name, loss)
        assert sum(loads for _, _, loads in found)[0].tolist() == totals


def _route_parts() -> dict[str, tuple[list[Tensor], dict[str, Tensor], Tensor]]:
    """Returns this rank's gradients of each micro-batch, recorded losses and loads, by the names of PARTS."""
    world, rank, found = dist.group.WORLD, dist.get_rank(), {}
    groups = ProcessGroupCollection(cp=world, tp_cp=world, tp_dp_cp=world)
    for name, (microbatches, per_token) in PARTS.items():
        router, rows, outputs = TopKRouter(_parts_config(per_token), groups), [], []
        for logits, lengths in zip(_part_logits(name)[:, rank], microbatches, strict=True):
            rows.append(logits.clone().requires_grad_())
            mask = torch.arange(4).unsqueeze(1) >= torch.tensor(lengths[rank])
            outputs.append(router.routing(rows[-1], mask).weights)
        for weights in reversed(outputs):
            (weights * 0).sum().backward()
        grads = [one.grad for one in rows]
        found[name] = grads, router.aux_losses.take_totals(), router.aux_losses.tokens_per_expert
    return found


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
