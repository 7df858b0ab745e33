"""The routing trace of a run matches its routers' choices in each pass: layouts, recomputation, a resumed run."""

from collections import defaultdict
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.core.transformer.moe.aux_losses import AuxLossRecorder
from megatron.core.transformer.moe.permutation import Routing
from megatron.core.transformer.moe.router import TopKRouter
from megatron.training.callbacks import RunStart
from megatron.training.callbacks.routing_trace import RoutingHeader, RoutingLog, read_lines, read_routing
from megatron.training.training import train
from tests.distributed.tiny_runs import started_run
from tests.functional_tests.case import Flags, command_line, read_bases
from tests.harness import run_on_ranks

FLAGS: Flags = {"num-layers": 4, "global-batch-size": 4, "train-iters": 3, "micro-batch-size": 1}
STAGES: Flags = {"pipeline-model-parallel-size": 2, "num-layers-per-virtual-pipeline-stage": 1, "global-batch-size": 3}
# Flags, and each rank's column in the counts of its stage's layers.
LAYOUTS: dict[str, tuple[Flags, list[int]]] = {
    "experts": ({"expert-model-parallel-size": 2, "moe-layer-freq": "[0,1,1,1]"}, [0, 1]),
    "stages": (STAGES, [0, 0]),
    "tensors": ({"tensor-model-parallel-size": 2, "sequence-parallel": True}, [0, 1]),
}
AGAIN: Flags = {**STAGES, "recompute-granularity": "full", "recompute-method": "uniform", "recompute-num-layers": 1}
Seen = dict[int, list[list[int]]]


@pytest.mark.slow
def test_a_trace_has_what_every_router_chose(tmp_path: Path) -> None:
    layouts = {name: flags for name, (flags, _) in LAYOUTS.items()} | {"again": AGAIN}
    ranks = run_on_ranks(
        _watch_all, 2, {name: _argv(flags, tmp_path / f"{name}.gz") for name, flags in layouts.items()}
    )
    for name, (_, columns) in LAYOUTS.items():
        steps = list(read_routing(tmp_path / f"{name}.gz"))
        assert [step.iteration for step in steps] == [1, 2, 3]
        seen = {(layer, columns[rank]): passes for rank in (0, 1) for layer, passes in ranks[rank][name].items()}
        found = {(layer, column): [] for layer, counts in steps[0].tokens.items() for column in range(counts.shape[1])}
        for (layer, column), passes in found.items():
            passes += [counts[column].tolist() for step in steps for counts in step.tokens[layer]]
        assert found == seen, name
    # Recomputed layers are counted once.
    texts = [list(read_lines(tmp_path / f"{name}.gz")) for name in ("stages", "again")]
    assert texts[0] == texts[1]


@pytest.mark.slow
def test_a_resumed_run_leaves_the_trace_of_one_that_was_not(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    flags = {"save": str(tmp_path / "saved"), "save-interval": 2, "expert-model-parallel-size": 2}
    run_on_ranks(_watch_all, 2, {"": _argv(flags, path)})
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"iteration":')
    again = {**flags, "load": str(tmp_path / "saved"), "ckpt-step": 2}
    run_on_ranks(_watch_all, 2, {"": _argv(again, path)})
    assert path.read_bytes() == whole and whole.count(b"routing_trace") == 1
    # Changed settings start a new header at their first step.
    run_on_ranks(_watch_all, 1, {"": _argv({**again, "expert-model-parallel-size": 1}, path)})
    steps = list(read_routing(path))
    assert [(step.iteration, step.header.data_parallel_size) for step in steps] == [(1, 2), (2, 2), (3, 1)]


def test_a_step_that_is_given_up_leaves_no_passes() -> None:
    recorder, counts = AuxLossRecorder(2, torch.device("cpu"), num_experts=3), torch.tensor([3, 2, 1])
    recorder.record_tokens(counts, layer_number=2)
    assert recorder.take_passes() == {}
    recorder.keep_passes()
    recorder.record_tokens(counts, layer_number=1)
    recorder.forget_step()
    recorder.record_tokens(counts, layer_number=2)
    recorder.finalize_step(None)
    assert list(recorder.take_passes()) == [2] and recorder.take_passes() == {}


@pytest.mark.parametrize("text", ["not a trace\n", '{"iteration": 3}\n'])
def test_a_file_that_is_no_trace_is_left_alone(tmp_path: Path, text: str) -> None:
    (tmp_path / "file").write_text(text)
    header = RoutingHeader(**dict.fromkeys([field.name for field in fields(RoutingHeader)], 1))
    for name in ("file", "missing/file", "."):
        with pytest.raises(ValueError, match="--record-routing is"):
            RoutingLog(tmp_path / name, header)
    assert (tmp_path / "file").read_text() == text
    with pytest.raises(ValueError, match="line 1 is not"):
        list(read_routing(tmp_path / "file"))


def _argv(flags: Flags, path: Path) -> list[str]:
    return command_line({**read_bases()["moe"], **FLAGS, "eval-interval": 2, **flags, "record-routing": str(path)})


# Functions that run on the ranks.


def _watch_all(argvs: dict[str, list[str]]) -> dict[str, Seen]:
    return {name: _watch(argv) for name, argv in argvs.items()}


def _watch(argv: list[str]) -> Seen:
    """Trains and returns the choices of each router in its training forwards, by layer."""
    seen: Seen = defaultdict(list)

    def note(router: Any, _: Any, output: Routing) -> None:
        if router.training:
            seen[router.layer_number].append(output.indices.flatten().bincount(minlength=router.num_experts).tolist())

    with started_run(argv) as run:
        for router in (part for chunk in run.model for part in chunk.modules() if isinstance(part, TopKRouter)):
            router.register_forward_hook(note)
        run.callbacks.on_train_start(RunStart(iteration=run.state.iteration, train_iters=run.train_iters))
        train(run)
        run.callbacks.on_run_end()
    return dict(seen)
