"""Steps that the device decides on against the host's own, bit for bit, and what a graph of them needs."""

import math

import pytest
import torch
from torch import nn

from megatron.core.dist_checkpointing import model_logical_pieces
from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, ParamGroupOverride, ParamKey
from tests.unit_tests.core.optimizer.reference import microbatches, our_step, tiny_model, wrap_and_build

FP16 = {"fp16": True, "initial_loss_scale": 3.0 * 2**10, "loss_scale_window": 3, "hysteresis": 1}
PRECISE = {"bf16": True, "use_precision_aware_optimizer": True, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}
PRECISIONS = [{}, {"deterministic_mode": True}, {"bf16": True}, PRECISE, FP16, {"fp16": True, "loss_scale": 1000.1}]
STEPS, OVERFLOWS, VOIDS = 20, {4, 5, 11}, {0, 3, 4, 12}


def dtype_of(settings):
    return torch.float16 if "fp16" in settings else torch.bfloat16 if "bf16" in settings else torch.float32


def build(settings):
    """A model with parameters in five groups: of their own rates, of --decoupled-lr, and the usual two."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"body": tiny_model(), "output_layer": nn.Linear(4, 3)}).to(dtype_of(settings))
    model.forward = lambda x: model["output_layer"](model["body"](x))
    overrides = {ParamKey(name="body.0.*"): ParamGroupOverride(max_lr=0.03, wd_mult=0.5)}
    return wrap_and_build(model, config_overrides=overrides, decoupled_lr=0.004, weight_decay=0.1, **settings)


def prepare_gradients(wrapped, optimizer, step):
    for number, group in enumerate(optimizer.param_groups):
        group["lr"] = 0.1 / (step + 3 + number)  # as a schedule: numbers that fp32 does not hold
    optimizer.zero_grad()
    (x,) = microbatches(step, dtype=next(wrapped.parameters()).dtype)
    loss = wrapped(x * math.inf if step in OVERFLOWS else x).float().square().mean()
    optimizer.scale_loss(loss).backward()
    finalize_model_grads([wrapped])


def device_step(optimizer, void=None):
    optimizer.prepare_device_step()
    return optimizer.settle_step_sync(optimizer.step_on_device(void))


def state_of(wrapped, optimizer):
    tensors = [p.detach() for p in wrapped.parameters()]
    tensors += [tensor.data for tensor in optimizer.sharded_state(model_logical_pieces(wrapped))]
    return [t.clone() for t in [*tensors, *optimizer._step_counts(), optimizer._device_scale]]


def assert_same_state(a, b):
    assert all(torch.equal(x, y) for x, y in zip(state_of(*a), state_of(*b), strict=True))
    assert a[1].state_dict() == b[1].state_dict()


@pytest.mark.parametrize("settings", PRECISIONS, ids=str)
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.parametrize("clip_grad", [0.0, 0.05])
def test_twenty_steps_decided_on_the_device_equal_the_hosts_bit_for_bit(optimizer, settings, clip_grad):
    if settings is PRECISE and optimizer == "sgd":
        settings = {"bf16": True, "sgd_momentum": 0.0}
    settings = {**settings, "optimizer": optimizer, "clip_grad": clip_grad, "log_num_zeros_in_grad": clip_grad > 0}
    host, device = build(settings), build(settings)
    norms, updates = set(), 0
    for step in range(STEPS):
        prepare_gradients(*host, step)
        prepare_gradients(*device, step)
        if step in VOIDS:
            before = state_of(*device)
            updated, _, num_zeros = device_step(device[1], void=torch.ones(1, dtype=torch.int32))
            assert not updated and num_zeros is None
            assert all(torch.equal(a, b) for a, b in zip(before, state_of(*device), strict=True))
        report = host[1].step()
        assert repr(device_step(device[1], void=torch.zeros(()))) == repr(report)
        assert_same_state(device, host)
        updates += report[0]
        norms.add(report[1])
    assert updates == STEPS - len(OVERFLOWS) == device[1].state_dict()["step"]
    assert len({norm for norm in norms if math.isfinite(norm)}) == updates
    assert clip_grad == 0 or max(norm for norm in norms if math.isfinite(norm)) > clip_grad


def test_a_loss_scale_reaches_losses_by_the_same_memory_and_has_the_bits_of_a_number():
    _, optimizer = build(FP16)
    place = optimizer._device_scale.data_ptr()
    losses = torch.randn(100), torch.randn((), dtype=torch.float64), torch.randn(3).half()
    for scale in (2.0**32, 1000.1, 3.0):
        state = {"scale": scale, "growth_tracker": 0, "hysteresis_tracker": 1}
        optimizer.load_state_dict({"step": 0, "grad_scaler": state})
        for loss in losses:
            assert torch.equal(optimizer.scale_loss(loss), loss.float() * scale)
    assert optimizer._device_scale.data_ptr() == place and float(optimizer.get_loss_scale()) == 3.0
    loss = torch.randn(())
    assert build({})[1].scale_loss(loss) is loss


def test_rates_reach_the_kernels_by_the_same_memory():
    wrapped, optimizer = wrap_and_build(tiny_model(), optimizer="sgd", sgd_momentum=0.0, weight_decay=0.0)
    (rule,) = optimizer._rules
    rates = [rate for rates in rule._rates for rate in rates.values()]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    our_step(wrapped, optimizer, microbatches(0))
    assert all(torch.equal(p, q) for p, q in zip(wrapped.parameters(), tiny_model().parameters()))
    for group in optimizer.param_groups:
        group["lr"] = 0.7
    optimizer.prepare_device_step()
    assert [rate.item() for rate in rates] == [0.7, 0.7]
    assert all(a is b for a, b in zip(rates, (rate for rates in rule._rates for rate in rates.values())))


def test_a_weight_decay_that_moves_after_a_step_on_the_device_is_an_error():
    wrapped, optimizer = build({})
    prepare_gradients(wrapped, optimizer, 0)
    assert device_step(optimizer)[0]
    optimizer.param_groups[0]["weight_decay"] = 0.2
    with pytest.raises(ValueError, match=r"were \[0.1, .* and are \[0.2, .*weight_decay must not change"):
        optimizer.prepare_device_step()


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"optimizer": "muon"}, "optimizer is muon, whose step the host decides on"),
        ({"optimizer_cpu_offload": True}, "optimizer_cpu_offload is set, and the host updates what it keeps"),
        ({**PRECISE, "exp_avg_sq_dtype": "fp16"}, "exp_avg_sq_dtype is fp16, .* must be fp32 or bf16"),
        ({**PRECISE, "main_params_dtype": "fp16"}, "main_params_dtype is fp16, .* must be fp32$"),
    ],
)
def test_what_needs_the_host_is_refused_by_the_settings_and_by_the_step(settings, message):
    with pytest.raises(ValueError, match=message):
        OptimizerConfig(**settings, optimizer_cuda_graph=True)
    _, optimizer = wrap_and_build(tiny_model(dtype_of(settings)), **settings)
    with pytest.raises(ValueError, match=message):
        optimizer.step_on_device()
