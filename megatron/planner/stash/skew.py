"""Made-up routing for a plan: how popular experts are in each step, and the rows that follow. Traces are in routing.py.

Letters as there. A token chooses each of E experts with a probability of its own, K of them in all and none twice. Rows
of a rank are drawn with the mean and the covariance of such choices (Hajek's approximation of sampling with unequal
probabilities, Annals of Mathematical Statistics 35, 1964), so that passes need no draw for each token.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch

from megatron.planner.stash.routing import RoutingSpan, check_size
from megatron.planner.stash.stages import PlannedRun

# Names of the models, of their numbers in order, and one example each.
_MODELS: dict[str, tuple[tuple[str, ...], str]] = {
    "balanced": ((), "balanced"),
    "dirichlet": (("CONCENTRATION",), "dirichlet:0.3"),
    "zipf": (("EXPONENT",), "zipf:1.1"),
    "drift": (("SPREAD", "STEPS"), "drift:0.5:50"),
}
_LEAST_POPULARITY = 1e-12
# Beyond these one expert gets all or all get alike, and fp64 overflows: drift takes exp of SPREAD.
_LEAST, _MOST = 0.001, {"EXPONENT": 100.0, "SPREAD": 100.0, "CONCENTRATION": 1e6, "STEPS": 1e6}


@dataclass(frozen=True)
class Skew:
    """How popular experts are. name: balanced: all alike. dirichlet: popularities of each step and layer are drawn
    anew, the more alike the larger the concentration. zipf: the expert at place k is chosen as often as k ** -exponent
    says, places drawn anew. drift: logarithms of popularities wander, with that spread, and forget where they were
    within about so many steps.
    """

    name: str
    numbers: tuple[float, ...]

    def __str__(self) -> str:
        return ":".join([self.name, *(f"{number:g}" for number in self.numbers)])


def parse_skew(text: str) -> Skew:
    """balanced, dirichlet:0.3, zipf:1.1 or drift:0.5:50. Raises ValueError for anything else."""
    name, *words = text.split(":")
    examples = ", ".join(example for _, example in _MODELS.values())
    if name not in _MODELS:
        raise ValueError(f"--skew is {text!r}: must be one of {examples}")
    wanted, example = _MODELS[name]
    try:
        numbers = tuple(float(word) for word in words)
    except ValueError:
        numbers = ()
    if len(numbers) != len(wanted) or not all(map(_is_usable, wanted, numbers)):
        limits = " and ".join(f"{one} from {_LEAST:g} to {_MOST[one]:g}" for one in wanted)
        shape = ":".join([name, *wanted])
        raise ValueError(
            f"--skew is {text!r}: must be {shape} with {limits}, as {example}"
            if wanted
            else f"--skew is {text!r}: must be {shape}, which has no numbers"
        )
    return Skew(name, numbers)


def _is_usable(what: str, number: float) -> bool:
    return _LEAST <= number <= _MOST[what]


def made_up_spans(run: PlannedRun, skew: Skew, *, num_steps: int, num_groups: int, seed: int) -> list[RoutingSpan]:
    """So many of the run's last steps. Raises ValueError where their rows would not fit into memory."""
    check_size(run, num_steps=num_steps, num_groups=num_groups)
    rows, most_of_pair = {}, np.zeros(num_steps, dtype=np.int64)
    for layer in run.layers:
        # Layers do not depend on each other, nor on which others there are.
        random = np.random.default_rng([seed, layer])
        chances = inclusion(
            popularity(skew, random, num_steps=num_steps, num_experts=run.ranks.num_experts), run.ranks.topk
        )
        by_rank = chances.reshape(num_steps, run.ranks.expert_ranks, -1)
        rows[layer] = _rows(by_rank, run, num_groups=num_groups, random=random)
        if run.ranks.counts_pairs:
            most = _most_of_pairs(by_rank, run, num_groups=num_groups, random=random)
            most_of_pair = np.maximum(most_of_pair, most)
    return [RoutingSpan(run.num_microbatches, rows, most_of_pair)]


def popularity(skew: Skew, random: np.random.Generator, *, num_steps: int, num_experts: int) -> np.ndarray:
    """[S, E], fp64: of each expert, above 0; each step's sum is 1."""
    shape, numbers = (num_steps, num_experts), skew.numbers
    if skew.name == "balanced":
        found = np.ones(shape)
    elif skew.name == "dirichlet":
        found = random.dirichlet(np.full(num_experts, numbers[0]), num_steps)
    elif skew.name == "zipf":
        found = random.permuted(np.broadcast_to(np.arange(1.0, num_experts + 1) ** -numbers[0], shape), axis=1)
    else:
        found = np.exp(_wandering(random, shape, spread=numbers[0], memory=numbers[1]))
    found = np.maximum(found / found.sum(axis=1, keepdims=True), _LEAST_POPULARITY)
    scaled: np.ndarray = found / found.sum(axis=1, keepdims=True)
    return scaled


def inclusion(popularities: np.ndarray, topk: int) -> np.ndarray:
    """[S, E] -> [S, E]: the probability that a token chooses each expert, at most 1, topk in all."""
    certain = np.zeros(popularities.shape, dtype=bool)
    chances = popularities
    # Each round fixes those that every token chooses; after topk rounds there can be no more.
    for _ in range(topk + 1):
        left = topk - certain.sum(axis=1, keepdims=True)
        others = np.where(certain, 0.0, popularities)
        chances = np.where(certain, 1.0, others * left / others.sum(axis=1, keepdims=True).clip(_LEAST_POPULARITY))
        certain = chances >= 1.0
    clipped: np.ndarray = chances.clip(0.0, 1.0)
    return clipped


def _wandering(random: np.random.Generator, shape: tuple[int, int], *, spread: float, memory: float) -> np.ndarray:
    """[S, E]: numbers of that standard deviation at any time, whose correlation fades as exp(-steps / memory)."""
    kept = math.exp(-1 / memory)
    found = random.standard_normal(shape)
    for step in range(1, shape[0]):
        found[step] = kept * found[step - 1] + math.sqrt(1 - kept * kept) * found[step]
    return spread * found


def _rows(chances: np.ndarray, run: PlannedRun, *, num_groups: int, random: np.random.Generator) -> np.ndarray:
    """chances: [S, ranks, experts of each] -> live rows of each pass, [M, S, groups * ranks], int32."""
    ranks, (num_steps, num_ranks, num_local) = run.ranks, chances.shape
    tokens = ranks.tokens * ranks.num_sharing
    means, spreads = tokens * chances.sum(axis=2), (chances * (1 - chances)).sum(axis=2)
    shape = run.num_microbatches, num_steps, num_groups, num_ranks
    noise = random.standard_normal(shape) * np.sqrt(tokens * spreads)[:, None]
    # What one rank gets more others get less: every token chooses as many.
    share = spreads / spreads.sum(axis=1, keepdims=True).clip(_LEAST_POPULARITY)
    noise -= share[:, None] * noise.sum(axis=3, keepdims=True)
    # Rounded by their sums, so that these stay whole.
    ends = np.rint(np.cumsum(means[:, None] + noise, axis=3))
    found = np.diff(ends, axis=3, prepend=0.0).clip(0, tokens * min(ranks.topk, num_local))
    rows: np.ndarray = found.reshape(run.num_microbatches, num_steps, -1).astype(np.int32)
    return rows


def _most_of_pairs(chances: np.ndarray, run: PlannedRun, *, num_groups: int, random: np.random.Generator) -> np.ndarray:
    """[S], int64: the most rows that one rank sends another in a layer's passes, drawn as the largest of as many."""
    ranks = run.ranks
    draws = run.num_microbatches * num_groups * ranks.num_sharing
    means, spreads = chances.sum(axis=2), (chances * (1 - chances)).sum(axis=2)
    alone = spreads * (1 - spreads / spreads.sum(axis=1, keepdims=True).clip(_LEAST_POPULARITY))
    # The largest of n draws has the n-th power of their distribution.
    levels = torch.from_numpy(random.random(means.shape) ** (1 / draws)).clamp(1e-12, 1 - 1e-12)
    most = ranks.tokens * means + np.sqrt(ranks.tokens * alone) * torch.special.ndtri(levels).numpy()
    limit = ranks.tokens * min(ranks.topk, chances.shape[2])
    rows: np.ndarray = np.rint(most).clip(0, limit).max(axis=1).astype(np.int64)
    return rows
