"""Makes a pool seem full in two replays, and checks that it grows, steps are retried and old memory is freed."""

from benchmarks.gpu.checks.reporting import checked_device, expect, report
from benchmarks.gpu.checks.training import become_a_rank, first_difference
from tests.gpu.test_step_graphs_on_gpu import starve

BEFORE = 3  # index of a step before the first growth
SLACK = {"allocated": 1 << 20, "reserved": 64 << 20}


def main() -> None:
    """Runs the check. Reports the memory of each step before it compares results."""
    checked_device()
    become_a_rank()
    large, small, starved = starve({})
    report(
        pool_bytes=starved.pool_bytes,
        memory={name: [step.get(name) for step in starved.memory] for name in starved.memory[0]},
        peak_mib=max(step.get("max_allocated", step.get("peak_rss", 0)) for step in starved.memory) / 2**20,
        captures=small.num_captures,
        failure=small.failure,
    )
    expect(not starved.left, "the pool was made to seem full twice")
    expect(starved.pool_bytes[BEFORE] < starved.pool_bytes[-1], "the pool grew")
    expect((small.failure, small.num_captures, small.num_graphs) == (None, 3, 1), "each growth caused one capture")
    wrong = first_difference(small, large)
    expect(wrong is None, f"steps are bitwise equal to a run with a large pool ({wrong or 'all equal'})")
    grown = starved.pool_bytes[-1] - starved.pool_bytes[BEFORE]
    for kind, slack in SLACK.items():
        more = starved.memory[-1].get(kind, 0) - starved.memory[BEFORE].get(kind, 0)
        expect(more <= grown + slack, f"{kind} memory grew by {more} bytes, the pool by {grown}")


if __name__ == "__main__":
    main()
