"""Tests that ZeRO-1 is bitwise equal to plain data parallelism on 3 and 4 ranks, and its checkpoints."""

import itertools
import math
import tracemalloc
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from benchmarks.live_bytes import LiveBytes
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import model_logical_pieces, model_sharded_tensors
from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer import DistributedOptimizer
from tests.counts import long_count, soak_only
from tests.distributed.optimizer_runs import OVERLAPS, PRECISE, Run
from tests.harness import run_on_ranks
from tests.unit_tests.core.optimizer.reference import microbatches, tiny_model

STEPS = long_count(2, soak=5)
CASES: list[tuple[torch.dtype, dict[str, Any]]] = [
    (torch.float32, {}),
    (torch.float32, {"optimizer": "sgd"}),
    (torch.float32, {"optimizer": "muon", "muon_nesterov": True}),
    (torch.bfloat16, {}),
    (torch.bfloat16, {"grad_reduce_in_fp32": False}),
    (torch.bfloat16, PRECISE),
    (
        torch.bfloat16,
        {**PRECISE, "grad_reduce_in_fp32": False, "main_grads_dtype": "bf16", "main_params_dtype": "fp16"},
    ),
]


def _modes() -> Iterator[dict[str, Any]]:
    for bucket_size in (1, 37, None):
        for overlap in OVERLAPS:
            yield {"zero1": True, "bucket_size": bucket_size, "overlap": overlap}
            if overlap in ("none", "grads"):
                yield {"zero1": False, "bucket_size": bucket_size, "overlap": overlap}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [3, soak_only(4)])
def test_all_modes_and_bucket_sizes_give_the_same_bits(ranks: int) -> None:
    run_on_ranks(_compare_modes, ranks, ranks == 3)


def _compare_modes(every_case: bool) -> None:
    for number, (dtype, settings) in enumerate(CASES if every_case else CASES[2:4]):
        expected = None
        # Each mode and bucket size runs with some of the cases; under `make soak`, with all of them.
        modes = list(_modes()) if long_count(0, soak=1) else list(_modes())[number % 5 :: 5]
        for mode in [{"zero1": False}, *modes]:
            run = Run(tiny_model(dtype), **mode, **settings)
            assert isinstance(run.optimizer, DistributedOptimizer) == mode["zero1"]
            seen = [run.step(step) for step in range(STEPS)], run.weights()
            expected = expected or seen
            assert seen[0] == expected[0], (dtype, settings, mode)
            for name, weight in seen[1].items():
                assert torch.equal(weight, expected[1][name]), (dtype, settings, mode, name)
        assert len({norm for _, updated, norm, *_ in expected[0] if updated}) == STEPS


@pytest.mark.slow
def test_b22_an_overflow_on_one_rank_skips_the_step_on_all_and_lowers_one_scale() -> None:
    run_on_ranks(_overflow_on_one_rank, 3)


def _overflow_on_one_rank() -> None:
    settings = {"initial_loss_scale": 64.0, "hysteresis": 1, "log_num_zeros_in_grad": True}
    runs = [
        Run(tiny_model(torch.float16), zero1=zero1, overlap=overlap, bucket_size=37, **settings)
        for zero1, overlap in ((False, "none"), (True, "none"), (True, "params"), (True, "step"))
    ]
    for step in range(4):
        # One rank's inputs overflow fp16 from the first step on, so state is saved and loaded before any update.
        factor = 1e5 if step in (0, 2) and dist.get_rank() == 1 else 1.0
        before = runs[2].optimizer.common_state()
        runs[2].model.disable_forward_pre_hook()
        reports = [run.step(step, factor)[1:] for run in runs]
        assert repr(reports) == repr([reports[0]] * len(runs))
        assert reports[0][0] == (step not in (0, 2))
        assert runs[2].optimizer.common_state()["step"] == before["step"] + reports[0][0]
        # Raises if a step, skipped or not, has re-enabled the hooks.
        runs[2].model.enable_forward_pre_hook()
    weights = [run.weights() for run in runs]
    assert all(torch.equal(w, weights[0][name]) for other in weights for name, w in other.items())


@pytest.mark.slow
def test_steps_decided_on_the_device_leave_what_the_hosts_leave() -> None:
    run_on_ranks(_compare_with_steps_on_device, 3)


def _compare_with_steps_on_device() -> None:
    half = {"initial_loss_scale": 64.0, "hysteresis": 1}
    kinds = [(torch.float16, half), (torch.bfloat16, {**PRECISE, "exp_avg_sq_dtype": "bf16"}), (torch.float32, {})]
    # Covers every dtype and every overlap; under `make soak`, all combinations.
    some = [(kinds[0], "none"), (kinds[0], "step"), (kinds[1], "params"), (kinds[2], "grads")]
    for (dtype, given), overlap in itertools.product(kinds, OVERLAPS) if long_count(0, soak=1) else some:
        settings: dict[str, Any] = {**given, "overlap": overlap, "bucket_size": 37, "log_num_zeros_in_grad": True}
        host, device = (Run(tiny_model(dtype), zero1=True, on_device=chosen, **settings) for chosen in (False, True))
        for step in range(STEPS):
            # One rank's inputs are infinite.
            factor = math.inf if step in (1, 3) and dist.get_rank() == 1 else 1.0
            reports = [run.step(step, factor) for run in (host, device)]
            assert repr(reports[0]) == repr(reports[1]), (dtype, overlap, step)
            assert reports[0][1] == (step not in (1, 3))
        assert host.optimizer.common_state() == device.optimizer.common_state()
        # Checked before the manual gather: the steps must leave the same gathers pending.
        due = [[group.param_state.name for group in run.model.launch_order.gather_order] for run in (host, device)]
        assert due[0] == due[1], (overlap, due)
        weights, others = host.weights(), device.weights()
        assert all(torch.equal(weight, others[name]) for name, weight in weights.items())
        for a, b in zip(host.tensors(), device.tensors(), strict=True):
            assert a.key == b.key and torch.equal(a.data, b.data), a.key


class Borrower(nn.Module):
    """Calls a module in forward, or only reads its weight."""

    calls = True

    def __init__(self) -> None:
        super().__init__()
        self.called, self.read = nn.Linear(5, 5), nn.Linear(5, 5, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.read(self.called(x)) if self.calls else self.called(x) @ self.read.weight


class Mixed(nn.Module):
    """An fp32 router between bf16 layers, and a parameter without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 7, dtype=torch.bfloat16), nn.Linear(7, 3, dtype=torch.bfloat16)
        self.router, self.empty = nn.Linear(7, 3), nn.Parameter(torch.empty(2, 0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x.bfloat16())
        return self.last(hidden) * self.router(hidden.float()).softmax(-1).bfloat16() + self.empty.sum()


@pytest.mark.slow
def test_b2_b34_weights_read_by_others_and_mixed_types_train_alike_in_every_mode() -> None:
    run_on_ranks(_train_unusual_models, 3)


def _train_unusual_models() -> None:
    # Attention reads its output projection's weight itself, and the layer in evaluation reads all inner weights.
    attends = partial(nn.TransformerEncoderLayer, 5, 1, 8, dropout=0.0, batch_first=True)
    for make, settings in ((attends, {}), (Mixed, {"bf16": True})):
        seen = []
        for zero1, overlap in ((False, "none"), *((True, overlap) for overlap in OVERLAPS)):
            torch.manual_seed(2)
            run = Run(make(), zero1=zero1, bucket_size=1, overlap=overlap, **settings)
            reports = []
            for step in range(STEPS):
                reports.append(run.step(step))
                with torch.no_grad():
                    reports.append(run.model.eval()(torch.ones(1, 2, 5)).sum().item())
                run.model.train()
            seen.append((reports, [weight.tolist() for weight in run.weights().values()]))
            types = {(buffer.param_data.dtype, buffer.grad_data.dtype) for buffer in run.model.all_buffers}
            assert types == {(p.dtype, torch.float32) for p in run.model.parameters()}
        assert seen == [seen[0]] * len(seen) and len(set(map(str, seen[0][0]))) == 2 * STEPS
    run = Run(Borrower(), zero1=True, bucket_size=1, overlap="params")
    run.step(0)
    run.model.module.calls = False  # type: ignore[assignment]
    run.model.wait_params(run.model.module.read.weight)  # type: ignore[union-attr,arg-type]
    run.step(1)
    with pytest.raises(
        RuntimeError, match="read.weight received a gradient, but forward used its values from before the last"
    ):
        run.step(2)


def _read_a_weight_during_its_gather() -> None:
    run = Run(Borrower(), zero1=True, bucket_size=1, overlap="params")
    run.step(0)
    run.optimizer.zero_grad()
    run.model.launch_order.launch_due_gathers()
    with pytest.raises(
        RuntimeError, match="read.weight received a gradient, but forward used its values from before the last"
    ):
        run.model.module.read.weight.square().sum().backward()  # type: ignore[union-attr,operator]


def test_b2_a_gradient_of_a_weight_that_was_read_during_its_gather_is_refused() -> None:
    run_on_ranks(_read_a_weight_during_its_gather, 2)


@pytest.mark.slow
def test_b24_frozen_parameters_frozen_in_mid_run_and_a_model_without_any_to_train() -> None:
    run_on_ranks(_freeze, 3)
    run_on_ranks(_freeze_in_mid_run, 3)


def _freeze() -> None:
    for frozen in (["0.weight", "1.bias"], [name for name, _ in tiny_model().named_parameters()]):
        results = []
        for zero1 in (False, True):
            model = tiny_model()
            for name, param in model.named_parameters():
                param.requires_grad_(name not in frozen)
            # The loss must depend on a parameter that requires gradients.
            x = nn.Parameter(torch.ones(1))
            run = Run(model, zero1=zero1, overlap="none", log_num_zeros_in_grad=True)
            run.optimizer.zero_grad()
            (run.model(microbatches(dist.get_rank())[0]).square().mean() * x).backward()
            finalize_model_grads([run.model])
            results.append((run.optimizer.step(), run.optimizer.norm_of(run.model.module.parameters()), run.weights()))
        assert results[0][:2] == results[1][:2] and results[1][0][0]
        for name, weight in results[1][2].items():
            assert torch.equal(weight, results[0][2][name])
            assert torch.equal(weight, dict(tiny_model().named_parameters())[name]) == (name in frozen)


def _freeze_in_mid_run() -> None:
    results = []
    for zero1, overlap in ((False, "none"), (False, "grads"), *((True, overlap) for overlap in OVERLAPS)):
        model, reports = tiny_model(), []
        for frozen in ("nothing", "0.", "2."):
            model.requires_grad_(True)
            for name, param in model.named_parameters():
                param.requires_grad_(not name.startswith(frozen))
            run = Run(model, zero1=zero1, bucket_size=1, overlap=overlap)
            with pytest.raises(ValueError, match=r"\d.weight is in another .* call release\(\) on that wrapper before"):
                Run(model, zero1=zero1)
            before = run.weights()
            reports += [run.step(step) for step in range(2)]
            after = run.weights()
            assert all(torch.equal(after[name], before[name]) == name.startswith(frozen) for name in after)
            assert run.model.release() is model
            with pytest.raises(RuntimeError, match=r"removed by release\(\): wrap the module"):
                run.optimizer.zero_grad()
            assert model(torch.ones(1, 5)).isfinite().all() and all(p.grad is None for p in model.parameters())
        results.append((reports, after))
    for reports, weights in results:
        assert reports == results[0][0]
        assert all(torch.equal(weight, results[0][1][name]) for name, weight in weights.items())


SAVED = [
    (torch.float32, {}, (2, 3)),
    (torch.bfloat16, PRECISE, (1, 2, 3, 4, 6) if long_count(0, soak=1) else (1, 2, 3)),
]


@pytest.mark.slow
@pytest.mark.parametrize("dtype, settings, sizes", SAVED)
def test_b14_any_number_of_ranks_loads_what_any_other_saved(
    tmp_path: Path, dtype: torch.dtype, settings: dict, sizes: tuple[int, ...]
) -> None:
    case = dtype, settings
    for ranks in sizes:
        run_on_ranks(_save, ranks, tmp_path / f"from{ranks}", *case)
    for ranks in sizes:
        run_on_ranks(_load_all, ranks, tmp_path, *case)


def _save(folder: Path, dtype: torch.dtype, settings: dict) -> None:
    run = Run(tiny_model(dtype), zero1=True, bucket_size=37, overlap="none", **settings)
    for step in range(2):
        run.step(step)
    boxes = run.optimizer.sharded_state(model_logical_pieces(run.model))
    numel = sum(p.numel() for p in run.model.parameters())
    states = 2 + (dtype != torch.float32)
    held = sum(box.data.numel() for box in boxes)
    # No rank stores more than its share of the buckets, which are small here and mostly padding.
    share = sum(bucket.layout.span.numel for buffer in run.model.all_buffers for bucket in buffer.buckets)
    assert held <= states * share // dist.get_world_size()
    total = torch.tensor(held)
    dist.all_reduce(total)
    assert total == states * numel
    dist_checkpointing.save_items(run.tensors(), folder, common={"optimizer": run.optimizer.common_state()})


class PeakOfAll(LiveBytes):
    """Also records the peak number of bytes after any operation, including Python's and numpy's allocations."""

    peak = 0

    def __torch_dispatch__(self, *args: Any, **kwargs: Any) -> Any:
        results = super().__torch_dispatch__(*args, **kwargs)
        self.peak = max(self.peak, self.total() + tracemalloc.get_traced_memory()[0])
        return results


@pytest.mark.slow
def test_b14_a_rank_holds_no_full_copy_while_it_saves_and_loads(tmp_path: Path) -> None:
    run_on_ranks(_measure_copies, 4, tmp_path / "saved")


def _measure_copies(folder: Path) -> None:
    wide = nn.Sequential(*[nn.Linear(256, 256, bias=False) for _ in range(16)]).bfloat16()
    run = Run(wide, zero1=True, bucket_size=70000, overlap="grads", **PRECISE)
    pieces = model_logical_pieces(run.model)
    # Moments and masters in fp32, as saved; this rank owns a quarter.
    full = 3 * 4 * sum(param.numel() for param in wide.parameters())
    tracemalloc.start()
    with PeakOfAll() as saving:
        dist_checkpointing.save_items(run.optimizer.sharded_state(pieces), folder, common={})
    with PeakOfAll() as loading, run.optimizer.loading(pieces) as state:
        dist_checkpointing.load_items(state, folder)
    assert all(full / 4 <= peak <= full / 2 for peak in (saving.peak, loading.peak))
    # Python also allocates file contents, which torch does not count.
    assert tracemalloc.get_traced_memory()[1] <= full / 2


def _load_all(folder: Path, dtype: torch.dtype, settings: dict) -> None:
    """Loads all checkpoints with a different bucket size than they were saved with; two ranks load without sharding."""
    for path in sorted(folder.glob("from?")):
        run = Run(tiny_model(dtype, seed=7), zero1=dist.get_world_size() != 2, overlap="none", **settings)
        with run.optimizer.loading(model_logical_pieces(run.model)) as state:
            common = dist_checkpointing.load_items([*model_sharded_tensors(run.model), *state], path)
        run.optimizer.load_state_dict(common["optimizer"])
        assert run.optimizer.common_state() == common["optimizer"]
        boxes = run.tensors()
        fresh = [torch.full_like(box.data, torch.nan) for box in boxes]
        stored = [
            dist_checkpointing.ShardedTensor.at(box.key, data, box.global_shape, box.global_offset)
            for box, data in zip(boxes, fresh)
        ]
        dist_checkpointing.load_items(stored, path)
        for box, data in zip(boxes, fresh):
            assert torch.equal(box.data, data), (path, box.key)
        # Replicas are equal, and stay equal after a step.
        run.step(9)
        for name, weight in run.weights().items():
            other = weight.clone()
            dist.broadcast(other, src=0)
            assert torch.equal(weight, other), name
