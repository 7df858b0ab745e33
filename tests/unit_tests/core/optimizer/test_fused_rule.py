"""FusedRule's steps over ranges, in any form of storage, are bit-identical to torch's functions over whole tensors."""

import itertools
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.optimizer import OptimizerConfig, flat_params, get_megatron_optimizer
from megatron.core.optimizer.adam import FusedRule, GradScale, _sgd_divisor_on
from megatron.core.optimizer.flat_params import FlatParamRange
from megatron.core.optimizer.stored_floats import Plain, StoredFloats, zeros_beside

LR, DECAY, EPS = 0.01, 0.1, 1e-8
OFFLOADED = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.6}
FEW_BITS = {"bf16": True, "use_precision_aware_optimizer": True}
# Dtypes of parameters and gradients, and optimizer settings.
FORMS: list[tuple[torch.dtype, torch.dtype, dict[str, Any]]] = [
    (torch.float32, torch.float32, {}),
    (torch.float64, torch.float64, {}),
    (torch.bfloat16, torch.float32, {"bf16": True}),
    (torch.bfloat16, torch.bfloat16, {"bf16": True}),
    (torch.float16, torch.float32, {"fp16": True}),
    (torch.bfloat16, torch.float32, FEW_BITS),
    (torch.bfloat16, torch.bfloat16, FEW_BITS),
    (torch.bfloat16, torch.float32, {**FEW_BITS, "store_param_remainders": False}),
    (torch.bfloat16, torch.float32, {**FEW_BITS, "exp_avg_dtype": "bf16"}),
    (torch.bfloat16, torch.bfloat16, {**FEW_BITS, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}),
    (torch.float32, torch.float32, {"use_precision_aware_optimizer": True, "exp_avg_sq_dtype": "bf16"}),
    (torch.bfloat16, torch.float32, {**FEW_BITS, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "fp16"}),
    (torch.bfloat16, torch.float32, {**FEW_BITS, "main_params_dtype": "fp16"}),
    (torch.bfloat16, torch.float32, {"bf16": True, **OFFLOADED}),
    (torch.bfloat16, torch.bfloat16, {**FEW_BITS, "exp_avg_dtype": "bf16", **OFFLOADED}),
    (torch.bfloat16, torch.float32, {"bf16": True, **OFFLOADED, "overlap_cpu_optimizer_d2h_h2d": True}),
    (torch.float32, torch.float32, {**OFFLOADED, "overlap_cpu_optimizer_d2h_h2d": True}),
    (torch.float32, torch.float32, {"optimizer": "sgd"}),
    (torch.float32, torch.float32, {"optimizer": "sgd", "sgd_momentum": 0.0}),
    (torch.bfloat16, torch.bfloat16, {"optimizer": "sgd", "bf16": True}),
    (torch.bfloat16, torch.float32, {"optimizer": "sgd", "bf16": True, **OFFLOADED}),
    (
        torch.bfloat16,
        torch.bfloat16,
        {"optimizer": "sgd", "bf16": True, **OFFLOADED, "overlap_cpu_optimizer_d2h_h2d": True},
    ),
]
DIVISORS = [1.0, 3.7, torch.tensor(3.7)]


class Case:
    """A model's runs before any step, the rule that steps them, and separate moments for the reference."""

    def __init__(self, params: torch.dtype, grads: torch.dtype, settings: Mapping[str, Any]) -> None:
        torch.manual_seed(0)
        # More than one piece, alternating ranges of two groups, and padding between parameters.
        shapes = [(70, 1001), (33,), (5, 7), (130,), (1100, 64)]
        model = nn.ParameterList(nn.Parameter(torch.randn(shape).to(params)) for shape in shapes)
        ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=grads != torch.bfloat16)
        wrapped = DistributedDataParallel(ModelParallelConfig(), ddp_config, model)
        self.config = OptimizerConfig(lr=LR, weight_decay=DECAY, adam_eps=EPS, **settings)
        (self.rule,) = get_megatron_optimizer(self.config, [wrapped])._rules
        assert isinstance(self.rule, FusedRule) and self.rule.ranges
        self.buffers = wrapped.all_buffers
        assert {buffer.grad_data.dtype for buffer in self.buffers} == {grads}
        if self.config.optimizer == "sgd":
            kinds = {"momentum_buffer": "fp32"} if self.config.sgd_momentum else {}
        else:
            kinds = {"exp_avg": self.config.exp_avg_dtype, "exp_avg_sq": self.config.exp_avg_sq_dtype}
        self.moments = {
            run: {kind: zeros_beside(run.main, dtype) for kind, dtype in kinds.items()} for run in self.rule.ranges
        }
        self.steps = {run: torch.zeros(()) for run in self.rule.ranges}

    def fill_gradients(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for buffer in self.buffers:
            buffer.grad_data.copy_(torch.randn(buffer.grad_data.shape, generator=generator))

    def step_by_torch(self, scale: GradScale) -> None:
        divisor = scale.divisor
        if not isinstance(divisor, Tensor):
            divisor = None if divisor == 1.0 else torch.tensor(divisor)
        for run in self.rule.ranges:
            stored = {"main": run.main, **self.moments[run]}
            values = {kind: one.read(0, one.numel) for kind, one in stored.items()}
            # Torch divides a gradient in place: in the run's memory if that has the dtype of the step, or in a copy if
            # gradients are sent to the host while other parameters are updated.
            grad = run.grad.clone() if self.config.overlap_cpu_optimizer_d2h_h2d else run.grad
            self._torchs_function(run, values, grad.to(values["main"]), divisor=divisor, skip=scale.skip)
            for kind, one in stored.items():
                one.write(0, values[kind])
            run.write_model()

    def _torchs_function(
        self,
        run: FlatParamRange,
        values: dict[str, Tensor],
        grad: Tensor,
        *,
        divisor: Tensor | None,
        skip: Tensor | None,
    ) -> None:
        common: dict[str, Any] = {
            "fused": True,
            "grad_scale": divisor,
            "found_inf": skip,
            "lr": torch.tensor(LR, dtype=torch.float64),
            "weight_decay": run.group.values(self.config)["weight_decay"],
            "maximize": False,
        }
        if self.config.optimizer == "sgd":
            sgd(
                [values["main"]],
                [grad],
                [values.get("momentum_buffer")],
                momentum=self.config.sgd_momentum,
                dampening=0.0,
                nesterov=False,
                **common,
            )
        else:
            adamw(
                [values["main"]],
                [grad],
                [values["exp_avg"]],
                [values["exp_avg_sq"]],
                [],
                [self.steps[run]],
                amsgrad=False,
                beta1=0.9,
                beta2=0.999,
                eps=EPS,
                **common,
            )

    def memory(self, moments: Mapping[FlatParamRange, Mapping[str, StoredFloats]]) -> list[Tensor]:
        """Returns a copy of all memory that a step may change, including gradients."""
        stored = [one for run in self.rule.ranges for one in (run.main, *moments[run].values())]
        kept = [value for one in stored for value in vars(one).values() if isinstance(value, Tensor)]
        buffers = [tensor for buffer in self.buffers for tensor in (buffer.param_data, buffer.grad_data)]
        return [tensor.clone().view(torch.uint8) for tensor in (*kept, *buffers)]


@pytest.mark.parametrize(("params", "grads", "settings"), FORMS, ids=str)
@pytest.mark.parametrize("divisor", DIVISORS, ids=["whole", "divided", "divided on the device"])
def test_a_step_has_the_bits_of_torchs_function_in_every_form(
    params: torch.dtype, grads: torch.dtype, settings: dict[str, Any], divisor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Simulates host masters of GPU parameters with separate copies on the CPU.
    monkeypatch.setattr(flat_params, "host_masters", lambda model: Plain(model.float().clone()))
    ours, theirs = Case(params, grads, settings), Case(params, grads, settings)
    # State on the host does not support a skip flag on the device.
    skips = [None] if OFFLOADED.items() <= settings.items() else [None, 0.0, 1.0]
    for number, skip in enumerate(itertools.islice(itertools.cycle(skips), 4)):
        scale = GradScale(divisor, None if skip is None else torch.tensor(skip))
        for case in (ours, theirs):
            case.fill_gradients(number)
        ours.rule.update(scale, frozenset(ours.rule.ranges))
        theirs.step_by_torch(scale)
        ours_now = ours.memory({run: ours.rule.flat_state(run) for run in ours.rule.ranges})
        assert all(map(torch.equal, ours_now, theirs.memory(theirs.moments)))
    if ours.config.optimizer == "adam":
        expected = sum(skips[number % len(skips)] != 1.0 for number in range(4))
        assert [float(count) for count in ours.rule.step_counts()] == [expected] * len(ours.rule.ranges)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("divisor", [None, torch.tensor(3.7)], ids=["whole", "divided"])
@pytest.mark.parametrize("skip", [None, 0.0, 1.0])
def test_torchs_function_is_its_kernel_with_the_next_count(
    dtype: torch.dtype, divisor: Tensor | None, skip: float | None
) -> None:
    generator = torch.Generator().manual_seed(1)
    start = [torch.rand(64 * 37, generator=generator, dtype=dtype) for _ in range(4)]
    found_inf = None if skip is None else torch.tensor(skip)
    by_function, by_kernel = [tensor.clone() for tensor in start], [tensor.clone() for tensor in start]
    common: dict[str, Any] = {
        "lr": torch.tensor(LR, dtype=torch.float64),
        "beta1": 0.9,
        "beta2": 0.999,
        "weight_decay": DECAY,
        "eps": EPS,
        "amsgrad": False,
        "maximize": False,
        "grad_scale": divisor,
        "found_inf": found_inf,
    }
    count = torch.tensor(3.0)
    adamw(*([one] for one in by_function), [], [count], fused=True, **common)
    torch._fused_adamw_(*([one] for one in by_kernel), [], [torch.tensor(4.0)], **common)
    assert all(map(torch.equal, by_function, by_kernel))
    assert count == (3.0 if skip == 1.0 else 4.0)
    assert all(map(torch.equal, by_function, start)) == (skip == 1.0)


def test_sgd_on_a_gpu_is_given_a_divisor_of_one_as_a_graph_gives_it() -> None:
    divisor = _sgd_divisor_on(GradScale(1.0), torch.device("meta"))
    assert divisor is not None and divisor.shape == () and divisor.dtype == torch.float32
    assert _sgd_divisor_on(GradScale(1.0), torch.device("cpu")) is None
    given = torch.tensor(3.7)
    assert _sgd_divisor_on(GradScale(given), torch.device("meta")) is given
