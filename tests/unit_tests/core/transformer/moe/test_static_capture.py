"""Expert layers with fixed-size buffers can be captured in a CUDA graph; layers that read token counts cannot."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from megatron.core.activations import quick_gelu
from megatron.core.graphs.safety import CaptureError, assert_capturable
from tests.unit_tests.core.models.small_models import LLAMA_LIKE, SEQ, VOCAB, small_config, small_model

EXPERTS = {**LLAMA_LIKE, "num_moe_experts": 4, "moe_aux_loss_coeff": 0.01, "moe_z_loss_coeff": 0.01}
STATIC = {"moe_grouped_gemm": True, "moe_expert_rank_capacity_factor": 4.0}
GPT_OSS = {
    "add_bias_linear": True,
    "activation_func": quick_gelu,
    "activation_func_clamp_value": 7.0,
    "glu_linear_offset": 1.0,
    "softmax_type": "learnable",
    "window_size": (4, 0),
}


def checked_twice(model: torch.nn.Module, loss: Callable[[], Tensor]) -> None:
    """Runs a warm-up step, and then a step that must be capturable. Gradients are allocated before both."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    loss().backward()
    with assert_capturable():
        loss().backward()


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields", [{}, GPT_OSS, {"lora_rank": 8, "add_bias_linear": True}], ids=["llama", "gpt-oss", "adapters"]
)
@pytest.mark.parametrize("is_fake", [False, True])
def test_a_static_layer_and_its_model_are_capturable_on_real_and_on_fake_tensors(
    is_fake: bool, fields: dict[str, Any]
) -> None:
    # Torch supports grouped GEMMs of fake tensors only in bf16.
    dtype = {"params_dtype": torch.bfloat16, "perform_initialization": False}
    with FakeTensorMode() if is_fake else nullcontext():
        model = small_model(small_config(**{**EXPERTS, **STATIC, **dtype, **fields}))
        layer = model.decoder.layers[0].mlp
        rows = torch.ones(SEQ, 2, 32, dtype=torch.bfloat16)
        checked_twice(layer, lambda: layer(rows)[0].float().square().sum())
        tokens = torch.zeros(2, SEQ, dtype=torch.int64)
        checked_twice(model, lambda: model(tokens, tokens, None, labels=tokens).mean())


def test_experts_that_run_one_by_one_are_refused_with_the_line_that_counts() -> None:
    model = small_model(small_config(**EXPERTS))
    tokens = torch.randint(0, VOCAB, (2, SEQ), generator=torch.Generator().manual_seed(1))
    with pytest.raises(CaptureError, match=r"tolist at .*experts\.py"):
        checked_twice(model, lambda: model(tokens, tokens, None, labels=tokens).mean())
