"""Generates the expert rows of a plan's steps, from a routing trace or from a model of skewed routing.

Letters: S steps, M microbatches of a step, N expert ranks (of all planned groups; ranks of one group are adjacent), E
experts. A block is the set of tokens of one rank's microbatch.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch

from megatron.core.transformer.moe.dispatch_static import mean_padding, padded_sum
from megatron.planner.stash.stages import ExpertRanks, PlannedRun
from megatron.training.callbacks.routing_trace import RoutingHeader, RoutingStep

# Maximum number of values that a plan keeps in memory, 4 bytes each.
_MAX_STORED_NUMBERS = 1 << 30
# Maps a skew model to the names of its parameters, in order, and an example.
_MODELS: dict[str, tuple[tuple[str, ...], str]] = {
    "balanced": ((), "balanced"),
    "dirichlet": (("CONCENTRATION",), "dirichlet:0.3"),
    "zipf": (("EXPONENT",), "zipf:1.1"),
    "drift": (("SPREAD", "STEPS"), "drift:0.5:50"),
}
_MIN_POPULARITY = 1e-12
# Beyond these limits, routing is degenerate or uniform, or exp of drift's SPREAD overflows fp64.
_MIN_NUMBER, _MAX_NUMBERS = 0.001, {"EXPONENT": 100.0, "SPREAD": 100.0, "CONCENTRATION": 1e6, "STEPS": 1e6}


@dataclass(frozen=True)
class RoutingSpan:
    """Expert rows of consecutive steps with the same number of microbatches.

    rows: maps a layer to the live rows of each forward, [M, S, N], int32. most_of_pair: largest number of rows that one
    rank sends to another in a forward, [S], int64; 0 if this number is not limited.
    """

    num_microbatches: int
    rows: dict[int, np.ndarray]
    most_of_pair: np.ndarray

    @property
    def num_steps(self) -> int:
        """Number of steps, S."""
        return len(self.most_of_pair)

    @property
    def most_rows(self) -> np.ndarray:
        """Largest number of live rows of a forward on any rank, [S], int64."""
        return np.max([rows.max(axis=(0, 2)) for rows in self.rows.values()], axis=0).astype(np.int64)

    def part(self, begin: int, end: int) -> "RoutingSpan":
        """Returns the span of the steps from `begin` up to, but excluding, `end`."""
        rows = {layer: of_layer[:, begin:end] for layer, of_layer in self.rows.items()}
        return RoutingSpan(self.num_microbatches, rows, self.most_of_pair[begin:end])


@dataclass(frozen=True)
class Skew:
    """Model of the experts' popularities, with its parameters.

    balanced: all experts are equally popular. dirichlet: popularities are drawn for each step and layer; a larger
    concentration makes them more equal. zipf: the k-th most popular expert has popularity k ** -exponent, in an order
    drawn for each step and layer. drift: logarithms of popularities are autoregressive, with a spread and a correlation
    time in steps.
    """

    name: str
    numbers: tuple[float, ...]

    def __str__(self) -> str:
        return ":".join([self.name, *(f"{number:g}" for number in self.numbers)])


def check_size(run: PlannedRun, *, num_steps: int, num_groups: int) -> None:
    """Raises ValueError if the rows of num_steps steps exceed the memory limit."""
    passes = num_steps * len(run.layers) * run.num_microbatches
    numbers = passes * num_groups * run.ranks.expert_ranks
    if numbers > _MAX_STORED_NUMBERS:
        raise ValueError(
            f"{num_steps:,} steps x {len(run.layers)} layers x {run.num_microbatches} micro-batches x "
            f"{num_groups * run.ranks.expert_ranks} expert ranks are {numbers:,} passes: must be at most "
            f"{_MAX_STORED_NUMBERS:,}; reduce --plan-steps or --plan-groups"
        )


def traced_spans(
    steps: Iterable[RoutingStep], run: PlannedRun, *, num_groups: int, seed: int
) -> tuple[list[RoutingSpan], list[str]]:
    """Maps the steps of a trace to the ranks of the run. Also returns sentences about the assumptions made.

    If ranks, tokens and microbatches of trace and run are equal, the rows are used unchanged. Otherwise blocks are
    merged or split to the run's number of tokens, and assigned to the run's ranks in order. If a step has too few
    blocks, its blocks are sampled with replacement. Raises ValueError if the trace comes from a different model.
    """
    mapper = _BlockMapper(run, num_groups=num_groups, random=np.random.default_rng(seed))
    planned = [mapper.step(step) for step in steps]
    if not planned:
        raise ValueError(
            "the trace contains no step: use a file that --record-routing wrote in a run of at least one step"
        )
    check_size(run, num_steps=len(planned), num_groups=num_groups)
    spans = [_joined(list(equal)) for _, equal in groupby(planned, key=lambda one: one.num_microbatches)]
    return spans, sorted(mapper.guesses)


class _BlockMapper:
    """Maps recorded blocks to the ranks of the run. guesses: sentences about the assumptions made."""

    def __init__(self, run: PlannedRun, *, num_groups: int, random: np.random.Generator) -> None:
        self._run, self._ranks, self._num_groups, self._random = run, run.ranks, num_groups, random
        self._checked: RoutingHeader | None = None
        self.guesses: set[str] = set()

    def step(self, step: RoutingStep) -> RoutingSpan:
        """Converts a recorded step to a span that contains one step of the run."""
        if step.header is not self._checked:
            check_model(step.header, self._run)
            self._checked = step.header
        counts = next(iter(step.tokens.values()))
        num_microbatches = self._length(step.header, counts)
        if self._is_exact(step.header, counts):
            chosen = {layer: of_layer[:, : self._num_planned] for layer, of_layer in step.tokens.items()}
        else:
            chosen = self._rearranged(step, num_microbatches)
        pairs = {layer: rows_of_pairs(of_layer, self._ranks) for layer, of_layer in chosen.items()}
        most = max(int(of_layer.max()) for of_layer in pairs.values()) if self._ranks.limits_pairs else 0
        rows = {
            layer: live_rows(of_layer, self._ranks).reshape(num_microbatches, 1, -1).astype(np.int32)
            for layer, of_layer in chosen.items()
        }
        return RoutingSpan(num_microbatches, rows, np.array([most]))

    @property
    def _num_planned(self) -> int:
        """Number of ranks of the planned groups."""
        return self._num_groups * self._ranks.num_sharing

    def _length(self, header: RoutingHeader, counts: np.ndarray) -> int:
        """Returns the planned step's number of microbatches: the recorded one if the recorded sizes match the run."""
        return len(counts) if self._is_exact(header, counts) else self._run.num_microbatches

    def _is_exact(self, header: RoutingHeader, counts: np.ndarray) -> bool:
        num_microbatches, num_ranks, _ = counts.shape
        has_sizes = (header.tokens_of_microbatch, num_ranks) == (self._ranks.tokens, self._ranks.num_ranks)
        return has_sizes and num_microbatches in self._run.lengths

    def _rearranged(self, step: RoutingStep, num_microbatches: int) -> dict[int, np.ndarray]:
        """Returns the number of tokens of each expert, by layer, [M, planned ranks, E], int64."""
        blocks = {layer: self._sized(of_layer, step.header) for layer, of_layer in step.tokens.items()}
        num_blocks, per_pass = len(next(iter(blocks.values()))), self._ranks.num_ranks
        if num_blocks >= num_microbatches * per_pass:
            places = np.arange(num_microbatches * per_pass).reshape(num_microbatches, per_pass)[:, : self._num_planned]
        else:
            self.guesses.add(
                f"the trace has {num_blocks:,} blocks of {self._ranks.tokens:,} tokens in a step, but the run "
                f"needs {num_microbatches * per_pass:,}: blocks of the step are sampled with replacement"
            )
            # All layers use the same blocks, because a block consists of the same tokens in each layer.
            places = self._random.integers(0, num_blocks, (num_microbatches, self._num_planned))
        return {layer: of_layer[places] for layer, of_layer in blocks.items()}

    def _sized(self, counts: np.ndarray, header: RoutingHeader) -> np.ndarray:
        """Merges or splits counts [M, R, E] into blocks with the run's number of tokens, [B, E]."""
        blocks, recorded, wanted = counts.reshape(-1, counts.shape[2]), header.tokens_of_microbatch, self._ranks.tokens
        if wanted % recorded == 0:
            joined = wanted // recorded
            usable = len(blocks) // joined * joined
            if usable == 0:
                raise ValueError(
                    f"the trace has {len(blocks)} blocks of {recorded} tokens in a step: too few for one micro-batch "
                    f"of a rank, which has {wanted}; record more micro-batches"
                )
            summed: np.ndarray = blocks[:usable].reshape(-1, joined, blocks.shape[1]).sum(axis=1)
            return summed
        if recorded % wanted:
            raise ValueError(
                f"a rank's micro-batch has {wanted} tokens in the run and {recorded} in the trace: one must be a "
                "multiple of the other; change --seq-length or --micro-batch-size"
            )
        self.guesses.add(
            f"a block of the trace has {recorded:,} tokens, but a rank of the run has {wanted:,}: blocks are split at "
            "random"
        )
        return self._split(blocks, recorded // wanted)

    def _split(self, blocks: np.ndarray, parts: int) -> np.ndarray:
        """Splits the expert choices of each block at random into `parts` equal parts: [B, E] -> [B * parts, E]."""
        found = np.empty((len(blocks), parts, blocks.shape[1]), dtype=np.int64)
        for left, block in zip(found, blocks):
            rest = block.copy()
            for part in range(parts):
                left[part] = self._random.multivariate_hypergeometric(rest, int(rest.sum()) // (parts - part))
                rest -= left[part]
        return found.reshape(-1, blocks.shape[1])


def check_model(header: RoutingHeader, run: PlannedRun) -> None:
    """Raises ValueError if the trace comes from a model whose experts or MoE layers differ from the run's."""
    ranks = run.ranks
    for what, recorded, wanted in (
        ("--num-experts", header.num_experts, ranks.num_experts),
        ("--moe-router-topk", header.topk, ranks.topk),
        ("layers with experts", header.layers, run.layers),
    ):
        if recorded != wanted:
            raise ValueError(
                f"the trace comes from a different model: {what} is {recorded} in the trace and {wanted} in the run; "
                "use a file that --record-routing wrote for this model"
            )


def rows_of_pairs(tokens: np.ndarray, ranks: ExpertRanks) -> np.ndarray:
    """Returns the rows that each rank sends to each expert rank: [M, groups, from rank, to expert rank], int64.

    tokens: number of tokens for each expert, [M, R, E], int64.
    """
    by_rank = tokens.reshape(
        len(tokens), -1, ranks.num_sharing, ranks.expert_ranks, tokens.shape[2] // ranks.expert_ranks
    )
    summed: np.ndarray = by_rank.sum(axis=-1)
    return summed


def live_rows(tokens: np.ndarray, ranks: ExpertRanks) -> np.ndarray:
    """Returns the live rows of each expert rank, including padding: [M, groups, expert ranks], int64.

    tokens: number of tokens for each expert, [M, R, E], int64.
    """
    alignment = ranks.budget.alignment
    of_expert = tokens.reshape(len(tokens), -1, ranks.num_sharing, tokens.shape[2]).sum(axis=2)
    padded = -(-of_expert // alignment) * alignment
    summed: np.ndarray = padded.reshape(*padded.shape[:2], ranks.expert_ranks, -1).sum(axis=-1)
    return summed


def _joined(steps: Sequence[RoutingSpan]) -> RoutingSpan:
    layers = steps[0].rows
    return RoutingSpan(
        steps[0].num_microbatches,
        {layer: np.concatenate([step.rows[layer] for step in steps], axis=1) for layer in layers},
        np.concatenate([step.most_of_pair for step in steps]),
    )


def parse_skew(text: str) -> Skew:
    """Parses a skew such as balanced, dirichlet:0.3, zipf:1.1 or drift:0.5:50. Raises ValueError for invalid text."""
    name, *words = text.split(":")
    examples = ", ".join(example for _, example in _MODELS.values())
    if name not in _MODELS:
        raise ValueError(f"--skew is {text!r}: must be one of {examples}")
    wanted, example = _MODELS[name]
    try:
        numbers = tuple(float(word) for word in words)
    except ValueError:
        numbers = ()
    if len(numbers) != len(wanted) or not all(_MIN_NUMBER <= n <= _MAX_NUMBERS[one] for one, n in zip(wanted, numbers)):
        limits = " and ".join(f"{one} from {_MIN_NUMBER:g} to {_MAX_NUMBERS[one]:g}" for one in wanted)
        shape = ":".join([name, *wanted])
        raise ValueError(
            f"--skew is {text!r}: must be {shape} with {limits}, for example {example}"
            if wanted
            else f"--skew is {text!r}: must be {shape}, which has no parameters"
        )
    return Skew(name, numbers)


def synthetic_spans(run: PlannedRun, skew: Skew, *, num_steps: int, num_groups: int, seed: int) -> list[RoutingSpan]:
    """Draws the rows of num_steps steps, each with as many microbatches as the run's last step.

    Raises ValueError if there are too many rows for memory (see check_size).
    """
    check_size(run, num_steps=num_steps, num_groups=num_groups)
    rows, most_of_pair = {}, np.zeros(num_steps, dtype=np.int64)
    for layer in run.layers:
        # A seed per layer makes a layer's rows independent of the other layers.
        random = np.random.default_rng([seed, layer])
        chances = inclusion(
            popularity(skew, random, num_steps=num_steps, num_experts=run.ranks.num_experts), run.ranks.topk
        )
        by_rank = chances.reshape(num_steps, run.ranks.expert_ranks, -1)
        rows[layer] = _drawn_rows(by_rank, run, num_groups=num_groups, random=random)
        if run.ranks.limits_pairs:
            most = _most_of_pairs(by_rank, run, num_groups=num_groups, random=random)
            most_of_pair = np.maximum(most_of_pair, most)
    return [RoutingSpan(run.num_microbatches, rows, most_of_pair)]


def popularity(skew: Skew, random: np.random.Generator, *, num_steps: int, num_experts: int) -> np.ndarray:
    """Draws the popularity of each expert in one layer, [S, E], fp64, positive and with sum 1 in each step."""
    shape, numbers = (num_steps, num_experts), skew.numbers
    if skew.name == "balanced":
        found = np.ones(shape)
    elif skew.name == "dirichlet":
        found = random.dirichlet(np.full(num_experts, numbers[0]), num_steps)
    elif skew.name == "zipf":
        found = random.permuted(np.broadcast_to(np.arange(1.0, num_experts + 1) ** -numbers[0], shape), axis=1)
    else:
        found = np.exp(_wandering(random, shape, spread=numbers[0], memory=numbers[1]))
    found = np.maximum(found / found.sum(axis=1, keepdims=True), _MIN_POPULARITY)
    scaled: np.ndarray = found / found.sum(axis=1, keepdims=True)
    return scaled


def _wandering(random: np.random.Generator, shape: tuple[int, int], *, spread: float, memory: float) -> np.ndarray:
    """Draws an autoregressive series [S, E] with standard deviation `spread` and correlation exp(-steps / memory)."""
    kept = math.exp(-1 / memory)
    found = random.standard_normal(shape)
    for step in range(1, shape[0]):
        found[step] = kept * found[step - 1] + math.sqrt(1 - kept * kept) * found[step]
    return spread * found


def inclusion(popularities: np.ndarray, topk: int) -> np.ndarray:
    """Returns the probability that a token chooses each expert, [S, E], with sum topk. popularities: [S, E]."""
    certain = np.zeros(popularities.shape, dtype=bool)
    chances = popularities
    # Each round caps the experts that every token chooses at probability 1. There are at most topk of them.
    for _ in range(topk + 1):
        left = topk - certain.sum(axis=1, keepdims=True)
        others = np.where(certain, 0.0, popularities)
        chances = np.where(certain, 1.0, others * left / others.sum(axis=1, keepdims=True).clip(_MIN_POPULARITY))
        certain = chances >= 1.0
    clipped: np.ndarray = chances.clip(0.0, 1.0)
    return clipped


def _drawn_rows(chances: np.ndarray, run: PlannedRun, *, num_groups: int, random: np.random.Generator) -> np.ndarray:
    """Draws the live rows of each forward, [M, S, groups * ranks], int32. chances: [S, ranks, experts of a rank]."""
    ranks, (num_steps, num_ranks, num_local) = run.ranks, chances.shape
    tokens = ranks.tokens * ranks.num_sharing
    means, spreads = tokens * chances.sum(axis=2), (chances * (1 - chances)).sum(axis=2)
    shape = run.num_microbatches, num_steps, num_groups, num_ranks
    noise = random.standard_normal(shape) * np.sqrt(tokens * spreads)[:, None]
    # The noise sums to zero over ranks, because every token chooses topk experts.
    share = spreads / spreads.sum(axis=1, keepdims=True).clip(_MIN_POPULARITY)
    noise -= share[:, None] * noise.sum(axis=3, keepdims=True)
    # Cumulative sums are rounded, because this preserves the total.
    ends = np.rint(np.cumsum(means[:, None] + noise, axis=3))
    found = np.diff(ends, axis=3, prepend=0.0).clip(0, tokens * min(ranks.topk, num_local))
    # The padding is estimated from the mean rows of each expert, because only the sum over experts is drawn.
    padding = mean_padding(tokens * chances, ranks.budget.alignment).sum(axis=2)
    found = padded_sum(found, padding[:, None], ranks.budget.alignment)
    rows: np.ndarray = found.reshape(run.num_microbatches, num_steps, -1).astype(np.int32)
    return rows


def _most_of_pairs(chances: np.ndarray, run: PlannedRun, *, num_groups: int, random: np.random.Generator) -> np.ndarray:
    """Draws the largest number of rows that one rank sends to another in a layer's forwards, [S], int64.

    Samples the maximum directly instead of drawing all pairs.
    """
    ranks = run.ranks
    draws = run.num_microbatches * num_groups * ranks.num_sharing
    means, spreads = chances.sum(axis=2), (chances * (1 - chances)).sum(axis=2)
    alone = spreads * (1 - spreads / spreads.sum(axis=1, keepdims=True).clip(_MIN_POPULARITY))
    # The distribution of the maximum of n draws is the n-th power of one draw's distribution.
    levels = torch.from_numpy(random.random(means.shape) ** (1 / draws)).clamp(1e-12, 1 - 1e-12)
    most = ranks.tokens * means + np.sqrt(ranks.tokens * alone) * torch.special.ndtri(levels).numpy()
    limit = ranks.tokens * min(ranks.topk, chances.shape[2])
    rows: np.ndarray = np.rint(most).clip(0, limit).max(axis=1).astype(np.int64)
    return rows
