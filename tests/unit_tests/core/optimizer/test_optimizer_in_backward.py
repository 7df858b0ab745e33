"""Updates in backward: rejected settings are named (TRAPS B28), runs find gradients only while they are held, and
each bucket takes one call and one kernel rather than one per parameter (ANCHORS, finding 5).
"""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.optimizer_in_backward import HandedGrads
from megatron.core.optimizer.state_memory import state_bytes_of
from tests.unit_tests.core.optimizer.reference import tiny_model

IN_BACKWARD = {"optimizer_in_backward": True}
CLIP = "OptimizerConfig.optimizer_in_backward_clip"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (IN_BACKWARD, f"clip_grad is 1.0 and .*optimizer_in_backward is set: .*{CLIP} must be exact, previous-norm or"),
        (
            {**IN_BACKWARD, "clip_grad": 0.0, "optimizer_in_backward_clip": "per-bucket"},
            f"{CLIP} is per-bucket and .*0",
        ),
        ({"optimizer_in_backward_clip": "exact"}, f"{CLIP} is exact: requires OptimizerConfig.optimizer_in_backward"),
        ({**IN_BACKWARD, "clip_grad": 0.0, "fp16": True}, f"fp16 and .* both set: .*{CLIP} must be exact"),
        (
            {**IN_BACKWARD, "clip_grad": 0.0, "optimizer": "muon"},
            "optimizer is muon and .*optimizer_in_backward is set",
        ),
        ({**IN_BACKWARD, "clip_grad": 0.0, "optimizer_cpu_offload": True}, "optimizer_cpu_offload is set and"),
        ({**IN_BACKWARD, "clip_grad": 0.0, "optimizer_cuda_graph": True}, "optimizer_cuda_graph is set and"),
        ({**IN_BACKWARD, "optimizer_in_backward_clip": "last"}, "must be one of exact, previous-norm, per-bucket"),
    ],
)
def test_b28_what_cannot_be_updated_in_backward_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        OptimizerConfig(lr=0.1, **settings)


def _build(*, releases: bool, per_token: bool = False, **settings: Any) -> Any:
    config = ModelParallelConfig(calculate_per_token_loss=per_token)
    model = DistributedDataParallel(config, DistributedDataParallelConfig(release_gradients=releases), tiny_model())
    return model, get_megatron_optimizer(OptimizerConfig(**{"lr": 0.1, "clip_grad": 0.0, **settings}), [model])


@pytest.mark.parametrize(
    ("built", "changed", "words"),
    [
        ({}, {"clip_grad": 1.0}, f"clip_grad is 1.0 and .*{CLIP} must be exact"),
        ({}, {"clip_grad": 1.0, "optimizer_in_backward_clip": "exact"}, f"{CLIP} is exact and was None when"),
        (
            {"clip_grad": 1.0, "optimizer_in_backward_clip": "per-bucket"},
            {"clip_grad": 0.0},
            f"{CLIP} is per-bucket and .*clip_grad is 0",
        ),
    ],
)
def test_b28_a_clip_that_is_asked_for_later_is_not_left_out_silently(
    built: dict[str, Any], changed: dict[str, Any], words: str
) -> None:
    model, optimizer = _build(releases=True, **IN_BACKWARD, **built)
    for name, value in changed.items():
        setattr(optimizer.config, name, value)
    before = [param.detach().clone() for param in model.parameters()]
    with pytest.raises(ValueError, match=words):
        model(torch.ones(2, 5)).sum().backward()
        model.finish_grad_sync()
    assert all(torch.equal(param, old) for param, old in zip(model.parameters(), before, strict=True))


def test_optimizer_and_wrapper_must_agree_on_who_frees_gradients() -> None:
    for releases in (False, True):
        words = rf"optimizer_in_backward is {not releases} and .*release_gradients .*\[{releases}\]: must be the same"
        with pytest.raises(ValueError, match=words):
            _build(releases=releases, optimizer_in_backward=not releases)


def test_gradients_that_are_divided_at_the_end_must_be_held() -> None:
    with pytest.raises(
        ValueError, match=f"calculate_per_token_loss and .*optimizer_in_backward .*{CLIP} must be exact"
    ):
        _build(releases=True, per_token=True, optimizer_in_backward=True)
    _build(releases=True, per_token=True, optimizer_in_backward=True, optimizer_in_backward_clip="exact")


def test_gradients_that_are_freed_are_not_planned_for() -> None:
    for releases in (False, True):
        model, optimizer = _build(releases=releases, optimizer_in_backward=releases)
        planned = state_bytes_of([model], optimizer.config)
        assert (planned.gradients == 0) == releases and planned.moments > 0


def test_runs_find_gradients_while_they_are_held_and_no_longer() -> None:
    model, optimizer = _build(releases=True, optimizer_in_backward=True)
    buffer = model.all_buffers[0]
    handed, owned = HandedGrads(buffer), buffer.owned_spans()[0]
    grad = torch.arange(owned.numel, dtype=torch.float32)
    with handed.holding(0, grad):
        found = handed.grad_of(0)
        assert torch.equal(found, grad) and found.data_ptr() == grad.data_ptr()
    with pytest.raises(KeyError):
        handed.grad_of(0)


class Updates(TorchDispatchMode):
    """Records the number of tensors that each call of the fused kernel steps."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "_fused_adam" in str(func):
            self.sizes.append(len(args[0]))
        return func(*args, **(kwargs or {}))


def test_finding_5_a_bucket_of_many_parameters_is_one_call_of_a_hook_and_one_kernel_on_one_tensor() -> None:
    module = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(50)))
    ddp_config = DistributedDataParallelConfig(release_gradients=True, bucket_size=25 * 64, overlap_grad_reduce=True)
    model = DistributedDataParallel(ModelParallelConfig(), ddp_config, module)
    get_megatron_optimizer(OptimizerConfig(lr=0.1, clip_grad=0.0, **IN_BACKWARD), [model])
    calls: list[int] = []
    model.register_bucket_ready_hook(lambda bucket: calls.append(len(bucket.params)))
    with Updates() as updates:
        model(torch.ones(1, 8)).sum().backward()
        model.finish_grad_sync()
    assert calls == [25, 25] and updates.sizes == [1, 1]
