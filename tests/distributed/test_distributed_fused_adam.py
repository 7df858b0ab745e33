"""Tests DistributedFusedAdam against torch's Adam on the whole batch, for all kinds of sharding and communication."""

import itertools
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parameters_to_vector

from megatron.core.dist_checkpointing.spread_tensor import SpreadTensor
from megatron.core.optimizer import DistributedFusedAdam
from tests.counts import long_count, soak_only
from tests.distributed.fused_adam_runs import (
    GREEDY,
    HYPER,
    LAYERS,
    LAZY,
    NONE,
    ODD,
    STEPS,
    Case,
    Run,
    Sums,
    alternating,
    assert_same_on_all_ranks,
    cap,
    factors,
    mean_gradients,
    plain_and_ours,
    run_cases,
    usually,
    world,
)
from tests.harness import run_on_ranks

FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
ODD = tuple(ODD)
REMAINDERS = {"store_params": False, "store_param_remainders": True}
# A few runs that combine unrelated optimizer features.
CASES = [
    Case(),
    Case({"bucket_cap_mb": cap(128)}),
    Case({"bucket_cap_mb": cap(1001), "overlap_grad_sync": False}, shapes=ODD),
    Case({"bucket_cap_mb": cap(1500), "overlap_param_sync": True, "debug": True}),
    Case({"bucket_cap_mb": cap(128), "overlap_param_sync": True}, shapes=ODD, microbatches=3),
    Case({"bucket_cap_mb": cap(1000)}, microbatches=3, waits=LAZY),
    Case({"bucket_cap_mb": cap(3001)}, microbatches=3, waits=GREEDY),
    Case({"overlap_grad_sync": False, "average_grad_sync": False}, shapes=ODD, microbatches=3, waits=GREEDY),
    Case({"bucket_cap_mb": cap(700), "contiguous_param_buffer": True, "average_grad_sync": False}),
    Case({"bucket_cap_mb": cap(700), "contiguous_grad_buffer": True, "pipeline_size": 1}, microbatches=3, waits=LAZY),
    Case(
        {"contiguous_grad_buffer": True, "contiguous_param_buffer": True, "overlap_param_sync": True},
        shapes=ODD,
        dtypes=(BF16,),
    ),
    Case({"bucket_cap_mb": cap(600), "adam_w_mode": False, "betas": (0.8, 0.95), "eps": 1e-3}, shapes=ODD),
]
TYPES = [
    Case({"bucket_cap_mb": cap(300)}, dtypes=(FP16,), shapes=ODD),
    Case({"bucket_cap_mb": cap(128)}, dtypes=(BF16,), microbatches=3),
    Case({"bucket_cap_mb": cap(1200), "dtype": FP64}, dtypes=(FP64,), microbatches=3, waits=GREEDY),
    Case({"grad_sync_dtype": BF16, "bucket_cap_mb": cap(1000)}, microbatches=3, waits=LAZY),
    Case({"grad_sync_dtype": FP16, "param_sync_dtype": BF16}, out=BF16, shapes=ODD),
    Case({"param_sync_dtype": FP32, "grad_sync_dtype": BF16, "overlap_param_sync": True}, dtypes=(FP16,)),
    Case({"store_params": False}, dtypes=(BF16,), masters="none", shapes=ODD),
    Case({"store_params": False, "bucket_cap_mb": cap(500)}),
    Case(REMAINDERS, dtypes=(BF16,), masters="remainders"),
    Case(
        {**REMAINDERS, "bucket_cap_mb": cap(128), "overlap_param_sync": True},
        dtypes=(BF16,),
        masters="remainders",
        shapes=ODD,
        microbatches=3,
        waits=GREEDY,
    ),
    Case({"dtype": BF16}, shapes=ODD),
    Case({"dtype": FP16, "bucket_cap_mb": cap(900)}, dtypes=(FP16,)),
]


CAPS = (128, 1001, 100 << 20)
FLAGS = [(False, False), (True, False), (False, True), (True, True)]
WAITS = ((1, NONE), (2, NONE), (2, LAZY), (2, GREEDY))
DTYPES = [(FP32,), (FP16,), (BF16,), (BF16, FP32, FP16)]


def combined(num_bytes, overlaps, waits, buffers, dtypes):
    """Builds a case with these values of all options."""
    settings = {
        "bucket_cap_mb": cap(num_bytes),
        "overlap_grad_sync": overlaps[0],
        "overlap_param_sync": overlaps[1],
        "contiguous_param_buffer": buffers[0],
        "contiguous_grad_buffer": buffers[1],
    }
    return Case(settings, dtypes=dtypes, shapes=ODD, microbatches=waits[0], waits=waits[1])


def every_case():
    """Yields the full product of these options."""
    for values in itertools.product(CAPS, FLAGS, WAITS, FLAGS, DTYPES):
        yield combined(*values)


# Covers every pair of values of different options, since the three Latin squares of these lines are orthogonal.
TIMES_2, TIMES_3 = (0, 2, 3, 1), (0, 3, 1, 2)
PAIRED = [
    combined(
        [*CAPS, CAPS[0]][TIMES_3[row] ^ column],
        FLAGS[row],
        WAITS[column],
        FLAGS[row ^ column],
        DTYPES[TIMES_2[row] ^ column],
    )
    for row, column in itertools.product(range(4), repeat=2)
]


# Three ranks run every case; one rank runs the cases that differ most from each other.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "cases"),
    [(1, CASES[1::4]), (3, CASES), soak_only(1, CASES), *(soak_only(ranks, CASES[1:9]) for ranks in (2, 4, 5))],
)
def test_steps_have_the_bits_of_torchs_fused_adamw_on_the_whole_batch(ranks, cases):
    run_on_ranks(run_cases, ranks, cases, timeout=300)


# Dtypes on one rank: see test_one_rank_without_torch_distributed_has_the_bits_of_torchs_fused_adamw.
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [soak_only(1), 3])
def test_every_dtype_of_parameters_gradients_states_and_messages_has_the_bits_of_torchs_adamw(ranks):
    run_on_ranks(run_cases, ranks, TYPES, timeout=300)


@pytest.mark.soak
@pytest.mark.parametrize("ranks", [2, 3])
def test_all_settings_that_go_together_have_the_bits_of_torchs_adamw(ranks):
    """Compares the full product of settings. In `make test` the next test covers every pair of them."""
    run_on_ranks(run_cases, ranks, list(every_case()), 8, timeout=3000)


@pytest.mark.slow
def test_any_two_settings_together_have_the_bits_of_torchs_adamw():
    run_on_ranks(run_cases, 3, PAIRED, 3)


@pytest.mark.parametrize("dtypes", [(FP32, BF16), (BF16, FP32), (BF16, BF16, FP32, FP16, FP64)], ids=str)
def test_b34_the_first_parameter_of_another_dtype_goes_to_a_bucket_of_its_own(dtypes):
    # The first dtype needs only one bucket, which has space for the other parameters.
    cases = [
        Case(settings, dtypes=dtypes, shapes=ODD)
        for settings in ({}, {"bucket_cap_mb": cap(512), "overlap_param_sync": True}, {"contiguous_grad_buffer": True})
    ]
    run_on_ranks(run_cases, 2, cases, 2)


def test_one_rank_without_torch_distributed_has_the_bits_of_torchs_fused_adamw():
    assert not dist.is_initialized()
    run_cases([CASES[0], CASES[1], TYPES[0], TYPES[8]])
    # Sizes that fill torch's SIMD vectors, so that nothing is padded.
    plain, ours, optimizer = plain_and_ours(lambda: nn.Linear(16, 16), bucket_cap_mb=cap(128))
    expected = torch.optim.AdamW(plain.parameters(), fused=True, **HYPER)
    for step in range(STEPS):
        x = torch.randn(5, 16, generator=torch.Generator().manual_seed(step))
        for model, stepped in ((plain, expected), (ours, optimizer)):
            stepped.zero_grad()
            model(x).square().sum().backward()
            stepped.step()
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), ours.parameters()))


def test_without_bias_correction_moments_are_taken_as_they_are():
    model = Sums()
    weights = [param.detach().double() for param in model.parameters()]
    moments = [[torch.zeros_like(w), torch.zeros_like(w)] for w in weights]
    optimizer = DistributedFusedAdam(model.parameters(), bias_correction=False, **HYPER)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(factors(tuple(LAYERS), step, 0, 0)).backward()
        optimizer.step()
        for weight, (m, v), grad in zip(weights, moments, mean_gradients(LAYERS, step, world=1)):
            weight.mul_(1 - HYPER["lr"] * HYPER["weight_decay"])
            m.lerp_(grad, 0.1)
            v.lerp_(grad.square(), 0.001)
            weight.sub_(HYPER["lr"] * m / (v.sqrt() + 1e-8))
    for param, weight in zip(model.parameters(), weights):
        # Weights are below 4 and rounded to the nearest fp32 value in each step.
        torch.testing.assert_close(param.detach().double(), weight, rtol=0, atol=STEPS * 2.0**-23)


OVERLAPPED, BUFFERED = (FP32, {"overlap_param_sync": True}), (BF16, {"contiguous_grad_buffer": True})


def redundant_grids():
    """Asserts that grids of four ranks are bitwise equal to the reference."""
    every = itertools.product((None, (4, 1), (2, 2), (1, 4)), (OVERLAPPED, BUFFERED))
    some = [((2, 2), OVERLAPPED), ((1, 4), OVERLAPPED), ((2, 2), BUFFERED), ((4, 1), BUFFERED)]
    for grid, (dtype, more) in usually(some, soak=every):
        settings = {"bucket_cap_mb": cap(1100), **more}
        run = Run(Case(settings, grid=grid, dtypes=(dtype,), microbatches=2, waits=LAZY))
        for step in range(STEPS):
            run.step(step)
        run.check(STEPS)
        norm = run.optimizer.grad_norm()
        grads = mean_gradients(LAYERS, STEPS - 1, world=4, microbatches=2)
        assert norm.item() == pytest.approx(math.sqrt(sum(g.square().sum().item() for g in grads)), rel=1e-6)


@pytest.mark.slow
def test_b16_a_grid_of_shards_and_copies_equals_one_row_of_shards():
    run_on_ranks(redundant_grids, 4)


def masters_and_moments(**settings):
    """Returns this rank's optimizer state by box, as numbers, after some steps with bf16 parameters."""
    run = Run(Case({"bucket_cap_mb": cap(900), **settings}, dtypes=(BF16,), shapes=ODD))
    rank, size = world()
    for step in range(STEPS):
        run.optimizer.zero_grad()
        run.model([factor * size for factor in factors(ODD, step, rank, 0)]).backward()
        run.optimizer.step()
    found = {}
    for number, states in run.optimizer.state_dict()["state"].items():
        for name, value in states.items():
            boxes = value.boxes if isinstance(value, SpreadTensor) else ()
            found.update({(number, name, box): (value.dtype, value.read(box).tolist()) for box in boxes})
    return found


def remainders():
    copies = masters_and_moments()
    assert {name for _, name, _ in copies} == {"step", "exp_avg", "exp_avg_sq", "fp32_param"}
    assert masters_and_moments(**REMAINDERS) == copies


# One rank: see test_steps_have_the_bits_of_torchs_fused_adamw_on_the_whole_batch.
@pytest.mark.parametrize("ranks", [soak_only(1), 3])
def test_bf16_parameters_with_remainders_are_the_fp32_masters_of_a_run_with_copies_bit_for_bit(ranks):
    run_on_ranks(remainders, ranks)


# Rounding errors add up over steps; the bounds are for this number of steps.
NARROW_STEPS = 20


def narrow_states():
    """Returns the relative deviation of weights from a run with fp32 states, by dtype and with or without scales.

    The deviation is relative to the total change of the weights.
    """
    found = []
    rank, size = world()
    for of_params, dtype, is_scaled in (
        (FP32, FP16, True),
        (FP16, FP16, True),
        (FP32, FP16, False),
        (BF16, BF16, True),
    ):
        settings = {"bucket_cap_mb": cap(900), "dtype": dtype, "with_scaled_states": is_scaled}
        run, exact = Run(Case({**settings, "overlap_param_sync": True}, dtypes=(of_params,))), Case(dtypes=(of_params,))
        reference = exact.reference(run.model.parameters())
        before = [value.clone() for value in reference.values]
        for step in range(NARROW_STEPS):
            run.optimizer.zero_grad()
            # Squares of these gradients underflow in fp16.
            own = [factor * size * 2.0**-12 for factor in factors(tuple(LAYERS), step, rank, 0)]
            run.model(own).backward()
            run.optimizer.step()
            reference.step([grad * 2.0**-12 for grad in mean_gradients(LAYERS, step, world=size)])
        run.optimizer.wait_params(run.model.parameters())
        exact_end = parameters_to_vector(reference.values).double()
        gone = (exact_end - parameters_to_vector(before)).norm()
        found.append(((parameters_to_vector(run.model.parameters()) - exact_end).norm() / gone).item())
    return found


@pytest.mark.slow
def test_states_in_16_bits_follow_fp32_where_they_have_scales():
    for half, of_half, unscaled, brain in run_on_ranks(narrow_states, 2):
        # Measured: 0.0032 for both, which is 20 roundings to 11 significant bits; 0.026 with the 8 bits of bf16.
        assert half < 0.0064 and of_half < 0.0064 and brain < 0.052
        assert not unscaled < 1


GRIDS = [
    ((2, 1), r"process_group has 4 ranks, distributed_process_group 2 and redundant_process_group 1: .* the product"),
    ((4, 2), r"process_group has 4 ranks, distributed_process_group 4 and redundant_process_group 2: .* the product"),
]


def wrong_grids():
    ranks = list(range(4))
    groups = {1: dist.new_subgroups(1)[0], 2: dist.new_subgroups(2)[0], 4: dist.new_group(ranks)}
    for (shards, copies), message in GRIDS:
        with pytest.raises(ValueError, match=message):
            DistributedFusedAdam(
                [nn.Parameter(torch.zeros(3))],
                process_group=groups[4],
                distributed_process_group=groups[shards],
                redundant_process_group=groups[copies],
            )
    pair, _ = dist.new_subgroups_by_enumeration([[0, 1], [2, 3]])
    first = dist.new_group([0, 1])
    if dist.get_rank() < 2:
        with pytest.raises(ValueError, match=r"redundant_process_group .*: "):
            DistributedFusedAdam(
                [nn.Parameter(torch.zeros(3))],
                process_group=first,
                distributed_process_group=groups[1],
                redundant_process_group=groups[4],
            )
    DistributedFusedAdam([nn.Parameter(torch.zeros(3))], process_group=pair).release()


def test_groups_that_are_no_grid_are_refused_with_their_sizes():
    run_on_ranks(wrong_grids, 4)


class Network(nn.Sequential):
    """Eleven layers of width 7 with nonlinearities, so that sums of gradients depend on their order."""

    def __init__(self, dtype=torch.float32):
        super().__init__(*[part for _ in range(11) for part in (nn.Linear(7, 7), nn.Tanh())])
        for layer in list(self)[::2]:
            nn.init.orthogonal_(layer.weight)
        self.to(dtype)


def batch(step, dtype, count):
    """Returns inputs in `count` equal parts: [count, 4, 7]."""
    return torch.randn(count, 4, 7, generator=torch.Generator().manual_seed(step)).to(dtype)


def train_network(bound, microbatches, *, dtype, **settings):
    """Trains both optimizers on the same batch and returns the largest difference of their weights.

    Ours splits the batch over ranks and microbatches. Asserts that the difference is at most `bound`.
    """
    rank, size = world()
    plain, ours, optimizer = plain_and_ours(lambda: Network(dtype), dtype=dtype, lr=3e-3, **settings)
    expected = torch.optim.AdamW(plain.parameters(), fused=True, lr=3e-3, weight_decay=HYPER["weight_decay"])
    for step in range(STEPS):
        parts = batch(step, dtype, size * microbatches)
        expected.zero_grad()
        plain(parts.flatten(0, 1)).square().mean().backward()
        expected.step()
        optimizer.zero_grad()
        for part in parts[rank * microbatches : (rank + 1) * microbatches]:
            (ours(part).square().mean() / microbatches).backward()
        optimizer.step()
    optimizer.wait_params(ours.parameters())
    worst = max((a - b).abs().max().item() for a, b in zip(plain.parameters(), ours.parameters()))
    assert worst <= bound, (worst, dtype, settings)
    assert_same_on_all_ranks(ours.parameters())
    return worst


# Four units in the last place of a weight near 1. Splitting the batch differently changes torch's result by up to one.
BOUNDS = {FP32: 4 * 2.0**-23, FP64: 4 * 2.0**-52}


# Dtype, microbatches, bucket size in bytes, whether parameters are gathered in forward.
NETWORKS = [(FP32, 1, 128, False), (FP32, 3, 1000, True), (FP64, 2, 10**6, True)]


def train_networks():
    for dtype, microbatches, num_bytes, overlaps in NETWORKS:
        settings = {"bucket_cap_mb": cap(num_bytes), "overlap_param_sync": overlaps}
        train_network(BOUNDS[dtype], microbatches, dtype=dtype, **settings)


# One rank: see test_steps_have_the_bits_of_torchs_fused_adamw_on_the_whole_batch.
@pytest.mark.parametrize("ranks", [soak_only(1), 3, soak_only(4)])
def test_a_network_of_width_7_follows_torchs_adamw_on_the_whole_batch(ranks):
    run_on_ranks(train_networks, ranks)


def overlap_and_bucket_sizes():
    """Returns the weights after some steps by bucket size, and asserts that they do not depend on overlaps."""
    rank, size = world()
    of_sizes = []
    for num_bytes in (4, 1001, 100 << 20):
        seen = []
        for grads, params, contiguous in alternating(itertools.product((False, True), repeat=3)):
            _, model, optimizer = plain_and_ours(
                Network,
                bucket_cap_mb=cap(num_bytes),
                overlap_grad_sync=grads,
                overlap_param_sync=params,
                contiguous_grad_buffer=contiguous,
            )
            losses = []
            for step in range(long_count(3, soak=6)):
                optimizer.zero_grad()
                loss = model(batch(step, FP32, size)[rank]).square().mean()
                loss.backward()
                losses.append(loss.item())
                optimizer.clip_grad_norm(0.5)
                optimizer.step()
            optimizer.wait_params(model.parameters())
            seen.append((losses, parameters_to_vector(model.parameters()).tolist()))
        assert all(one == seen[0] for one in seen), num_bytes
        of_sizes.append(torch.tensor(seen[0][1]))
    return of_sizes


@pytest.mark.slow
def test_b25_neither_overlap_nor_buffers_nor_bucket_sizes_change_results():
    for of_sizes in run_on_ranks(overlap_and_bucket_sizes, 3):
        for weights in of_sizes[1:]:
            # gloo adds in the order of its chunks, which depends on the bucket: see BOUNDS.
            torch.testing.assert_close(weights, of_sizes[0], rtol=0, atol=BOUNDS[FP32] * HYPER["lr"] / 3e-3)


def injected(shape, rank):
    """Draws integers, whose mean over ranks is bitwise equal in any order; gloo's order depends on the position."""
    drawn = torch.randint(-9, 10, shape, generator=torch.Generator().manual_seed(10 * sum(shape) + rank))
    return drawn.float() * world()[1]


# Shape, and a function that converts a contiguous parameter or gradient to a different memory order.
ORDERS = {
    "channels_last": ((5, 3, 4, 3), lambda t: t.clone(memory_format=torch.channels_last)),
    "channels_last_3d": ((4, 3, 2, 3, 3), lambda t: t.clone(memory_format=torch.channels_last_3d)),
    "transposed": ((7, 10), lambda t: t.t().clone(memory_format=torch.contiguous_format).t()),
    "one channel": ((6, 1, 3, 3), lambda t: t.clone(memory_format=torch.channels_last)),
    "permuted": ((3, 4, 5), lambda t: t.permute(1, 2, 0).contiguous().permute(2, 0, 1)),
}


def strides_of(param):
    # The stride of a dimension of size 1 is arbitrary.
    return [stride for size, stride in zip(param.shape, param.stride()) if size > 1]


def trained_by_injected(turns_params, turns_grads, **settings):
    """Returns the parameters after two steps, and asserts that their strides have not changed."""
    rank, _ = world()
    params = []
    for shape, turn in ORDERS.values():
        values = injected(shape, -1)
        params.append(nn.Parameter(turn(values) if turns_params else values))
    strides = [strides_of(param) for param in params]
    optimizer = DistributedFusedAdam(params, **settings, **HYPER)
    for step in range(2):
        optimizer.zero_grad()
        for param, (shape, turn) in zip(params, ORDERS.values()):
            grad = injected(shape, rank) * (step + 1)
            # With more than one rank, ranks use different memory orders.
            param.grad = turn(grad) if turns_grads != (rank == 1) else grad
        optimizer.step()
    assert [strides_of(param) for param in params] == strides
    return [param.detach() for param in params]


def injected_gradients():
    """Compares both memory orders of parameters and of manual gradients, in buckets that split them anywhere."""
    every = itertools.product((128, 777, 10**7), (False, True))
    for num_bytes, contiguous in usually([(128, False), (777, True), (10**7, True)], soak=every):
        settings = {"contiguous_param_buffer": contiguous, "contiguous_grad_buffer": contiguous}
        settings["bucket_cap_mb"] = cap(num_bytes)
        first, *others = [
            trained_by_injected(*turns, **settings) for turns in itertools.product((False, True), repeat=2)
        ]
        for other in others:
            assert all(torch.equal(a, b) for a, b in zip(first, other)), settings
        assert not any(torch.equal(a, injected(a.shape, -1)) for a in first)


# A single rank copies gradients as two ranks do, but sends nothing.
@pytest.mark.parametrize("ranks", [soak_only(1), 2, soak_only(3)])
def test_any_memory_order_of_parameters_and_gradients_gives_the_bits_of_nchw(ranks):
    run_on_ranks(injected_gradients, ranks)


def make_convolutions(turns):
    torch.manual_seed(1)
    made = nn.Sequential(nn.Conv3d(3, 5, 3, padding=1), nn.Flatten(2), nn.Unflatten(2, (6, 6)), nn.Conv2d(5, 3, 3))
    if turns:
        made[0].to(memory_format=torch.channels_last_3d)
        made[3].to(memory_format=torch.channels_last)
        assert not made[0].weight.is_contiguous() and not made[3].weight.is_contiguous()
    return made


def train_convolutions():
    """Trains on autograd's gradients; kernels for NHWC add in a different order."""
    of_order = []
    for turns in (False, True):
        model = make_convolutions(turns)
        strides = [param.stride() for param in model.parameters()]
        optimizer = DistributedFusedAdam(model.parameters(), bucket_cap_mb=cap(300), overlap_param_sync=True, lr=3e-3)
        for step in range(2):
            x = torch.randn(2, 3, 1, 6, 6, generator=torch.Generator().manual_seed(2 * step + world()[0]))
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        optimizer.wait_params(model.parameters())
        assert [param.stride() for param in model.parameters()] == strides
        of_order.append([param.detach() for param in model.parameters()])
    for ours, theirs in zip(*of_order):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=BOUNDS[FP32])


def test_channels_last_convolutions_train_as_contiguous_ones():
    run_on_ranks(train_convolutions, 2)


def precision_of_sums():
    """Returns sums that show whether gradients were accumulated in fp32 and reduced in bf16."""
    found = {}
    for name, dtype, sync in (("wide", BF16, FP32), ("narrow", FP32, BF16)):
        param = nn.Parameter(torch.zeros(65, dtype=dtype))
        optimizer = DistributedFusedAdam([param], grad_sync_dtype=sync, average_grad_sync=False)
        for grad in (256.0, 1.0, 1.0):
            (param * grad).sum().backward()
            optimizer.grad_sync()
        found[name] = (optimizer.grad_norm() / math.sqrt(65)).item()
    return found


def test_sums_are_kept_in_the_dtype_that_gradients_are_sent_in():
    for found in run_on_ranks(precision_of_sums, 2):
        # 512 + 2 + 2 is rounded to 512 by the 8 significant bits of bf16.
        assert found == {"wide": pytest.approx(516), "narrow": pytest.approx(512)}
