"""Weights that other code writes into a model after its optimizer was built are what the next step updates."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, MegatronOptimizer
from tests.unit_tests.core.optimizer.reference import TorchReference, microbatches, our_step, tiny_model, wrap

HALF = torch.bfloat16
STATES = {"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adam": {},
    "sgd": {"optimizer": "sgd"},
    "muon": {"optimizer": "muon"},
    "adam, fp16 masters": {"use_precision_aware_optimizer": True, "main_params_dtype": torch.float16},
    "adam, remainders": {"use_precision_aware_optimizer": True, **STATES},
    "adam, full masters": {"use_precision_aware_optimizer": True, "store_param_remainders": False, **STATES},
    "adam, offloaded": {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5},
    "adam, deterministic": {"deterministic_mode": True},
    "in backward": {"optimizer_in_backward": True, "optimizer_in_backward_clip": "exact", "clip_grad": 1.0},
    "in backward, per bucket": {
        "optimizer_in_backward": True,
        "optimizer_in_backward_clip": "per-bucket",
        "clip_grad": 1.0,
    },
    "distributed": {"use_distributed_optimizer": True},
    "fused": {"optimizer": "distributed_fused_adam", "use_distributed_optimizer": True},
    "torch's AdamW": {},
}
# Masters whose lower digits remain: those of a written weight may differ from it by half a unit, to which they round.
REMAINING = ("adam, remainders",)


class Run:
    """A bf16 model with its optimizer."""

    def __init__(self, kind: str, weights: dict[str, torch.Tensor] | None = None) -> None:
        self.model = tiny_model(HALF)
        if weights is not None:
            self.model.load_state_dict(weights)
        settings = {"lr": 0.01, "bf16": True, "clip_grad": 0.0, **OPTIMIZERS[kind]}
        if kind == "torch's AdamW":
            self.wrapped: Any = wrap(self.model)
            adam = torch.optim.AdamW(self.model.parameters(), lr=0.01)
            self.optimizer: MegatronOptimizer = Float16OptimizerWithFloat16Params(
                adam, OptimizerConfig(**settings), None
            )
            return
        overlap = {"use_distributed_optimizer": settings.get("use_distributed_optimizer", False)}
        overlap["shard_gradients"] = settings.get("optimizer") == "distributed_fused_adam"
        in_backward = settings.get("optimizer_in_backward", False)
        overlap.update(overlap_grad_reduce=in_backward, release_gradients=in_backward)
        self.wrapped = wrap(self.model, overlap={name: value for name, value in overlap.items() if value})
        self.optimizer = get_megatron_optimizer(OptimizerConfig(**settings), [self.wrapped])

    def train(self, steps: int, *, first: int = 0) -> "Run":
        for step in range(first, first + steps):
            self.wrapped.zero_grad_buffer()
            our_step(self.wrapped, self.optimizer, microbatches(step, dtype=HALF))
        return self

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: value.detach().clone() for name, value in self.model.state_dict().items()}


def other_weights() -> dict[str, torch.Tensor]:
    """Values that no element of a trained model has, so that every element is a write."""
    generator = torch.Generator().manual_seed(5)
    shapes = {name: value.shape for name, value in tiny_model(HALF).state_dict().items()}
    return {name: (3 + 0.1 * torch.randn(shape, generator=generator)).to(HALF) for name, shape in shapes.items()}


def by_load(model: nn.Module) -> None:
    model.load_state_dict(other_weights())


def by_copy(model: nn.Module) -> None:
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(other_weights()[name])


def by_data(model: nn.Module) -> None:
    for name, param in model.named_parameters():
        param.data.copy_(other_weights()[name])


def by_slices(model: nn.Module) -> None:
    with torch.no_grad():
        for name, param in model.named_parameters():
            for index, row in enumerate(other_weights()[name]):
                param[index] = row


def by_state_dict(model: nn.Module) -> None:
    state = model.state_dict()
    for name, value in other_weights().items():
        state[name].copy_(value)


def by_detached(model: nn.Module) -> None:
    for name, param in model.named_parameters():
        param.detach().copy_(other_weights()[name])


@torch.no_grad()
def by_list(model: nn.Module) -> None:
    names, params = zip(*model.named_parameters(), strict=True)
    torch._foreach_copy_(params, [other_weights()[name] for name in names])


@torch.inference_mode()
def by_inference(model: nn.Module) -> None:
    by_copy(model)


@torch.no_grad()
def by_arithmetic(model: nn.Module) -> None:
    for name, param in model.named_parameters():
        param.zero_().add_(other_weights()[name])


def by_apply(model: nn.Module) -> None:
    names = {param: name for name, param in model.named_parameters()}

    def reset(module: nn.Module) -> None:
        for param in module.parameters(recurse=False):
            with torch.no_grad():
                param.set_(param).flatten().copy_(other_weights()[names[param]].flatten())

    model.apply(reset)


def by_numpy(model: nn.Module) -> None:
    for name, param in model.named_parameters():
        param.detach().view(torch.int16).numpy()[...] = other_weights()[name].view(torch.int16).numpy()


WRITES: dict[str, Callable[[nn.Module], None]] = {
    "load_state_dict": by_load,
    "copy_": by_copy,
    ".data": by_data,
    "slices": by_slices,
    "state_dict": by_state_dict,
    "detach": by_detached,
    "foreach": by_list,
    "inference mode": by_inference,
    "arithmetic": by_arithmetic,
    "apply": by_apply,
    "numpy": by_numpy,
}
# Seen only by the comparison before the first step, as documented.
UNSEEN = (".data", "numpy")
COMMON = ("load_state_dict", "copy_", ".data", "slices")  # for every optimizer
PAIRS = [(kind, write) for kind in OPTIMIZERS for write in WRITES if write in COMMON or kind in ("adam", "fused")]


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize(("kind", "write"), PAIRS)
def test_weights_written_before_the_first_step_are_those_it_updates(kind: str, write: str) -> None:
    expected = Run(kind, other_weights()).train(3).weights()
    run = Run(kind)
    WRITES[write](run.model)
    assert_same(run.train(3).weights(), expected)


@pytest.mark.parametrize(
    ("kind", "write"), [(kind, write) for kind, write in PAIRS if write not in UNSEEN and kind not in REMAINING]
)
def test_weights_written_between_steps_are_those_the_next_one_updates(kind: str, write: str) -> None:
    """Compares with reload_model_params(), which a script may call itself."""
    expected = Run(kind).train(2)
    by_load(expected.model)
    expected.optimizer.reload_model_params()
    run = Run(kind).train(2)
    WRITES[write](run.model)
    assert_same(run.train(2, first=2).weights(), expected.train(2, first=2).weights())


@pytest.mark.parametrize("write", WRITES)
def test_written_weights_are_trained_as_by_torch(write: str) -> None:
    """The reference is torch's optimizer over fp32 masters of the written weights, without any code of ours."""
    twin = tiny_model(HALF)
    twin.load_state_dict(other_weights())
    reference = TorchReference(twin, partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1, fused=True))
    model = tiny_model(HALF)
    wrapped = wrap(model, deterministic_mode=True)
    settings = {"lr": 0.01, "bf16": True, "clip_grad": 0.0, "weight_decay": 0.1, "deterministic_mode": True}
    optimizer = get_megatron_optimizer(OptimizerConfig(**settings), [wrapped])
    WRITES[write](model)
    for step in range(5):
        inputs = microbatches(step, dtype=HALF)
        our_step(wrapped, optimizer, inputs)
        reference.step(inputs)
        assert_same(model.state_dict(), twin.state_dict())


def by_assignment(model: nn.Module) -> None:
    model.load_state_dict(other_weights(), assign=True)


def by_new_data(model: nn.Module) -> None:
    for name, param in model.named_parameters():
        param.data = other_weights()[name]


def by_vector(model: nn.Module) -> None:
    weights = other_weights()
    vector = torch.cat([weights[name].flatten() for name, _ in model.named_parameters()])
    nn.utils.vector_to_parameters(vector, model.parameters())


def by_exchange(model: nn.Module) -> None:
    for name, param in model.named_parameters():
        torch.utils.swap_tensors(param, nn.Parameter(other_weights()[name]))


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("kind", ["adam", "in backward", "fused"])
@pytest.mark.parametrize("move", [by_assignment, by_new_data, by_vector, by_exchange])
def test_parameters_that_left_their_buffer_are_named(move: Callable[[nn.Module], None], kind: str, steps: int) -> None:
    run = Run(kind).train(steps)
    move(run.model)
    with pytest.raises(ValueError, match=r"parameter 0\.weight was (replaced|moved, converted or assigned other data)"):
        run.train(1, first=steps)


@pytest.mark.parametrize(
    "kind", ["adam", "adam, remainders", "adam, fp16 masters", "muon", "distributed", "in backward", "torch's AdamW"]
)
def test_masters_of_weights_that_were_not_written_keep_all_their_digits(kind: str) -> None:
    """A write of the same values changes nothing, and a write to one parameter leaves the others alone."""
    plain, run = Run(kind).train(2), Run(kind).train(2)
    with torch.no_grad():
        for param in run.model.parameters():
            param.copy_(param.clone())
        for one in (plain, run):
            one.model.get_parameter("0.bias").fill_(0.25)
    assert_same(run.train(6, first=2).weights(), plain.train(6, first=2).weights())


def test_a_write_to_masters_with_remainders_is_kept_to_their_last_digit() -> None:
    expected, run = Run("adam, remainders").train(2), Run("adam, remainders").train(2)
    by_load(expected.model)
    expected.optimizer.reload_model_params()
    by_load(run.model)
    run.train(1, first=2), expected.train(1, first=2)
    for name, value in expected.weights().items():
        # Half a unit of bf16 before the update may be one after it.
        torch.testing.assert_close(run.weights()[name], value, rtol=2**-7, atol=1e-3)


def test_data_written_later_needs_a_reload_as_documented() -> None:
    expected, run = Run("adam").train(1), Run("adam").train(1)
    by_copy(expected.model)
    by_data(run.model)
    run.optimizer.reload_model_params()
    assert_same(run.train(2, first=1).weights(), expected.train(2, first=1).weights())


def test_a_step_on_the_device_takes_writes_before_it_starts() -> None:
    def device_step(run: Run, step: int) -> None:
        run.optimizer.zero_grad()
        for x in microbatches(step, dtype=HALF):
            run.wrapped(x).square().mean().backward()
        finalize_model_grads([run.wrapped])
        run.optimizer.prepare_device_step()
        run.optimizer.settle_step_sync(run.optimizer.step_on_device())

    expected, run = Run("adam", other_weights()), Run("adam")
    by_data(run.model)
    for step in range(2):
        device_step(expected, step)
        device_step(run, step)
    by_copy(run.model)
    by_copy(expected.model)
    device_step(expected, 2), device_step(run, 2)
    assert_same(run.weights(), expected.weights())
