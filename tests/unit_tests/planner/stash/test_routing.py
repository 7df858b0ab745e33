"""Synthetic routing: rows have the mean and spread of independent tokens, and popularities drift as specified."""

import math
from dataclasses import replace

import numpy as np
import pytest

from megatron.core.transformer.moe.dispatch_static import StaticBudget
from megatron.planner.stash.routing import RoutingSpan, inclusion, parse_skew, popularity, synthetic_spans
from megatron.planner.stash.stages import ExpertRanks, PlannedRun, PlannedStage, StashFlags
from tests.unit_tests.planner.stash.plain_flags import FLAGS

EXPERTS, TOPK, TOKENS, RANKS = 8, 2, 64, 4


def planned(*, num_microbatches: int = 4, flags: StashFlags = FLAGS) -> PlannedRun:
    """Returns a run of one stage and one layer with experts shared by 4 ranks, without a schedule."""
    budget = StaticBudget(2.0, TOPK, EXPERTS // RANKS, RANKS, 1, 1)
    ranks = ExpertRanks(EXPERTS, TOPK, TOKENS, RANKS, RANKS, 1, budget, limits_pairs=True)
    stage = PlannedStage((1,), lambda count: (), lambda count, ahead: ())
    return PlannedRun(flags, ranks, [stage], 1, num_microbatches, frozenset({num_microbatches}))


def one_by_one(chances: np.ndarray, random: np.random.Generator, draws: int) -> np.ndarray:
    """Draws the rows of passes, [draws, ranks], for tokens with TOPK independent choices."""
    tokens = TOKENS * RANKS
    rows = np.empty((draws, RANKS))
    for draw in range(draws):
        chosen = np.empty((0, EXPERTS), dtype=bool)
        while len(chosen) < tokens:
            tried = random.random((4 * tokens, EXPERTS)) < chances
            chosen = np.concatenate([chosen, tried[tried.sum(axis=1) == TOPK]])
        rows[draw] = chosen[:tokens].reshape(tokens, RANKS, -1).sum(axis=(0, 2))
    return rows


def test_rows_have_the_mean_and_spread_of_independent_tokens() -> None:
    # With equal popularities only the number of experts matters.
    run = planned(num_microbatches=2000)
    (span,) = synthetic_spans(run, parse_skew("balanced"), num_steps=1, num_groups=1, seed=3)
    rows = span.rows[1][:, 0]
    assert (rows.sum(axis=1) == TOKENS * RANKS * TOPK).all()
    reference = one_by_one(np.full(EXPERTS, TOPK / EXPERTS), np.random.default_rng(1), 400)
    assert rows.mean() == reference.mean() == TOKENS * TOPK
    assert rows.std() == pytest.approx(reference.std(), rel=0.1)
    # The maximum over 2000 passes of 4 ranks that send to 4 ranks.
    pair = one_by_one(np.full(EXPERTS, TOPK / EXPERTS), np.random.default_rng(2), 100).max() / RANKS
    assert TOKENS * TOPK / RANKS < pair < span.most_of_pair[0] <= TOKENS * TOPK


def test_each_token_chooses_topk_distinct_experts() -> None:
    for text in ("balanced", "dirichlet:0.05", "zipf:3", "drift:4:10"):
        popularities = popularity(parse_skew(text), np.random.default_rng(2), num_steps=50, num_experts=EXPERTS)
        assert popularities.sum(axis=1) == pytest.approx(np.ones(50)) and (popularities > 0).all()
        chances = inclusion(popularities, TOPK)
        assert chances.sum(axis=1) == pytest.approx(np.full(50, TOPK)) and chances.max() <= 1
        # The probability of a choice is monotonic in popularity.
        order = np.argsort(popularities, axis=1)
        assert (np.diff(np.take_along_axis(chances, order, axis=1), axis=1) >= -1e-9).all()
    small = inclusion(np.array([[0.4, 0.3, 0.2, 0.1]]), 2)
    assert small == pytest.approx(np.array([[0.8, 0.6, 0.4, 0.2]]))
    assert inclusion(np.array([[0.7, 0.1, 0.1, 0.1]]), 2) == pytest.approx(np.array([[1, 1 / 3, 1 / 3, 1 / 3]]))


def test_drift_has_its_spread_and_correlation_time() -> None:
    skew, random = parse_skew("drift:0.5:20"), np.random.default_rng(5)
    logs = np.log(popularity(skew, random, num_steps=4000, num_experts=64))
    logs -= logs.mean(axis=1, keepdims=True)
    assert logs.std() == pytest.approx(0.5, rel=0.05)
    for steps in (1, 20, 60):
        kept = (logs[steps:] * logs[:-steps]).mean() / logs.var()
        assert kept == pytest.approx(math.exp(-steps / 20), abs=0.05)


def test_rows_grow_with_skew_and_depend_on_the_seed() -> None:
    def most(text: str, seed: int = 1) -> float:
        (span,) = synthetic_spans(planned(), parse_skew(text), num_steps=50, num_groups=1, seed=seed)
        return float(span.most_rows.mean())

    assert most("balanced") < most("dirichlet:10") < most("dirichlet:1") < most("dirichlet:0.1")
    assert most("zipf:0.5") < most("zipf:1.1") and most("drift:0.2:5") < most("drift:1:5")
    assert most("zipf:1.1") == most("zipf:1.1") != most("zipf:1.1", seed=2)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("even", "--skew is 'even': must be one of balanced, dirichlet:0.3, zipf:1.1, drift:0.5:50"),
        ("zipf", "must be zipf:EXPONENT with EXPONENT from 0.001 to 100, for example zipf:1.1"),
        ("zipf:-1", "must be zipf:EXPONENT with EXPONENT from 0.001 to 100"),
        ("dirichlet:nan", "must be dirichlet:CONCENTRATION"),
        (
            "drift:1",
            "must be drift:SPREAD:STEPS with SPREAD from 0.001 to 100 and STEPS from 0.001 to",
        ),
        ("balanced:1", "must be balanced, which has no parameters"),
    ],
)
def test_invalid_skews_are_refused(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_skew(text)


def test_a_span_is_sliced_by_steps_and_limited_in_size() -> None:
    run = planned()
    (span,) = synthetic_spans(run, parse_skew("zipf:1"), num_steps=5, num_groups=1, seed=1)
    part = span.part(1, 3)
    assert isinstance(part, RoutingSpan) and part.num_steps == 2 and (part.rows[1] == span.rows[1][:, 1:3]).all()
    with pytest.raises(ValueError, match="passes: must be at most .* reduce --plan-steps or --plan-groups"):
        synthetic_spans(
            replace(run, num_microbatches=1 << 20), parse_skew("zipf:1"), num_steps=999, num_groups=1, seed=1
        )
