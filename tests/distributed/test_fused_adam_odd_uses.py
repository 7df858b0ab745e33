"""Tests DistributedFusedAdam with other uses of its parameters: torch.autograd.grad, user hooks, grad scalers."""

import pytest
import torch
from torch import nn

from megatron.core.optimizer import DistributedFusedAdam
from tests.distributed.plain_steps import PlainSteps
from tests.harness import run_on_ranks

RATES = {"lr": 0.01, "betas": (0.75, 0.5), "eps": 1e-3, "weight_decay": 0.125}


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 13), nn.Tanh(), nn.Linear(13, 3))


def loss_of(model, step):
    torch.manual_seed(step)
    return model(torch.randn(4, 5)).square().mean()


def pair(**settings):
    """Builds the same model twice, with torch's AdamW and with DistributedFusedAdam in small buckets."""
    plain, model = net(), net()
    optimizer = DistributedFusedAdam(model.parameters(), **RATES, bucket_cap_mb=512 / 2**20, **settings)
    return plain, torch.optim.AdamW(plain.parameters(), **RATES), model, optimizer


def assert_equal(plain, model):
    actual = dict(model.named_parameters())
    torch.testing.assert_close(actual, dict(plain.named_parameters()), rtol=1e-5, atol=1e-6)


def test_module_zero_grad_counts_after_autograd_grad_of_parameters():
    plain, plain_optimizer, model, optimizer = pair()
    for step in range(3):
        for module, steps in ((plain, plain_optimizer), (model, optimizer)):
            module.zero_grad()
            loss_of(module, step).backward()
            steps.step()
            torch.autograd.grad(loss_of(module, step), list(module.parameters()))
    assert_equal(plain, model)


def test_a_scaler_finds_gradients_after_autograd_grad_of_parameters():
    _, _, model, optimizer = pair()
    before = [param.detach().clone() for param in model.parameters()]
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(loss_of(model, 0)).backward()
    torch.autograd.grad(loss_of(model, 0), list(model.parameters()))
    scaler.step(optimizer)
    assert not any(torch.equal(old, new) for old, new in zip(before, model.parameters()))


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize("create_graph", [False, True])
def test_gradients_kept_beside_reduced_ones_are_nobody_elses_memory(create_graph):
    first, second = (nn.Parameter(torch.zeros(4)) for _ in range(2))
    optimizer = DistributedFusedAdam([first, second], **RATES)
    (first + second).sum().backward()
    with optimizer.no_sync():
        for _ in range(2):
            (first + second).sum().backward(create_graph=create_graph)
    assert first.grad.tolist() == second.grad.tolist() == [2.0] * 4
    assert optimizer.grad_norm().item() == pytest.approx(3 * 8**0.5)


def hooks_that_read_weights(overlap_param_sync):
    plain, plain_optimizer, model, optimizer = pair(overlap_param_sync=overlap_param_sync, debug=overlap_param_sync)
    for module in (plain, model):
        module[2].register_forward_pre_hook(lambda layer, given: (given[0] + layer.weight.sum(),))
        # A second hook, on a module that runs earlier in forward.
        module[0].register_forward_pre_hook(lambda layer, given: (given[0] * layer.bias.sum(),))
    for step in range(4):
        for module, steps in ((plain, plain_optimizer), (model, optimizer)):
            steps.zero_grad()
            loss_of(module, step).backward()
            steps.step()
    optimizer.wait_params(model.parameters())
    assert_equal(plain, model)


@pytest.mark.parametrize("ranks", [1, 2])
def test_hooks_before_forward_read_gathered_weights(ranks):
    run_on_ranks(hooks_that_read_weights, ranks, True, timeout=60)


def test_hooks_of_parameters_see_gradients_that_add_to_others():
    plain, model, seen = net(), net(), []
    plain_optimizer = torch.optim.AdamW(plain.parameters(), **RATES)
    for module in (plain, model):
        for param in module.parameters():
            param.register_post_accumulate_grad_hook(lambda param: seen.append(param.grad.isfinite().all()))
    # The optimizer's hooks run after the hooks above.
    optimizer = DistributedFusedAdam(model.parameters(), **RATES)
    for step in range(2):
        for module, steps in ((plain, plain_optimizer), (model, optimizer)):
            for part in range(3):
                loss_of(module, 3 * step + part).backward()
            steps.step()
    assert_equal(plain, model)
    assert len(seen) == 2 * 2 * 3 * 4


class Broken(torch.autograd.Function):
    """Raises an error in backward."""

    @staticmethod
    def forward(ctx, given):
        return given.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ValueError("broken")


def test_module_zero_grad_forgets_a_backward_that_broke_off():
    plain, plain_optimizer, model, optimizer = pair()
    for step in range(3):
        for module, steps in ((plain, plain_optimizer), (model, optimizer)):
            module.zero_grad()
            hidden = Broken.apply(module[1](module[0](torch.ones(1, 5))))
            with pytest.raises(ValueError, match="broken"):
                module[2](hidden).sum().backward()
            module.zero_grad()
            loss_of(module, step).backward()
            steps.step()
    assert_equal(plain, model)


def test_module_zero_grad_forgets_what_no_sync_has_copied():
    _, _, model, optimizer = pair()
    with optimizer.no_sync(greedy_grad_copy=True):
        loss_of(model, 0).backward()
        model.zero_grad()
    assert optimizer.grad_norm().item() == 0.0


@pytest.mark.parametrize("unscales_first", [False, True])
def test_a_scaler_that_saw_gradients_of_one_rank_alone_is_refused(unscales_first):
    _, _, model, optimizer = pair()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with optimizer.no_sync():
        scaler.scale(loss_of(model, 0)).backward()
    if unscales_first:
        scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="call grad_sync"):
        scaler.step(optimizer)


def test_a_scaler_that_saw_reduced_gradients_of_an_earlier_iteration_alone_is_refused():
    _, _, model, optimizer = pair()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(loss_of(model, 0)).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    with optimizer.no_sync():
        scaler.scale(loss_of(model, 1)).backward()
    with pytest.raises(RuntimeError, match="call grad_sync"):
        scaler.step(optimizer)


@pytest.mark.parametrize("numbers", [(0, 1), (0,), (1,)])
def test_a_scaler_is_refused_at_once_where_no_sync_has_kept_gradients_beside_reduced_ones(numbers):
    params = [nn.Parameter(torch.ones(3, dtype=dtype)) for dtype in (torch.float32, torch.bfloat16)]
    optimizer = DistributedFusedAdam(params, lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(sum(param.sum().float() for param in params)).backward()
    with optimizer.no_sync():
        for _ in range(2):
            scaler.scale(sum(params[number].sum().float() for number in numbers)).backward()
    assert all(params[number].grad.tolist() == [8.0] * 3 for number in numbers)
    with pytest.raises(RuntimeError, match=r"call grad_sync\(\) before scaler.unscale_"):
        scaler.unscale_(optimizer)
    # Follows the error's advice with a new scaler, since torch's does not unscale twice.
    optimizer.grad_sync()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.zeros(()))
    scaler.unscale_(optimizer)
    expected = [3.0 if number in numbers else 1.0 for number in range(2)]
    assert optimizer.grad_norm().item() == pytest.approx((3 * sum(one**2 for one in expected)) ** 0.5)


def test_a_scaler_sees_what_no_sync_has_copied():
    plain, plain_optimizer, model, optimizer = pair()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer.init_params()
    loss_of(plain, 0).backward()
    with optimizer.no_sync(greedy_grad_copy=True):
        scaler.scale(loss_of(model, 0)).backward()
    plain_optimizer.step()
    scaler.step(optimizer)
    assert_equal(plain, model)


def test_gradients_of_a_skipped_step_count_as_unscaled_once():
    _, _, model, optimizer = pair()
    (4.0 * loss_of(model, 0)).backward()
    scaled = optimizer.grad_norm().item()
    # Set as by a scaler when the gradients of a different optimizer overflow.
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(4.0), torch.tensor(1.0)
    optimizer.unscale_grads(inv_scale=torch.tensor(1.0))
    optimizer.step()
    del optimizer.grad_scale, optimizer.found_inf
    assert optimizer.grad_norm().item() == pytest.approx(scaled / 4.0)


def scaler_that_saw_own_gradients_alone():
    optimizer = PlainSteps([param := nn.Parameter(torch.ones(3))], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with optimizer.no_sync():
        scaler.scale(param.sum()).backward()
    with pytest.raises(RuntimeError, match=r"call grad_sync\(\) before scaler.unscale_"):
        scaler.step(optimizer)
    optimizer.grad_sync()
    scaler.update()
    before = param.detach().clone()
    scaler.step(optimizer)
    assert bool((param < before).all())


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_scaler_that_decides_itself_must_see_reduced_gradients(ranks):
    run_on_ranks(scaler_that_saw_own_gradients_alone, ranks)
