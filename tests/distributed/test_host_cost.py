"""The budget of a step's host cost: calls and Triton launches per layer and micro-batch.

benchmarks/host_cost.py counts them against a stub of libcuda. They repeat exactly for one set of versions; the budget
is for the pinned torch and Triton, with room for other versions. CPU time depends on the machine and has no budget.
`python benchmarks/host_cost.py --functions 40` lists the functions with the most calls.
"""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.host_cost import StepCost, difference

ROOT = Path(__file__).resolve().parents[2]
# A budget above the count by more than this fraction must be lowered, so that a saving cannot be lost.
ROOM = 0.05


@dataclass(frozen=True)
class Budget:
    """Upper limits per layer and micro-batch."""

    calls: float
    launches: float


BUDGETS = {
    "dropless": Budget(calls=1045, launches=7),
    "static": Budget(calls=1290, launches=15),
    "stash": Budget(calls=1800, launches=21),
    "pages": Budget(calls=1665, launches=19),
    "8 bits": Budget(calls=1640, launches=27.5),
    "8 bits, stash": Budget(calls=2130, launches=32.5),
    "8 bits, pages": Budget(calls=1975, launches=30.5),
}
# Most calls of experts in 8 bits, relative to the same side in bf16. Launches of Triton cannot be compared, because
# torch launches products in bf16; test_launch_budget.py compares the launches of both.
MOST_IN_8_BITS = 1.3
OF_BF16 = {"8 bits": "static", "8 bits, stash": "stash", "8 bits, pages": "pages"}


@pytest.mark.slow
def test_a_layer_and_microbatch_cost_no_more_than_their_budget(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    command = [sys.executable, ROOT / "benchmarks/host_cost.py", "--rounds", "0", "--sides", *BUDGETS, "--json", path]
    subprocess.run(command, check=True, timeout=300, cwd=ROOT)
    found = json.loads(path.read_text())["layer_and_microbatch"]
    costs = {name: (found[name]["calls"], found[name]["launches"]) for name in BUDGETS}
    more = {
        name: (calls, launches)
        for name, (calls, launches) in costs.items()
        if calls > BUDGETS[name].calls or launches > BUDGETS[name].launches
    }
    assert not more, f"(calls, launches) above the budget: {more}; the budget is {BUDGETS}"
    lower = {
        name: (calls, launches)
        for name, (calls, launches) in costs.items()
        if calls * (1 + ROOM) < BUDGETS[name].calls or launches < BUDGETS[name].launches
    }
    assert not lower, f"fewer (calls, launches), so lower the budget: {lower}; the budget is {BUDGETS}"


def test_budgets_of_experts_in_8_bits_are_near_those_in_bf16() -> None:
    for name, other in OF_BF16.items():
        assert BUDGETS[name].calls <= MOST_IN_8_BITS * BUDGETS[other].calls


def test_the_difference_of_two_steps_is_per_layer_and_microbatch() -> None:
    few = StepCost(calls=100, python_calls=50, launches=8, operators=30, functions={"a": 8, "b": 4})
    many = StepCost(calls=180, python_calls=90, launches=24, operators=70, functions={"a": 16, "c": 8})
    found = difference(few, many)
    assert (found.calls, found.python_calls, found.launches, found.operators) == (10, 5, 2, 5)
    assert found.cpu_ms is None, "steps that were not timed have no time"
    assert found.functions == {"a": 1, "b": -0.5, "c": 1}
