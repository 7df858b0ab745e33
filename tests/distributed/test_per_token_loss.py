"""--calculate-per-token-loss: gradients of uneven microbatches and ranks against one process in fp64."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import pretrain_gpt
from megatron.core.distributed import PlainDataParallel, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config
from megatron.training.training import train_step
from tests.distributed.tiny_runs import started_run
from tests.functional_tests.case import command_line, read_bases
from tests.harness import run_on_ranks
from tests.unit_tests.core.models.small_models import LLAMA_LIKE, SEQ, VOCAB, small_config, small_model

RANKS, MICROBATCHES = 3, 2


def build() -> GPTModel:
    losses = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.3, "moe_z_loss_coeff": 0.1}
    experts = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 16, **losses}
    config = small_config(params_dtype=torch.float64, calculate_per_token_loss=True, **LLAMA_LIKE, **experts)
    return small_model(config)


def microbatch(index: int) -> tuple[Tensor, Tensor]:
    """Tokens [2, S + 1] and loss mask [2, S]; from one token to all, and none in the second and third."""
    generator = torch.Generator().manual_seed(index)
    tokens = torch.randint(0, VOCAB, (2, SEQ + 1), generator=generator)
    share = [0.05, 0.0, 0.0, 1.0, 0.5, 0.1][index]
    return tokens, (torch.rand(2, SEQ, generator=generator) < share).float()


def losses_of(model: nn.Module, index: int) -> Tensor:
    tokens, _ = microbatch(index)
    return model(tokens[:, :-1], torch.arange(SEQ).expand(2, SEQ), None, labels=tokens[:, 1:])


def forward_step(indices: Any, model: nn.Module) -> Any:
    index = next(indices)
    _, mask = microbatch(index)
    return losses_of(model, index), lambda losses: ((losses * mask).sum(), mask.sum(), {})


def gradients_of_a_rank() -> list[Tensor]:
    model = PlainDataParallel(build(), group=dist.group.WORLD, calculate_per_token_loss=True)
    config = get_model_config(model)
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = lambda loss: loss * 4.0  # as a loss scale of fp16, which the optimizer takes off
    config.aux_loss_scale_func = model.module.aux_losses.set_backward_scale
    first = dist.get_rank() * MICROBATCHES
    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(range(first, first + MICROBATCHES)),
        model=model,
        num_microbatches=MICROBATCHES,
    )
    return [grad / 4.0 for _, grad in model.named_main_grads()]


def test_uneven_microbatches_and_ranks_give_the_gradient_of_all_tokens_together() -> None:
    reference = build()
    count = RANKS * MICROBATCHES
    total = torch.stack([microbatch(index)[1].double().sum() for index in range(count)]).sum()
    # A router's loss counts each of its microbatch's tokens, learned or not.
    reference.aux_losses.set_backward_scale(1.0 / total)
    for index in range(count):
        ((losses_of(reference, index) * microbatch(index)[1]).sum() / total).backward()
    for gradients in run_on_ranks(gradients_of_a_rank, RANKS):
        for (name, parameter), gradient in zip(reference.named_parameters(), gradients, strict=True):
            assert (gradient - parameter.grad).norm() <= 1e-10 * parameter.grad.norm(), name


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
