"""Tests of expert memory over several steps: pages match the plan, pools grow, and results do not change."""

import copy
from copy import deepcopy
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron.core.device.streams import SideStream
from megatron.core.group_collectives import RemoteRankError
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.dispatch_static import MoEStaticTokenDispatcher
from megatron.core.transformer.moe.expert_step import ExpertStep
from megatron.core.transformer.moe.paged_stash import Counter, group_memory
from megatron.core.transformer.moe.paged_stash.arithmetic import GroupRows, resident_groups, simulate
from megatron.core.transformer.moe.paged_stash.sizing import RESERVE_STEPS, LearnedSizes, stash_footprint
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.step.expert_memory import (
    ExpertMemory,
    ExpertSchedule,
    Shortfall,
    build_expert_memory,
    describe_shortfalls,
)
from megatron.training.step.step_runner import ExpertOverflowError
from tests.harness import run_on_ranks

TOKENS = 32
PAGES = {"moe_paged_stash": True, "moe_paged_stash_page_size": 8}
FP8 = {"fp8": "e4m3", "fp8_recipe": "mxfp8", "bf16": True, "params_dtype": torch.bfloat16}
MIXED = {**FP8, "first_last_layers_bf16": True}
COMPUTE, DTYPE = "moe_paged_stash_compute", "moe_paged_stash_dtype"


@dataclass
class Toy:
    """Four expert layers in one process, where each routing has T x K rows."""

    model: GPTModel
    memory: ExpertMemory

    @classmethod
    def of(cls, num_microbatches: int = 2, *, balanced_rows: int = 2 * TOKENS, **settings: Any) -> "Toy":
        """Builds the model. balanced_rows: fewer than T x K if a rank's experts receive more than their share."""
        torch.manual_seed(3)
        shape = {"num_layers": 4, "hidden_size": 32, "num_attention_heads": 2, "num_moe_experts": 4}
        experts = {"moe_ffn_hidden_size": 48, "moe_grouped_gemm": True, "moe_expert_rank_capacity_factor": 1.5}
        swiglu = {"gated_linear_unit": True, "activation_func": F.silu, "add_bias_linear": False}
        stash = settings if "moe_paged_stash" in settings else PAGES | settings
        config = TransformerConfig(**shape, **experts, **swiglu, **stash, hidden_dropout=0.0, attention_dropout=0.0)
        model = GPTModel(config, get_gpt_decoder_block_spec(config), vocab_size=64, max_sequence_length=TOKENS)
        memory = build_expert_memory([model], seq_length=TOKENS, micro_batch_size=1, groups=ProcessGroupCollection())
        assert memory is not None
        memory._balanced_rows = balanced_rows
        memory.prepare(LearnedSizes(), num_microbatches=num_microbatches, pp_group=None)
        return cls(model, memory)

    def passes(self, num_microbatches: int) -> list[bool]:
        """Runs forward and backward; returns the overflow flags."""
        self.memory.begin_step(num_microbatches=num_microbatches, forward_only=False)
        self.model.zero_grad()
        batches = torch.randint(0, 64, (num_microbatches, 1, TOKENS + 1), generator=torch.Generator().manual_seed(5))

        def forward_step(iterator: Any, model: GPTModel) -> Any:
            tokens = next(iterator)
            losses = model(tokens[:, :-1], torch.arange(TOKENS)[None], None, labels=tokens[:, 1:])
            return losses, lambda output: (output.mean(), {})

        forward_backward_no_pipelining(
            forward_step_func=forward_step,
            data_iterator=iter(batches),
            model=self.model,
            num_microbatches=num_microbatches,
        )
        return [flag > 0 for flag in self.memory.overflow_flags().tolist()]

    def step(self, num_microbatches: int = 2) -> int:
        """Runs a step with retries; returns the number of attempts."""
        for runs in range(1, 9):
            if not any(self.passes(num_microbatches)):
                self.memory.end_step()
                return runs
            self.memory.grow_sync(iteration=1)
        raise AssertionError("growing the pool does not help")

    @property
    def grads(self) -> list[Tensor]:
        return [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize(
    ("settings", "runs", "dropped"),
    [
        ({}, 1, set()),
        ({"moe_paged_stash_buffer_size_factor_cuda": 0.0, "moe_paged_stash_buffer_size_factor_cpu": 1.0}, 1, set()),
        ({"moe_paged_stash_buffer_size_factor_cuda": 0.8}, 1, {Counter.DROPPED_GATE_UP}),
        ({"moe_paged_stash_buffer_size_factor_cuda": 0.3}, 1, {Counter.DROPPED_GATE_UP}),
        ({"moe_paged_stash_buffer_size_factor_cuda": 0.1}, 2, {Counter.DROPPED_GATE_UP}),
        ({"moe_paged_stash_buffer_size_factor_cuda": 0.5, "moe_paged_stash_overflow_policy": "rerun"}, 2, set()),
        ({"recompute_granularity": "selective", "recompute_modules": ["moe_act"]}, 1, set()),
    ],
)
def test_gradients_are_those_of_whole_buffers_and_counts_those_of_the_plan(
    settings: dict[str, Any], runs: int, dropped: set[Counter]
) -> None:
    toy, whole = Toy.of(**settings), Toy.of(moe_paged_stash=False)
    assert (toy.step(), whole.step()) == (runs, 1)
    for ours, theirs in zip(toy.grads, whole.grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    figures = toy.memory.last_step
    assert figures is not None and figures.layout is not None and figures.num_discards == runs - 1
    resident = resident_groups(figures.events)
    planned = simulate(
        figures.events,
        lambda group: GroupRows((), 0) if group in resident else GroupRows(figures.specs[group[0]], 2 * TOKENS),
        layout=figures.layout,
        reserve=figures.reserve,
    )
    assert planned.counters == figures.counters
    assert {
        counter for counter in (Counter.DROPPED_ACT, Counter.DROPPED_GATE_UP) if figures.counters[counter]
    } == dropped, "act is never stashed"
    assert toy.memory.stash is not None
    toy.memory.stash.pool.check_integrity_sync()


@pytest.mark.parametrize("precision", [FP8, MIXED])
@pytest.mark.parametrize("stash", [{COMPUTE: "pages"}, {COMPUTE: "copies"}, {DTYPE: "mxfp8"}])
def test_rows_in_8_bits_are_planned_in_the_sizes_that_a_step_stashes(
    precision: dict[str, Any], stash: dict[str, Any]
) -> None:
    toy, whole = Toy.of(**precision, **stash), Toy.of(**precision, moe_paged_stash=False)
    stashed = toy.memory.stash
    assert stashed is not None
    planned = dict(stashed._reserve._stashed)
    toy.step()
    assert whole.step() == 1
    if DTYPE not in stash:
        for ours, theirs in zip(toy.grads, whole.grads, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    stashed = toy.memory.stash
    assert stashed is not None
    found = {group: ([*specs], rows) for group, (specs, rows) in stashed._reserve._stashed.items()}
    assert found == {group: ([*specs], rows) for group, (specs, rows) in planned.items()}
    # The last layer is never stashed, so the first layer has the largest groups.
    footprint = stash_footprint(toy.memory._config, toy.memory.needs, layout=stashed.pool.layout)
    assert footprint.working_set_bytes == stashed.footprint().working_set_bytes


def test_more_microbatches_keep_the_pool_and_a_measured_peak_sets_it() -> None:
    toy = Toy.of(1, moe_paged_stash_buffer_size_factor_cuda=-2.0)
    assert [toy.step(count) for count in (1, 3, 2, 1)] == [1] * 4
    figures = toy.memory.last_step
    assert figures is not None and figures.layout is not None
    assert figures.layout.device_pages == 2 * figures.pages_wanted == 2 * figures.balanced_pages
    # Slightly more than 1.5 x. In a buffer with a whole number of rows, the rows may have fitted.
    toy.passes(1)
    toy.memory.step.factor_needed.fill_(1.51)
    toy.memory.end_step()
    assert toy.memory.last_step is not figures and toy.memory.last_step.factor_needed == 1.5
    assert toy.memory.learned_sync().rows_share == dict.fromkeys(range(1, 5), 1.0)


def test_a_stash_follows_what_runs_where_frozen_layers_keep_nothing() -> None:
    toy = Toy.of()
    toy.model.embedding.requires_grad_(False)
    toy.model.decoder.layers[0].requires_grad_(False)
    epochs = [(toy.step(), toy.memory.epoch) for _ in range(4)]
    # The plan is dropped after the first step. The order of the second step is used for the third.
    assert epochs == [(1, 1), (1, 1), (1, 2), (1, 2)]
    figures = toy.memory.last_step
    assert figures is not None
    assert figures.counters[Counter.DROPPED_GATE_UP] == 0
    assert figures.counters[Counter.PLANNED_PAGES] > 0


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, "F1 F2 F3 F4 B4 F1 B3 F2 B2 F3 B1 F4 B4 B3 B2 B1"),
        # The forward still passes through the layers whose groups are recomputed, and which stash nothing.
        (
            {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2},
            "F3 F4 B4 B3 F3 F4 B4 B3",
        ),
    ],
)
def test_the_groups_of_a_pair_are_planned_in_turns(settings: dict[str, Any], expected: str) -> None:
    chunks = [Toy.of(**settings).model]
    config = copy.copy(chunks[0].config)
    config.overlap_moe_expert_parallel_comm = True
    schedule = ExpertSchedule(chunks, ProcessGroupCollection(), config=config)
    events = [f"{event.kind.value}{event.name.removeprefix('layer ')}" for event in schedule.events(2)]
    assert " ".join(events) == expected


def test_lengths_that_come_again_find_their_stashes_and_only_growth_ends_an_epoch() -> None:
    toy = Toy.of()
    memory, seen, grads = toy.memory, [], []
    for count in (2, 4, 2, 4):
        assert toy.step(count) == 1
        seen.append(memory.stash)
        grads.append([grad.clone() for grad in toy.grads])
    assert seen[0] is seen[2] and seen[1] is seen[3] and seen[0] is not seen[1] and memory.epoch == 0
    torch.testing.assert_close(grads[2:], grads[:2], rtol=0, atol=0)
    memory.adopt(LearnedSizes(capacity_factor=2.0))
    assert toy.step(4) == toy.step(2) == 1 and memory.stash not in seen and memory.epoch == 1
    for count in (*range(1, 9), *range(1, 9)):
        memory.begin_step(num_microbatches=count, forward_only=False)
    assert memory.epoch == 1
    memory.begin_step(num_microbatches=9, forward_only=False)
    assert memory.epoch == 2, "a step of 1 microbatch would use a different stash"
    small = Toy.of(moe_paged_stash_buffer_size_factor_cuda=0.1)
    assert [(small.step(), small.memory.epoch) for _ in range(2)] == [(2, 1), (1, 1)]


def test_stashes_that_replace_each_other_share_two_streams() -> None:
    with patch.object(group_memory, "SideStream", wraps=group_memory.SideStream) as created:
        toy, streams = Toy.of(), set[tuple[SideStream, ...]]()
        for count in (2, 4, 2, 3):
            toy.step(count)
            assert toy.memory.stash is not None
            keeper = toy.memory.stash._keeper
            streams.add((keeper._stash_stream, keeper._restore_stream))
            if count == 3:
                break
            toy.memory.adopt(LearnedSizes(capacity_factor=1.6 + count / 10))
    assert len(streams) == 1 and created.call_count == 2


def test_dispatchers_reserve_memory_at_the_start_and_when_the_factor_grows() -> None:
    reserved = list[tuple[float, int, int]]()

    def noted(dispatcher: MoEStaticTokenDispatcher, num_tokens: int, *, row_bytes: int) -> None:
        reserved.append((dispatcher.budget.factor, num_tokens, row_bytes))

    with patch.object(MoEStaticTokenDispatcher, "reserve", noted):
        toy = Toy.of()
        toy.memory.release_graphs = lambda: reserved.append((0.0, 0, 0))
        toy.memory.adopt(LearnedSizes(capacity_factor=2.0))
    # Graphs that use the old memory are dropped first.
    assert reserved == 4 * [(1.5, TOKENS, 128)] + [(0.0, 0, 0)] + 4 * [(2.0, TOKENS, 128)]


def test_fuller_passes_change_the_reserve_in_place() -> None:
    toy, fresh, whole = Toy.of(balanced_rows=48), Toy.of(), Toy.of(moe_paged_stash=False)
    memory, stash = toy.memory, toy.memory.stash
    assert stash is not None and stash.reserved_share == 48 / 64
    before = stash.reserve
    memory.begin_step(num_microbatches=4, forward_only=False)
    other = memory.stash
    shares = []
    for count in (2, 4, 2):
        assert toy.step(count) == fresh.step(count) == whole.step(count) == 1
        torch.testing.assert_close(toy.grads, whole.grads, rtol=0, atol=0)
        shares.append(stash.reserved_share)
        assert memory.stash is (other if count == 4 else stash) and memory.epoch == 0
    # From the end of the first step on, all rows are expected.
    assert shares == [0.999] * 3 and other is not None and other.reserved_share == 0.999
    assert fresh.memory.stash is not None and before
    for one in (toy, fresh):
        one.memory.begin_step(num_microbatches=2, forward_only=False)
    assert stash.reserve == fresh.memory.stash.reserve != before
    for share in (0.0, 1.5):
        with pytest.raises(ValueError, match=f"share is {share}: must be above 0 and at most 1"):
            stash.set_reserved_share(share)


def test_the_first_steps_of_a_resumed_run_reserve_as_the_steps_before_its_checkpoint_did(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    toy = Toy.of(balanced_rows=TOKENS // 2, moe_paged_stash_buffer_size_factor_cuda=8.0)
    # Simulates passes with balanced rows, which fill a quarter of a buffer.
    monkeypatch.setattr(toy.memory, "_learn_rows", lambda rows: 1.0)
    toy.memory.prepare(LearnedSizes(rows_share={2: 3.0}, expert_ranks=1), num_microbatches=2, pp_group=None)
    shares = []
    for _ in range(RESERVE_STEPS + 1):
        assert toy.memory.stash is not None and toy.step() == 1
        shares.append(toy.memory.stash.reserved_share)
    assert shares == [0.75] * (RESERVE_STEPS - 1) + [0.25] * 2


def test_a_resumed_run_uses_grown_pools_only_for_rows_of_the_same_size() -> None:
    toy = Toy.of()
    assert toy.memory.stash is not None
    configured = toy.memory.stash.pool.layout.device_pages
    own = toy.memory.learned_sync()
    assert own.row_bytes == 4 * (32 + 2 * 48)
    for row_bytes in (0, own.row_bytes + 4 * 48, own.row_bytes):
        learned = LearnedSizes(device_factor=2.2, rows_share={2: 1.0}, expert_ranks=1, row_bytes=row_bytes)
        lines = toy.memory.prepare(learned, num_microbatches=2, pp_group=None)
        is_used = row_bytes == own.row_bytes
        assert toy.memory.stash.pool.layout.device_pages == (2 * configured if is_used else configured)
        assert sum("pools start with the configured sizes" in line for line in lines) == (not is_used)
        assert toy.memory.learned_sync().rows_share == {2: 1.0}


def test_a_step_without_pages_is_an_error_where_the_policy_says_so() -> None:
    toy = Toy.of(moe_paged_stash_buffer_size_factor_cuda=0.1, moe_paged_stash_overflow_policy="error")
    assert toy.passes(2) == [False, True]
    with pytest.raises(ExpertOverflowError, match="rank 0.*--moe-paged-stash-buffer-size-factor-cuda"):
        toy.memory.grow_sync(iteration=7)
    with torch.no_grad():
        before = toy.memory.last_step
        toy.memory.begin_step(num_microbatches=1, forward_only=True)
        toy.model(torch.zeros(1, TOKENS, dtype=torch.int64), torch.arange(TOKENS)[None], None)
        toy.memory.end_step()
    assert toy.memory.last_step is before and toy.memory.step.passes == []


def test_shortfalls_are_reported_once_with_their_ranks_and_the_largest_need() -> None:
    rows, pages = Shortfall(1.06, 1.01), Shortfall(90, 60, pages_for="inputs")
    line = describe_shortfalls([rows, None, rows._replace(needed=1.3), pages])
    assert line == (
        "ranks 0, 2: experts needed a capacity factor of up to 1.300, not 1.010; "
        "rank 3: no pages for inputs: 90 are needed at the same time, of 60 in the pool"
    )


def _refusal_of_pool() -> str:
    factor = 1e12 if dist.get_rank() == 1 else 1.0
    with pytest.raises((ValueError, RemoteRankError)) as caught:
        Toy.of(moe_paged_stash_buffer_size_factor_cuda=factor)
    return str(caught.value)


def test_a_pool_that_one_rank_refuses_is_refused_on_all_ranks() -> None:
    other, refusing = run_on_ranks(_refusal_of_pool, 2, timeout=60)
    assert refusing.startswith("--moe-paged-stash-buffer-size-factor-cuda requests") and "2**31" in refusing
    assert other == f"rank 1: {refusing}"


def _refusal_of_pages() -> str:
    takes_rows = patch("megatron.training.step.expert_memory.takes_order", lambda experts: dist.get_rank() == 0)
    with takes_rows, pytest.raises((ValueError, RemoteRankError)) as caught:
        Toy.of(moe_paged_stash_compute="pages", **PAGES)
    return str(caught.value)


def test_pages_for_experts_that_take_rows_are_refused_on_all_ranks() -> None:
    other, refusing = run_on_ranks(_refusal_of_pages, 2, timeout=60)
    assert refusing.startswith("--moe-paged-stash-compute is 'pages', but the experts of a layer are GroupedMLP")
    assert other == f"rank 1: {refusing}"


def test_a_model_without_a_trainer_keeps_nothing_from_forward_to_forward() -> None:
    toy = Toy.of()
    alone = deepcopy(toy.model)
    alone(torch.zeros(1, TOKENS, dtype=torch.int64), torch.arange(TOKENS)[None], None)
    steps = [part for part in alone.modules() if isinstance(part, ExpertStep)]
    assert steps and toy.memory.step not in steps
    assert all(not step.passes and len(step.rows) == 0 and step.stash is None for step in steps)
