"""Storage forms of floats return the written values, exactly or within the precision of the form."""

import pytest
import torch

from megatron.core.dist_checkpointing import model_logical_pieces
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer.state_dict import MASTERS, state_prefix
from megatron.core.optimizer.stored_floats import BLOCK, Rounded, ScaledHalf, WithRemainder, full_masters, half_masters
from tests.unit_tests.core.optimizer.reference import microbatches, our_step, tiny_model, wrap_and_build


def test_bf16_and_its_remainder_are_every_finite_fp32_bit_for_bit() -> None:
    bits = torch.randint(-(2**31), 2**31, (1 << 16,), generator=torch.Generator().manual_seed(3)).int()
    # Ties between two bf16 values of both signs, signed zeros, the smallest and the largest value.
    special = [0x3F808000, 0x3F818000, -0x407F8000, 0, -(2**31), 1, 0x7F7FFFFF, 0x0000FFFF, 0x00008000]
    bits[: len(special)] = torch.tensor(special)
    values = bits.view(torch.float32)
    values = torch.where(values.isfinite(), values, 1.5)
    model = torch.zeros(values.numel(), dtype=torch.bfloat16)
    stored = WithRemainder(model)
    stored.write(0, values)
    assert torch.equal(stored.read(0, stored.numel).view(torch.int32), values.view(torch.int32))
    # Parameters are rounded to nearest, except for ties.
    is_half = values.view(torch.int32) & 0xFFFF == 0x8000
    assert is_half.any() and torch.equal(model[~is_half], values[~is_half].bfloat16())
    assert stored.num_bytes == 2 * values.numel()


@pytest.mark.parametrize("exponent", [-30.0, -12.0, 0.0, 9.0, 30.0])
def test_scaled_fp16_keeps_its_digits_at_any_size_and_what_it_gave_comes_back_exactly(exponent: float) -> None:
    values = torch.randn(BLOCK * 50, generator=torch.Generator().manual_seed(1)) * 10**exponent
    values[BLOCK : 2 * BLOCK] = 0
    stored = ScaledHalf(torch.zeros(values.numel(), dtype=torch.float16))
    stored.write(0, values)
    read = stored.read(0, values.numel())
    torch.testing.assert_close(read, values, rtol=2**-11, atol=float(values.abs().max()) * 2**-24)
    other = ScaledHalf(torch.zeros(values.numel(), dtype=torch.float16))
    # Written in different ranges than before.
    for start in range(0, values.numel(), 5 * BLOCK):
        other.write(start, read[start : start + 5 * BLOCK])
    assert torch.equal(other.read(0, values.numel()), read)


@pytest.mark.parametrize(
    "settings, bound",
    [
        ({}, 0.0),
        ({"store_param_remainders": False}, 0.0),
        ({"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}, 2e-2),
        ({"exp_avg_dtype": "fp16", "exp_avg_sq_dtype": "fp16"}, 2e-3),
        # A step changes weights of about 0.3 by at most 0.01, and their relative precision is 2^-12.
        ({"main_params_dtype": "fp16"}, 1e-2),
    ],
)
def test_narrow_states_step_like_fp32_ones(settings: dict, bound: float) -> None:
    """Applies the same gradients to both, and compares updates within the precision of the storage form."""
    updates = []
    for given in ({}, {"use_precision_aware_optimizer": True, **settings}):
        wrapped, optimizer = wrap_and_build(tiny_model(torch.bfloat16), bf16=True, clip_grad=0.0, **given)
        before = _masters(wrapped, optimizer)
        for step in range(20):
            # Gradients that do not depend on the rounding of the weights.
            for buffer in wrapped.all_buffers:
                generator = torch.Generator().manual_seed(step)
                buffer.grad_data.copy_(torch.randn(buffer.grad_data.shape, generator=generator) * 1e-4)
            assert optimizer.step()[0]
        updates.append(_masters(wrapped, optimizer) - before)
    difference = (updates[1] - updates[0]).norm() / updates[0].norm()
    assert difference <= bound


def _masters(wrapped, optimizer) -> torch.Tensor:
    """Returns the masters of all parameters: [N], fp32."""
    state = optimizer.sharded_state(model_logical_pieces(wrapped))
    masters = [tensor.data.flatten() for tensor in state if tensor.key.startswith(state_prefix(MASTERS))]
    return torch.cat(masters).clone()


def test_states_take_the_memory_of_their_types() -> None:
    model = torch.zeros(1024, dtype=torch.bfloat16)
    forms = (full_masters(model), half_masters(model), WithRemainder(model), Rounded(model))
    assert [form.num_bytes / model.numel() for form in forms] == [4, 2 + 1 / BLOCK, 2, 2]


def test_norm_of_parameters_and_reload_read_any_form() -> None:
    for settings in ({}, {"main_params_dtype": "fp16"}):
        wrapped, optimizer = wrap_and_build(
            tiny_model(torch.bfloat16), bf16=True, use_precision_aware_optimizer=True, **settings
        )
        our_step(wrapped, optimizer, microbatches(0, dtype=torch.bfloat16))
        norm = _masters(wrapped, optimizer).double().norm().item()
        assert optimizer.params_norm() == pytest.approx(norm, rel=1e-6)
        wrapped.module.load_state_dict(tiny_model(torch.bfloat16, seed=5).state_dict())
        optimizer.reload_model_params()
        expected = torch.cat([p.flatten() for p in tiny_model(torch.bfloat16, seed=5).parameters()]).double().norm()
        assert optimizer.params_norm() == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"exp_avg_dtype": "bf16"}, "exp_avg_dtype is bf16: requires use_precision_aware_optimizer"),
        ({"use_precision_aware_optimizer": True, "exp_avg_sq_dtype": "fp8"}, "exp_avg_sq_dtype is fp8: must be fp32"),
        (
            {"use_precision_aware_optimizer": True, "optimizer": "sgd"},
            "optimizer is sgd with use_precision_aware_optimizer: must be adam or distributed_fused_adam",
        ),
    ],
)
def test_types_that_cannot_be_kept_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OptimizerConfig(**settings)
