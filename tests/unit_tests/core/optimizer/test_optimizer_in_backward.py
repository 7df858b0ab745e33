"""What updates in backward refuse, naming both settings (TRAPS B28), and where runs find what was handed out."""

from typing import Any

import pytest
import torch

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.layout import Span
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
        ({"optimizer_in_backward_clip": "exact"}, f"{CLIP} is exact: needs OptimizerConfig.optimizer_in_backward"),
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
    return model, get_megatron_optimizer(OptimizerConfig(lr=0.1, clip_grad=0.0, **settings), [model])


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


def test_runs_find_gradients_while_they_are_lent_and_no_longer() -> None:
    model, optimizer = _build(releases=True, optimizer_in_backward=True)
    buffer = model.all_buffers[0]
    handed, owned = HandedGrads(buffer), buffer.owned_spans()[0]
    grad = torch.arange(owned.numel, dtype=torch.float32)
    with handed.lent(0, grad):
        found = handed.grad_of(Span(owned.start + 64, 64))
        assert torch.equal(found, grad[64:128]) and found.data_ptr() == grad[64:].data_ptr()
    with pytest.raises(KeyError):
        handed.grad_of(owned)
