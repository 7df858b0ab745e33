"""TRAPS B20: unevenly masked ranks, microbatches and parts of sequences have the gradients of one process in fp64."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pretrain_gpt
from megatron.core.distributed import PlainDataParallel, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.parallel_state import (
    get_data_parallel_group,
    get_data_parallel_rank,
    get_expert_data_parallel_group,
    initialize_model_parallel,
)
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config
from megatron.training.training import train_step
from megatron.training.utils import get_batch_on_this_cp_rank
from tests.counts import slow
from tests.distributed.tiny_runs import started_run
from tests.functional_tests.case import command_line, read_bases
from tests.harness import run_on_ranks
from tests.unit_tests.core.models.small_models import LLAMA_LIKE, SEQ, VOCAB, small_config, small_model

MICROBATCHES = 2
LOSSES = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.3, "moe_z_loss_coeff": 0.1}
EXPERTS = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 16, **LOSSES}


def build(*, per_token: bool, **fields: Any) -> GPTModel:
    return small_model(
        small_config(params_dtype=torch.float64, calculate_per_token_loss=per_token, **LLAMA_LIKE, **fields)
    )


def microbatch(index: int) -> dict[str, Tensor]:
    """[2, S] each; from one token to all, none in the second and third, in the fourth only the first quarter's."""
    generator = torch.Generator().manual_seed(index)
    tokens = torch.randint(0, VOCAB, (2, SEQ + 1), generator=generator)
    share = [0.05, 0.0, 0.0, 1.0, 0.5, 0.1][index]
    mask = (torch.rand(2, SEQ, generator=generator) < share).float()
    if index == 3:
        # All that there is on the first of two or three ranks.
        mask[:, SEQ // 4 :] = 0
    places = torch.arange(SEQ).expand(2, SEQ)
    return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "loss_mask": mask, "position_ids": places}


def losses_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])


def forward_step(indices: Any, model: nn.Module, *, returns_share: bool) -> Any:
    whole = microbatch(next(indices))
    batch = get_batch_on_this_cp_rank(whole)
    mask, of_whole = batch["loss_mask"], whole["loss_mask"].sum().clamp(min=1)
    if returns_share:
        return losses_of(model, batch), lambda losses: ((losses * mask).sum() / of_whole, {})
    return losses_of(model, batch), lambda losses: ((losses * mask).sum(), mask.sum(), {})


def gradients_of_a_rank(cp_size: int, fields: dict[str, Any]) -> list[list[Tensor]]:
    """Without per-token loss, from sums and from shares in the mean, and with it."""
    initialize_model_parallel(context_parallel_size=cp_size)
    found = []
    for per_token, returns_share in ((False, False), (False, True), (True, False)):
        group = get_data_parallel_group(with_context_parallel=True)
        chunk = build(per_token=per_token, context_parallel_size=cp_size, **fields)
        experts = get_expert_data_parallel_group()
        model = PlainDataParallel(chunk, group=group, expert_group=experts, calculate_per_token_loss=per_token)
        chunk.config.finalize_model_grads_func = finalize_model_grads
        chunk.config.grad_scale_func = lambda loss: loss * 4.0  # as a loss scale of fp16, which the optimizer takes off
        chunk.config.aux_loss_scale_func = chunk.aux_losses.set_backward_scale
        first = get_data_parallel_rank() * MICROBATCHES
        get_forward_backward_func()(
            forward_step_func=partial(forward_step, returns_share=returns_share),
            data_iterator=iter(range(first, first + MICROBATCHES)),
            model=model,
            num_microbatches=MICROBATCHES,
        )
        found.append([grad / 4.0 for _, grad in model.named_main_grads()])
    return found


def gradients_of_one_process(dp_size: int, *, per_token: bool, **fields: Any) -> dict[str, Tensor]:
    reference, batches = build(per_token=per_token, **fields), [microbatch(i) for i in range(dp_size * MICROBATCHES)]
    counts = torch.stack([batch["loss_mask"].double().sum() for batch in batches])
    weights = (1 / counts.sum()).expand_as(counts) if per_token else 1 / counts.clamp(min=1) / len(batches)
    # A router's loss counts each of its microbatch's tokens, learned or not.
    reference.aux_losses.set_backward_scale(
        weights[0] if per_token else torch.tensor(1 / len(batches), dtype=torch.float64)
    )
    for batch, weight in zip(batches, weights):
        ((losses_of(reference, batch) * batch["loss_mask"]).sum() * weight).backward()
    return {name: parameter.grad for name, parameter in reference.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize(
    ("ranks", "cp_size", "fields"),
    [(3, 1, EXPERTS), (4, 2, EXPERTS), slow(4, 2, {"cp_comm_type": "all_gather"}), slow(4, 4, {})],
)
def test_uneven_tokens_of_ranks_and_microbatches_give_the_gradients_of_one_process(
    ranks: int, cp_size: int, fields: dict[str, Any]
) -> None:
    outcomes = run_on_ranks(gradients_of_a_rank, ranks, cp_size, fields)
    for index, per_token in enumerate((False, False, True)):
        expected = gradients_of_one_process(ranks // cp_size, per_token=per_token, **fields)
        for outcome in outcomes:
            for (name, gradient), found in zip(expected.items(), outcome[index], strict=True):
                assert (found - gradient).norm() <= 1e-10 * gradient.norm(), (name, per_token)


def script_model(pre_process: bool = True, post_process: bool = True) -> nn.Module:
    model = pretrain_gpt.model_provider(pre_process, post_process)
    get_model_config(model).calculate_per_token_loss = True
    return model


def steps_of_script_and_flag() -> list[tuple[float, float]]:
    flags = {**read_bases()["dense"], "mock-data": True, "eval-iters": 0, "train-iters": 3, "global-batch-size": 4}
    found = []
    for extra, provider in (({}, script_model), ({"calculate-per-token-loss": True}, pretrain_gpt.model_provider)):
        with started_run(command_line({**flags, **extra}), model_provider=provider) as run:
            reports = [train_step(run)[0] for _ in range(2)]
            found.append((reports[1].losses["lm loss"], reports[1].grad_norm))
    return found


def test_a_script_may_ask_for_it_in_the_model_as_the_flag_does() -> None:
    (by_script, by_flag), _ = run_on_ranks(steps_of_script_and_flag, 2)
    assert by_script == by_flag
