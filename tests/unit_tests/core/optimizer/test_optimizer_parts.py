"""Optimizers that a Megatron script builds around a torch optimizer: steps compared with torch's, and state dicts."""

import copy
import math

import pytest
import torch
from torch import nn

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import model_sharded_tensors
from megatron.core.optimizer import (
    ChainedOptimizer,
    ConstantGradScaler,
    DynamicGradScaler,
    Float16OptimizerWithFloat16Params,
    FP32Optimizer,
    OptimizerConfig,
)
from megatron.core.tensor_parallel.param_attributes import copy_marks
from tests.unit_tests.core.optimizer.reference import microbatches, tiny_model, wrap

MAKERS = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.1),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9, weight_decay=0.1),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.01, momentum=0.5),
    "nadam": lambda params: torch.optim.NAdam(params, lr=0.01),
}


def config(**settings):
    return OptimizerConfig(**{"lr": 0.01, "clip_grad": 0.0, **settings})


def step(model, optimizer, number, *, dtype=torch.float32):
    optimizer.zero_grad()
    loss = model(microbatches(number, dtype=dtype)[0]).float().square().mean()
    optimizer.scale_loss(loss).backward()
    return optimizer.step()


@pytest.mark.parametrize("clip_grad", [0.0, 0.05])
@pytest.mark.parametrize("name", MAKERS)
def test_an_fp32_optimizer_steps_as_its_torch_optimizer(name, clip_grad):
    model, twin = tiny_model(), tiny_model()
    optimizer = FP32Optimizer(MAKERS[name](model.parameters()), config(clip_grad=clip_grad), None)
    plain = MAKERS[name](twin.parameters())
    for number in range(5):
        updated, norm, zeros = step(model, optimizer, number)
        plain.zero_grad()
        twin(microbatches(number)[0]).square().mean().backward()
        expected = nn.utils.clip_grad_norm_(twin.parameters(), clip_grad or math.inf)
        plain.step()
        assert updated and zeros is None and norm == pytest.approx(float(expected), rel=1e-6)
    for one, other in zip(model.parameters(), twin.parameters()):
        torch.testing.assert_close(one, other, rtol=0 if not clip_grad else 1e-5, atol=0 if not clip_grad else 1e-6)
    assert optimizer.param_groups is not plain.param_groups and optimizer.get_parameters() == list(model.parameters())
    assert optimizer.state is optimizer.optimizer.state and set(optimizer.state) == set(model.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_masters_of_sixteen_bit_parameters_are_stepped_in_fp32_and_rounded(dtype):
    model, twin = tiny_model(dtype), tiny_model(dtype)
    scaler = ConstantGradScaler(8.0) if dtype == torch.float16 else None
    torch_optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    optimizer = Float16OptimizerWithFloat16Params(torch_optimizer, config(), scaler, None)
    masters = [param.detach().float() for param in twin.parameters()]
    plain = torch.optim.AdamW(masters, lr=0.01)
    for number in range(3):
        assert step(model, optimizer, number, dtype=dtype)[0]
        twin.zero_grad()
        (twin(microbatches(number, dtype=dtype)[0]).float().square().mean() * (8.0 if scaler else 1.0)).backward()
        for master, param in zip(masters, twin.parameters()):
            master.grad = param.grad.float() / (8.0 if scaler else 1.0)
        plain.step()
        for master, param in zip(masters, twin.parameters()):
            param.data.copy_(master)
    for param, other, master in zip(model.parameters(), twin.parameters(), masters):
        assert torch.equal(param, other) and torch.equal(param.main_param, master)
        assert param.main_param.dtype == torch.float32 and not param.main_param_sharded
    # Torch's optimizer steps the masters.
    assert [p for group in torch_optimizer.param_groups for p in group["params"]] == [
        param.main_param for param in model.parameters()
    ]
    assert set(optimizer.state) == {param.main_param for param in model.parameters()}
    assert all(param.grad is None for param in optimizer.get_parameters())


def test_sixteen_bit_parameters_without_masters_are_refused():
    with pytest.raises(ValueError, match=r"param_groups\[0\]\['params'\]\[0\] is torch.bfloat16: must be float32"):
        FP32Optimizer(torch.optim.SGD(tiny_model(torch.bfloat16).parameters(), lr=0.1), config(), None)


def test_an_overflow_skips_the_step_and_lowers_the_scale():
    model = tiny_model(torch.float16)
    scaler = DynamicGradScaler(8.0, 1.0, 2.0, 0.5, 100, 1)
    optimizer = Float16OptimizerWithFloat16Params(torch.optim.SGD(model.parameters(), lr=1.0), config(), scaler, None)
    before = copy.deepcopy(list(model.parameters()))
    optimizer.zero_grad()
    optimizer.scale_loss(model(microbatches(0, dtype=torch.float16)[0] * math.inf).float().sum()).backward()
    updated, _, _ = optimizer.step()
    assert not updated and float(optimizer.get_loss_scale()) == 4.0 == scaler.scale.item()
    assert scaler.inv_scale.item() == 0.25
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters()))


def test_main_grads_of_a_wrapper_are_stepped_and_stay_in_its_buffers():
    model, twin = tiny_model(), tiny_model()
    wrapped = wrap(model)
    optimizer = FP32Optimizer(torch.optim.SGD(model.parameters(), lr=0.1), config(), None)
    plain = torch.optim.SGD(twin.parameters(), lr=0.1)
    for number in range(2):
        wrapped.zero_grad_buffer()
        wrapped(microbatches(number)[0]).square().mean().backward()
        wrapped.finish_grad_sync()
        assert optimizer.step()[0]
        plain.zero_grad()
        twin(microbatches(number)[0]).square().mean().backward()
        plain.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters()))
    assert all(param.grad is None and param.main_grad.any() for param in model.parameters())


def test_a_parameter_without_a_gradient_stays_and_adds_nothing_to_norm_and_zeros():
    model = tiny_model()
    unused = nn.Parameter(torch.ones(3))
    params = [*model.parameters(), unused]
    optimizer = FP32Optimizer(torch.optim.AdamW(params, lr=0.1), config(log_num_zeros_in_grad=True), None)
    updated, norm, zeros = step(model, optimizer, 0)
    total = torch.cat([param.grad.flatten() for param in model.parameters()])
    assert updated and norm == pytest.approx(float(total.norm()), rel=1e-6) and zeros == int((total == 0).sum())
    assert torch.equal(unused, torch.ones(3)) and unused not in optimizer.state


def test_parts_of_a_step_are_called_one_by_one():
    model, twin = tiny_model(), tiny_model()
    optimizer = FP32Optimizer(torch.optim.SGD(model.parameters(), lr=0.1), config(clip_grad=1.0), None)
    with pytest.raises(RuntimeError, match="step_with_ready_grads was called without prepare_grads"):
        optimizer.step_with_ready_grads()
    optimizer.zero_grad()
    model(microbatches(0)[0]).square().mean().backward()
    twin(microbatches(0)[0]).square().mean().backward()
    assert not optimizer.prepare_grads()
    norm = optimizer.clip_grad_norm(0.05)
    expected = nn.utils.clip_grad_norm_(twin.parameters(), 0.05)
    assert norm == pytest.approx(float(expected), rel=1e-6) and optimizer.get_grad_norm() == pytest.approx(0.05, 1e-4)
    assert optimizer.step_with_ready_grads()
    torch.optim.SGD(twin.parameters(), lr=0.1).step()
    for one, other in zip(model.parameters(), twin.parameters()):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-8)
    model.zero_grad()
    model(microbatches(0)[0] * 0).sum().backward()
    assert optimizer.count_zeros() == sum((param.grad == 0).sum().item() for param in model.parameters())


def test_zero_grad_sets_none_or_zeros():
    model = tiny_model()
    optimizer = FP32Optimizer(torch.optim.SGD(model.parameters(), lr=0.1), config(), None)
    model(microbatches(0)[0]).sum().backward()
    optimizer.zero_grad(set_to_none=False)
    assert not any(param.grad.any() for param in model.parameters())
    optimizer.zero_grad()
    assert all(param.grad is None for param in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_a_state_dict_continues_bit_for_bit(name, dtype, tmp_path):
    def built(model):
        if dtype == torch.float32:
            return FP32Optimizer(MAKERS[name](model.parameters()), config(), None)
        return Float16OptimizerWithFloat16Params(MAKERS[name](model.parameters()), config(), None, None)

    straight = tiny_model(dtype)
    optimizer = built(straight)
    for number in range(2):
        step(straight, optimizer, number, dtype=dtype)
    torch.save({"model": straight.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "saved.pt")
    resumed = tiny_model(dtype, seed=3)
    other = built(resumed)
    saved = torch.load(tmp_path / "saved.pt")
    resumed.load_state_dict(saved["model"])
    other.load_state_dict(saved["optimizer"])
    for number in range(2, 4):
        assert step(straight, optimizer, number, dtype=dtype) == step(resumed, other, number, dtype=dtype)
    assert all(torch.equal(a, b) for a, b in zip(straight.parameters(), resumed.parameters()))
    with pytest.raises(ValueError, match=r"state_dict\['state'\] has shapes"):
        other.load_state_dict({**saved["optimizer"], "state": saved["optimizer"]["state"][1:]})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sharded_state_dict_is_saved_and_loaded_with_the_model(dtype, tmp_path):
    def built(model):
        if dtype == torch.float32:
            return FP32Optimizer(MAKERS["adamw"](model.parameters()), config(), None)
        return Float16OptimizerWithFloat16Params(MAKERS["adamw"](model.parameters()), config(), None, None)

    straight = tiny_model(dtype)
    optimizer = built(straight)
    step(straight, optimizer, 0, dtype=dtype)
    items = model_sharded_tensors(straight)
    state = optimizer.sharded_state_dict(items)
    dist_checkpointing.save_items({"model": items, "optimizer": state}, tmp_path / "c", common={})
    names = {tensor.key for tensor in state["tensors"]}
    assert "optimizer.exp_avg.0.weight" in names
    assert ("optimizer.fp32_param.0.weight" in names) == (dtype == torch.bfloat16)
    resumed = tiny_model(dtype, seed=3)
    other = built(resumed)
    items = model_sharded_tensors(resumed)
    state = other.sharded_state_dict(items, is_loading=True)
    dist_checkpointing.load_items({"model": items, "optimizer": state}, tmp_path / "c")
    other.load_state_dict(state)
    assert step(straight, optimizer, 1, dtype=dtype) == step(resumed, other, 1, dtype=dtype)
    assert all(torch.equal(a, b) for a, b in zip(straight.parameters(), resumed.parameters()))
    with pytest.raises(ValueError, match="model_sharded_state_dict has no item for"):
        other.sharded_state_dict(items[1:])
    with pytest.raises(ValueError, match="distrib_optim_sharding_type'] is 'dp_reshardable'"):
        other.sharded_state_dict(items, metadata={"distrib_optim_sharding_type": "dp_reshardable"})


def test_an_init_state_fn_allocates_the_state_for_a_save_before_the_first_step():
    model, called = tiny_model(), []

    def allocate(optimizer, config=None):
        called.append(optimizer)
        for param in model.parameters():
            optimizer.state[param]["momentum_buffer"] = torch.full_like(param, 2.0)

    torch_optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    before = copy.deepcopy(list(model.parameters()))
    state = FP32Optimizer(torch_optimizer, config(), allocate).state_dict()["state"]
    assert called == [torch_optimizer] and all((one["momentum_buffer"] == 2.0).all() for one in state)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters()))


def test_state_that_is_not_elementwise_is_refused_by_name():
    class Odd(torch.optim.SGD):
        def step(self):
            for param in self.param_groups[0]["params"]:
                self.state[param]["rows"] = torch.zeros(len(param))

    optimizer = FP32Optimizer(Odd(tiny_model().parameters(), lr=0.1), config(), None)
    with pytest.raises(ValueError, match="state rows of torch's Odd is a Tensor without one number"):
        optimizer.state_dict()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_offloaded_state_has_no_memory_and_comes_back_with_the_same_bits(dtype):
    model, twin = tiny_model(dtype), tiny_model(dtype)
    ours, other = (
        Float16OptimizerWithFloat16Params(torch.optim.AdamW(one.parameters(), lr=0.01), config(), None, None)
        for one in (model, twin)
    )
    for one, optimizer in ((model, ours), (twin, other)):
        step(one, optimizer, 0, dtype=dtype)
    moments = [state["exp_avg"] for state in ours.state.values()]
    ours.offload_to_cpu()
    assert not any(moment.untyped_storage().nbytes() for moment in moments)
    with pytest.raises(RuntimeError, match="call restore_from_cpu first"):
        step(model, ours, 1, dtype=dtype)
    ours.restore_from_cpu()
    assert step(model, ours, 1, dtype=dtype) == step(twin, other, 1, dtype=dtype)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters()))


def test_a_torch_optimizer_cannot_step_on_the_device():
    model = tiny_model()
    optimizer = FP32Optimizer(torch.optim.SGD(model.parameters(), lr=0.1), config(), None)
    model(microbatches(0)[0]).sum().backward()
    optimizer.prepare_device_step()
    with pytest.raises(ValueError, match="step_on_device does not support torch's SGD"):
        optimizer.step_on_device()


# Chains.


def test_a_chain_clips_by_one_norm_and_steps_each_optimizer():
    model, twin = tiny_model(), tiny_model()
    params, others = list(model.parameters()), list(twin.parameters())
    chained = ChainedOptimizer(
        [
            FP32Optimizer(torch.optim.AdamW(params[:3], lr=0.01), config(clip_grad=0.05), None),
            FP32Optimizer(torch.optim.SGD(params[3:], lr=0.1), config(clip_grad=0.05), None),
        ]
    )
    plain = [torch.optim.AdamW(others[:3], lr=0.01), torch.optim.SGD(others[3:], lr=0.1)]
    for number in range(3):
        updated, norm, _ = step(model, chained, number)
        twin.zero_grad()
        twin(microbatches(number)[0]).square().mean().backward()
        expected = nn.utils.clip_grad_norm_(twin.parameters(), 0.05)
        for one in plain:
            one.step()
        assert updated and norm == pytest.approx(float(expected), rel=1e-6)
    for one, other in zip(params, others):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)
    assert chained.get_parameters() == params
    assert [group["lr"] for group in chained.param_groups] == [0.01, 0.1]
    chained.param_groups[1]["lr"] = 0.2
    assert chained.chained_optimizers[1].param_groups[0]["lr"] == 0.2
    saved = chained.state_dict()
    chained.load_state_dict(saved)
    assert chained.common_state()["step"] == 3


def test_the_state_of_a_chain_of_torch_optimizers_is_a_view_of_theirs():
    model = tiny_model()
    params = list(model.parameters())
    first, second = torch.optim.AdamW(params[:3], lr=0.01), torch.optim.SGD(params[3:], lr=0.1, momentum=0.9)
    chained = ChainedOptimizer([first, second])
    assert len(chained.state) == 0
    model(microbatches(0)[0]).sum().backward()
    assert chained.step()[0]
    assert len(chained.state) == len(params)
    for (index, param), value in chained.state.items():
        assert value is (first, second)[index].state[param] is chained.state[param]
        chained.state[index, param] = {name: tensor.clone() for name, tensor in value.items()}
        assert (first, second)[index].state[param] is not value
    with pytest.raises(KeyError):
        chained.state[nn.Parameter(torch.ones(1))]


def test_chains_that_would_disagree_are_refused():
    def one(**settings):
        return FP32Optimizer(torch.optim.SGD(tiny_model().parameters(), lr=0.1), config(**settings), None)

    with pytest.raises(ValueError, match=r"OptimizerConfig.clip_grad of chained_optimizers is \[1.0, 2.0\]"):
        ChainedOptimizer([one(clip_grad=1.0), one(clip_grad=2.0)])
    with pytest.raises(ValueError, match="chained_optimizers is empty"):
        ChainedOptimizer([])
    with pytest.raises(TypeError, match="chained_optimizers contains a int"):
        ChainedOptimizer([3])
    with pytest.raises(ValueError, match="no optimizer in the chain updates shards"):
        ChainedOptimizer([one()]).save_parameter_state("x")


def test_metadata_of_a_parameter_is_copied_without_its_gradient():
    source, destination = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    source.is_special, source.main_grad, source.tensor_model_parallel = True, torch.ones(2), True
    copy_marks(destination, source)
    assert destination.is_special and destination.tensor_model_parallel and "main_grad" not in vars(destination)
