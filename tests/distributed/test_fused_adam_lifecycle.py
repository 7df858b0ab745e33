"""Tests DistributedFusedAdam through a run: groups, schedules, first steps, frozen and unused weights, recompute.

Every result is compared bitwise with torch's fused Adam.
"""

import copy
import itertools
import pickle
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR
from torch.utils.checkpoint import checkpoint

from megatron.core.optimizer import DistributedFusedAdam
from megatron.core.optimizer.fused_adam_grads import GradProxy
from tests.distributed.fused_adam_runs import (
    GREEDY,
    HYPER,
    LAYERS,
    LAZY,
    ODD,
    STEPS,
    Case,
    Reference,
    Run,
    Sums,
    alternating,
    assert_same_on_all_ranks,
    cap,
    factors,
    mean_gradients,
    usually,
    world,
)
from tests.harness import run_on_ranks

SHAPES = tuple(ODD)
SMALL = {"bucket_cap_mb": cap(700)}
OVERLAPPED = {**SMALL, "overlap_param_sync": True, "debug": True}


def each_third(params):
    """Returns groups whose parameters are interleaved."""
    return [
        {"params": params[::3], "lr": 0.11, "weight_decay": 0.0},
        {"params": params[1::3], "betas": (0.5, 0.9), "eps": 1e-3},
        {"params": params[2::3]},
    ]


def decaying(optimizer):
    return LambdaLR(optimizer, [lambda epoch: 1 / (epoch + 1), lambda epoch: 1.0, lambda epoch: 0.9**epoch])


def one_cycle(optimizer):
    # OneCycleLR also changes a beta.
    return OneCycleLR(optimizer, max_lr=[0.1, 0.2, 0.05], total_steps=STEPS + 1)


TINY = {"bucket_cap_mb": cap(128)}


def groups_and_schedules():
    every = itertools.product((SMALL, OVERLAPPED, TINY), (decaying, one_cycle))
    some = ((SMALL, one_cycle), (OVERLAPPED, decaying), (TINY, one_cycle))
    for settings, schedule in usually(some, soak=every):
        run = Run(Case(settings, shapes=SHAPES), each_third)
        schedules = [schedule(optimizer) for optimizer in (run.optimizer, run.reference.optimizer)]
        for step in range(STEPS):
            run.step(step)
            for one in schedules:
                one.step()
        run.check(STEPS)
        rates = [[group["lr"] for group in o.param_groups] for o in (run.optimizer, run.reference.optimizer)]
        assert rates[0] == rates[1] and len(set(rates[0])) == 3


def test_groups_have_their_own_rates_which_schedules_move():
    run_on_ranks(groups_and_schedules, 3)


def added_groups():
    for settings in (SMALL, OVERLAPPED, {}):
        # The reference does not step a weight before it is added, since it has no gradient.
        run = Run(Case(settings, shapes=SHAPES), lambda params: [{"params": params[:4]}])
        params, there = list(run.model.parameters()), 4
        for step in range(6):
            run.step(step, used=lambda number, step, rank, microbatch, there=there: number < there)
            if step % 2 == 1 and there < 8:
                added = {"params": params[there : there + 2], "lr": 0.2}
                run.optimizer.add_param_group(added)
                run.reference.add_param_group(added)
                there += 2
        run.check(6)


def test_groups_are_added_between_steps():
    run_on_ranks(added_groups, 2)


def released():
    run = Run(Case(OVERLAPPED, shapes=SHAPES))
    run.step(0)
    run.optimizer.release()
    # Parameters no longer wait for gathers.
    for param, value in zip(run.model.parameters(), run.reference.values):
        assert torch.equal(param, value)


def test_after_release_parameters_have_the_values_of_the_last_step():
    run_on_ranks(released, 2)


def initialised(run, how):
    params = list(run.model.parameters())
    if how == "all":
        run.optimizer.init_params()
    elif how == "some":
        run.optimizer.init_params(params[3:5])
        run.optimizer.init_params(params[2:6])
    elif how == "buckets":
        run.optimizer.init_params_bucket([params[5], params[0]])
        run.optimizer.init_params_bucket(params[1:4])
    elif how == "one":
        run.optimizer.init_params(params[7])


def ways_to_begin():
    one, several, buffered = (torch.float32,), (torch.bfloat16, torch.float32), {"contiguous_grad_buffer": True}
    every = itertools.product(("lazily", "all", "some", "buckets", "one"), (OVERLAPPED, buffered), (one, several))
    for how, settings, dtypes in alternating(every):
        run = Run(Case(settings, shapes=SHAPES, dtypes=dtypes))
        initialised(run, how)
        for step in range(3):
            # In the first step, only some parameters get gradients, in a different order than in the groups.
            run.step(step, used=lambda number, step, rank, microbatch: step > 0 or number in (2, 7, 3))
        run.check(3)


def test_parameters_join_at_their_first_gradient_or_when_told_with_the_same_result():
    run_on_ranks(ways_to_begin, 2)


def dtypes_of_their_own():
    """Gives one parameter states in bf16 and another a bf16 param_sync_dtype, and leaves the third at the defaults."""
    rank, size = world()
    shapes, bf16 = ((65,), (65,), (65,)), torch.bfloat16
    model = Sums(shapes)
    params = list(model.parameters())
    references = [
        Reference([one], **given, **HYPER) for one, given in zip(params, ({"dtype": bf16}, {"out": bf16}, {}))
    ]
    optimizer = DistributedFusedAdam(params, **HYPER)
    optimizer.init_params(params[:1], dtype=bf16)
    optimizer.init_params_bucket(params[1:2], param_sync_dtype=bf16)
    with pytest.raises((TypeError, ValueError), match="grad_dtype"):
        optimizer.init_params(params[2:], grad_dtype=bf16)
    for step in range(5):
        optimizer.zero_grad()
        model([factor * size for factor in factors(shapes, step, rank, 0)]).backward()
        optimizer.step()
        for reference, grad in zip(references, mean_gradients(shapes, step, world=size)):
            reference.step([grad])
    for param, reference in zip(params, references):
        assert torch.equal(param.detach(), reference.values[0])


def test_parameters_can_be_given_dtypes_of_their_own():
    run_on_ranks(dtypes_of_their_own, 2)


# Returns whether a weight is used: (weight index, step, rank, microbatch). Weight 0 always is, so that there is a loss.
USES = {
    "on no rank": lambda number, step, rank, microbatch: number != 3,
    "not on rank 1": lambda number, step, rank, microbatch: number not in (3, 5) or rank != 1,
    "on rank 1 alone": lambda number, step, rank, microbatch: number == 0 or rank == 1,
    "alternately": lambda number, step, rank, microbatch: number % 2 == step % 2 or number == 0,
    "by step, rank and microbatch": lambda number, step, rank, microbatch: (
        (number * 7 + step + rank + microbatch) % 3 > 0 or number == 0
    ),
}


def unused_weights():
    cases = [
        Case(SMALL, shapes=SHAPES),
        Case({**OVERLAPPED, **TINY}, shapes=SHAPES, microbatches=2),
        Case({**SMALL, "contiguous_grad_buffer": True}, shapes=SHAPES, microbatches=2, waits=LAZY),
        Case({"overlap_grad_sync": False}, shapes=SHAPES, microbatches=2, waits=GREEDY),
    ]
    nowhere, elsewhere, alone, alternately, mixed = USES.values()
    some = [
        *((cases[0], used) for used in (nowhere, elsewhere, alternately)),
        *((cases[1], used) for used in (alone, mixed)),
        *((cases[2], used) for used in (nowhere, mixed)),
        *((cases[3], used) for used in (elsewhere, alternately)),
    ]
    for case, used in usually(some, soak=itertools.product(cases, USES.values())):
        run = Run(case)
        for step in range(3):
            run.step(step, used=used)
        run.check(3)


@pytest.mark.slow
def test_b4_b6_weights_that_get_no_gradient_somewhere_are_stepped_by_zeros():
    run_on_ranks(unused_weights, 3)


FROZEN = (1, 4, 6)


def frozen_weights():
    for settings in (SMALL, OVERLAPPED, {"contiguous_param_buffer": True, "contiguous_grad_buffer": True}):
        run = Run(Case(settings, shapes=SHAPES))
        params = list(run.model.parameters())
        before = [param.detach().clone() for param in params]
        for number in FROZEN:
            params[number].requires_grad_(False)
        for step in range(2):
            run.step(step, used=lambda number, step, rank, microbatch: number not in FROZEN)
        run.optimizer.wait_params(params)
        for number, (param, old) in enumerate(zip(params, before)):
            assert torch.equal(param, old if number in FROZEN else run.reference.values[number]), number


def test_b24_frozen_weights_stay_what_they_are():
    run_on_ranks(frozen_weights, 2)


class Repeated(nn.Module):
    """Calls each product of a model twice, in two orders, with some calls recomputed."""

    def __init__(self, model, reentrant):
        super().__init__()
        self.model, self.reentrant = model, reentrant

    def forward(self, factors):
        terms = []
        for round_, products in enumerate((self.model.products, reversed(self.model.products))):
            factors_of_round = factors if round_ == 0 else factors[::-1]
            for number, (one, factor) in enumerate(zip(products, factors_of_round)):
                is_recomputed = self.reentrant is not None and (number + round_) % 3 > 0
                given = factor.clone().requires_grad_()
                terms.append(checkpoint(one, given, use_reentrant=self.reentrant) if is_recomputed else one(given))
        return torch.stack(terms).sum()


def used_twice():
    rank, size = world()
    buffered = {"contiguous_grad_buffer": True}
    every = itertools.product((None, False, True), (OVERLAPPED, TINY, buffered))
    some = ((None, OVERLAPPED), (False, TINY), (False, buffered), (True, OVERLAPPED), (True, buffered))
    for reentrant, settings in usually(some, soak=every):
        run = Run(Case(settings, shapes=SHAPES))
        model = Repeated(run.model, reentrant)
        for step in range(2):
            run.optimizer.zero_grad()
            for microbatch in range(2):
                kept = run.optimizer.no_sync() if step == 1 and microbatch == 0 else torch.enable_grad()
                with kept:
                    model([factor * size for factor in factors(SHAPES, step, rank, 0)]).backward()
            run.optimizer.step()
            run.reference.step([4 * grad for grad in run.grads(step)])
        run.check(2)


def test_b5_weights_used_twice_and_recomputed_get_the_sum():
    run_on_ranks(used_twice, 3)


def backwards_and_zeros():
    """Tests dropped gradients, gradients that add up over backwards, and steps that reuse earlier gradients."""
    for settings in (SMALL, OVERLAPPED, {"overlap_grad_sync": False}, {"contiguous_grad_buffer": True}):
        run = Run(Case(settings, shapes=SHAPES))
        run.step(0)
        # Both reduced and unreduced gradients are dropped.
        run.optimizer.zero_grad()
        run.backward(7)
        with run.optimizer.no_sync():
            run.backward(8)
        run.optimizer.zero_grad(set_to_none=settings is SMALL)
        run.backward(1)
        run.optimizer.step()
        run.reference.step(run.grads(1))
        # Steps by the same gradients again, as torch's optimizer does without zero_grad; then accumulates further ones.
        run.optimizer.step()
        run.reference.step(run.grads(1))
        run.backward(2)
        run.optimizer.step()
        run.reference.step([a + b for a, b in zip(run.grads(1), run.grads(2))])
        run.check(2)
        run.step(3)
        run.check(3)


def test_gradients_add_up_until_zero_grad_also_over_steps():
    run_on_ranks(backwards_and_zeros, 3)


def closures():
    run = Run(Case(OVERLAPPED, shapes=SHAPES))
    for step in range(3):

        def closure(step=step):
            assert torch.is_grad_enabled()
            run.optimizer.zero_grad()
            return run.backward(step)

        # A disabled scaler must pass a closure through.
        scaling = {"grad_scaler": torch.amp.GradScaler("cpu", enabled=False)} if step == 1 else {}
        with torch.no_grad():
            loss = run.optimizer.step(closure, **scaling)
        assert loss.requires_grad
        run.reference.step(run.grads(step))
    run.check(3)


def test_a_closure_makes_the_gradients_and_its_loss_is_returned():
    run_on_ranks(closures, 2)


def gradients_by_hand():
    """Sets gradients before the step: all of them, or some while backward computes the others."""
    rank, size = world()
    for settings in (SMALL, {"contiguous_grad_buffer": True, **OVERLAPPED}):
        run = Run(Case(settings, shapes=SHAPES))
        for step in range(4):
            run.optimizer.zero_grad()
            own = [factor * size for factor in factors(SHAPES, step, rank, 0)]
            by_hand = range(8) if step % 2 else (1, 5)
            if step % 2 == 0:
                run.backward(step, used=lambda number, step, rank, microbatch: number not in (1, 5))
            for number in by_hand:
                param = list(run.model.parameters())[number]
                param.grad = own[number].to(param.dtype)
            if step == 3:
                run.optimizer.grad_sync()
            run.optimizer.step()
            run.reference.step(run.grads(step))
        run.check(4)


def test_gradients_set_by_hand_are_stepped_by():
    run_on_ranks(gradients_by_hand, 3)


def gradients_of_some_ranks():
    """Sets gradients manually or accumulates them in no_sync, for weights that differ between ranks."""
    rank, size = world()
    every = itertools.product(
        (SMALL, OVERLAPPED, {**SMALL, "contiguous_grad_buffer": True}), (True, False), (True, False)
    )
    for settings, by_hand, is_eager in alternating(every):
        run = Run(Case(settings, shapes=SHAPES))
        if is_eager:
            run.optimizer.init_params()
        for step, used in enumerate([*USES.values(), lambda number, step, rank, microbatch: rank == 1]):
            run.optimizer.zero_grad()
            own = [factor * size for factor in factors(SHAPES, step, rank, 0)]
            numbers = [number for number in range(8) if used(number, step, rank, 0)]
            if by_hand:
                for number in numbers:
                    param = list(run.model.parameters())[number]
                    param.grad = own[number].to(param.dtype)
            elif numbers:
                with run.optimizer.no_sync():
                    run.model([factor if number in numbers else None for number, factor in enumerate(own)]).backward()
            run.optimizer.step()
            run.reference.step(run.grads(step, used=used))
        run.check(6)


@pytest.mark.slow
def test_gradients_that_some_ranks_have_set_or_kept_are_stepped_by():
    run_on_ranks(gradients_of_some_ranks, 3, timeout=60)


def stale_reads():
    """Tests reads outside modules, evaluation, uncalled modules and saved weights with overlapped gathers."""
    run = Run(Case({**OVERLAPPED, "bucket_cap_mb": cap(300)}, shapes=LAYERS))
    params = list(run.model.parameters())
    run.step(0)
    # Parameters are NaN until they are awaited, except for this rank's shards.
    with torch._C.DisableTorchFunctionSubclass():
        assert any(param.isnan().any() for param in params)
    with pytest.raises(RuntimeError, match="wait_params"):
        params[0].isnan()
    run.optimizer.wait_params(params[4:6])
    assert all(torch.equal(a, b) for a, b in zip(params[4:6], run.reference.values[4:6]))
    with torch.no_grad():
        own = factors(tuple(LAYERS), 0, 0, 0)
        assert torch.equal(run.model(own), run.reference.loss(own))
    run.check(0)
    # Some modules are never called between the steps.
    for step in range(1, 4):
        run.step(step, used=lambda number, step, rank, microbatch: number in (0, 3))
    run.optimizer.param_sync()
    assert all(torch.equal(param, value) for param, value in zip(params, run.reference.values))
    saved = {name: value.clone() for name, value in run.model.state_dict().items()}
    run.step(4)
    run.optimizer.param_sync()
    assert not any(torch.equal(value, saved[name]) for name, value in run.model.state_dict().items())
    assert_same_on_all_ranks(params)


def test_b1_b2_b10_weights_that_are_not_gathered_are_nan_and_never_read():
    run_on_ranks(stale_reads, 3)


class Failing(RuntimeError):
    pass


def errors_in_a_step():
    run = Run(Case(OVERLAPPED, shapes=SHAPES))

    def fail(grad):
        raise Failing

    for step in range(4):
        if step % 2:
            # The error occurs on all ranks, because an error on a single rank would make the others time out.
            handle = list(run.model.parameters())[3].register_hook(fail)
            with pytest.raises(Failing):
                run.backward(step)
            handle.remove()
        run.step(step)
    run.check(4)


def test_b32_after_an_error_in_backward_zero_grad_begins_anew():
    run_on_ranks(errors_in_a_step, 2)


def views_of_buffers():
    plain = Run(Case(SMALL)).optimizer
    with pytest.raises(ValueError, match="contiguous_grad_buffer"):
        plain.grad_buffer_view(plain.param_groups[0]["params"][0])
    param = nn.Parameter(torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last))
    other = nn.Parameter(torch.zeros(5, dtype=torch.bfloat16))
    optimizer = DistributedFusedAdam([param, other], contiguous_grad_buffer=True)
    for each in (param, other):
        view = optimizer.grad_buffer_view(each)
        assert view.shape == each.shape and view.stride() == each.stride() and view.dtype == torch.float32
        with optimizer.no_sync(greedy_grad_copy=True):
            (each * 3).sum().backward()
        assert torch.equal(view, torch.full_like(view, 3.0))
    # The proxy in place of param.grad shows whether it is cleared.
    assert isinstance(param.grad, GradProxy) and other.grad is None
    optimizer.zero_grad()
    assert not any(optimizer.grad_buffer_view(each).any() for each in (param, other))


def test_buffers_show_gradients_in_the_memory_order_of_parameters():
    run_on_ranks(views_of_buffers, 2)


@pytest.mark.parametrize(
    "use",
    [
        lambda grad, module: grad.data_ptr(),
        lambda grad, module: grad.numpy(),
        lambda grad, module: grad.tolist(),
        lambda grad, module: grad.detach(),
        lambda grad, module: torch.from_dlpack(grad),
        lambda grad, module: copy.deepcopy(grad),
        lambda grad, module: pickle.dumps(grad),
        lambda grad, module: module.share_memory(),
    ],
)
def test_a_reduced_gradient_has_no_memory_to_read_or_move(use):
    module = nn.Linear(5, 2)
    optimizer = DistributedFusedAdam(module.parameters(), lr=0.1)
    module(torch.ones(1, 5)).sum().backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="which DistributedFusedAdam has reduced to shards over ranks"):
        use(module.weight.grad, module)


class AddsItself(torch.autograd.Function):
    """A product that adds its weight's gradient to the buffer itself, as fused kernels do."""

    @staticmethod
    def forward(ctx, weight, add, factor):
        ctx.weight, ctx.factor, ctx.add = weight, factor, add
        return (weight.double() * factor).sum()

    @staticmethod
    def backward(ctx, grad_output):
        ctx.add(ctx.weight, ctx.factor * grad_output)
        return None, None, None


def add_to_buffer(optimizer, weight, grad):
    optimizer.grad_buffer_view(weight).add_(grad)
    optimizer.register_grad_ready(weight)


def fused_gradients():
    """Trains with half of the weights adding gradients in their own backward, over three microbatches."""
    rank, size = world()
    for settings in (SMALL, {"overlap_grad_sync": False}, TINY):
        run = Run(Case({**settings, "contiguous_grad_buffer": True}, shapes=SHAPES, microbatches=3))
        run.optimizer.init_params()
        for product in list(run.model.products)[::2]:
            product.forward = partial(AddsItself.apply, product.weight, partial(add_to_buffer, run.optimizer))
        for step in range(2):
            run.step(step)
        run.check(2)


@pytest.mark.slow
def test_kernels_add_gradients_to_buffers_themselves():
    run_on_ranks(fused_gradients, 3)
