"""Tests random pairs of layouts: one loads the other's checkpoint bitwise by logical name, and continues training.

The draw covers sizes of every axis, schedules, optimizer instances, buckets, vocabulary padding, frozen parts, whether
the output layer is tied, paged stash and the optimizer mode. Some ranks own only padding. Chosen pairs are in
test_checkpoints_of_layouts.
"""

import random
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from functools import partial
from itertools import product, starmap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pretrain_gpt
from megatron.training.training import run_step
from tests.counts import long_count
from tests.distributed.parity import Box, boxes_of_state, layout, put_together
from tests.distributed.stash_runs import stash
from tests.distributed.tiny_runs import comparable, started_run
from tests.functional_tests.case import Flags, command_line, read_bases
from tests.harness import run_on_ranks

SEED = 124  # its six pairs cover every mode, and replicas of most
PAIRS = long_count(6, soak=60)
MOST_RANKS = long_count(6, soak=8)
BATCH = long_count(6, soak=12)  # samples; divisible by every data-parallel size
# Steps before and after the save. The second step after it uses weights updated from the loaded state.
STEPS_BEFORE, STEPS_AFTER = long_count(1, soak=2), 2
TOLERANCE = 1e-6  # of losses, relative, in fp32: docs/numerics.md
HALF_TOLERANCE = 0.02  # the same, in bf16
# Threads of gloo's groups outlive the runs and keep polling. Hundreds of them would slow down later runs.
_RUNS_OF_A_PROCESS = 4
MASTER, MOMENT = "optimizer.fp32_param.", "optimizer.exp_avg"
EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
# The tensors are few and small. In a bucket per tensor, most ranks own nothing.
TRAINING: Flags = {
    "num-layers": 4,
    "hidden-size": 16,
    "num-attention-heads": 4,
    "init-method-std": 0.1,
    "seq-length": 8,
    "max-position-embeddings": 8,
    "micro-batch-size": 1,
    "global-batch-size": BATCH,
    "vocab-size": 61,
    "train-iters": STEPS_BEFORE + STEPS_AFTER,
    "lr-warmup-iters": 0,
    "adam-eps": 1e-5,
    "clip-grad": 0.5,
    "eval-iters": 0,
    "log-params-norm": True,
}
EXPERTS: Flags = {
    "num-experts": 6,
    "moe-ffn-hidden-size": 16,
    "moe-layer-freq": "[0,1,1,1]",
    "moe-router-score-function": "sigmoid",
    "moe-router-enable-expert-bias": True,
    "disable-bias-linear": None,
    "softmax-type": "learnable",
}
LATENT: Flags = {
    "position-embedding-type": "rope",
    "group-query-attention": None,
    "num-query-groups": None,
    "multi-latent-attention": True,
    "qk-layernorm": True,
    "q-lora-rank": 6,
    "kv-lora-rank": 5,
    "qk-head-dim": 3,
    "qk-pos-emb-head-dim": 2,
    "v-head-dim": 4,
}
FROZEN: dict[str, list[tuple[str, ...]]] = {
    "dense": [(), (), ("embedding.*",), ("*.mlp.*", "*.self_attention.linear_*", "*embeddings*")],
    "moe": [(), (), ("*.experts.*",), ("*.mlp.*", "*.self_attention.linear_*", "*embeddings*")],
}
PAGES: Flags = {
    "moe-expert-rank-capacity-factor": 1.0,
    **stash(None, page_size=8, buffer_bytes=4 * 8 * 32 * 4, overflow_policy="rerun"),
}
ZERO1: Flags = {"use-distributed-optimizer": True}
IN_BACKWARD: Flags = {"optimizer-in-backward": True, "optimizer-in-backward-clip": "exact"}
PRECISION_AWARE: Flags = {"use-precision-aware-optimizer": True}
MODES: dict[str, Flags] = {
    "ddp": {},
    "zero1": ZERO1,
    "zero1, overlapped": {**ZERO1, "overlap-grad-reduce": True, "overlap-param-gather": True},
    "zero2": {**ZERO1, "optimizer": "distributed_fused_adam"},
    "fsdp2": {"use-torch-fsdp2": True},
    "ddp, in backward": IN_BACKWARD,
    "zero1, in backward": {**ZERO1, **IN_BACKWARD},
    "zero2, in backward": {**ZERO1, "optimizer": "distributed_fused_adam", **IN_BACKWARD},
    "fsdp2, in backward": {"use-torch-fsdp2": True, **IN_BACKWARD},
}
HALF_MODES: dict[str, Flags] = {
    "precision-aware": {**ZERO1, **PRECISION_AWARE},
    "precision-aware, bf16 moments": {**ZERO1, **PRECISION_AWARE, "exp-avg-dtype": "bf16", "exp-avg-sq-dtype": "bf16"},
}
# Modes that are bitwise equal to each other with any number of microbatches.
WHOLE_BATCH = ("ddp", "zero1", "zero1, overlapped", "ddp, in backward", "zero1, in backward")


@dataclass(frozen=True)
class Sizes:
    """A layout, as the size of each axis."""

    tp: int = 1
    cp: int = 1
    pp: int = 1
    vpp: int = 1
    dp: int = 1
    ep: int = 1
    etp: int = 1

    @property
    def ranks(self) -> int:
        """Number of processes."""
        return self.tp * self.cp * self.pp * self.dp

    @property
    def expert_dp(self) -> int:
        """Number of ranks with the same experts."""
        return self.ranks // (self.pp * self.ep * self.etp)


@dataclass(frozen=True)
class Side:
    """One of the two runs of a pair. padding: the multiple to which a rank's vocabulary is padded."""

    sizes: Sizes
    mode: str
    instances: int
    bucket: int | None
    padding: int
    frozen: tuple[str, ...]
    is_tied: bool
    parallel_load: bool
    schedule: str = "1f1b"

    def argv(self, model: Flags) -> list[str]:
        """Returns the command line of the run."""
        axes = {name: size for name, size in vars(self.sizes).items() if name != "dp"}
        flags = {**model, **layout(**axes), **{**MODES, **HALF_MODES}[self.mode]}
        flags["make-vocab-size-divisible-by"] = self.padding
        flags["ckpt-fully-parallel-load"] = self.parallel_load
        flags["pipeline-schedule"] = self.schedule
        flags["untie-embeddings-and-output-weights"] = not self.is_tied
        if self.instances > 1:
            flags["num-distributed-optimizer-instances"] = self.instances
        if self.bucket is not None:
            # Without overlap there is only one bucket.
            flags |= {"ddp-bucket-size": self.bucket, "overlap-grad-reduce": True}
        return command_line(flags)


@dataclass(frozen=True)
class Pair:
    """The run that saves, the run that loads, and the model flags that they share."""

    saves: Side
    loads: Side
    model: Flags

    @property
    def same_bits(self) -> bool:
        """Whether the two runs must be bitwise equal."""
        one, other = (replace(side, bucket=None, parallel_load=False) for side in (self.saves, self.loads))
        # Padding determines where the vocabulary is split between tensor-parallel ranks, and thereby its sums.
        if one.sizes.tp == 1:
            one = replace(one, padding=other.padding)
        if one.mode in WHOLE_BATCH and other.mode in WHOLE_BATCH:
            one = replace(one, mode=other.mode)
        return one == other


@dataclass
class Trained:
    """A rank's record of a run.

    state: tensors that were saved or loaded. values: counters and sizes stored with them. reports: of the steps after
    the checkpoint. factor: capacity factor of an expert rank's rows, where it is fixed. repeated: how often each of
    these steps was restarted with more capacity.
    """

    state: list[Box]
    values: dict[str, Any]
    reports: list[dict[str, Any]] = field(default_factory=list)
    factor: float | None = None
    repeated: list[int] = field(default_factory=list)


@pytest.mark.slow
def test_any_layout_goes_on_from_the_checkpoint_of_any_other(tmp_path: Path) -> None:
    pairs = [_draw(number) for number in range(PAIRS)]
    _assert_drawn_widely(pairs)
    saved = _run_by_ranks([(pair.saves, pair.model) for pair in pairs], "--save", tmp_path)
    loaded = _run_by_ranks([(pair.loads, pair.model) for pair in pairs], "--load", tmp_path)
    problems = [
        f"pair {number}: {problem}\n   {pair.saves}\n   {pair.loads}\n   {pair.model}"
        for number, pair in enumerate(pairs)
        for problem in _problems(pair, saved[number], loaded[number])
    ]
    assert not problems, "\n".join(problems)


# Drawing pairs.


def _draw(number: int) -> Pair:
    """Draws the pair of a number, deterministically. In every third pair both layouts are equal except for buckets."""
    draw = random.Random(f"pair {number}, {SEED}")
    kind, half = ("dense", "moe")[number % 2], draw.random() < 0.4
    same = number % 3 == 0
    model: Flags = {**read_bases()[kind], **TRAINING, **(EXPERTS if kind == "moe" else {})}
    model["bf16"] = half
    if number % 5 == 2:
        model |= LATENT
    if number % 6 in (1, 3):
        # Buffers and pages of a fixed size, far too small. The first steps learn the required sizes.
        model |= PAGES
    # Different layouts draw different dropout masks.
    model["hidden-dropout"] = 0.1 if same else 0.0
    # Modes take turns, so that few pairs cover all of them.
    modes = [*MODES, *(HALF_MODES if half else {})]
    saves, loads = (_draw_side(draw, kind, modes[(2 * number + side + 2) % len(modes)]) for side in (0, 1))
    if draw.random() < 0.5:
        loads = replace(loads, frozen=saves.frozen)
    # Weights that were trained separately cannot be tied.
    loads = replace(loads, is_tied=saves.is_tied and loads.is_tied)
    if same:
        mode = draw.choice(WHOLE_BATCH if saves.mode in WHOLE_BATCH and saves.instances == 1 else (saves.mode,))
        loads = replace(loads, sizes=saves.sizes, mode=mode, instances=saves.instances, frozen=saves.frozen)
        loads = replace(loads, is_tied=saves.is_tied)
        loads = replace(loads, bucket=None if "fsdp2" in mode else loads.bucket)
        loads = replace(loads, padding=saves.padding if saves.sizes.tp > 1 else loads.padding)
    saves, loads = (replace(side, schedule=_draw_schedule(draw, side.sizes)) for side in (saves, loads))
    return Pair(saves, replace(loads, schedule=saves.schedule) if same else loads, model)


def _draw_side(draw: random.Random, kind: str, mode: str) -> Side:
    possible = [one for one in _layouts(kind) if one.pp == 1 or "fsdp2" not in mode]
    # First draws how the model is split, or the few layouts with virtual chunks would hardly ever be drawn.
    cut = draw.choice(sorted({_cut(one) for one in possible}))
    sizes = draw.choice([one for one in possible if _cut(one) == cut])
    groups = (sizes.dp * sizes.cp, sizes.expert_dp) if kind == "moe" else (sizes.dp * sizes.cp,)
    several = "zero1" in mode and all(group % 2 == 0 for group in groups)
    return Side(
        sizes,
        mode,
        instances=2 if several else 1,
        bucket=None if "fsdp2" in mode else draw.choice([1, 1001, None]),
        padding=draw.choice([1, 16, 128]),
        frozen=draw.choice(FROZEN[kind]),
        is_tied=draw.random() < 0.6,
        parallel_load=draw.random() < 0.3,
    )


def _draw_schedule(draw: random.Random, sizes: Sizes) -> str:
    """Draws 1F1B or a schedule with weight passes, which places the chunks of virtual stages in a V."""
    if sizes.pp == 1:
        return "1f1b"
    return draw.choice(["zbv" if sizes.vpp > 1 else "zb-h1", "1f1b"])


def _layouts(kind: str) -> list[Sizes]:
    expert_axes = ((1, 2, 3, 6), (1, 2)) if kind == "moe" else ((1,), (1,))
    replicas = [size for size in (1, 2, 3, 4, 6) if BATCH % size == 0]
    drawn = product((1, 2), (1, 2), (1, 2, 4), (1, 2), replicas, *expert_axes)
    return [sizes for sizes in starmap(Sizes, drawn) if sizes.ranks <= MOST_RANKS and _exists(sizes)]


def _cut(sizes: Sizes) -> tuple[int, ...]:
    return sizes.tp, sizes.cp, sizes.pp, sizes.vpp


def _exists(sizes: Sizes) -> bool:
    """Returns whether the layers, experts and microbatches divide evenly in this layout."""
    if sizes.vpp > 1 and (sizes.pp != 2 or BATCH // sizes.dp % sizes.pp):
        return False
    return sizes.ranks % (sizes.pp * sizes.ep * sizes.etp) == 0


def _assert_drawn_widely(pairs: Sequence[Pair]) -> None:
    """Asserts that the pairs cover every axis and mode."""
    sides = [side for pair in pairs for side in (pair.saves, pair.loads)]
    for axis in vars(Sizes()):
        assert len({getattr(side.sizes, axis) for side in sides}) > 1, axis
    assert {side.mode for side in sides} >= set(MODES)
    assert {pair.same_bits for pair in pairs} == {True, False}
    assert any(side.instances > 1 for side in sides)
    for name in ("frozen", "is_tied"):
        assert any(getattr(pair.saves, name) != getattr(pair.loads, name) for pair in pairs), name
    assert {pair.same_bits for pair in pairs if PAGES.items() <= pair.model.items()} == {True, False}


# Running the pairs and comparing the results.


def _run_by_ranks(sides: Sequence[tuple[Side, Flags]], flag: str, folder: Path) -> list[list[Trained]]:
    """Returns the ranks' records of each side; sides with the same number of ranks share their processes."""
    numbers: dict[int, list[int]] = defaultdict(list)
    for number, (side, _) in enumerate(sides):
        numbers[side.sizes.ranks].append(number)
    results: dict[int, list[Trained]] = {}
    batches = [
        (ranks, own[i : i + _RUNS_OF_A_PROCESS])
        for ranks, own in numbers.items()
        for i in range(0, len(own), _RUNS_OF_A_PROCESS)
    ]
    for ranks, own in batches:
        jobs = [([*sides[n][0].argv(sides[n][1]), flag, str(folder / f"{n}")], sides[n][0].frozen) for n in own]
        by_rank = run_on_ranks(_train_each, ranks, jobs, timeout=120 + 60 * len(jobs))
        results |= dict(zip(own, map(list, zip(*by_rank)), strict=True))
    return [results[number] for number in range(len(sides))]


def _problems(pair: Pair, saved: list[Trained], loaded: list[Trained]) -> Iterator[str]:
    """Describes the errors of the resumed run."""
    for rank, own in enumerate(loaded):
        if own.values != saved[0].values:
            yield f"rank {rank} begins with {own.values}, {saved[0].values} were saved"
    before, after = (put_together([box for own in ranks for box in own.state]) for ranks in (saved, loaded))
    if pair.saves.is_tied and not pair.loads.is_tied:
        before |= {key.replace(EMBEDDING, OUTPUT): value for key, value in before.items() if key.endswith(EMBEDDING)}
    yield from _differences(pair, before, after)
    yield from _other_sizes(pair, saved, loaded)
    yield from _other_reports(pair, saved[0].reports, loaded[0].reports)


def _other_reports(pair: Pair, expected: list[dict[str, Any]], reports: list[dict[str, Any]]) -> Iterator[str]:
    """Describes steps of the resumed run that differ from the uninterrupted run."""
    if pair.saves.frozen != pair.loads.frozen or pair.saves.is_tied != pair.loads.is_tied:
        # Only the loss of the first step comes from equal weights.
        expected, reports = expected[:1], reports[:1]
    for step, (report, reference) in enumerate(zip(reports, expected, strict=True)):
        if pair.same_bits and report != reference:
            yield f"step {step} is {report}, uninterrupted {reference}"
        tolerance = HALF_TOLERANCE if pair.model["bf16"] else TOLERANCE
        if report["losses"] != pytest.approx(reference["losses"], rel=tolerance, abs=0):
            yield f"losses of step {step} are {report['losses']}, uninterrupted {reference['losses']}"


def _differences(pair: Pair, before: dict[str, Tensor], after: dict[str, Tensor]) -> Iterator[str]:
    """Describes tensors that were not loaded as they were saved."""
    keys = before.keys() ^ after.keys()
    # A weight frozen while tied has no state; an untied output layer then starts with a new state.
    keys -= {key for key in keys if key.endswith(OUTPUT) and key.replace(OUTPUT, EMBEDDING) not in before}
    if pair.saves.frozen == pair.loads.frozen and keys:
        yield f"only one side has {sorted(keys)}"
    short = "bf16 moments" in pair.loads.mode
    for key in sorted(before.keys() & after.keys()):
        expected = before[key]
        if short and key.startswith(MOMENT):
            expected = expected.bfloat16().float()
        if not torch.equal(after[key], expected):
            yield f"{key} differs by {(after[key].double() - expected.double()).abs().max().item():.3g}"


def _other_sizes(pair: Pair, saved: list[Trained], loaded: list[Trained]) -> Iterator[str]:
    """Describes sizes that a rank had learned before the save but must learn again after the load."""
    for rank, own in enumerate(loaded):
        if own.factor is not None and own.factor < (saved[0].factor or 0.0):
            yield f"rank {rank} has room for {own.factor} times the balanced rows, {saved[0].factor} before"
    if pair.same_bits and loaded[0].repeated != saved[0].repeated:
        yield f"steps began {loaded[0].repeated} times anew, {saved[0].repeated} uninterrupted"


# Functions that run in a rank's process.


def _train_each(jobs: Sequence[tuple[list[str], tuple[str, ...]]]) -> list[Trained]:
    results = []
    for argv, frozen in jobs:
        # Shows in the output of a failed rank which run it was.
        print(f"{frozen} frozen, {' '.join(argv)}", file=sys.stderr)
        results.append(_train(argv, frozen))
    return results


def _train(argv: Sequence[str], frozen: Sequence[str]) -> Trained:
    with started_run(argv, model_provider=partial(_frozen_model, frozen)) as run:
        if "--save" in argv:
            for _ in range(STEPS_BEFORE):
                run_step(run)
            run.save_checkpoint()
        memory = run.expert_memory
        trained = Trained(boxes_of_state(run), run.state.state_dict())
        if memory is not None:
            trained.factor = memory.learned_sync().capacity_factor
        for _ in range(STEPS_AFTER):
            trained.reports.append(comparable(run.measured(run_step(run)[0])))
            if memory is not None and memory.last_step is not None:
                trained.repeated.append(memory.last_step.num_discards)
        return trained


def _frozen_model(frozen: Sequence[str], pre_process: bool, post_process: bool, **options: Any) -> nn.Module:
    model = pretrain_gpt.model_provider(pre_process, post_process, **options)
    for name, param in model.named_parameters():
        param.requires_grad = not any(fnmatch(name, pattern) for pattern in frozen)
    return model
