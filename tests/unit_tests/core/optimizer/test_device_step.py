"""Steps decided on the device are bit-identical to steps decided on the host, and satisfy the needs of a CUDA graph."""

import math
from itertools import product
from unittest.mock import patch

import pytest
import torch

from megatron.core.graphs.safety import assert_capturable
from megatron.core.graphs.tape import TapeGraphs
from megatron.core.optimizer import OptimizerConfig
from tests.counts import soak_only
from tests.pairwise import pairwise
from tests.unit_tests.core.optimizer.grouped_run import (
    FP16,
    OVERFLOWS,
    PRECISE,
    STEPS,
    assert_same_state,
    build,
    dtype_of,
    prepare_gradients,
    state_of,
)
from tests.unit_tests.core.optimizer.reference import tiny_model, wrap_and_build

SCALED = {**PRECISE, "exp_avg_dtype": "fp16", "exp_avg_sq_dtype": "fp16"}
PRECISIONS = [
    {},
    {"deterministic_mode": True},
    {"bf16": True},
    PRECISE,
    SCALED,
    FP16,
    {"fp16": True, "loss_scale": 1000.1},
]
VOIDS = {0, 3, 4, 12}


def device_step(optimizer, discard=None):
    optimizer.prepare_device_step()
    return optimizer.settle_step_sync(optimizer.step_on_device(discard))


OPTIONS = {"settings": PRECISIONS, "optimizer": ["adam", "sgd"], "clip_grad": [0.0, 0.05]}
# All pairs of options; `make soak` runs all triples.
CASES = [tuple(case.values()) for case in pairwise(**OPTIONS)]
MORE_CASES = [case for case in product(*OPTIONS.values()) if case not in CASES]


@pytest.mark.parametrize(tuple(OPTIONS), CASES + [soak_only(*case) for case in MORE_CASES], ids=str)
def test_steps_decided_on_the_device_equal_the_hosts_bit_for_bit(optimizer, settings, clip_grad):
    if settings in (PRECISE, SCALED) and optimizer == "sgd":
        settings = {"bf16": True, "sgd_momentum": 0.0}
    settings = {**settings, "optimizer": optimizer, "clip_grad": clip_grad, "log_num_zeros_in_grad": clip_grad > 0}
    host, device = build(settings), build(settings)
    norms, updates = set(), 0
    for step in range(STEPS):
        prepare_gradients(*host, step)
        prepare_gradients(*device, step)
        if step in VOIDS:
            before = state_of(*device)
            updated, _, num_zeros = device_step(device[1], discard=torch.ones(1, dtype=torch.int32))
            assert not updated and num_zeros is None
            assert all(torch.equal(a, b) for a, b in zip(before, state_of(*device), strict=True))
        report = host[1].step()
        assert repr(device_step(device[1], discard=torch.zeros(()))) == repr(report)
        assert_same_state(device, host)
        updates += report[0]
        norms.add(report[1])
    assert updates == STEPS - len(OVERFLOWS) == device[1].state_dict()["step"]
    assert len({norm for norm in norms if math.isfinite(norm)}) == updates
    assert clip_grad == 0 or max(norm for norm in norms if math.isfinite(norm)) > clip_grad


@pytest.mark.parametrize("settings", [*PRECISIONS, {"optimizer": "sgd"}], ids=str)
def test_a_step_on_the_device_and_what_scales_the_loss_can_be_captured(settings):
    wrapped, optimizer = build({**settings, "log_num_zeros_in_grad": True})
    prepare_gradients(wrapped, optimizer, 0)
    optimizer.prepare_device_step()
    loss, discard = torch.randn(()), torch.zeros(1, dtype=torch.int64)
    with assert_capturable() as region:
        optimizer.scale_loss(loss)
        done = optimizer.step_on_device(discard)
        region.keep(done.outcome)
    assert optimizer.settle_step_sync(done)[0]


@pytest.mark.parametrize("settings", [{"optimizer": "sgd"}, {"bf16": True}, PRECISE, SCALED, FP16], ids=str)
def test_a_step_that_was_captured_once_follows_gradients_rates_scales_and_voids(settings):
    settings = {**settings, "clip_grad": 0.05, "log_num_zeros_in_grad": True}
    host, graphed = build(settings), build(settings)
    loss, discard, captured = torch.randn(()), torch.zeros(1, dtype=torch.int32), None
    for step in range(STEPS):
        prepare_gradients(*host, step)
        prepare_gradients(*graphed, step)
        graphed[1].prepare_device_step()
        if captured is None:
            before = state_of(*graphed)
            with TapeGraphs().capturing() as tape:
                captured = graphed[1].scale_loss(loss), graphed[1].step_on_device(discard)
            assert all(torch.equal(a, b) for a, b in zip(before, state_of(*graphed), strict=True))
        discard.fill_(step in VOIDS)
        if step in VOIDS:
            tape.replay()
            assert graphed[1].settle_step_sync(captured[1])[0] is False
            discard.zero_()
        loss.fill_(step)
        expected = host[1].scale_loss(loss)
        tape.replay()
        assert torch.equal(captured[0], expected)
        assert repr(graphed[1].settle_step_sync(captured[1])) == repr(host[1].step())
        assert_same_state(graphed, host)


def test_a_capture_that_breaks_off_leaves_an_optimizer_that_steps():
    wrapped, optimizer = build({})
    prepare_gradients(wrapped, optimizer, 0)
    optimizer.prepare_device_step()
    with patch("torch._fused_adamw_", side_effect=RuntimeError("not permitted when stream is capturing")):
        with pytest.raises(RuntimeError, match="not permitted"), TapeGraphs().capturing():
            optimizer.step_on_device()
    with pytest.raises(RuntimeError, match="load a checkpoint"):
        optimizer.step()
    optimizer.forget_broken_capture()
    other = build({})
    prepare_gradients(*other, 0)
    assert optimizer.step() == other[1].step()
    assert_same_state((wrapped, optimizer), other)


def test_a_loss_scale_reaches_losses_by_the_same_memory_and_has_the_bits_of_a_number():
    _, optimizer = build(FP16)
    losses = torch.randn(100), torch.randn((), dtype=torch.float64), torch.randn(3).half()
    with TapeGraphs().capturing() as tape:
        scaled = [optimizer.scale_loss(loss) for loss in losses]
    for scale in (2.0**32, 1000.1, 3.0):
        state = {"scale": scale, "growth_tracker": 0, "hysteresis_tracker": 1}
        optimizer.load_state_dict({"step": 0, "grad_scaler": state})
        tape.replay()
        for loss, replayed in zip(losses, scaled, strict=True):
            assert torch.equal(optimizer.scale_loss(loss), loss.float() * scale)
            assert torch.equal(replayed, loss.float() * scale)
    assert float(optimizer.get_loss_scale()) == 3.0
    loss = torch.randn(())
    assert build({})[1].scale_loss(loss) is loss


def test_rates_reach_the_kernels_by_the_same_memory():
    settings = {"optimizer": "sgd", "sgd_momentum": 0.0, "weight_decay": 0.0, "clip_grad": 0.0}
    wrapped, optimizer = wrap_and_build(tiny_model(), **settings)
    prepare_gradients(wrapped, optimizer, 0)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.prepare_device_step()
    with TapeGraphs().capturing() as tape:
        done = optimizer.step_on_device()
    for rate in (0.0, 0.7):
        before = [param.detach().clone() for param in wrapped.parameters()]
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.prepare_device_step()
        tape.replay()
        assert optimizer.settle_step_sync(done)[0]
        for param, old in zip(wrapped.parameters(), before, strict=True):
            torch.testing.assert_close(param.detach(), old - rate * param.main_grad, rtol=0, atol=1e-6)
            assert torch.equal(param, old) == (rate == 0.0)


@pytest.mark.parametrize(
    "name, value, message",
    [
        ("weight_decay", 0.2, r"weight_decay of parameter group 0 was 0.1 .* is 0.2: .*weight_decay must not change"),
        ("betas", (0.5, 0.5), r"betas of parameter group 0 was \(0.9, .* is \(0.5, 0.5\): "),
        ("eps", 1.0, "eps of parameter group 0 was 1e-08 .* is 1.0: "),
    ],
)
def test_a_setting_that_changes_after_a_step_on_the_device_is_an_error(name, value, message):
    wrapped, optimizer = build({})
    prepare_gradients(wrapped, optimizer, 0)
    assert device_step(optimizer)[0]
    optimizer.param_groups[0][name] = value
    with pytest.raises(ValueError, match=message):
        optimizer.prepare_device_step()


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"optimizer": "muon"}, "optimizer is muon, which requires a host decision"),
        ({"optimizer_cpu_offload": True}, "optimizer_cpu_offload is set, so updates run on the host"),
        ({**PRECISE, "main_params_dtype": "fp16"}, "main_params_dtype is fp16: .* must be fp32$"),
    ],
)
def test_what_needs_the_host_is_refused_by_the_settings_and_by_the_step(settings, message):
    with pytest.raises(ValueError, match=message):
        OptimizerConfig(**settings, optimizer_cuda_graph=True)
    _, optimizer = wrap_and_build(tiny_model(dtype_of(settings)), **settings)
    with pytest.raises(ValueError, match=message):
        optimizer.step_on_device()
