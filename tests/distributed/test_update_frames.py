"""From the entry of an update to the kernel that performs it, few functions call each other.

A reader who follows a gradient reads one function for each frame of the stack at the kernel, as does a debugger.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

import megatron
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    TorchFullyShardedDataParallel,
    TorchFullyShardedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.optimizer import (
    ChainedOptimizer,
    FP32Optimizer,
    MegatronOptimizer,
    OptimizerConfig,
    get_megatron_optimizer,
)
from megatron.core.optimizer.optimizer_in_backward import UpdatesInBackward
from tests.harness import run_on_ranks

OURS = str(Path(str(megatron.__file__)).parent)
STEP, TAKE = MegatronOptimizer.step.__qualname__, UpdatesInBackward.take.__qualname__


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))


def _with_ddp(ddp: dict[str, Any], **settings: Any) -> tuple[nn.Module, MegatronOptimizer]:
    model = DistributedDataParallel(ModelParallelConfig(), DistributedDataParallelConfig(**ddp), _model())
    return model, get_megatron_optimizer(OptimizerConfig(**{"lr": 0.1, **settings}), [model])


def _with_fsdp2() -> tuple[nn.Module, MegatronOptimizer]:
    model = TorchFullyShardedDataParallel(ModelParallelConfig(), TorchFullyShardedDataParallelConfig(), _model())
    return model, get_megatron_optimizer(OptimizerConfig(lr=0.1), [model])


def _chained() -> tuple[nn.Module, MegatronOptimizer]:
    model, optimizer = _with_ddp(ZERO1)
    return model, ChainedOptimizer([optimizer])


def _over_torch() -> tuple[nn.Module, MegatronOptimizer]:
    model = _model()
    return model, FP32Optimizer(torch.optim.AdamW(model.parameters(), fused=True), OptimizerConfig(lr=0.1))


@dataclass(frozen=True)
class Case:
    """A model with its optimizer, the operator whose calls are watched, and the entry of the update.

    frames: the number of this project's functions from the entry to the caller of the operator, both included.
    """

    frames: int
    build: Callable[[], tuple[nn.Module, MegatronOptimizer]]
    operator: str = "_fused_adamw_"
    entry: str = STEP


ZERO1 = {"use_distributed_optimizer": True}
GATHERED_IN_STEP = dict.fromkeys(
    ("overlap_grad_reduce", "overlap_param_gather", "overlap_param_gather_with_optimizer_step"), True
)
CASES = {
    "DDP": Case(5, lambda: _with_ddp({})),
    "DDP, SGD": Case(5, lambda: _with_ddp({}, optimizer="sgd"), "_fused_sgd_"),
    # Ends in newton_schulz; the chain of Muon and Adam, and MuonRule._orthogonalize, are two frames more.
    "DDP, Muon": Case(7, lambda: _with_ddp({}, optimizer="muon"), "addmm"),
    "in backward": Case(
        3, lambda: _with_ddp({"release_gradients": True}, optimizer_in_backward=True, clip_grad=0.0), entry=TAKE
    ),
    "ZeRO-1": Case(5, lambda: _with_ddp(ZERO1)),
    "ZeRO-1, gathered in the step": Case(6, lambda: _with_ddp(ZERO1 | GATHERED_IN_STEP)),
    "ZeRO-1, Muon": Case(6, lambda: _with_ddp(ZERO1, optimizer="muon"), "addmm"),
    "chain of ZeRO-1": Case(6, _chained),
    "FSDP2": Case(5, _with_fsdp2),
    "torch's AdamW": Case(4, _over_torch),
}


def _stacks_on_rank(name: str) -> list[list[str]]:
    """Returns the stacks, innermost function first and up to the entry, of all calls of the operator in two steps."""
    case = CASES[name]
    parallel_state.initialize_model_parallel()
    model, optimizer = case.build()
    operator = getattr(torch, case.operator)
    stacks: list[list[str]] = []

    def watched(*args: Any, **kwargs: Any) -> Any:
        stack: list[str] = []
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and not (stack and stack[-1].endswith(case.entry)):
            stack.append(f"{frame.f_code.co_filename}: {frame.f_code.co_qualname}")
            frame = frame.f_back
        stacks.append(stack)
        return operator(*args, **kwargs)

    with patch.object(torch, case.operator, watched):
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(2, 16)).square().mean().backward()
            if name != "torch's AdamW":
                finalize_model_grads([model])
            optimizer.step()
    return stacks


@pytest.mark.parametrize("name", CASES)
def test_few_functions_call_each_other_between_the_entry_of_an_update_and_its_kernel(name: str) -> None:
    (stacks,) = run_on_ranks(_stacks_on_rank, 1, name)
    assert stacks, f"{CASES[name].operator} was not called"
    for stack in stacks:
        assert stack[-1].endswith(CASES[name].entry), stack
        assert sum(function.startswith(OURS) for function in stack) <= CASES[name].frames, "\n".join(stack)
