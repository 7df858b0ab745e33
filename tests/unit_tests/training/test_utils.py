"""Tests of helpers that scripts import by name. test_document_borders.py compares masks and positions."""

import argparse

import torch
import torch.distributed as dist

from megatron.core.parallel_state import destroy_model_parallel, initialize_model_parallel
from megatron.training.arguments import parse_args
from megatron.training.utils import average_losses_across_data_parallel_group, get_blend_and_blend_per_split
from tests.harness import run_on_ranks


def average_of_ranks() -> list[float]:
    initialize_model_parallel()
    losses = [torch.tensor(float(dist.get_rank())), torch.tensor([2.0])]
    averaged = average_losses_across_data_parallel_group(losses)
    destroy_model_parallel()
    return averaged.tolist()


def test_losses_are_averaged_over_ranks() -> None:
    assert run_on_ranks(average_of_ranks, 3) == [[1.0, 2.0]] * 3


def test_blends_of_the_command_line() -> None:
    def blends(*words: str) -> tuple:
        args: argparse.Namespace = parse_args(argv=list(words))
        return get_blend_and_blend_per_split(args)

    assert blends("--mock-data") == (None, None)
    assert blends("--data-path", "2", "a") == ((["a"], [2.0]), None)
    assert blends("--train-data-path", "a", "--test-data-path", "b") == (None, [(["a"], None), None, (["b"], None)])
