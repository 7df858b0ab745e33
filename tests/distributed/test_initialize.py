"""How ranks start together: what one of them was told differently ends all of them."""

import torch.distributed as dist

from megatron.core.agreement import RemoteRankError
from megatron.training.arguments import CommandLineError
from megatron.training.initialize import initialize_megatron
from tests.functional_tests.case import command_line, read_bases
from tests.harness import launch_on_ranks


def test_a_rank_with_another_flag_ends_all_ranks_with_its_name_and_both_values() -> None:
    argv = command_line({**read_bases()["dense"], "mock-data": True, "global-batch-size": 6})
    outcomes = launch_on_ranks(_start, 3, argv)
    text = "--hidden-size is 96 on this rank and 32 on rank 0: start all ranks with the same flags"
    errors = [(type(outcome.error), str(outcome.error)) for outcome in outcomes]
    remote = (RemoteRankError, f"rank 2: {text}")
    assert errors == [remote, remote, (CommandLineError, text)]


def _start(argv: list[str]) -> None:
    # Folders may have other names on another machine.
    own = {1: ["--tensorboard-dir", "/tmp/elsewhere"], 2: ["--hidden-size", "96"]}
    initialize_megatron(argv=[*argv, *own.get(dist.get_rank(), [])])
