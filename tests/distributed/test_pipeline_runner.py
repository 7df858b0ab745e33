"""Checks that pipeline stages in separate processes compute the same as one process for any microbatch count."""

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.utils import is_pp_first_stage, is_pp_last_stage
from megatron.core.pipeline_placement import placement_of
from megatron.core.process_groups_config import ProcessGroupCollection
from tests.harness import run_on_ranks

SEQ, BATCH, HIDDEN = 3, 2, 4


class Part(nn.Linear):
    """Part of a model of linear layers. All parts but the first receive their input through set_input_tensor."""

    def __init__(self, number: int, **options: Any) -> None:
        super().__init__(HIDDEN, HIDDEN, dtype=torch.float64)
        torch.manual_seed(number)
        nn.init.normal_(self.weight)
        nn.init.normal_(self.bias)
        self.config = ModelParallelConfig(params_dtype=torch.float64, **options)
        self.config.hidden_size = HIDDEN  # type: ignore[attr-defined]
        self.given: torch.Tensor | None = None

    def set_input_tensor(self, tensor: torch.Tensor) -> None:
        self.given = tensor

    def forward(self, data: torch.Tensor | None) -> torch.Tensor:
        given = data if self.given is None else self.given
        self.given = None
        return torch.tanh(super().forward(given))


def forward_step(iterator: Any, part: nn.Module) -> Any:
    output = part(None if iterator is None else next(iterator))
    return output, lambda out: (out.square().sum(), {"loss": out.detach().square().sum()})


def microbatches(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(SEQ, BATCH, HIDDEN, dtype=torch.float64, generator=generator) for _ in range(count)]


def run_stage(chunks: int, counts: list[int], overlap: bool, schedule: str = "1f1b") -> list[Any]:
    stage, stages = dist.get_rank(), dist.get_world_size()
    parts = placement_of(schedule, stages, chunks).parts_of(stage)
    found = []
    for count in counts:
        model = [Part(part, overlap_p2p_comm=overlap, pipeline_schedule=schedule) for part in parts]
        ended: list[int] = []
        model[0].config.finalize_model_grads_func = lambda parts, _, ended=ended: ended.append(len(parts))
        first = iter(microbatches(count)) if stage == 0 else None
        arguments: dict[str, Any] = {
            "forward_step_func": forward_step,
            "data_iterator": [first, *[None] * (chunks - 1)],
            "model": model,
            "num_microbatches": count,
            "seq_length": SEQ,
            "micro_batch_size": BATCH,
            "pg_collection": ProcessGroupCollection(pp=dist.group.WORLD),
        }
        reports = get_forward_backward_func(stages, chunks)(**arguments)
        assert ended == [chunks]
        arguments["data_iterator"][0] = iter(microbatches(count)) if stage == 0 else None
        evaluated = get_forward_backward_func(stages, chunks)(**arguments, forward_only=True)
        assert [r["loss"].item() for r in evaluated] == [r["loss"].item() for r in reports]
        grads = [part.weight.grad for part in model]
        found.append(([report["loss"].item() for report in reports], grads))
    return found


@pytest.mark.parametrize(
    ("stages", "chunks", "overlap", "schedule"),
    [(2, 1, True, "1f1b"), (3, 2, False, "1f1b"), (3, 2, True, "1f1b"), (3, 1, True, "zb-h1"), (3, 2, True, "zbv")],
)
def test_stages_give_the_gradients_of_one_process(stages: int, chunks: int, overlap: bool, schedule: str) -> None:
    counts, placement = [1, 2, 5], placement_of(schedule, stages, chunks)
    ranks = run_on_ranks(run_stage, stages, chunks, counts, overlap, schedule)
    for index, count in enumerate(counts):
        model = [Part(number) for number in range(stages * chunks)]
        losses = []
        for data in microbatches(count):
            for part in model:
                data = part(data)
            (data.square().sum() / count).backward()
            losses.append(data.square().sum().item())
        for stage, rank in enumerate(ranks):
            assert rank[index][0] == (pytest.approx(losses, rel=1e-12) if stage == placement.loss_stage else [])
            for chunk, gradient in enumerate(rank[index][1]):
                expected = model[placement.part_of(stage, chunk)].weight.grad
                torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-14)


def schedule_of_ones_own() -> tuple[float, torch.Tensor | None]:
    """Runs a custom schedule with one microbatch in the pipeline at a time; returns loss and gradient."""
    stage, group, shape = dist.get_rank(), dist.group.WORLD, (SEQ, BATCH, HIDDEN)
    part, first, last = Part(stage), is_pp_first_stage(group), is_pp_last_stage(group)
    stages, loss = P2PCommunicator(group, part.config), 0.0
    given = stages.recv_forward(shape, first)
    for number, data in enumerate(microbatches(2)):
        output = part(data if first else given)
        if number:
            (gradient,) = stages.send_forward_recv_backward([output.detach()], [shape], last)
        else:
            stages.send_forward(output.detach(), last)
            gradient = stages.recv_backward(shape, last)
        if last:
            loss, gradient = loss + output.square().sum().item(), output.detach()  # halved for two microbatches
        output.backward(gradient)
        back = None if first else given.grad
        given = stages.send_backward(back, first) if number else stages.send_backward_recv_forward(back, shape, first)
    return loss, part.weight.grad


def test_stages_may_be_driven_by_a_schedule_of_ones_own() -> None:
    expected = run_on_ranks(run_stage, 3, 1, [2], False)
    for (loss, gradient), [(losses, [wanted])] in zip(run_on_ranks(schedule_of_ones_own, 3), expected, strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=1e-12, atol=1e-14)
        assert loss == pytest.approx(sum(losses))


def different_shapes() -> None:
    part = Part(dist.get_rank())
    get_forward_backward_func(2)(
        forward_step_func=forward_step,
        data_iterator=None,
        model=part,
        num_microbatches=1,
        seq_length=SEQ + dist.get_rank(),
        micro_batch_size=BATCH,
        pg_collection=ProcessGroupCollection(pp=dist.group.WORLD),
    )


def test_stages_that_would_exchange_different_shapes_all_say_so() -> None:
    with pytest.raises(ValueError, match="stages would exchange different tensors"):
        run_on_ranks(different_shapes, 2)


class IgnoresInput(Part):
    """A last stage whose loss depends only on a parameter."""

    def forward(self, data: torch.Tensor | None) -> torch.Tensor:
        return torch.tanh(self.bias).expand(SEQ, BATCH, HIDDEN)


def _ignore_input() -> None:
    stage = dist.get_rank()
    part = Part(0) if stage == 0 else IgnoresInput(1)
    arguments: dict[str, Any] = {
        "forward_step_func": forward_step,
        "data_iterator": [iter(microbatches(3)) if stage == 0 else None],
        "model": [part],
        "num_microbatches": 3,
        "seq_length": SEQ,
        "micro_batch_size": BATCH,
        "pg_collection": ProcessGroupCollection(pp=dist.group.WORLD),
    }
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        get_forward_backward_func(2, 1)(**arguments)
    told = [str(one.message) for one in caught if "does not depend on the hidden states" in str(one.message)]
    assert len(told) == stage
    grad = part.weight.grad
    assert grad is None if stage == 1 else grad is not None and not grad.any()


def test_a_stage_that_ignores_its_input_gives_the_earlier_ones_gradients_of_zero() -> None:
    run_on_ranks(_ignore_input, 2)
