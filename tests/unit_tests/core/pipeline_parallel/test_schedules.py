"""Schedules as lists of actions, and their execution: order, loss scaling, and gradients of many microbatches."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch

from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.runner import ScheduleRunner
from megatron.core.pipeline_parallel.schedule import (
    Action,
    ActionKind,
    Pair,
    forward_only,
    one_forward_one_backward,
    validate_schedule,
)
from megatron.core.pipeline_parallel.sync_callables import SyncCallables
from megatron.core.process_groups_config import ProcessGroupCollection


class Linear(torch.nn.Linear):
    """A linear model with a configuration."""

    def __init__(self) -> None:
        super().__init__(3, 1, bias=False, dtype=torch.float64)
        self.config = ModelParallelConfig()


def forward_step(data_iterator: Iterator[torch.Tensor], model: torch.nn.Module) -> Any:
    """Returns the output and a function for its sum of squares over a batch of varying size."""
    output = model(next(data_iterator))
    count = torch.tensor(float(output.shape[0]))
    return output, lambda out: (out.square().sum(), count, {"loss": torch.stack([out.square().sum().detach(), count])})


def batches() -> list[torch.Tensor]:
    return [torch.randn(size, 3, dtype=torch.float64) for size in (2, 5, 1)]


def run(model: torch.nn.Module, data: list[torch.Tensor], **options: Any) -> Any:
    forward_backward = get_forward_backward_func()
    common = {"forward_step_func": forward_step, "model": [model]}
    return forward_backward(**common, data_iterator=iter(data), num_microbatches=len(data), **options)


def test_no_pipelining_holds_one_microbatch_at_a_time() -> None:
    actions = one_forward_one_backward(0, 1, num_microbatches=3)
    validate_schedule(actions)
    assert [str(action) for action in actions] == ["F0.0", "B0.0", "F0.1", "B0.1", "F0.2", "B0.2"]
    assert [str(action) for action in forward_only(actions)] == ["F0.0", "F0.1", "F0.2"]
    paired = one_forward_one_backward(0, 1, num_microbatches=3, paired=True)
    validate_schedule(paired)
    assert [str(step) for step in paired] == ["F0.0", "B0.0+F0.1", "B0.1+F0.2", "B0.2"]
    assert forward_only(paired) == forward_only(actions)


@pytest.mark.parametrize("kinds", ["B", "BF", "FF", "FBB"])
def test_impossible_orders_are_refused(kinds: str) -> None:
    with pytest.raises(ValueError, match="schedule runs"):
        validate_schedule([Action(ActionKind(kind), 0, 0) for kind in kinds])


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        ("F1B0", "schedule pairs F0.1.B0.0: must be a backward and a forward"),
        ("B0B1", "schedule pairs B0.0.B0.1: must be a backward and a forward"),
        ("B1F1", "schedule pairs B0.1.F0.1: the backward needs what the forward computes"),
        ("B1F2", "schedule runs B0.1 before F0.1"),
        ("B0F0", "schedule pairs B0.0.F0.0"),
    ],
)
def test_impossible_pairs_are_refused(pair: str, message: str) -> None:
    first, second = (Action(ActionKind(kind), 0, int(number)) for kind, number in (pair[:2], pair[2:]))
    with pytest.raises(ValueError, match=message):
        validate_schedule([Action(ActionKind.FORWARD, 0, 0), Pair(first, second)])


def test_an_impossible_schedule_is_refused_before_anything_runs() -> None:
    model, data = Linear(), batches()
    arguments: dict[str, Any] = {"forward_step": forward_step, "data_iterators": [iter(data)], "num_microbatches": 3}
    communicator = P2PCommunicator(None, model.config)
    runner = ScheduleRunner(model=[model], config=model.config, communicator=communicator, **arguments)
    with pytest.raises(ValueError, match="schedule runs F0.0 twice"):
        runner.run([*one_forward_one_backward(0, 1, num_microbatches=1), Action(ActionKind.FORWARD, 0, 0)])
    assert runner.reports == [] and model.weight.grad is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"decoder_seq_length": 3, "seq_length": 4}, "decoder_seq_length is 3"),
        ({"adjust_tensor_shapes_fn": print}, "adjust_tensor_shapes_fn is .*stages exchange tensors of one shape"),
        ({"force_all_reduce": True}, "force_all_reduce is True"),
        ({"p2p_communicator": object()}, "p2p_communicator is object: must be P2PCommunicator"),
        ({"collect_non_loss_data": True}, "collect_non_loss_data is True"),
        ({"data_iterator": [None, None]}, "data_iterator has 2 iterators for 1 model chunks"),
        ({"model": [Linear(), Linear()], "data_iterator": [None, None]}, "2 model chunks were given"),
    ],
)
def test_keywords_that_nothing_would_honour_are_refused(options: dict[str, Any], message: str) -> None:
    arguments = {"forward_step_func": forward_step, "model": Linear(), "data_iterator": None, "num_microbatches": 1}
    with pytest.raises(ValueError, match=message):
        get_forward_backward_func()(**{**arguments, "first_val_step": True, **options})
    with pytest.raises(TypeError, match="unexpected keyword arguments: modle"):
        get_forward_backward_func()(**arguments, modle=None)


def test_gradients_are_the_mean_over_microbatches_of_token_means() -> None:
    model, data = Linear(), batches()
    scaled: list[torch.Tensor] = []
    model.config.grad_scale_func = lambda loss: loss * 8
    model.set_aux_loss_scale = scaled.append
    reports = run(model, data)
    expected = sum(model(batch).square().mean() for batch in data) / 3 * 8
    (gradient,) = torch.autograd.grad(expected, [model.weight])
    assert model.weight.grad is not None
    torch.testing.assert_close(model.weight.grad, gradient, rtol=1e-12, atol=0)
    assert [report["loss"][1].item() for report in reports] == [2, 5, 1]
    assert [float(scale) for scale in scaled] == [8 / 3]


def test_per_token_loss_leaves_the_division_to_the_finalizer() -> None:
    model, data = Linear(), batches()
    finalized: list[Any] = []
    model.config.calculate_per_token_loss = True
    model.config.finalize_model_grads_func = lambda chunks, tokens: finalized.append((chunks, tokens))
    scaled: list[torch.Tensor] = []
    model.set_aux_loss_scale = scaled.append
    run(model, data)
    (gradient,) = torch.autograd.grad(sum(model(batch).square().sum() for batch in data), [model.weight])
    assert model.weight.grad is not None
    torch.testing.assert_close(model.weight.grad, gradient, rtol=1e-12, atol=0)
    assert finalized[0][0] == [model] and finalized[0][1].item() == 8
    assert [float(scale) for scale in scaled] == [1.0]


@contextmanager
def deferring(events: list[str]) -> Iterator[None]:
    events.append("defer")
    yield
    events.append("allow")


def test_reduction_is_deferred_until_the_last_backward() -> None:
    events: list[str] = []
    model = Linear()
    model.config.no_sync_func = no_sync = partial(deferring, events)
    model.register_forward_hook(lambda *_: events.append("forward"))
    model.weight.register_post_accumulate_grad_hook(lambda _: events.append("backward"))
    run(model, batches())
    assert events == ["defer", *["forward", "backward"] * 2, "forward", "allow", "backward"]
    events.clear()
    model.config.no_sync_func = [no_sync]
    model.config.grad_sync_func = lambda parameters: events.append(f"reduce {len(list(parameters))}")
    model.config.param_sync_func = [lambda parameters: events.append("gather")]
    run(model, batches())
    assert events == ["defer", "gather", *["forward", "backward"] * 3, "allow", "reduce 1"]
    model.config.param_sync_func = [print, print]
    with pytest.raises(ValueError, match="param_sync_func has 2 callables for 1 model chunks"):
        run(model, batches())


def test_reductions_are_no_longer_deferred_after_an_error_in_a_pass() -> None:
    def fail(*_: Any) -> None:
        raise ArithmeticError

    events: list[str] = []
    model = Linear()
    model.config.no_sync_func = partial(deferring, events)
    model.register_forward_hook(fail)
    with pytest.raises(ArithmeticError):
        run(model, batches())
    assert events == ["defer", "allow"]


def test_one_callable_defers_the_reductions_of_several_chunks() -> None:
    events: list[str] = []
    chunks = [Linear(), Linear()]
    passes = [Action(kind, chunk, 0) for kind in (ActionKind.FORWARD, ActionKind.BACKWARD) for chunk in (0, 1)]
    chunks[0].config.no_sync_func = partial(deferring, events)
    for reduces, expected in (
        (False, ["defer", "F0", "F1", "allow", "B0", "defer", "allow", "B1"]),
        (True, ["defer", "F0", "F1", "B0", "allow", "reduce", "defer", "B1", "allow", "reduce"]),
    ):
        chunks[0].config.grad_sync_func = [lambda _: events.append("reduce")] * 2 if reduces else None
        sync = SyncCallables(chunks[0].config, chunks, actions=passes)
        events.clear()
        sync.begin()
        for step in passes:
            sync.before(step)
            events.append(f"{step.kind.name[0]}{step.chunk}")
            sync.after(step)
        assert events == expected


def test_parameters_of_a_chunk_are_gathered_from_the_first_forward_of_the_one_before() -> None:
    events: list[str] = []
    chunks = [Linear() for _ in range(4)]
    chunks[0].config.param_sync_func = [lambda _, n=n: events.append(f"gather {n}") for n in range(4)]
    passes = [Action(ActionKind.FORWARD, chunk, microbatch) for microbatch in (0, 1) for chunk in range(4)]
    sync = SyncCallables(chunks[0].config, chunks, actions=passes)
    sync.begin()
    for step in passes:
        sync.before(step)
        events.append(f"F{step.chunk}")
        sync.after(step)
    forwards = ["F0", "F1", "F2", "F3"]
    assert events == ["gather 0", "gather 1", "F0", "gather 2", "F1", "gather 3", "F2", "F3", *forwards]


def test_evaluation_makes_no_gradients() -> None:
    model = Linear()
    assert len(run(model, batches(), forward_only=True)) == 3
    assert model.weight.grad is None


def test_the_groups_of_a_schedule_choose_it_and_are_passed_on() -> None:
    model, data = Linear(), batches()
    chosen = get_forward_backward_func(schedule_pg_collection=ProcessGroupCollection())
    communicator = P2PCommunicator(None, model.config)
    reports = chosen(
        forward_step_func=forward_step,
        model=model,
        data_iterator=iter(data),
        num_microbatches=3,
        p2p_communicator=communicator,
        force_all_reduce=False,
    )
    assert len(reports) == 3 and model.weight.grad is not None


def test_weight_passes_refuse_a_wrapper_whose_hooks_would_run_too_early() -> None:
    # Its constructor would require a process group.
    wrapper = torch.nn.parallel.DistributedDataParallel
    wrapped, config = wrapper.__new__(wrapper), Linear().config
    torch.nn.Module.__init__(wrapped)
    wrapped.module = Linear()
    arguments: dict[str, Any] = {"forward_step": forward_step, "data_iterators": [iter(batches())]}
    communicator = P2PCommunicator(None, config)
    runner = ScheduleRunner(model=[wrapped], config=config, communicator=communicator, num_microbatches=1, **arguments)
    with pytest.raises(ValueError, match="torch's DistributedDataParallel, .* --pipeline-schedule"):
        runner.run([Action(kind, 0, 0) for kind in ActionKind])
