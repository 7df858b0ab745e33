"""A model with several parameter groups, changing learning rates, and gradients that occasionally overflow."""

import math

import torch
from torch import nn

from megatron.core.dist_checkpointing import model_logical_pieces
from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer import ParamGroupOverride, ParamKey
from tests.unit_tests.core.optimizer.reference import microbatches, tiny_model, wrap_and_build

FP16 = {"fp16": True, "initial_loss_scale": 3.0 * 2**10, "loss_scale_window": 3, "hysteresis": 1}
PRECISE = {"bf16": True, "use_precision_aware_optimizer": True, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}
# Three good steps after the overflows increase the loss scale, and one more step uses the larger scale.
STEPS, OVERFLOWS = 8, {2, 3}


def dtype_of(settings):
    return torch.float16 if "fp16" in settings else torch.bfloat16 if "bf16" in settings else torch.float32


def build(settings, device="cpu"):
    """Builds the wrapped model and its optimizer: groups with overrides, with --decoupled-lr, and the usual two."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"body": tiny_model(), "output_layer": nn.Linear(4, 3)}).to(device, dtype_of(settings))
    model.forward = lambda x: model["output_layer"](model["body"](x))
    overrides = {ParamKey(name="body.0.*"): ParamGroupOverride(max_lr=0.03, wd_mult=0.5)}
    return wrap_and_build(model, config_overrides=overrides, decoupled_lr=0.004, weight_decay=0.1, **settings)


def prepare_gradients(wrapped, optimizer, step):
    for number, group in enumerate(optimizer.param_groups):
        group["lr"] = 0.1 / (step + 3 + number)  # like a schedule: values that are not exact in fp32
    optimizer.zero_grad()
    (x,) = microbatches(step)
    x = x.to(next(wrapped.parameters())) * (math.inf if step in OVERFLOWS else 1.0)
    loss = wrapped(x).float().square().mean()
    optimizer.scale_loss(loss).backward()
    finalize_model_grads([wrapped])


def state_of(wrapped, optimizer):
    tensors = [p.detach() for p in wrapped.parameters()]
    tensors += [tensor.data for tensor in optimizer.sharded_state(model_logical_pieces(wrapped))]
    return [t.clone() for t in [*tensors, optimizer.scale_loss(torch.ones(()))]]


def assert_same_state(a, b):
    assert all(torch.equal(x, y) for x, y in zip(state_of(*a), state_of(*b), strict=True))
    assert a[1].common_state() == b[1].common_state()
