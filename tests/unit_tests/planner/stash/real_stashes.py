"""Runs the real stashes of all ranks in one process, with given counts of expert rows. Contains no tests.

Buffers, pages and schedules equal those of the planned run.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import pretrain_gpt
from megatron.core.num_microbatches_calculator import destroy_num_microbatches_calculator
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.paged_stash import EventKind
from megatron.core.transformer.moe.paged_stash.sizing import LearnedSizes
from megatron.core.transformer.moe.paged_stash.stash_order import layer_of
from megatron.core.transformer.moe.static_rows import order_by_expert
from megatron.planner.fake_ranks import fake_rank
from megatron.training.command_line.parser import RunArguments
from megatron.training.command_line.published import publish_run
from megatron.training.config import RunConfig
from megatron.training.setup import model_parts, setup_batches
from megatron.training.step import expert_memory
from megatron.training.step.expert_memory import ExpertMemory, StepFigures, build_expert_memory


class RealRank:
    """One rank's experts and their memory. stage, group, number: its position among the ranks with experts."""

    def __init__(self, run_config: RunConfig, stage: int, *, group: int, number: int) -> None:
        self.stage, self.group, self.number = stage, group, number
        transformer, world_size = run_config.transformer, run_config.launch.world_size
        self._size = transformer.expert_model_parallel_size
        self._tokens = run_config.data.seq_length * run_config.training.micro_batch_size
        rank = stage * (world_size // transformer.pipeline_model_parallel_size) + group * self._size + number
        with fake_rank(run_config, rank, world_size=world_size) as groups:
            publish_run(RunArguments(run_config))
            setup_batches(run_config)
            model = [chunk for chunk, _ in model_parts(pretrain_gpt.model_provider, run_config.transformer)]
            found = build_expert_memory(
                model,
                seq_length=run_config.data.seq_length,
                micro_batch_size=run_config.training.micro_batch_size,
                groups=groups,
            )
            publish_run(None)
            destroy_num_microbatches_calculator()
        assert found is not None
        self.memory: ExpertMemory = found
        layers = [part for chunk in model for part in chunk.modules() if isinstance(part, MoELayer)]
        self._layers = {layer.router.layer_number: layer for layer in layers}
        # check_effect expects all stages of the run. A stage whose backward directly follows forward stashes nothing.
        with patch.object(expert_memory, "check_effect"):
            self.memory.prepare(
                LearnedSizes(), num_microbatches=run_config.batch_sizes().final_num_microbatches, pp_group=None
            )

    def run_step(self, tokens: dict[int, np.ndarray]) -> None:
        """Runs the passes of a step in schedule order. tokens: layer -> [M, R, E], as in a trace."""
        num_microbatches = len(next(iter(tokens.values())))
        self.memory.begin_step(num_microbatches=num_microbatches, forward_only=False)
        outputs: dict[tuple[int, int], Tensor] = {}
        for event in self.memory.needs.events:
            layer = layer_of(event.name)
            if event.kind is EventKind.BACKWARD:
                outputs.pop((layer, event.instance)).sum().backward()
            else:
                outputs[layer, event.instance] = self._forward(layer, tokens[layer][event.instance])

    def _forward(self, number: int, tokens: np.ndarray) -> Tensor:
        """Returns the output of the tokens with an expert. tokens: [R, E]."""
        layer = self._layers[number]
        own = tokens[self.group * self._size : (self.group + 1) * self._size].sum(axis=0)
        per_expert = torch.tensor(own.reshape(self._size, -1)[self.number], dtype=torch.int64)
        max_rows = layer.token_dispatcher.budget.rows_of_rank(self._tokens)
        num_tokens, num_experts = int(per_expert.sum()), len(per_expert)
        # One choice for each of as many tokens as the buffer has rows; those beyond the first ones have no expert.
        chosen = torch.arange(num_experts).repeat_interleave(per_expert)[:max_rows]
        chosen = F.pad(chosen, (0, max_rows - len(chosen)), value=num_experts)
        alignment = layer.token_dispatcher.budget.alignment
        order = order_by_expert(chosen.view(-1, 1), num_experts, capacity=max_rows, alignment=alignment)
        tokens = torch.randn(max_rows, layer.config.hidden_size, requires_grad=True)
        weights = torch.rand(max_rows, 1, requires_grad=True)
        assert layer.expert_step is not None
        stashed = layer.expert_step.begin_experts(number, order.num_rows, max_rows=max_rows)
        output: Tensor = layer.experts(tokens, order.rows_per_group, weights, order=order, stashed=stashed)[0]
        return output[:num_tokens]


def run_together(ranks: Sequence[RealRank], tokens: dict[int, np.ndarray]) -> tuple[list[StepFigures], int]:
    """Retries a step of all ranks until none overflows. Returns the results of each rank and the number of retries."""
    discards = 0
    while True:
        for rank in ranks:
            rank.run_step(tokens)
        if not any(rank.memory.overflow_flags().any() for rank in ranks):
            break
        discards += 1
        with _gathering([rank.memory._needed_sizes_sync() for rank in ranks]):
            for rank in ranks:
                rank.memory.grow_sync(iteration=discards)
    for rank in ranks:
        rank.memory.end_step()
    figures = [rank.memory.last_step for rank in ranks]
    return [one for one in figures if one is not None], discards


@contextmanager
def _gathering(everyone: list) -> Iterator[None]:
    with patch.object(expert_memory, "gather_objects", lambda own, group: everyone):
        yield
