"""pretrain_gpt.py in which one rank computes a NaN in one microbatch of its third step. Tests select the function."""

from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

import pretrain_gpt
from megatron.core.enums import ModelType
from megatron.core.utils import unwrap_model
from megatron.training import pretrain
from megatron.training.errors import exit_on_user_error

RANK, STEP, MICROBATCH, NUM_MICROBATCHES = 1, 3, 1, 2
PARAMETER = "decoder.layers.0.self_attention.linear_proj.weight"

ForwardStep = Callable[[Iterator[Any], nn.Module], tuple[Tensor, Any]]


def nan_in_loss(argv: list[str]) -> None:
    """Trains with a loss that becomes NaN, and with it the gradient of every parameter."""
    _main(argv, lambda losses, _: losses * float("nan"))


def nan_in_gradient(argv: list[str]) -> None:
    """Trains with finite losses and a gradient of PARAMETER that becomes NaN."""
    _main(argv, _poison_gradient)


def _poison_gradient(losses: Tensor, model: nn.Module) -> Tensor:
    unwrap_model(model).get_parameter(PARAMETER).register_hook(lambda grad: grad * float("nan"))
    return losses


def _main(argv: list[str], poison: Callable[[Tensor, nn.Module], Tensor]) -> None:
    with exit_on_user_error():
        pretrain(
            pretrain_gpt.train_valid_test_datasets_provider,
            pretrain_gpt.model_provider,
            ModelType.encoder_or_decoder,
            _poisoned(poison),
            argv=argv,
        )


def _poisoned(poison: Callable[[Tensor, nn.Module], Tensor]) -> ForwardStep:
    place = (STEP - 1) * NUM_MICROBATCHES + MICROBATCH
    calls = 0

    def forward_step(data_iterator: Iterator[Any], model: nn.Module) -> tuple[Tensor, Any]:
        nonlocal calls
        losses, loss_func = pretrain_gpt.forward_step(data_iterator, model)
        if model.training:
            if calls == place and dist.get_rank() == RANK:
                losses = poison(losses, model)
            calls += 1
        return losses, loss_func

    return forward_step
