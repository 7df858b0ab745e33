"""Tests that `bucket.states` shows hooks the optimizer state that the next step starts from.

Covers every wrapper and rule. Updates in backward are covered in test_optimizer_in_backward.
"""

import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    TorchFullyShardedDataParallel,
    TorchFullyShardedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.distributed.grad_hooks import ReadyBucket, RunState
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel.param_attributes import MatrixWindow
from tests.distributed.hook_runs import after_step
from tests.harness import run_on_ranks
from tests.unit_tests.core.optimizer.reference import microbatches, tiny_model

SHARDED = {"use_distributed_optimizer": True, "bucket_size": 37}
WRAPPERS: dict[str, dict[str, Any]] = {
    "ddp": {"bucket_size": 37},
    "zero1": {**SHARDED, "overlap_grad_reduce": True, "overlap_param_gather": True},
    "zero2": {**SHARDED, "shard_gradients": True},
}
RULES: dict[str, dict[str, Any]] = {
    "adam": {},
    "sgd": {"optimizer": "sgd", "sgd_momentum": 0.9, "weight_decay": 0.1},
    "adam in few bits": {
        "use_precision_aware_optimizer": True,
        "store_param_remainders": True,
        "exp_avg_dtype": "bf16",
        "exp_avg_sq_dtype": "fp16",
    },
}


def _wrap(wrapper: str, module: nn.Module) -> Any:
    config = ModelParallelConfig(deterministic_mode=True)
    if wrapper == "fsdp2":
        fsdp2 = TorchFullyShardedDataParallelConfig(grad_reduce_in_fp32=True)
        return TorchFullyShardedDataParallel(config, fsdp2, module, [nn.Linear])
    ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, **WRAPPERS[wrapper])
    return DistributedDataParallel(config, ddp_config, module)


def _optimizer(model: Any, dtype: torch.dtype, **settings: Any) -> Any:
    given = {"lr": 0.01, "clip_grad": 0.0, "deterministic_mode": True, "bf16": dtype == torch.bfloat16}
    if model.ddp_config.shard_gradients:
        given["optimizer"] = "distributed_fused_adam"
    return get_megatron_optimizer(OptimizerConfig(**{**given, **settings}), [model])


def _step(model: Any, optimizer: Any, number: int, dtype: torch.dtype) -> None:
    optimizer.zero_grad()
    (x,) = microbatches(10 * number + dist.get_rank(), 1, dtype=dtype)
    model(x).float().square().mean().backward()
    finalize_model_grads([model])
    assert optimizer.step()[0]


class Forecast:
    """A bucket hook that predicts the next step's states from the current ones, and compares."""

    def __init__(self, *, is_kept_whole: bool) -> None:
        self.step, self.num_elements = 0, 0
        self._is_kept_whole = is_kept_whole
        self._expected: dict[tuple[str, int], dict[str, torch.Tensor]] = {}

    def __call__(self, bucket: ReadyBucket) -> None:
        assert [one.span.start for one in bucket.states] == sorted(one.span.start for one in bucket.states)
        for state in bucket.states:
            self._meet(bucket, state)
        found = [one.span.intersection(state.span).numel for one in bucket.slices for state in bucket.states]
        assert sum(found) == sum(one.span.numel for one in bucket.slices), "each owned element, exactly once"
        self.num_elements += sum(found)

    def _meet(self, bucket: ReadyBucket, state: RunState) -> None:
        part, key = slice(state.span.start, state.span.end), (bucket.name, state.span.start)
        assert torch.equal(state.master.to(bucket.shard.dtype), bucket.shard[part])
        if self.step == 0:
            assert not any(moment.any() for moment in state.moments.values())
        else:
            found = {"master": state.master, **state.moments}
            # bf16 has 8 significant bits.
            close = {"rtol": 1e-5, "atol": 1e-7} if self._is_kept_whole else {"rtol": 1e-2, "atol": 1e-5}
            torch.testing.assert_close(found, self._expected[key], **close)
        if self._is_kept_whole and self.step == 1:
            # The step must start from the values written here.
            state.master.mul_(2.0)
            bucket.shard[part].copy_(state.master)
            next(iter(state.moments.values())).neg_()
        self._expected[key] = after_step(state, bucket.grad[part], self.step)


def _forecast(wrapper: str, rules: list[str]) -> None:
    for name in rules:
        few_bits = "few bits" in name
        dtypes = [torch.bfloat16] if few_bits else [torch.float32, torch.bfloat16]
        for dtype in dtypes:
            model = _wrap(wrapper, tiny_model(dtype))
            optimizer = _optimizer(model, dtype, **RULES[name])
            forecast = Forecast(is_kept_whole=not few_bits)
            model.register_bucket_ready_hook(forecast)
            for step in range(3):
                for group in optimizer.param_groups:
                    group["lr"] = 0.01 * 0.5**step
                forecast.step = step
                _step(model, optimizer, step, dtype)
            total = torch.tensor(forecast.num_elements)
            dist.all_reduce(total)
            ranks = 2 if wrapper == "ddp" else 1
            assert total.item() == 3 * ranks * sum(param.numel() for param in tiny_model().parameters())


@pytest.mark.slow
@pytest.mark.parametrize("wrapper", [*WRAPPERS, "fsdp2"])
def test_states_are_what_the_step_starts_from(wrapper: str) -> None:
    # ZeRO-2 supports only Adam; sharded masters are always fp32.
    rules = [name for name in RULES if wrapper in ("ddp", "zero1") or name == "adam"]
    run_on_ranks(_forecast, 2, wrapper, rules)


class Halves(nn.Module):
    """A weight that consists of two matrices, of equal or different shapes."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.weight, self._rows = nn.Parameter(torch.randn(8, 5)), rows

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.T

    def weight_matrices(self) -> dict[str, list[MatrixWindow]]:
        first, second = (self._rows, 5), (8 - self._rows, 5)
        return {"weight": [MatrixWindow(first, (5, 1), 0), MatrixWindow(second, (5, 1), 5 * self._rows)]}


def _see_matrices() -> None:
    for wrapper in ("ddp", "zero1"):
        model = _wrap(wrapper, nn.Sequential(nn.Linear(5, 5), Halves(4), nn.Linear(8, 5), Halves(3)))
        settings = {"optimizer": "muon", "muon_momentum": 0.75, "muon_scale_mode": "unit_rms_norm"}
        optimizer = _optimizer(model, torch.float32, **settings)
        kinds: dict[str, set[str]] = {}
        momenta: dict[str, torch.Tensor] = {}

        def look(bucket: ReadyBucket, kinds: Any = kinds, momenta: Any = momenta) -> None:
            for one in bucket.slices:
                for state in bucket.restricted([one.name])[0].states:
                    kinds[one.name] = set(state.moments) | ({"lr"} & set(state.settings))
                    grad = bucket.grad[one.span.start : one.span.end]
                    expected = momenta.get(one.name)
                    if "momentum_buffer" in state.moments:
                        kept = state.moments["momentum_buffer"][: one.span.numel]
                        torch.testing.assert_close(kept, torch.zeros_like(grad) if expected is None else expected)
                        momenta[one.name] = kept.lerp(grad, 0.25)

        model.register_bucket_ready_hook(look)
        for step in range(3):
            _step(model, optimizer, step, torch.float32)
        matrix, other = {"momentum_buffer", "lr"}, {"exp_avg", "exp_avg_sq", "lr"}
        wanted = {"0.weight": matrix, "0.bias": other, "1.weight": matrix, "2.weight": matrix, "2.bias": other}
        # Matrices of different shapes have different learning rates.
        wanted["3.weight"] = {"momentum_buffer"}
        assert kinds and all(kinds[name] == wanted[name] for name in kinds), kinds


def test_matrices_have_their_momentum_and_the_settings_that_they_share() -> None:
    run_on_ranks(_see_matrices, 2)


def _follow_optimizers() -> None:
    for wrapper in ("zero1", "fsdp2"):
        model, seen = _wrap(wrapper, tiny_model()), list[Any]()
        model.register_bucket_ready_hook(lambda bucket, seen=seen: seen.append(bucket.states))

        def rates_of_a_step(model: Any = model, seen: list[Any] = seen) -> set[float]:
            seen.clear()
            model.zero_grad_buffer()
            model(torch.ones(2, 5)).sum().backward()
            finalize_model_grads([model])
            return {state.settings["lr"] for states in seen for state in states}

        assert rates_of_a_step() == set()
        first = _optimizer(model, torch.float32, lr=0.5)
        assert rates_of_a_step() == {0.5}
        second = _optimizer(model, torch.float32, lr=0.25)
        assert rates_of_a_step() == {0.25} and first.param_groups
        seen.clear()
        del first, second
        gc.collect()
        assert rates_of_a_step() == set(), "the states of a deleted optimizer must be freed"


def test_states_are_those_of_the_last_optimizer_and_go_with_it() -> None:
    run_on_ranks(_follow_optimizers, 1)
