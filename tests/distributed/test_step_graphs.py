"""A step captured once and replayed is bit-identical to the eager step in every layout.

Changed steps are captured again, and steps that cannot be captured run eagerly. Tapes stand in for CUDA graphs on the
CPU.
"""

import itertools
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import pretrain_gpt
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, GraphedReductions
from megatron.core.full_cuda_graph import FullCudaGraphWrapper
from megatron.core.graphs.capture import CaptureFailedError, GraphParticipant, fingerprints
from megatron.core.graphs.tape import TapeGraphs
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.training.run import TrainingRun
from tests.counts import slow, soak_only
from tests.distributed.graph_runs import FULL, LOCAL, Trained, WatchedPages, train_here
from tests.distributed.stash_runs import ROUTER, stash
from tests.distributed.tiny_runs import OVERLAPPED_SMALL_BUCKETS, Batch
from tests.functional_tests.case import Flags, read_bases
from tests.functional_tests.merged_flags import merged_argv
from tests.harness import run_on_ranks

# The first step runs eagerly, the second is captured, and the remaining steps are replayed.
RUN: Flags = {
    "micro-batch-size": 1,
    "train-iters": 4,
    "lr-warmup-iters": 0,
    "eval-interval": 2,
    "clip-grad": 0.3,
    "cuda-graph-warmup-steps": 1,
}
EXPERTS: Flags = {"num-layers": 4, "seq-length": 16, "init-method-std": 0.1}
OVERLAP: Flags = {"expert-model-parallel-size": 2, "moe-token-dispatcher-type": "allgather"}
EAGER: Flags = {"cuda-graph-impl": "none", "optimizer-cuda-graph": False}
RESUMED: Flags = {"train-iters": 4}


class Case(NamedTuple):
    """One case: ranks, flags beyond a base of the functional tests, number of captures, and graphs at the end."""

    ranks: int
    base: str
    flags: Flags
    captures: int = 1
    graphs: int = 1


CASES = {
    "dropout": Case(1, "dense", {"bf16": True, **read_bases()["dropout"]}),
    "sequences": Case(2, "dense", {"context-parallel-size": 2}),
    # One step of each new length runs eagerly; the next step is captured.
    "growing batch": Case(
        1,
        "moe",
        {
            **EXPERTS,
            **stash(1.0),
            "moe-expert-rank-capacity-factor": 2,
            "rampup-batch-size": [2, 2, 6],
            "train-iters": 6,
        },
        captures=2,
        graphs=2,
    ),
    "experts": Case(
        2, "moe", {**EXPERTS, **OVERLAP, **ROUTER, **OVERLAPPED_SMALL_BUCKETS, "moe-expert-rank-capacity-factor": 4}
    ),
    "few pages": Case(1, "moe", {**EXPERTS, **ROUTER, **stash(0.3, 0.4), "moe-expert-rank-capacity-factor": 2}),
    "pages of stages": Case(
        2, "moe", {**EXPERTS, **stash(), "moe-expert-rank-capacity-factor": 2, "pipeline-model-parallel-size": 2}
    ),
    "scaled update of tensors": Case(
        2,
        "llama",
        {
            "fp16": True,
            "initial-loss-scale": 65536,
            "loss-scale-window": 2,
            "optimizer-cuda-graph": True,
            "tensor-model-parallel-size": 2,
            "sequence-parallel": True,
        },
    ),
    "sharded update": Case(2, "dense", {**OVERLAPPED_SMALL_BUCKETS, "optimizer-cuda-graph": True}),
    "update of stages": Case(
        2,
        "llama",
        {
            "num-layers": 4,
            "pipeline-model-parallel-size": 2,
            "num-layers-per-virtual-pipeline-stage": 1,
            "recompute-granularity": "full",
            "recompute-method": "uniform",
            "recompute-num-layers": 1,
            "calculate-per-token-loss": True,
            "optimizer-cuda-graph": True,
        },
    ),
    # Replayed steps run out of rows. They rerun with more rows, and the next step is captured again.
    "void update": Case(
        2,
        "moe",
        {
            **EXPERTS,
            **ROUTER,
            **OVERLAP,
            **stash(0.6),
            "moe-expert-rank-capacity-factor": 1.05,
            "lr": 0.03,
            "global-batch-size": 2,
            "train-iters": 7,
            "eval-interval": 3,
            "eval-iters": 0,
            "optimizer-cuda-graph": True,
        },
        captures=2,
    ),
    "void pages": Case(
        2,
        "moe",
        {
            **EXPERTS,
            **OVERLAP,
            **stash(1.25, overflow_policy="rerun"),
            "moe-expert-rank-capacity-factor": 4,
            "lr": 0.03,
            "train-iters": 7,
            "eval-interval": 3,
        },
        captures=2,
    ),
}
QUICK = ["sharded update"]
# Each case is part of the case above that its comment names.
REPEATED = {
    "one loss a token": Case(2, "llama", {"calculate-per-token-loss": True}),  # update of stages
    "shards": Case(3, "dense", {"global-batch-size": 6, **OVERLAPPED_SMALL_BUCKETS}),  # sharded update
    "sharded update of three": Case(
        3, "dense", {"global-batch-size": 6, **OVERLAPPED_SMALL_BUCKETS, "optimizer-cuda-graph": True}
    ),
    "tensors": Case(2, "llama", {"tensor-model-parallel-size": 2, "sequence-parallel": True}),  # scaled update
    "stages of tensors": Case(  # update of stages
        4, "llama", {**CASES["update of stages"].flags, "tensor-model-parallel-size": 2, "optimizer-cuda-graph": False}
    ),
    "pages": Case(  # void update
        2, "moe", {**EXPERTS, **ROUTER, **stash(1.5), "moe-expert-rank-capacity-factor": 4, **OVERLAP}
    ),
    "void": CASES["void update"]._replace(flags={**CASES["void update"].flags, "optimizer-cuda-graph": False}),
}


def _argv(case: Case, *more: Flags) -> list[str]:
    return merged_argv(case.base, RUN, case.flags, *more)


def _both(case: Case) -> tuple[Trained, Trained]:
    return train_here(_argv(case, EAGER)), train_here(_argv(case, {**FULL, **case.flags}))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [*QUICK, *(slow(name) for name in CASES if name not in QUICK), *map(soak_only, REPEATED)]
)
def test_replayed_steps_have_the_bits_of_eager_ones(name: str) -> None:
    case = (CASES | REPEATED)[name]
    for eager, captured in run_on_ranks(_both, case.ranks, case):
        assert captured.failure is None
        assert (captured.num_captures, captured.num_graphs) == (case.captures, case.graphs)
        captured.assert_same(eager, name)


def _growth(flags: Flags) -> tuple[list[tuple[int, int]], list[int]]:
    watched = WatchedPages()
    train_here(_argv(CASES["void pages"], flags), graphs=watched.graphs, setup=watched.setup)
    return watched.num_alive, watched.num_dropped


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [FULL, {**LOCAL, "cuda-graph-modules": ["moe"], "moe-paged-stash-prefetch-layers": 0}],
    ids=["full", "local"],
)
def test_graphs_and_old_pages_are_gone_when_new_pages_are_allocated(flags: Flags) -> None:
    both = run_on_ranks(_growth, 2, {**flags, "cuda-graph-warmup-steps": 1})
    for num_alive, num_dropped in both:
        assert num_alive and set(num_alive) == {(0, 0)}
        # At least one growth dropped existing graphs.
        assert max(num_dropped) > 0


def _resumed(folder: str) -> tuple[Trained, Trained]:
    """Returns an uninterrupted run without graphs, and a run with graphs that was stopped after step 2 and resumed."""
    case = CASES["void update"]
    eager = train_here(_argv(case, EAGER, RESUMED))
    saving: Flags = {**FULL, **case.flags, **RESUMED, "save": folder, "load": folder}
    first = train_here(_argv(case, saving, {"exit-interval": 2}))
    second = train_here(_argv(case, saving))
    second.steps, second.evaluations = first.steps + second.steps, first.evaluations + second.evaluations
    return eager, second


@pytest.mark.slow
def test_a_run_resumed_with_graphs_has_the_bits_of_one_that_never_stopped(tmp_path: Path) -> None:
    for eager, resumed in run_on_ranks(_resumed, 2, str(tmp_path)):
        assert resumed.num_captures == 1
        resumed.assert_same(eager, "resumed")


def _with_short_batches(run: TrainingRun) -> AbstractContextManager[None]:
    """Shortens the batches of steps 3 and 4 on rank 1."""
    batches = run.train_iterator
    assert batches is not None

    def read() -> Iterator[Batch]:
        for number, batch in enumerate(batches):
            is_short = dist.get_rank() == 1 and number // 2 in (2, 3)
            yield {key: value[:, :16] for key, value in batch.items()} if is_short else batch

    run.train_iterator = read()
    return nullcontext()


def _with_batches_of_two_lengths() -> tuple[Trained, Trained]:
    case = Case(2, "dense", {"global-batch-size": 4, "create-attention-mask-in-dataloader": None, "train-iters": 6})
    argvs = _argv(case), _argv(case, FULL)
    eager, captured = (train_here(argv, setup=_with_short_batches) for argv in argvs)
    return eager, captured


@pytest.mark.slow
def test_ranks_whose_batches_differ_do_the_same_with_a_step() -> None:
    for eager, captured in run_on_ranks(_with_batches_of_two_lengths, 2):
        assert captured.failure is None and captured.num_captures == 2
        captured.assert_same(eager, "batches of two lengths")


def _reads_its_loss() -> tuple[Trained, Trained]:
    forward = GPTModel.forward

    def reads(*args: object, **keywords: object) -> object:
        losses = forward(*args, **keywords)
        losses.sum().item()
        return losses

    with patch.object(GPTModel, "forward", reads):
        return _both(CASES["sharded update"])


@pytest.mark.slow
def test_a_step_that_cannot_be_captured_runs_eagerly_as_if_nothing_had_been_tried() -> None:
    for eager, captured in run_on_ranks(_reads_its_loss, 2):
        assert captured.failure is not None and "_local_scalar_dense" in captured.failure
        assert (captured.num_captures, captured.num_graphs) == (1, 0)
        captured.assert_same(eager, "a forward that reads its loss")


def _with_halved_gradients(run: TrainingRun) -> AbstractContextManager[None]:
    for chunk in run.model:
        chunk.register_bucket_ready_hook(lambda bucket: bucket.grad.mul_(0.5))
    return nullcontext()


def _with_a_hook() -> tuple[Trained, Trained]:
    case = CASES["sharded update"]
    argvs = _argv(case, EAGER), _argv(case, {**FULL, **case.flags})
    eager, captured = (train_here(argv, setup=_with_halved_gradients) for argv in argvs)
    return eager, captured


@pytest.mark.slow
def test_an_update_that_hooks_on_gradients_would_miss_is_not_captured() -> None:
    for eager, captured in run_on_ranks(_with_a_hook, 2):
        assert captured.failure is not None and "hooks on reduced gradients are registered" in captured.failure
        assert (captured.num_captures, captured.num_graphs) == (1, 0)
        captured.assert_same(eager, "a hook on reduced gradients")


def _plans_of_all_states() -> None:
    """Compares the plan for each pair of states of two ranks with the plan expected from both states."""
    facts = [*itertools.product((False, True), repeat=3)]
    for everyone in itertools.product(facts, repeat=dist.get_world_size()):
        is_stale, is_warm, is_captured = everyone[dist.get_rank()]
        run = FullCudaGraphWrapper(lambda **_: [], 1, device=TapeGraphs(), participants=[participant := _Aged()])
        for key in ("a", "b") if is_captured else ("b",):
            run._graphs[key] = None  # type: ignore[assignment]
        run._steps_to_warm_up, run._warm = 0, {"a": None} if is_warm else {}
        run._last_fingerprints = fingerprints([participant])
        participant.age += is_stale
        with patch.object(dist, "all_reduce", wraps=dist.all_reduce) as sent, patch.object(dist, "all_gather_object"):
            plan = run._agree_on_plan_sync("a")
            assert dist.all_gather_object.call_count == 0  # type: ignore[attr-defined]
        ((numbers,), _), *others = sent.call_args_list
        assert (numbers.dtype, numbers.shape, numbers.device.type, others) == (torch.int64, (3,), "cpu", [])
        any_stale, all_warm, all_captured = any(f[0] for f in everyone), *(all(f[i] for f in everyone) for i in (1, 2))
        replays = "REPLAY" if all_captured else "CAPTURE" if all_warm else "WARM_UP"
        assert plan.name == ("WARM_UP" if any_stale else replays), everyone
        assert run.num_graphs == (0 if any_stale else 1 + is_captured)


class _Aged(GraphParticipant):
    age = 0

    def fingerprint(self) -> int:
        return self.age


def test_ranks_agree_on_the_plan_of_a_step_in_one_reduction_of_three_numbers() -> None:
    run_on_ranks(_plans_of_all_states, 2, timeout=60)


def _messages_of_steps() -> list[Counter[str]]:
    """Counts the collectives of an eager step, a captured one and two replays, without those of the passes."""
    run, counts = FullCudaGraphWrapper(lambda **_: [], 1, device=TapeGraphs()), list[Counter[str]]()
    for _ in range(4):
        with _Collectives() as collectives:
            run(data_iterator=None, num_microbatches=1)
        counts.append(collectives.counts)
    return counts


class _Collectives(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.counts[func._opname] += 1
        return func(*args, **(kwargs or {}))


def test_a_step_of_a_whole_graph_sends_one_message_besides_its_passes() -> None:
    for eager, _, *replays in run_on_ranks(_messages_of_steps, 2, timeout=60):
        assert [eager, *replays] == 3 * [Counter(allreduce_=1)]


def _late_in_the_capture() -> str:
    """Captures a step in which rank 1 has one more gradient than in the step before; returns this rank's error."""
    settings = DistributedDataParallelConfig(overlap_grad_reduce=True)
    model = DistributedDataParallel(ModelParallelConfig(), settings, nn.Linear(2, 2))
    num_backwards = iter([1, 1 + dist.get_rank()])

    def passes(**unused: object) -> list[object]:
        for _ in range(next(num_backwards)):
            model(torch.ones(1, 2)).sum().backward()
        return []

    run = FullCudaGraphWrapper(passes, 1, device=TapeGraphs(), participants=[GraphedReductions([model])])
    model.zero_grad_buffer()
    run(data_iterator=None, num_microbatches=1)
    model.finish_grad_sync()
    model.zero_grad_buffer()
    with pytest.raises(CaptureFailedError) as told:
        run(data_iterator=None, num_microbatches=1)
    return str(told.value)


def test_all_ranks_refuse_a_graph_in_which_one_has_a_gradient_behind_its_bucket() -> None:
    first, late = run_on_ranks(_late_in_the_capture, 2, timeout=60)
    assert "gradients became ready after their bucket was sent" in late and first == f"rank 1: {late}"


def _graphs_at_the_end() -> list[int]:
    held, drop = [], FullCudaGraphWrapper.drop_graphs

    def noted(graph: FullCudaGraphWrapper) -> None:
        held.append(graph.num_graphs)
        drop(graph)
        held.append(graph.num_graphs)

    with patch.object(FullCudaGraphWrapper, "drop_graphs", noted):
        with patch("megatron.training.setup.graph_device", TapeGraphs):
            pretrain_gpt.main(_argv(CASES["dropout"], FULL))
    return held


@pytest.mark.slow
def test_a_run_lets_go_of_its_graphs_before_its_groups_end() -> None:
    assert run_on_ranks(_graphs_at_the_end, 1, backend=None) == [[1, 0]]


def test_graphs_are_bounded_and_the_last_used_ones_stay() -> None:
    ran: list[int] = []

    def passes(*, data_iterator: list[object], num_microbatches: int, forward_only: bool) -> list[object]:
        ran.append(num_microbatches)
        return []

    run = FullCudaGraphWrapper(passes, 1, device=TapeGraphs(), max_graphs=2)
    for count in (1, 1, 2, 2, 3, 3, 2, 3, 1):
        run(data_iterator=None, num_microbatches=count)
    # Each count is warmed up and captured once, then replayed without Python. The graph of 1 was evicted and is
    # captured again.
    assert ran == [1, 1, 2, 2, 3, 3, 1]
    assert run.num_graphs == 2
