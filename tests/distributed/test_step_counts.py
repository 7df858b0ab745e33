"""Costs of a training step besides arithmetic: messages, reads of tensors by the host, operators and calls.

Times would differ between machines; these counts do not. `PYTHONPATH=. python tests/distributed/step_counts.py` prints
them, and the functions with the most calls.
"""

from collections import Counter
from dataclasses import dataclass

import pytest

from tests.distributed.step_counts import StepCounts, counts_of

# Collectives other than those of gradients and parameters, and why each is needed:
# - StatisticsExchange: losses for the log, and whether any rank wants to stop, over the ranks of all stages.
# - agree_sync: whether every rank has launched the same reductions, before any rank waits for them.
# - end_finished_sync: whether a rank has reset the iteration meanwhile, before any rank updates.
MESSAGES = {"allreduce_": 3}
READS = {
    "_sum_sync": 1,  # losses
    "non_finite_sync": 1,  # this rank's gradients
    "agree_sync": 1,
    "highest_sync": 1,
    "read_norm_sync": 1,
    "run_step": 1,  # the loss scale, a tensor of the host
}
# Files that read tensors of the host: the batch, and the number of rows of each expert, which a GPU reads on the
# device.
ON_HOST = ("megatron/core/datasets/", "megatron/core/transformer/moe/grouped_gemm.py")


@dataclass(frozen=True)
class Limits:
    """Collectives of gradients, parameters and norms, and limits on operators, calls of our functions, and all calls.

    operators, calls: include functions of torch, so the limits leave space for other versions of torch.
    """

    moves: dict[str, int]
    operators: int
    own_calls: int
    calls: int


EXPERT_PARALLEL = ("--expert-model-parallel-size", "2", "--moe-token-dispatcher-type", "alltoall")
CASES = {
    (): Limits({"allreduce_": 1}, operators=560, own_calls=1205, calls=1950),
    ("--use-distributed-optimizer",): Limits(
        # With two ranks, a reduce-scatter is an exchange of halves and an all-gather is two broadcasts; the norm is
        # gathered.
        {"alltoall_base_": 1, "broadcast_": 2, "allgather_": 1},
        operators=560,
        own_calls=1235,
        calls=2000,
    ),
    EXPERT_PARALLEL: Limits(
        # Per layer: numbers of rows, then rows and their probabilities to the experts and back. Backward repeats all of
        # these except the numbers of rows. The norm of experts is gathered.
        {"allreduce_": 1, "alltoall_base_": 7, "allgather_": 1},
        operators=630,
        own_calls=1365,
        calls=2300,
    ),
}
# Each layer with an exchange reads how many rows it receives from each rank.
READS_OF_LAYER = {EXPERT_PARALLEL: {"row_splits_sync": 1}}


@pytest.mark.parametrize("flags", CASES, ids=" ".join)
def test_a_step_sends_reads_and_calls_no_more_than_it_must(flags: tuple[str, ...]) -> None:
    limits = CASES[flags]
    for counts in counts_of(flags):
        assert counts.collectives == Counter(MESSAGES) + Counter(limits.moves), counts
        assert _reads(counts) == READS | READS_OF_LAYER.get(flags, {}), counts
        assert counts.operators.total() <= limits.operators, counts
        assert counts.own_calls() <= limits.own_calls, counts
        assert counts.calls.total() <= limits.calls, counts


def test_a_step_walks_over_no_module_and_enters_no_range_of_a_profiler_that_is_off() -> None:
    for counts in counts_of(["--use-distributed-optimizer"]):
        assert counts.calls_of("named_modules", "named_parameters", "_named_members", "named_children") == 0, counts
        ranges = [place for place in counts.calls.elements() if place[0].endswith("autograd/profiler.py")]
        # Opened by torch's DataLoader.
        assert sum(name == "__enter__" for _, name in ranges) == 1, counts
        assert counts.calls_of("get_world_size", "get_process_group_ranks") == 0, counts


def test_more_layers_cost_the_same_messages_and_reads() -> None:
    one, two = (counts_of(["--num-layers", number])[0] for number in ("1", "2"))
    assert one.collectives == two.collectives and _reads(one) == _reads(two)


def _reads(counts: StepCounts) -> Counter[str]:
    reads: Counter[str] = Counter()
    for (path, name), count in counts.reads.items():
        reads[name] += 0 if path.startswith(ON_HOST) else count
    return +reads
