"""Updates in backward with pipeline stages and virtual chunks: release of gradients, and bucket norms of tied tables.

test_in_backward_training checks that the results are bit-identical to a step after backward.
"""

from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.live_bytes import LiveBytes
from megatron.core.distributed.bucket_storage import BucketLifetimeGrads, _ParamAndGradBucket
from megatron.core.distributed.grad_hooks import ReadyBucket
from megatron.core.logical_tensors import canonical_name
from megatron.training.run import TrainingRun
from megatron.training.training import run_step
from tests.counts import long_count
from tests.distributed.hook_runs import after_step
from tests.distributed.layout_runs import EP2, FLAGS, INTERLEAVED, OVERLAPPED, ZERO2
from tests.distributed.parity import layout
from tests.distributed.tiny_runs import gather_parameters, started_run
from tests.functional_tests.case import Flags, command_line, read_bases
from tests.harness import run_on_ranks

MODES: dict[str, Flags] = {"ddp": {}, "zero1": OVERLAPPED, "zero2": {**ZERO2, **OVERLAPPED}}
IN_BACKWARD: Flags = {"optimizer-in-backward": True, "ddp-bucket-size": 1001, "lr": 0.01}
STEPS, CLIP = long_count(2, soak=4), 0.02


def num_bytes(bucket: _ParamAndGradBucket) -> int:
    """Returns the bytes of a bucket's allocated gradients."""
    assert isinstance(bucket.grads, BucketLifetimeGrads)
    return bucket.grads.num_bytes


class Released:
    """Checks in each bucket hook that earlier buckets have released their gradients, and after a step that all have."""

    def __init__(self, run: TrainingRun) -> None:
        self.run, self.given = run, list[_ParamAndGradBucket]()
        groups = [group for chunk in run.model for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups]
        self.buckets = [bucket for group in groups for bucket in group.buckets]
        assert len(self.buckets) == len(groups) > 0
        self._bucket_of = {slot.param: bucket for bucket in self.buckets for slot in bucket.slots}
        for chunk in run.model:
            chunk.register_bucket_ready_hook(self._look)
            for buffer in chunk.all_buffers:
                assert buffer.grad_data.is_meta and not buffer.persistent_grads

    def _look(self, bucket: ReadyBucket) -> None:
        self.given.append(self._bucket_of[bucket.params[0]])
        assert bucket.grad.numel() == bucket.shard.numel()
        assert not any(num_bytes(bucket) for bucket in self.given)

    def after_step(self, held: int) -> None:
        """Checks that every gradient was released. held: bytes that the step allocated and that are still alive."""
        assert len(set(self.given)) == len(self.given) == len(self.buckets), "one hook call per bucket"
        self.given.clear()
        assert not any(num_bytes(bucket) for bucket in self.buckets)
        whole = sum(4 * buffer.layout.numel for chunk in self.run.model for buffer in chunk.all_buffers)
        assert held < 0.05 * whole, (held, whole)


def _release(argvs: Sequence[Sequence[str]]) -> None:
    for argv in argvs:
        with started_run(argv) as run:
            released = Released(run)
            for _ in range(2):
                with LiveBytes() as memory:
                    run_step(run)
                released.after_step(memory.total())


OFF: Flags = {"clip-grad": 0}
EXACT: Flags = {"optimizer-in-backward-clip": "exact"}


@pytest.mark.slow
def test_stages_and_virtual_chunks_have_no_gradients_left_of_what_was_updated() -> None:
    base = {**read_bases()["moe"], **FLAGS, **INTERLEAVED, **EP2, **IN_BACKWARD, "global-batch-size": 4}
    # test_released_gradients covers each mode without stages.
    usual = [{**OFF, **MODES["ddp"]}, {**EXACT, **MODES["zero2"]}]
    every = [{**policy, **mode} for policy in (OFF, EXACT) for mode in MODES.values()]
    flags = every if long_count(0, soak=1) else usual
    run_on_ranks(_release, 4, [command_line({**base, **one}) for one in flags], timeout=300)


class Clipped:
    """A bucket hook that computes the expected update from states and gradients, clipped by the bucket's norm."""

    def __init__(self, run: TrainingRun, clip: float) -> None:
        self.run, self.clip = run, clip
        self.expected: list[tuple[Tensor, Tensor]] = []
        self.coefficients: dict[str, float] = {}
        self.step = 0
        for chunk in run.model:
            chunk.register_bucket_ready_hook(self._look)

    def _look(self, bucket: ReadyBucket) -> None:
        squares = bucket.grad.double().square().sum()
        if self.run.model[0].ddp_config.use_distributed_optimizer:
            dist.all_reduce(squares, group=self.run.groups.dp_cp)
        coefficient = min(1.0, self.clip / (squares.sqrt().item() + 1e-6))
        self.coefficients |= {canonical_name(one.name): coefficient for one in bucket.slices}
        for state in bucket.states:
            grad = bucket.grad[state.span.start : state.span.end] * coefficient
            # A view of the master that the optimizer will update.
            self.expected.append((state.master, after_step(state, grad, self.step)["master"]))

    def after_step(self) -> None:
        """Compares the updated masters with the expected ones."""
        assert self.expected or not self.coefficients
        for master, expected in self.expected:
            torch.testing.assert_close(master, expected, rtol=1e-5, atol=1e-6)
        self.expected.clear()
        self.step += 1


TABLES = ("embedding.word_embeddings.weight", "output_layer.weight")


def _clip(argvs: Sequence[Sequence[str]]) -> list[tuple[Tensor, float]]:
    """Returns, for each run, this rank's copy of the table and the clip coefficient of its last gradient."""
    found = []
    for argv in argvs:
        with started_run(argv) as run:
            clipped = Clipped(run, CLIP)
            for _ in range(STEPS):
                run_step(run)
                clipped.after_step()
            gather_parameters(run)
            named = (item for chunk in run.model for item in chunk.named_parameters())
            table = next(param.detach().clone() for name, param in named if canonical_name(name) in TABLES)
            own = next(clipped.coefficients[name] for name in TABLES if name in clipped.coefficients)
            others = {value for name, value in clipped.coefficients.items() if name not in TABLES}
            assert own < 1 and len(others) > 1 and own not in others
            found.append((table, own))
    return found


@pytest.mark.slow
def test_b28_buckets_are_clipped_by_their_own_norm_and_tied_tables_of_two_stages_alike() -> None:
    flags: Flags = {
        **layout(pp=2),
        "global-batch-size": 4,
        "optimizer-in-backward-clip": "per-bucket",
        "clip-grad": CLIP,
    }
    base = {**read_bases()["dense"], **FLAGS, **flags, **IN_BACKWARD}
    first, *others = run_on_ranks(_clip, 4, [command_line({**base, **mode}) for mode in MODES.values()], timeout=300)
    for other in others:
        for (table, own), (expected, wanted) in zip(other, first, strict=True):
            assert torch.equal(table, expected) and own == wanted
