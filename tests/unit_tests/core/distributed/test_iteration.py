"""Phases of an iteration on one rank: allowed transitions, and errors for calls in the wrong order."""

import pytest

from megatron.core.distributed.iteration import Iteration, IterationOutcome, MethodNames


def outcome(**flags: bool) -> IterationOutcome:
    return IterationOutcome(**{"is_aborted": False, "is_non_finite": False, "is_reordered": False, **flags}, late=[])


def test_an_iteration_collects_finishes_and_steps() -> None:
    iteration = Iteration()
    iteration.has_optimizer = True
    for _ in range(2):
        iteration.begin()
        assert iteration.is_collecting and not iteration.is_finished
        assert iteration.agree_sync(outcome(), of_all_stages=True) == outcome()
        iteration.finish()
        assert iteration.is_finished and not iteration.is_collecting
        iteration.step()
        assert iteration.is_finished
        # A second optimizer over the same parameters may join the same step.
        iteration.step()
    iteration.resume()
    assert iteration.is_collecting


def test_a_gradient_out_of_turn_is_refused_in_the_words_of_the_owner() -> None:
    iteration = Iteration(words=MethodNames(zero="zero_grad", finish="step"))
    iteration.finish()
    with pytest.raises(RuntimeError, match="w was produced after step: call zero_grad before the first backward"):
        iteration.refuse_gradient("w")
    iteration.abort_sync("a reason")
    for call in (iteration.check_usable, iteration.step, lambda: iteration.refuse_gradient("w")):
        with pytest.raises(RuntimeError, match=r"call reset_iteration\(\) or zero_grad\(\) first"):
            call()
    iteration.begin()
    iteration.check_usable()


def test_a_replayed_iteration_is_neither_collecting_nor_finished() -> None:
    iteration = Iteration()
    iteration.mark_replayed()
    assert iteration.is_replayed and not iteration.is_collecting and not iteration.is_finished
    iteration.finish()
    assert iteration.is_finished


def test_nothing_begins_after_the_wrapper_was_taken_off() -> None:
    iteration = Iteration()
    iteration.close()
    for call in (iteration.begin, iteration.step, iteration.check_usable):
        with pytest.raises(RuntimeError, match="removed by release"):
            call()


@pytest.mark.parametrize("problem, error", [("a parameter moved", ValueError), (KeyError("hook"), KeyError)])
def test_an_aborted_iteration_raises_this_ranks_problem(problem: str | Exception, error: type[Exception]) -> None:
    iteration, failed = Iteration(), outcome(is_aborted=True)
    assert failed.has_failed and not outcome(is_reordered=True).has_failed
    with pytest.raises(error, match="moved|hook"):
        iteration.raise_aborted_sync(failed, problem=problem, non_finite=[], in_backward=False)
    with pytest.raises(RuntimeError, match="was aborted"):
        iteration.check_usable()
