"""Kernels of a planned step: FLOPs per pass as in the log, and recomputation counted separately."""

from collections import Counter

import pytest

import pretrain_gpt
from megatron.core.block_scaled.format import BlockFormat
from megatron.planner.plan import Plan, plan_run
from megatron.planner.step_time import run_time
from megatron.planner.work import Kernels, Unit
from megatron.training.arguments import parse_args, read_run_config, validate_args
from megatron.training.command_line.config_builder import run_config_of
from megatron.training.compute.devices import planned_device
from tests.functional_tests.case import Flags, command_line, read_bases

STATIC: Flags = {"moe-grouped-gemm": True, "moe-expert-rank-capacity-factor": 2.0}
IN_8_BITS: Flags = {**STATIC, "fp8-format": "e4m3", "fp8-recipe": "mxfp8"}
ALL_LAYERS: Flags = {
    "recompute-granularity": "full",
    "recompute-method": "uniform",
    "recompute-num-layers": 1,
}


def _plan(base: str, flags: Flags, *, ranks: int = 1) -> Plan:
    argv = command_line({**read_bases()[base], "bf16": True, "micro-batch-size": 2, "global-batch-size": 8, **flags})
    run_config = read_run_config([*argv, "--dry-run", "--world-size", str(ranks)])
    return plan_run(run_config, pretrain_gpt.model_provider, forward_step_func=pretrain_gpt.forward_step)


def _flops(kernels: Kernels, unit: Unit | None = None) -> float:
    return sum(kernel.flops * count for kernel, count in kernels.items() if unit in (None, kernel.unit))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("base", "flags", "ranks"),
    [
        ("dense", {}, 1),
        ("llama", {"tensor-model-parallel-size": 2, "sequence-parallel": True}, 2),
        ("llama", {"pipeline-model-parallel-size": 2, "num-layers": 4, "num-virtual-stages-per-pipeline-rank": 2}, 2),
        ("moe", {"expert-model-parallel-size": 2, "moe-grouped-gemm": True}, 2),
        ("moe", {"expert-model-parallel-size": 2, **STATIC}, 2),
        # All tokens reach a rank with all experts, so the factor does not enlarge its buffers.
        ("moe", STATIC, 1),
    ],
)
def test_flops_of_all_ranks_equal_those_of_the_log(
    base: str, flags: Flags, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The log's FLOPs exclude the padding of experts on a GPU.
    monkeypatch.setenv("MEGATRON_PLAN_DEVICE", "cpu")
    plan = _plan(base, flags, ranks=ranks)
    chunks = [chunk for stage in plan.stages for chunk in stage.load.chunks]
    forward = sum(_flops(chunk.forward) for chunk in chunks)
    backward = sum(_flops(chunk.backward) for chunk in chunks)
    attention = sum(_flops(chunk.forward, Unit.ATTENTION) for chunk in chunks)
    assert attention > 0
    # Fused attention recomputes its scores in backward, which the log's FLOPs exclude.
    assert backward == pytest.approx(2 * forward + 0.5 * attention)
    copies = ranks // len(plan.stages)
    samples = 2 * (copies if base == "moe" else 1)
    assert (forward + backward - 0.5 * attention) * copies == pytest.approx(plan.flops_per_sample * samples)


@pytest.mark.slow
def test_recomputed_layers_run_forward_twice() -> None:
    (plain,), (again,) = (_plan("llama", flags).stages for flags in ({}, ALL_LAYERS))
    assert not plain.load.chunks[0].recompute
    assert _flops(again.load.chunks[0].forward) == _flops(plain.load.chunks[0].forward)
    assert _flops(again.load.chunks[0].backward) == _flops(plain.load.chunks[0].backward)
    output = sum(k.flops * n for k, n in plain.load.chunks[0].forward.items() if k.kind == "output and loss")
    narrow = min(k.flops for k in plain.load.chunks[0].forward if k.kind == "feed-forward" and k.flops)
    # Torch stops recomputing once backward has its tensors, before the last matmul of each of two layers.
    assert _flops(again.load.chunks[0].recompute) == _flops(plain.load.chunks[0].forward) - output - 2 * narrow


def test_backward_kernels_have_the_kind_of_their_module() -> None:
    (stage,) = _plan("moe", {"moe-grouped-gemm": True}).stages
    chunk = stage.load.chunks[0]
    scores = _flops(chunk.forward, Unit.ATTENTION)
    for kind in ("attention", "experts", "router", "output and loss"):
        forward, backward = (
            sum(one.flops * count for one, count in kernels.items() if one.kind == kind)
            for kernels in (chunk.forward, chunk.backward)
        )
        assert forward > 0 and backward == 2 * forward + (0.5 * scores if kind == "attention" else 0.0), kind


def test_experts_in_8_bits_multiply_and_quantize_packed_rows_and_quantize_weights_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MEGATRON_PLAN_DEVICE", "cpu")
    (stage,) = _plan("moe", IN_8_BITS).stages
    chunk, layers, experts, form = stage.load.chunks[0], 2, 4, BlockFormat(32)
    hidden, ffn, tokens, topk = 32, 32, 2 * 32, 2
    # All choices have rows on the only rank. Each expert has less than a block of padding, half a block on average.
    rows, live = (tokens * topk + experts * padding for padding in (form.block - 1, form.block // 2))
    rows = rows // form.block * form.block
    product = 2 * live * hidden * 2 * ffn, 2 * live * ffn * hidden
    forward, backward = (
        Counter(one.flops for one in kernels.elements() if one.dtype == "mxfp8")
        for kernels in (chunk.forward, chunk.backward)
    )
    assert forward == dict.fromkeys(product, layers)
    assert backward == dict.fromkeys(product, 2 * layers), "gradients of rows and of weights"
    moved = {one.num_bytes for one in chunk.forward if one.kind == "experts" and not one.flops}
    x, act = form.row_bytes(hidden), form.row_bytes(ffn)
    assert tokens * (2 * hidden + x) in moved, "tokens are quantized before they are copied into rows"
    assert rows * (2 * 2 * ffn + 4 + act) + 8 in moved, "gate_up, routing weights and act"
    once = Counter({one.num_bytes: n for one, n in stage.load.update.items() if one.kind == "experts"})
    packed = experts * hidden * form.row_bytes(2 * ffn), experts * ffn * form.row_bytes(hidden)
    weights = experts * hidden * 2 * ffn * 2, experts * ffn * hidden * 2
    assert once == {own + copy: layers for own, copy in zip(weights, packed)}


def test_an_activation_is_one_kernel_that_moves_its_rows_once() -> None:
    chunk = _plan("llama", {}).stages[0].load.chunks[0]
    act = 64 * 64 * 2  # tokens, ffn, bytes of bf16
    forward, backward = (
        {one.num_bytes: count for one, count in kernels.items() if one.kind == "feed-forward" and not one.flops}
        for kernels in (chunk.forward, chunk.backward)
    )
    # gate_up and act; in backward the gradient of act, gate_up, its gradient, and act. There are two layers.
    assert forward == {3 * act: 2} and backward[6 * act] == 2


def test_an_update_moves_the_bytes_of_adam_and_of_the_gradient_norm() -> None:
    (stage,) = _plan("moe", {"moe-grouped-gemm": True}).stages
    moved = sum(kernel.num_bytes * count for kernel, count in stage.load.update.items())
    # Bytes per parameter: gradient (read), master and moments (read and written), the 16-bit parameter (written), and
    # the gradient again, read by the norm. The first step's comparison of masters with parameters would add 30.
    assert moved / (stage.memory.states.masters / 4) == pytest.approx(4 + 8 + 16 + 2 + 4, abs=0.5)


@pytest.mark.slow
def test_recompute_takes_time() -> None:
    run_config = run_config_of(
        validate_args(parse_args(argv=[*command_line({**read_bases()["llama"], "bf16": True}), "--dry-run"]))
    )
    device = planned_device({})
    steps = [run_time(_plan("llama", flags), run_config, device=device) for flags in ({}, ALL_LAYERS)]
    assert steps[0] is not None and steps[1] is not None
    assert steps[0].stages[0].recompute == 0 < steps[1].stages[0].recompute
    assert steps[1].seconds > steps[0].seconds
