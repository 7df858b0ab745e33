"""Tests clipping, norms and loss scaling of DistributedFusedAdam against torch's clip_grad_norm_ and GradScaler."""

import functools
import io
import itertools
import math

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

from megatron.core.optimizer import DistributedFusedAdam
from tests.counts import long_count, soak_only
from tests.distributed.fused_adam_runs import (
    LAZY,
    ODD,
    Case,
    Run,
    alternating,
    assert_same_on_all_ranks,
    cap,
    factors,
    usually,
    world,
)
from tests.distributed.plain_steps import PlainSteps
from tests.harness import run_on_ranks

SHAPES = tuple(ODD)
# Adam is nearly independent of the size of gradients unless eps is large.
BIG_EPS = {"eps": 1.0, "lr": 0.3}
# The clipping factor is applied in a different place, which rounds each gradient differently by one or two units in the
# last place, in each of 8 steps of at most 0.3.
CLOSE = {"rtol": 0.0, "atol": 8 * 0.3 * 4 * 2**-23}
FP16, FP32 = torch.float16, torch.float32


class Scaled:
    """A run with a loss scaler, and plain PyTorch's reference with a second scaler."""

    def __init__(self, settings, dtype=FP32, *, plain_steps=False, **scaler):
        self.run = Run(Case({**BIG_EPS, **settings}, shapes=SHAPES, dtypes=(dtype,)))
        self.ours, self.reference = self.run.optimizer, self.run.reference
        self.plain = self.reference.optimizer
        if plain_steps:
            self.ours.__class__ = PlainSteps
        chosen = {"init_scale": 2.0**8, "growth_interval": 2, **scaler}
        self.our_scaler, self.scaler = (torch.amp.GradScaler("cpu", **chosen) for _ in range(2))
        self.scaler.scale(torch.zeros(()))
        self.overflow = 0.0

    def gradients(self, step, *, overflow=False):
        """Computes scaled gradients on both sides. overflow: one element is infinite on the last rank."""
        self.ours.zero_grad()
        self.backward(step, overflow=overflow)
        self.reference.set_grads(self.all_grads(step, overflow), scale=self.scaler.get_scale())

    def backward(self, step, *, overflow=False):
        rank, size = world()
        own = [factor * size for factor in factors(SHAPES, step, rank, 0)]
        if overflow and rank == size - 1:
            own[5][3] = math.inf
        self.our_scaler.scale(self.run.model(own)).backward()

    def all_grads(self, step, overflow):
        grads = self.run.grads(step)
        if overflow:
            grads[5][3] = math.inf
        return grads

    def clip(self, max_norm):
        """Clips both sides, asserts that their norms are close, and returns the norm."""
        ours = self.ours.clip_grad_norm(max_norm)
        plain = clip_grad_norm_(self.reference.masters, max_norm)
        assert ours.shape == () and ours.dtype == FP32
        torch.testing.assert_close(ours, plain.float(), rtol=1e-6, atol=0, equal_nan=True)
        return plain.item()

    def finish(self):
        """Steps both sides with their scalers, which must then be in equal states."""
        self.our_scaler.step(self.ours)
        self.scaler.step(self.plain)
        for scaler in (self.our_scaler, self.scaler):
            scaler.update()
        assert self.our_scaler.state_dict() == self.scaler.state_dict()
        self.reference.publish()

    def check(self, **bounds):
        params = list(self.run.model.parameters())
        self.ours.wait_params(params)
        for param, value in zip(params, self.reference.values):
            torch.testing.assert_close(param.detach(), value, **(bounds or {"rtol": 0.0, "atol": 0.0}))
        assert_same_on_all_ranks(params)


# Each function leaves both sides ready for scaler.step.


def unscale_then_clip(scaled):
    scaled.ours.unscale_grads(grad_scaler=scaled.our_scaler)
    scaled.scaler.unscale_(scaled.plain)
    scaled.clip(2.0)


def torchs_unscale_then_clip(scaled):
    scaled.our_scaler.unscale_(scaled.ours)
    scaled.scaler.unscale_(scaled.plain)
    scaled.clip(2.0)


def clip_then_unscale(scaled):
    scaled.clip(600.0)
    scaled.ours.unscale_grads(grad_scaler=scaled.our_scaler)
    scaled.scaler.unscale_(scaled.plain)


def clip_then_torchs_unscale(scaled):
    scaled.clip(600.0)
    scaled.our_scaler.unscale_(scaled.ours)
    scaled.scaler.unscale_(scaled.plain)


def clip_alone(scaled):
    scaled.clip(600.0)


def nothing(scaled):
    pass


ORDERS = [unscale_then_clip, torchs_unscale_then_clip, clip_then_unscale, clip_then_torchs_unscale, clip_alone, nothing]
OVERFLOWS = {0, 2, 3}  # includes the first step, where states exist but have not been updated


def orders_of_calls(order):
    several = ({"bucket_cap_mb": cap(700)}, {"overlap_param_sync": True, "debug": True}, {"overlap_grad_sync": False})
    # Steps handled by the optimizer and by the scaler alternate; every second order begins with the other one.
    is_odd = bool(ORDERS.index(order) % 2)
    some = [(is_odd != bool(number % 2), settings) for number, settings in enumerate(several)]
    for plain_steps, settings in usually(some, soak=itertools.product((False, True), several)):
        scaled = Scaled(settings, plain_steps=plain_steps)
        # After the last overflow, enough steps follow for the scale to grow.
        for step in range(6):
            scaled.gradients(step, overflow=step in OVERFLOWS)
            order(scaled)
            before = [value.clone() for value in scaled.reference.values]
            scaled.finish()
            has_moved = not all(torch.equal(a, b) for a, b in zip(before, scaled.reference.values))
            assert has_moved == (step not in OVERFLOWS)
        # Scales are powers of two, so without clipping nothing is rounded.
        scaled.check(**({} if order is nothing else CLOSE))
        assert scaled.scaler.get_scale() != 2.0**8


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
def test_any_order_of_unscaling_clipping_and_stepping_equals_plain_pytorch(order):
    run_on_ranks(orders_of_calls, long_count(2, soak=3), order)


def skipped_step(**settings):
    """Runs a step that overflows on one rank, where shards end inside parameters that are copied from collectives."""
    scaled = Scaled({"bucket_cap_mb": cap(400), "contiguous_param_buffer": False, **settings})
    scaled.gradients(0, overflow=True)
    scaled.finish()
    scaled.check()


@pytest.mark.parametrize("settings", [{}, {"overlap_param_sync": True}], ids=str)
def test_after_a_skipped_step_all_ranks_have_the_parameters_from_before(settings):
    run_on_ranks(functools.partial(skipped_step, **settings), 2)


def scales_by_hand():
    scaled = Scaled({"bucket_cap_mb": cap(700)}, init_scale=1000.1)
    for step in range(6):
        scaled.gradients(step, overflow=step == 3)
        inverse = torch.tensor(1 / 1000.1)
        found = scaled.ours.unscale_grads(inv_scale=inverse if step % 2 else inverse.item())
        assert {place: flag.item() for place, flag in found.items()} == {torch.device("cpu"): float(step == 3)}
        for master in scaled.reference.masters:
            master.grad.mul_(inverse)
        scaled.clip(1.5)
        # Without a scaler, the caller must act on the result.
        if step != 3:
            scaled.ours.step()
            scaled.plain.step()
        scaled.reference.publish()
    scaled.check(**CLOSE)


def test_gradients_unscaled_by_a_number_are_stepped_without_a_scaler():
    run_on_ranks(scales_by_hand, 2)


def without_scales():
    """Runs neither scaler nor unscaling; infinite gradients are applied, as in torch."""
    scaled = Scaled({"bucket_cap_mb": cap(700)}, enabled=False)
    for step in range(3):
        scaled.gradients(step)
        scaled.clip(2.0)
        scaled.our_scaler.step(scaled.ours)
        scaled.plain.step()
        scaled.reference.publish()
    scaled.check(**CLOSE)


def test_without_a_scale_clipping_equals_plain_pytorch():
    run_on_ranks(without_scales, 2)


def more_after_unscaling():
    """Runs further backwards after unscaling and clipping; their gradients are added unchanged."""
    every = itertools.product(({"bucket_cap_mb": cap(700)}, {"overlap_grad_sync": False}), (False, True))
    for settings, contiguous in alternating(every):
        scaled = Scaled({**settings, "contiguous_grad_buffer": contiguous})
        for step in (0, 3):
            scaled.gradients(step)
            unscale_then_clip(scaled)
            for later in (step + 1, step + 2):
                scaled.backward(later)
                added = scaled.run.grads(later)
                for master, grad in zip(scaled.reference.masters, added):
                    master.grad.add_(grad * scaled.scaler.get_scale())
                if later == step + 1:
                    scaled.clip(300.0)
            scaled.clip(1e9)
            scaled.finish()
        scaled.check(**CLOSE)


def test_gradients_that_come_after_unscaling_and_clipping_are_added_as_plain_pytorch_adds_them():
    run_on_ranks(more_after_unscaling, 3)


def steps_without_zero_grad():
    """Steps repeatedly by gradients that are already unscaled and clipped, then again with a new scale."""
    for settings in ({}, {"contiguous_param_buffer": False}):
        steps_of(Scaled({"bucket_cap_mb": cap(700), **settings}))


def steps_of(scaled):
    scaled.gradients(0)
    unscale_then_clip(scaled)
    scaled.finish()
    for _ in range(2):
        scaled.ours.step()
        scaled.plain.step()
    scaled.reference.publish()
    scaled.clip(0.5)
    scaled.ours.step()
    scaled.plain.step()
    scaled.reference.publish()
    # Also by gradients that the scaler unscaled in its own step, clipped beforehand or not.
    for clips in (False, True):
        scaled.gradients(1)
        if clips:
            scaled.clip(600.0)
        scaled.finish()
        norm = plain_norm([master.grad for master in scaled.reference.masters])
        assert scaled.ours.grad_norm().item() == pytest.approx(norm, rel=1e-6)
        scaled.ours.step()
        scaled.plain.step()
        scaled.reference.publish()
    scaled.check(**CLOSE)


def test_steps_without_zero_grad_go_on_with_unscaled_and_clipped_gradients():
    run_on_ranks(steps_without_zero_grad, 2)


def overflow_of_one_rank():
    for dtype, settings in (
        (FP32, {}),
        (FP16, {"overlap_param_sync": True}),
        (torch.bfloat16, {"store_params": False, "store_param_remainders": True}),
        (FP16, {"with_scaled_states": True, "dtype": FP16, "param_sync_dtype": FP16}),
    ):
        settings = {"bucket_cap_mb": cap(400), **settings}
        runs = [Run(Case(settings, shapes=SHAPES, dtypes=(dtype,))) for _ in range(2)]
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        # Compares steps skipped on the device with steps that never ran, beginning with the first step.
        for step in range(4):
            for run, skips in zip(runs, (step in (0, 2), False)):
                if run is runs[1] and step in (0, 2):
                    continue
                run.optimizer.zero_grad()
                rank, size = world()
                own = [factor * size for factor in factors(SHAPES, step, rank, 0)]
                if skips and rank == 1:
                    own[5][3] = math.inf
                loss = run.model(own)
                (scaler.scale(loss) if run is runs[0] else loss).backward()
                scaler.step(run.optimizer) if run is runs[0] else run.optimizer.step()
            scaler.update()
            saved = io.BytesIO()
            torch.save(runs[0].optimizer.state_dict(), saved)
            if step in (0, 2):
                saved.seek(0)
                runs[0].optimizer.load_state_dict(torch.load(saved, weights_only=False))
        for run in runs:
            run.optimizer.wait_params(run.model.parameters())
        assert scaler.get_scale() == 1.0
        for ours, theirs in zip(runs[0].model.parameters(), runs[1].model.parameters()):
            assert torch.equal(ours, theirs), settings


@pytest.mark.slow
def test_b22_an_overflow_of_one_rank_skips_the_step_on_all_and_leaves_states_to_save_and_load():
    run_on_ranks(overflow_of_one_rank, 3)


def plain_norm(grads, norm_type=2.0):
    return torch.linalg.vector_norm(torch.cat([grad.flatten() for grad in grads]), norm_type).item()


def norms(dtype, settings, rel):
    """Checks norms of all, some and no parameters in either order, for several norm types, and of later gradients."""
    case = Case({"bucket_cap_mb": cap(700), **settings}, shapes=SHAPES, dtypes=(dtype,), microbatches=2, waits=LAZY)
    for first in ("some", "all") if dtype == FP32 else ("some",):
        run = Run(case)
        optimizer, params = run.optimizer, list(run.model.parameters())
        assert optimizer.grad_norm().item() == 0.0
        run.backward(0)
        grads = run.grads(0)
        some = (1, 5, 6)
        expected = {"all": plain_norm(grads), "some": plain_norm([grads[number] for number in some])}
        chosen = {"all": None, "some": [params[number] for number in some]}
        for which in (first, *sorted(expected), *sorted(expected, reverse=True)):
            assert optimizer.grad_norm(chosen[which]).item() == pytest.approx(expected[which], rel=rel), which
        assert optimizer.grad_norm(iter(chosen["some"])).item() == pytest.approx(expected["some"], rel=rel)
        assert optimizer.grad_norm(params[3]).item() == pytest.approx(plain_norm([grads[3]]), rel=rel)
        assert optimizer.grad_norm([]).item() == 0.0 == optimizer.grad_norm([params[4]]).item()
        for norm_type in (math.inf, 1.0, 3.0):
            found = optimizer.grad_norm(norm_type=norm_type).item()
            assert found == pytest.approx(plain_norm(grads, norm_type), rel=rel)
        run.backward(1)
        grads = [a + b for a, b in zip(grads, run.grads(1))]
        assert optimizer.grad_norm(force=True).item() == pytest.approx(plain_norm(grads), rel=rel)
        optimizer.zero_grad()
        assert optimizer.grad_norm().item() == 0.0


def all_norms():
    for dtype in (FP32, FP16, torch.bfloat16):
        norms(dtype, {}, 1e-6)
    norms(torch.float64, {"dtype": torch.float64, "grad_sync_dtype": torch.float64}, 1e-6)
    norms(FP32, {"contiguous_grad_buffer": True, "overlap_param_sync": True}, 1e-6)
    # First the norm exceeds fp16, although no element does; then squares underflow. Only one rank has gradients that
    # are not zero, so that sums fit in fp16.
    for value in (3e4, 2.0**-20):
        param = nn.Parameter(torch.zeros(1000, dtype=FP16))
        optimizer = DistributedFusedAdam([param], grad_sync_dtype=FP16, average_grad_sync=False)
        param.grad = torch.full_like(param, value if world()[0] == 0 else 0.0)
        assert optimizer.grad_norm().item() == pytest.approx(value * math.sqrt(1000), rel=1e-3)


# On three ranks this rank's norm is one term of a sum; on one rank it is the whole sum.
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [soak_only(1), 3])
def test_b35_b37_norms_of_some_and_of_all_are_right_in_any_order(ranks):
    run_on_ranks(all_norms, ranks)


def clips():
    """Clips some gradients and then all, to zero, by inf norms, and not at all."""
    for settings in ({"bucket_cap_mb": cap(700)}, {"contiguous_grad_buffer": True}):
        scaled = Scaled(settings, enabled=False)
        params, masters = list(scaled.run.model.parameters()), scaled.reference.masters
        for step, calls in enumerate(
            [
                [((1, 5, 6), 2.0, 2.0), (range(8), 3.0, 2.0)],
                [(range(8), 3.0, 2.0), ((0, 6), 0.5, 2.0), ((7,), math.inf, 2.0)],
                [((3,), 0.0, 2.0), ((), 1.0, 2.0), (range(8), 2.0, math.inf)],
                [(range(8), 0.0, 2.0)],
                [(range(8), 1e9, 1.0), ((2, 3), 1.0, math.inf)],
            ]
        ):
            scaled.gradients(step)
            for numbers, max_norm, norm_type in calls:
                ours = scaled.ours.clip_grad_norm(max_norm, [params[number] for number in numbers], norm_type=norm_type)
                # torch cannot compute the largest element of an empty tensor.
                chosen = [masters[number] for number in numbers if masters[number].numel()]
                plain = clip_grad_norm_(chosen, max_norm, norm_type)
                assert ours.item() == pytest.approx(plain.item(), rel=1e-6)
            norm = plain_norm([master.grad for master in masters])
            assert scaled.ours.grad_norm().item() == pytest.approx(norm, rel=1e-6)
            scaled.ours.step()
            scaled.plain.step()
            scaled.reference.publish()
            scaled.check(**CLOSE)


# One rank clips by the norm checked in test_b35_b37_norms_of_some_and_of_all_are_right_in_any_order.
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [soak_only(1), 3])
def test_b37_clipping_some_or_all_to_anything_equals_torchs(ranks):
    run_on_ranks(clips, ranks)
