"""Updates in backward of sharded parameters (FSDP2) are bit-identical to the step after backward (TRAPS B27 to B30).

Covers hooks on gradients that are released, and errors. test_in_backward_memory covers memory, and
test_torch_fsdp2_training the training program.
"""

from collections import Counter
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron.core.dist_checkpointing import model_logical_pieces
from megatron.core.distributed import NonFiniteGradientError, TorchFullyShardedDataParallel, finalize_model_grads
from megatron.core.distributed.grad_hooks import ReadyBucket
from megatron.core.group_collectives import RemoteRankError
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32, count_zeros_fp32
from tests.counts import slow, soak_only
from tests.distributed.fsdp2_runs import DETERMINISTIC, FSDP2, KEPT_ALWAYS, MODES, Counted, Net, Run, loss_of_words
from tests.harness import run_on_ranks

# The learning rate falls after two steps.
STEPS = 3
EXACT = {"clip_grad": 0.3, "optimizer_in_backward_clip": "exact"}


def assert_same(run: Run, other: Run) -> None:
    """Asserts that shards and states are equal."""
    ours, theirs = run.tensors(), other.tensors()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())


def _compare(mode: str, net: dict[str, bool], count: int, dtype: torch.dtype, settings: dict[str, Any]) -> None:
    runs = [Run(Net(**net).to(dtype), mode=mode, in_backward=chosen, **settings) for chosen in (False, True)]
    for step in range(STEPS):
        reports = [run.step(count=count) for run in runs]
        assert repr(reports[0]) == repr(reports[1]), (mode, step)
        assert reports[0][1], "no step may be skipped"
    assert_same(*runs)


def _compare_each(modes: list[str], net: dict[str, bool], count: int, dtype: torch.dtype, settings: list[Any]) -> None:
    for number, mode in enumerate(modes):
        _compare(mode, net, count, dtype, settings[number % len(settings)])


TIED = {"tied": True, "recompute": True}


@pytest.mark.slow
@pytest.mark.parametrize(
    "ranks, net, modes",
    [
        (2, {}, ["kept", "freed"]),
        slow(3, TIED, ["freed", "kept", "offloaded", "gathered ahead"]),
        # The cases above cover every mode and both models; these are other pairs of a mode and a model.
        soak_only(4, {}, ["freed"]),
        soak_only(2, TIED, ["kept", "gathered ahead"]),
        soak_only(3, {}, list(MODES)),
        soak_only(4, TIED, list(MODES)),
    ],
    ids=str,
)
def test_steps_in_backward_are_steps_after_it(ranks: int, net: dict[str, bool], modes: list[str]) -> None:
    run_on_ranks(_compare_each, ranks, modes, net, 1, torch.float32, [{}, EXACT] if ranks == 3 else [{}])


HALF = {"initial_loss_scale": 64.0, "hysteresis": 1, "loss_scale_window": 3}


@pytest.mark.slow
@pytest.mark.parametrize(
    "dtype, settings",
    [
        (torch.bfloat16, [{"bf16": True}, {"bf16": True, **EXACT}]),
        (torch.float16, [{"fp16": True, **EXACT, **HALF}]),
    ],
    ids=["bf16", "fp16"],
)
def test_b29_b36_several_microbatches_make_one_step_in_16_bits(dtype: torch.dtype, settings: list[Any]) -> None:
    run_on_ranks(_compare_each, 2, ["freed", KEPT_ALWAYS], {}, 2, dtype, settings)


def _policies() -> None:
    """Compares updates with SGD by hand, computed from the gradients that hooks see."""
    clip = 0.3
    for policy, mode in (("previous-norm", "freed"), ("per-bucket", "kept")):
        sgd = {"optimizer": "sgd", "sgd_momentum": 0.0, "weight_decay": 0.0}
        run = Run(Net(), mode=mode, clip_grad=clip, optimizer_in_backward_clip=policy, **sgd)
        seen: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        run.model.register_bucket_ready_hook(
            lambda b, seen=seen: seen.append((b.shard, b.shard.clone(), b.grad.clone()))
        )
        previous = None
        for lr in (0.05, 0.05, 0.025):
            _, _, norm, *_ = run.step()
            squares = torch.stack([grad.square().sum() for *_, grad in seen]).double()
            dist.all_reduce(squares)
            assert norm == pytest.approx(squares.sum().sqrt().item(), rel=1e-6) and norm > clip
            norms = squares.sqrt() if policy == "per-bucket" else torch.full_like(squares, previous or norm)
            for (shard, before, grad), of_clip in zip(seen, norms.tolist(), strict=True):
                torch.testing.assert_close(shard, before - lr * min(1.0, clip / (of_clip + 1e-6)) * grad)
            previous = norm
            seen.clear()


def test_b28_policies_clip_units_as_they_are_defined() -> None:
    run_on_ranks(_policies, 2)


def _released(module: nn.Module, mode: str = "freed") -> TorchFullyShardedDataParallel:
    return TorchFullyShardedDataParallel(DETERMINISTIC, replace(MODES[mode], release_gradients=True), module)


def _backward(model: TorchFullyShardedDataParallel, seed: int = 0) -> None:
    loss_of_words(model, torch.Generator().manual_seed(10 * seed + dist.get_rank())).backward()


def _hooks(recompute: bool) -> None:
    counted = Counted()
    model = counted.watch(Net(recompute=recompute), _released)
    params = dict(model.module.named_parameters())
    once = Counter(product(("param", "bucket", "after"), params))
    for step in range(3):
        if step == 1:
            model.load_state_dict(dict(model.state_dict()), assign=True)
        model.zero_grad_buffer()
        for earlier in (model.no_sync, model.accumulate):
            with earlier():
                _backward(model)
        assert not counted.seen
        # An evaluation leaves no unit waiting for a backward, either.
        model.eval()
        with torch.no_grad():
            model(torch.zeros(1, 3, dtype=torch.int64))
        model.train()
        _backward(model)
        # Only layers followed by the reduction of a later unit have run their hooks; the root's parameters come last.
        of_layers = {name for name in params if "layers" in name}
        assert {name for _, name in counted.seen} == of_layers
        assert not any(isinstance(params[name].grad, torch.Tensor) for name in of_layers)
        finalize_model_grads([model])
        seen = counted.take()
        assert Counter(seen) == once
        assert list(dict.fromkeys(name.split(".")[1] for _, name in seen if name in of_layers)) == ["2", "1", "0"]
        assert all(param.grad is None for param in params.values())


@pytest.mark.parametrize("ranks, recompute", [(1, False), (2, True)])
def test_b27_hooks_run_in_backward_once_a_step_and_survive_assigned_state(ranks: int, recompute: bool) -> None:
    run_on_ranks(_hooks, ranks, recompute)


def _stepped_in_hooks(release: bool, mode: str) -> list[float]:
    """Steps in hooks as docs/hooks.md shows, and returns the losses."""
    model = TorchFullyShardedDataParallel(DETERMINISTIC, replace(MODES[mode], release_gradients=release), Net())
    params = list(model.parameters())
    optimizers = {param: torch.optim.AdamW([model.owned_shard(param)], lr=0.05) for param in params}
    schedules = {param: torch.optim.lr_scheduler.StepLR(one, 2) for param, one in optimizers.items()}

    def step(owned: nn.Parameter) -> None:
        optimizers[owned].step()
        schedules[owned].step()
        optimizers[owned].zero_grad()

    for param in params:
        model.register_post_accumulate_grad_hook(param, step)
    losses, generator = [], torch.Generator().manual_seed(dist.get_rank())
    for _ in range(STEPS):
        model.zero_grad_buffer()
        loss = loss_of_words(model, generator)
        loss.backward()
        model.finish_grad_sync()
        losses.append(loss.item())
    return losses


def _stepped_both_ways() -> list[list[float]]:
    return [_stepped_in_hooks(release, mode) for release, mode in ((False, "freed"), (True, "freed"), (True, "kept"))]


@pytest.mark.slow
def test_optimizers_that_step_in_hooks_of_a_backward_train_as_those_at_its_end() -> None:
    for at_end, *in_backward in run_on_ranks(_stepped_both_ways, 2):
        assert in_backward == [at_end, at_end] and len(set(at_end)) == STEPS


class Repeated(nn.Module):
    """Layers that are called in any order, some of them several times."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: torch.Tensor, order: list[int]) -> torch.Tensor:
        hidden = self.first(x)
        for index in order:
            hidden = self.layers[index](hidden).tanh()
        return hidden


class Kept:
    """Records the gradients that hooks see, by parameter, and updates the parameters in the hook."""

    def __init__(self, model: TorchFullyShardedDataParallel) -> None:
        self.grads: dict[str, torch.Tensor] = {}
        model.register_bucket_ready_hook(self.note)

    def note(self, bucket: ReadyBucket) -> None:
        for one in bucket.slices:
            assert one.name not in self.grads, "each parameter once"
            self.grads[one.name] = one.view_of(bucket.grad).clone()
        bucket.shard.add_(bucket.grad, alpha=-0.1)


def _call_again() -> None:
    for mode in ("freed", "kept", "gathered ahead"):
        model, plain = _released(Repeated(), mode), TorchFullyShardedDataParallel(DETERMINISTIC, FSDP2, Repeated())
        ours, theirs = Kept(model), Kept(plain)
        # In some orders, a unit gathered ahead of use was updated before.
        for order in ([0, 1, 2], [1, 0, 1, 2], [2, 2, 1, 0], [0, 2], [0, 1, 0, 1, 0, 2]):
            for each in (model, plain):
                each.zero_grad_buffer()
                each(torch.ones(2, 4) + dist.get_rank(), order).sum().backward()
                if each is model:
                    assert len(ours.grads) >= 2 * (len(set(order)) - 1)
                each.finish_grad_sync()
            assert ours.grads.keys() == theirs.grads.keys() and len(ours.grads) == 8
            assert all(torch.equal(grad, theirs.grads[name]) for name, grad in ours.grads.items()), (mode, order)
            ours.grads.clear()
            theirs.grads.clear()


@pytest.mark.slow
def test_b6_units_that_are_called_several_times_wait_for_all_their_gradients() -> None:
    run_on_ranks(_call_again, 2)


def _second_backward() -> None:
    model = _released(Net())
    kept = Kept(model)
    model.zero_grad_buffer()
    _backward(model)
    with pytest.raises(RuntimeError, match=r"gradient of unit layers\.2 \(with layers\.2\..* in accumulate\(\)"):
        _backward(model)
    for _ in range(2):
        model.reset_iteration()
        kept.grads.clear()
        # The number of gradients per parameter is known now.
        _backward(model)
        _backward(model)
        model.finish_grad_sync()
        assert len(kept.grads) == len(list(model.parameters()))
    with pytest.raises(RuntimeError, match=r"scale_gradients was called with .*release_gradients"):
        model.scale_gradients(0.5)
    # These functions raise instead of returning results without the released gradients.
    params = list(model.parameters())
    for attempt in (lambda: clip_grad_by_total_norm_fp32(params, 0.1, 1.0), lambda: count_zeros_fp32(params)):
        with pytest.raises(ValueError, match=r"release_gradients, which frees gradients during backward"):
            attempt()


def test_b6_a_second_backward_outside_accumulate_is_refused_by_name() -> None:
    run_on_ranks(_second_backward, 2)


class _BrokenError(Exception):
    """An error in a user's code."""


def _fail_on_one_rank() -> None:
    run, plain = Run(Net(), **EXACT), Run(Net(), **EXACT)
    fails = [False]

    def fail(bucket: ReadyBucket) -> None:
        if fails[0] and bucket.name == "unit layers.1.0" and dist.get_rank() == 1:
            raise _BrokenError("not today")

    run.model.register_bucket_ready_hook(fail)
    for fails[0] in (False, True, False):
        if not fails[0]:
            assert run.step() == plain.step()
        else:
            state = run.generator.get_state()
            # Other ranks do not wait for this rank in backward.
            run.backward()
            if dist.get_rank() == 1:
                # The error is raised again by later calls.
                with pytest.raises(_BrokenError):
                    run.optimizer.zero_grad()
            with pytest.raises(_BrokenError if dist.get_rank() == 1 else RemoteRankError, match="not today"):
                finalize_model_grads([run.model])
            run.model.reset_iteration()
            run.generator.set_state(state)
    assert_same(run, plain)


def test_b32_an_error_in_a_hook_of_one_rank_is_told_to_the_others() -> None:
    run_on_ranks(_fail_on_one_rank, 2)


def _not_finite(checked: bool) -> None:
    run = Run(Net(), check_for_nan_in_grad=checked)
    run.step()
    error, words = (NonFiniteGradientError, "rank 0: ") if checked else (RuntimeError, "norm of all gradients is nan")
    with pytest.raises(error, match=words):
        run.step(factor=float("nan") if dist.get_rank() == 1 else 1.0)
    run.model.reset_iteration()
    with pytest.raises(RuntimeError, match="load a checkpoint"):
        run.step()


@pytest.mark.parametrize("checked", [True, False])
def test_a_gradient_that_is_not_finite_ends_the_run_on_all_ranks(checked: bool) -> None:
    run_on_ranks(_not_finite, 2, checked)


def _misused() -> None:
    run = Run(Net())
    run.backward()
    with pytest.raises(RuntimeError, match="optimizer steps without finish_grad_sync"):
        run.optimizer.step()
    with pytest.raises(ValueError, match=r"optimizer_in_backward is True and .*release_gradients of the chunks is \[F"):
        model = TorchFullyShardedDataParallel(DETERMINISTIC, FSDP2, Net())
        get_megatron_optimizer(OptimizerConfig(lr=0.1, clip_grad=0.0, optimizer_in_backward=True), [model])


def test_a_step_before_gradients_are_finished_and_a_wrapper_that_keeps_them_are_refused() -> None:
    run_on_ranks(_misused, 2)


def _frozen_units() -> None:
    frozen = Net()
    for param in frozen.layers[1].parameters():
        param.requires_grad_(False)
    frozen.table.requires_grad_(False)
    twin = Net()
    for ours, theirs in zip(frozen.parameters(), twin.parameters()):
        theirs.requires_grad_(ours.requires_grad)
    runs = [Run(frozen), Run(twin, in_backward=False)]
    for _ in range(3):
        assert runs[0].step(count=2) == runs[1].step(count=2)
        with torch.no_grad():
            words = torch.zeros(1, 3, dtype=torch.int64)
            assert torch.equal(*(run.model(words) for run in runs))
    assert_same(*runs)
    assert all(buffer.grad_data.is_meta for buffer in runs[0].model.all_buffers)


@pytest.mark.slow
def test_frozen_units_and_evaluations_between_steps_change_no_bit() -> None:
    run_on_ranks(_frozen_units, 2)


def _converted() -> None:
    model = _released(Net())
    _backward(model)
    model.reset_iteration()
    model.to(torch.float64)
    kept = Kept(model)
    _backward(model)
    model.finish_grad_sync()
    assert {grad.dtype for grad in kept.grads.values()} == {torch.float64}
    assert sum(grad.any().item() for grad in kept.grads.values()) > 10


def test_converted_shards_have_gradients_of_their_dtype() -> None:
    run_on_ranks(_converted, 2)


def _exchange(settings: dict[str, Any]) -> None:
    """Compares a normal run with one that alternates updates in backward and after it, resuming at each change."""
    expected = Run(Net(), in_backward=False, **settings)
    reports = [expected.step() for _ in range(6)]
    before = None
    for number, chosen in enumerate((True, False, True)):
        run = Run(Net(), in_backward=chosen, **settings)
        if before is not None:
            saved = before.tensors()
            with torch.no_grad():
                for one in run.model.shard_weights():
                    one.values.copy_(saved[one.range.name])
            with run.optimizer.loading(model_logical_pieces(run.model)) as boxes:
                for box in boxes:
                    box.data.copy_(saved[f"{box.key} {box.global_offset}"])
            run.optimizer.load_state_dict(before.optimizer.common_state())
            run.generator.set_state(before.generator.get_state())
            run.num_steps = before.num_steps
        assert [run.step() for _ in range(2)] == reports[2 * number : 2 * number + 2]
        before = run
    assert before is not None
    assert_same(before, expected)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, EXACT], ids=["clip off", "exact"])
def test_b30_states_are_those_of_the_step_after_backward_both_ways(settings: dict[str, Any]) -> None:
    run_on_ranks(_exchange, 2, settings)
