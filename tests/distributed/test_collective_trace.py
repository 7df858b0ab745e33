"""Tests that ranks that launch different collectives are named on every rank instead of hanging."""

import re

import pytest
import torch
import torch.distributed as dist

from megatron.core.distributed.iteration import CollectiveMismatchError, CollectiveTrace
from tests.harness import run_on_ranks


def launches(number, *, bucket=0):
    return {"op": "all_reduce", "flat": torch.zeros(64 * number), "bucket": f"chunk 0 dense {bucket}"}


def trace_of_all(*, debug_timeout_s=None):
    trace = CollectiveTrace(dist.group.WORLD, debug_timeout_s=debug_timeout_s)
    for bucket in range(4):
        trace.name_bucket(f"chunk 0 dense {bucket}", [f"layer{bucket}.{name}" for name in "abcd"])
    return trace


def agree(trace):
    largest = torch.tensor(trace.agreement())
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    trace.check_agreed(largest.tolist())


def differ_in_a_step():
    """Swaps two buckets of equal size on rank 1 in the second of three steps, which no backend would detect."""
    trace = trace_of_all()
    told = []
    for step in range(3):
        order = [0, 2, 1, 3] if (step, dist.get_rank()) == (1, 1) else [0, 1, 2, 3]
        for bucket in order:
            trace.record(group=dist.group.WORLD, **launches(1, bucket=bucket))
        try:
            agree(trace)
        except CollectiveMismatchError as error:
            told.append((step, str(error)))
    return told


def test_a_step_whose_launches_differ_is_told_on_all_ranks_with_both_entries():
    per_rank = run_on_ranks(differ_in_a_step, 3)
    ((step, message),) = per_rank[0]
    assert step == 1 and per_rank == [per_rank[0]] * 3
    assert re.search(r"launch 2 of this step differs: ranks 0, 2 launch .* chunk 0 dense 1 .*layer1\.a", message)
    assert re.search(
        r"rank 1 launch .* chunk 0 dense 2 \(4 parameters: layer2\.a, layer2\.b, layer2\.c, \.\.\.\)", message
    )


def differ_when_debugging(case):
    rank = dist.get_rank()
    pair = dist.new_group([0, 1])
    trace = trace_of_all(debug_timeout_s=1.0 if case == "missing" else 30.0)
    for _ in range(3):
        trace.record(group=dist.group.WORLD, **launches(1))
        trace.record(group=None, **launches(1))
    agree(trace)
    try:
        if case == "missing" and rank == 2:
            return "did not come"
        if case == "other group" and rank == 1:
            trace.record(group=pair, **launches(1))
        trace.record(group=dist.group.WORLD, **launches(2 if (case, rank) == ("size", 1) else 1, bucket=3))
    except CollectiveMismatchError as error:
        return str(error)
    return "no error"


@pytest.mark.slow
@pytest.mark.parametrize(
    "case, expected",
    [
        ("size", r"launch 7 .* differs: ranks 0, 2 launch .* 64 .*layer3\.a.*; rank 1 launch .* 128 .*layer3\.a"),
        ("other group", r"launch 7 .* differs: .*rank.* 0.* launch .* over 3 ranks .*; rank 1 launch .* over 2 ranks"),
        (
            "missing",
            r"rank 2 did not reach launch 7 .* within 1 s.* launches .*layer3\.a.* launch of rank 2 was: .*dense 0",
        ),
    ],
    ids=["size", "other-group", "missing"],
)
def test_debugging_names_the_first_difference_before_anything_is_launched(case, expected):
    told = run_on_ranks(differ_when_debugging, 3, case, timeout=60)
    if case == "missing":
        assert told.pop() == "did not come"
    assert len(set(told)) == 1 and re.search(expected, told[0]), told
