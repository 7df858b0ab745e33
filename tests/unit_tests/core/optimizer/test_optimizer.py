"""Optimizer steps are bit-identical to torch's, and survive a save and load."""

import math
from functools import partial

import pytest
import torch
from torch import nn

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import LogicalPiece, model_logical_pieces
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.optimizer import (
    DistributedOptimizer,
    Float16OptimizerWithFloat16Params,
    FP32Optimizer,
    OptimizerConfig,
    get_megatron_optimizer,
)
from tests.unit_tests.core.optimizer.reference import (
    TorchReference,
    assert_same_parameters,
    microbatches,
    our_step,
    tiny_model,
    wrap,
    wrap_and_build,
)

ADAMW = partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1, fused=True)
SGD = partial(torch.optim.SGD, lr=0.01, weight_decay=0.1, momentum=0.9, fused=True)


def assert_follows_torch(model, twin, reference, *, count, **settings):
    wrapped, optimizer = wrap_and_build(model, weight_decay=0.1, deterministic_mode=True, **settings)
    for step in range(20):
        inputs = microbatches(step, count, dtype=next(twin.parameters()).dtype)
        updated, norm, _ = our_step(wrapped, optimizer, inputs)
        assert updated and norm == reference.step(inputs)
        assert_same_parameters(model, twin)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("clip_grad", [0.0, 0.05, 1e6])
@pytest.mark.parametrize("make, name", [(ADAMW, "adam"), (SGD, "sgd")])
def test_twenty_fp32_steps_equal_torch_bit_for_bit(make, name, clip_grad, count):
    twin = tiny_model()
    reference = TorchReference(twin, make, clip_grad)
    assert_follows_torch(tiny_model(), twin, reference, count=count, clip_grad=clip_grad, optimizer=name)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_sixteen_bit_gradients_are_summed_and_applied_in_fp32(dtype):
    torch_dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    twin = tiny_model(torch_dtype)
    settings = {dtype: True, "loss_scale": 1.0} if dtype == "fp16" else {dtype: True}
    assert_follows_torch(
        tiny_model(torch_dtype), twin, TorchReference(twin, ADAMW, 0.05), count=3, clip_grad=0.05, **settings
    )


def test_twenty_clipped_steps_agree_with_ordinary_torch_code():
    model, plain = tiny_model(), tiny_model()
    wrapped, optimizer = wrap_and_build(model, weight_decay=0.0, clip_grad=0.1)
    adamw = torch.optim.AdamW(plain.parameters(), lr=0.01, weight_decay=0.0)
    for step in range(20):
        (x,) = microbatches(step)
        our_step(wrapped, optimizer, [x])
        adamw.zero_grad()
        plain(x).square().mean().backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        adamw.step()
    for p, q in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)


def test_biases_and_one_dimensional_parameters_do_not_decay():
    model = tiny_model()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    wrapped, optimizer = wrap_and_build(model, weight_decay=0.5)
    optimizer.zero_grad()
    wrapped.finish_grad_sync()  # no backward: all gradients are zero, so only weight decay changes parameters
    assert optimizer.step() == (True, 0.0, None)
    for name, p in model.named_parameters():
        expected = before[name] if p.dim() == 1 else before[name] * (1 - 0.01 * 0.5)
        torch.testing.assert_close(p.detach(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("settings", [{}, {"clip_grad": 0.0}, {"bf16": True}, {"fp16": True}])
def test_a_gradient_that_is_not_finite_changes_nothing_but_the_scale(settings, bad):
    dtype = torch.bfloat16 if "bf16" in settings else torch.float16 if "fp16" in settings else torch.float32
    wrapped, optimizer = wrap_and_build(tiny_model(dtype), initial_loss_scale=8.0, hysteresis=1, **settings)
    our_step(wrapped, optimizer, microbatches(0, dtype=dtype))
    pieces = model_logical_pieces(wrapped)
    before = [t.data.clone() for t in optimizer.sharded_state(pieces)] + [p.clone() for p in wrapped.parameters()]
    updated, norm, _ = our_step(wrapped, optimizer, [microbatches(1, dtype=dtype)[0] * bad])
    assert not updated and not math.isfinite(norm)
    after = [t.data for t in optimizer.sharded_state(pieces)] + list(wrapped.parameters())
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert optimizer.state_dict()["step"] == 1
    assert float(optimizer.get_loss_scale()) == (4.0 if "fp16" in settings else 1.0)
    # The next finite gradient is applied as usual.
    assert our_step(wrapped, optimizer, microbatches(2, dtype=dtype))[0]


def test_a_loss_scale_of_a_power_of_two_does_not_change_a_step():
    results = []
    for scale in (1.0, 1024.0):
        model = tiny_model(torch.float16)
        wrapped, optimizer = wrap_and_build(model, fp16=True, loss_scale=scale, clip_grad=0.0)
        norms = [our_step(wrapped, optimizer, microbatches(step, dtype=torch.float16))[1] for step in range(5)]
        results.append((model, norms))
    # Small fp16 gradients lose precision without a loss scale.
    assert results[0][1] == pytest.approx(results[1][1], rel=1e-3)
    for p, q in zip(results[0][0].parameters(), results[1][0].parameters()):
        torch.testing.assert_close(p, q, rtol=1e-2, atol=2e-3)


def test_dynamic_scale_finds_its_way_down_from_two_to_the_32():
    wrapped, optimizer = wrap_and_build(tiny_model(torch.float16), fp16=True)
    outcomes = [our_step(wrapped, optimizer, microbatches(s, dtype=torch.float16))[0] for s in range(40)]
    assert not outcomes[0] and outcomes[-1]
    assert sum(outcomes) == optimizer.state_dict()["step"]


PRECISE = {"bf16": True, "use_precision_aware_optimizer": True}
RESUMED = [
    (name, settings)
    for name in ("adam", "sgd", "muon")
    for settings in ({}, {"bf16": True}, {"fp16": True, "loss_scale_window": 2})
]
RESUMED.append(("adam", {**PRECISE, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "fp16"}))
RESUMED.append(("adam", {**PRECISE, "main_params_dtype": "fp16"}))


@pytest.mark.parametrize("name, settings", RESUMED)
@pytest.mark.parametrize("stop", [0, 7])
def test_resume_from_a_checkpoint_continues_bit_for_bit(tmp_path, name, settings, stop):
    settings = {**settings, "optimizer": name}
    dtype = torch.bfloat16 if "bf16" in settings else torch.float16 if "fp16" in settings else torch.float32
    straight, stopped, resumed = (wrap_and_build(tiny_model(dtype, seed), **settings) for seed in (0, 0, 1))
    for step in range(14):
        our_step(*straight, microbatches(step, dtype=dtype))
    for step in range(stop):
        our_step(*stopped, microbatches(step, dtype=dtype))
    dist_checkpointing.save_items(state_of(*stopped), tmp_path / "c", common={"optimizer": stopped[1].common_state()})
    with resumed[1].loading(model_logical_pieces(resumed[0])) as state:
        weights = dist_checkpointing.model_sharded_tensors(resumed[0])
        common = dist_checkpointing.load_items([*weights, *state], tmp_path / "c")
    resumed[1].load_state_dict(common["optimizer"])
    for step in range(stop, 14):
        our_step(*resumed, microbatches(step, dtype=dtype))
    assert resumed[1].common_state() == straight[1].common_state()
    for a, b in zip(state_of(*resumed), state_of(*straight), strict=True):
        assert a.key == b.key and torch.equal(a.data, b.data), a.key


def state_of(wrapped, optimizer):
    weights = dist_checkpointing.model_sharded_tensors(wrapped)
    return weights + optimizer.sharded_state(model_logical_pieces(wrapped))


def test_state_has_one_box_per_logical_piece_and_no_wrapper_in_its_keys():
    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1 = nn.Linear(3, 8, bias=False)

        def logical_pieces(self, prefix):
            parts = enumerate(("gate", "up"))
            return {
                "fc1.weight": [
                    LogicalPiece(f"{prefix}fc1.{n}", (4, 3), (3, 1), 12 * i, (4, 3), (0, 0)) for i, n in parts
                ]
            }

    wrapped, optimizer = wrap_and_build(nn.Sequential(Gated()).bfloat16(), bf16=True)
    keys = [tensor.key for tensor in optimizer.sharded_state(model_logical_pieces(wrapped))]
    names = ("exp_avg", "exp_avg_sq", "fp32_param")
    assert keys == [f"optimizer.{name}.0.fc1.{part}" for name in names for part in ("gate", "up")]


def test_reload_takes_masters_from_weights_that_were_loaded_alone():
    wrapped, optimizer = wrap_and_build(tiny_model(torch.bfloat16), bf16=True, weight_decay=0.0)
    wrapped.module.load_state_dict(tiny_model(torch.bfloat16, seed=5).state_dict())
    optimizer.reload_model_params()
    optimizer.zero_grad()
    wrapped.finish_grad_sync()
    optimizer.step()
    assert_same_parameters(wrapped.module, tiny_model(torch.bfloat16, seed=5))


def test_a_model_without_trainable_parameters_steps_without_effect():
    model = tiny_model().requires_grad_(False)
    wrapped, optimizer = wrap_and_build(model, log_num_zeros_in_grad=True)
    optimizer.zero_grad()
    wrapped.finish_grad_sync()
    assert optimizer.step() == (True, 0.0, 0.0)
    # Other ranks may have trainable parameters, and count this step.
    assert optimizer.state_dict()["step"] == 1
    assert_same_parameters(model, tiny_model())


def test_frozen_parameters_stay_and_the_others_train_as_if_alone():
    model, alone = tiny_model(), tiny_model()
    model[0].requires_grad_(False)
    wrapped, optimizer = wrap_and_build(model)
    our_step(wrapped, optimizer, microbatches(0))
    assert_same_parameters(model[0], alone[0])
    assert not torch.equal(model[2].weight, alone[2].weight)


def test_zeros_are_counted_without_padding():
    model = nn.Linear(5, 3)
    wrapped, optimizer = wrap_and_build(model, log_num_zeros_in_grad=True)
    x = torch.zeros(2, 5)
    x[:, 0] = 1.0
    assert our_step(wrapped, optimizer, [x])[2] == 12.0


def test_mixed_precision_steps_fp32_parameters_themselves():
    model = tiny_model()
    model[2].bfloat16()
    wrapped, optimizer = wrap_and_build(model, bf16=True)
    masters = [t.key for t in optimizer.sharded_state(model_logical_pieces(wrapped)) if "fp32_param" in t.key]
    assert masters == ["optimizer.fp32_param.2.bias", "optimizer.fp32_param.2.weight"]


def test_parameters_moved_after_the_optimizer_was_built_are_an_error_not_a_silent_loss():
    wrapped, optimizer = wrap_and_build(tiny_model())
    wrapped.double()
    with pytest.raises(ValueError, match="parameter 0.weight was moved"):
        our_step(wrapped, optimizer, microbatches(0, dtype=torch.float64))


def test_precision_chooses_the_class():
    assert isinstance(wrap_and_build(tiny_model())[1], FP32Optimizer)
    assert isinstance(wrap_and_build(tiny_model(torch.bfloat16), bf16=True)[1], Float16OptimizerWithFloat16Params)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"optimizer": "lion"}, "'lion': must be one of adam, sgd, muon"),
        ({"lr": 0.1, "min_lr": 0.2}, "min_lr is 0.2: must be at most OptimizerConfig.lr"),
        ({"fp16": True, "bf16": True}, "OptimizerConfig.fp16 and OptimizerConfig.bf16 are both given"),
        ({"min_loss_scale": 2.0, "initial_loss_scale": 1.0}, "min_loss_scale is 2.0"),
        ({"clip_grad": -1.0}, "clip_grad is -1.0: must be at least 0"),
        ({"overlap_cpu_optimizer_d2h_h2d": True}, "requires optimizer_cpu_offload as well"),
    ],
)
def test_settings_that_cannot_be_honoured_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        OptimizerConfig(**settings)


def test_builder_asks_for_a_learning_rate_and_a_wrapper():
    with pytest.raises(ValueError, match="lr is None"):
        get_megatron_optimizer(OptimizerConfig(), [wrap(tiny_model())])
    of_names = DistributedDataParallelConfig(param_name_patterns_for_fp32_local_accumulation=["0.*", "nothing*"])
    with pytest.raises(ValueError, match=r"accumulation contains nothing\*: must match"):
        ddp = DistributedDataParallel(ModelParallelConfig(), of_names, tiny_model(torch.bfloat16))
        get_megatron_optimizer(OptimizerConfig(lr=0.1), [ddp])
    with pytest.raises(ValueError, match="model_chunks is empty"):
        get_megatron_optimizer(OptimizerConfig(lr=0.1), [])
    with pytest.raises(ValueError, match="None, None and 2.0: must be .* pass config_overrides instead"):
        get_megatron_optimizer(OptimizerConfig(lr=0.1), [wrap(tiny_model())], None, lr_mult=2.0)
    with pytest.raises(ValueError, match="Sequential: must be wrapped"):
        get_megatron_optimizer(OptimizerConfig(lr=0.1), [tiny_model()])
    sharded = OptimizerConfig(lr=0.1, use_distributed_optimizer=True)
    both = r"OptimizerConfig.* is True and DistributedDataParallelConfig.use_distributed_optimizer is False"
    with pytest.raises(ValueError, match=both):
        get_megatron_optimizer(sharded, [wrap(tiny_model())])
    # By default the wrapper decides.
    for config in (sharded, OptimizerConfig(lr=0.1)):
        wrapped = wrap(tiny_model(), overlap={"use_distributed_optimizer": True})
        assert isinstance(get_megatron_optimizer(config, [wrapped]), DistributedOptimizer)


def test_settings_have_megatrons_defaults_and_read_dtypes_and_their_names():
    config = OptimizerConfig(lr=0.1, timers=None)
    assert (config.min_lr, config.lowest_lr, config.optimizer_offload_fraction) == (None, 0.0, 0.0)
    assert config.main_grads_dtype == config.exp_avg_dtype == torch.float32 and callable(config.timers)
    precise = {"use_precision_aware_optimizer": True, "lr": 0.1}
    given = OptimizerConfig(**precise, exp_avg_dtype=torch.bfloat16, exp_avg_sq_dtype="fp16")
    assert (given.exp_avg_dtype, given.exp_avg_sq_dtype) == (torch.bfloat16, torch.float16)
    with pytest.raises(ValueError, match="exp_avg_dtype is fp8: must be fp32, bf16 or fp16"):
        OptimizerConfig(**precise, exp_avg_dtype=torch.uint8)
    with pytest.raises(ValueError, match="main_grads_dtype is torch.float16|main_grads_dtype is 'fp16'"):
        OptimizerConfig(**precise, main_grads_dtype=torch.float16)
    with pytest.raises(ValueError, match="decoupled_weight_decay is False: .*AdamW.*keep the default True"):
        OptimizerConfig(lr=0.1, decoupled_weight_decay=False)


def test_overlap_that_the_wrapper_lacks_is_refused():
    ddp = wrap(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="OptimizerConfig.overlap_param_gather is True and Distributed.* is False"):
        get_megatron_optimizer(OptimizerConfig(lr=0.1, overlap_param_gather=True), [ddp])
