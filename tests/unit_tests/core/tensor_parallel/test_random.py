"""Named random-number streams, and recomputed functions."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.tensor_parallel import (
    CheckpointWithoutOutput,
    checkpoint,
    get_all_rng_states,
    get_cuda_rng_tracker,
    get_data_parallel_rng_tracker_name,
    get_expert_parallel_rng_tracker_name,
    model_parallel_cuda_manual_seed,
)
from megatron.core.tensor_parallel.random import (
    CheckpointFunction,
)


def test_streams_go_on_where_they_were_and_leave_the_default_one_alone() -> None:
    tracker = get_cuda_rng_tracker(use_cudagraphable_rng=True)
    model_parallel_cuda_manual_seed(5)
    assert tracker.generators() == []
    with tracker.fork():
        whole = torch.rand(4)
    default = torch.rand(2)
    model_parallel_cuda_manual_seed(5)
    with tracker.fork():
        first = torch.rand(2)
    assert torch.equal(torch.rand(2), default)
    with tracker.fork(), pytest.raises(ValueError, match="no random-number stream 'other'"), tracker.fork("other"):
        pass
    with tracker.fork():
        assert torch.equal(torch.cat([first, torch.rand(2)]), whole)
    model_parallel_cuda_manual_seed(5, tp_rank=1)
    with tracker.fork():
        assert not torch.equal(torch.rand(4), whole)
    with pytest.raises(ValueError, match="te_rng_tracker is True: .*must be False"):
        model_parallel_cuda_manual_seed(5, True)
    with pytest.raises(ValueError, match="already exists"):
        tracker.add("model-parallel-rng", 1)


def noisy(x: Tensor, weight: Tensor, shift: float) -> Tensor:
    """Draws from both streams and saves intermediate results for backward."""
    with get_cuda_rng_tracker().fork():
        x = F.dropout(x, 0.5)
    return F.dropout(F.gelu(x * weight).exp(), 0.5) * shift


def through_checkpoint(x: Tensor, weight: Tensor, consumer: Tensor) -> Tensor:
    return checkpoint(noisy, False, x, weight, 2.0) @ consumer


def through_discarding(x: Tensor, weight: Tensor, consumer: Tensor) -> Tensor:
    part = CheckpointWithoutOutput()
    output = part.checkpoint(noisy, x, weight, 2.0)
    result = output @ consumer
    part.discard_output_and_register_recompute(result)
    assert not result.requires_grad or output.untyped_storage().nbytes() == 0
    return result


def through_function(x: Tensor, weight: Tensor, consumer: Tensor) -> Tensor:
    return CheckpointFunction.apply(noisy, False, x, weight, 2.0) @ consumer


@pytest.mark.parametrize("through", [through_checkpoint, through_discarding, through_function])
@pytest.mark.parametrize("frozen", [(), (0,), (1,), (2,), (0, 1), (0, 1, 2)])
def test_the_second_run_draws_the_same_numbers(through: Any, frozen: tuple[int, ...]) -> None:
    def gradients(function: Any) -> list[Any]:
        model_parallel_cuda_manual_seed(9)
        tensors = [torch.randn(8, 8, requires_grad=index not in frozen) for index in range(3)]
        results = [function(*tensors) for _ in range(2)]  # both forwards run before either backward
        if len(frozen) < 3:
            sum(result.sum() for result in results).backward()
        with get_cuda_rng_tracker().fork():
            stream = torch.rand(2)
        return [*results, *(tensor.grad for tensor in tensors if tensor.grad is not None), stream, torch.rand(2)]

    plain = gradients(lambda x, weight, consumer: noisy(x, weight, 2.0) @ consumer)
    torch.testing.assert_close(gradients(through), plain, rtol=0, atol=0)


def test_an_output_that_nobody_discards_an_identity_and_a_second_backward() -> None:
    x = torch.randn(4, requires_grad=True)
    kept, same = CheckpointWithoutOutput(), CheckpointWithoutOutput()
    (kept.checkpoint(torch.exp, x) * 2).sum().backward()
    torch.testing.assert_close(x.grad, 2 * x.detach().exp())
    output = same.checkpoint(lambda value: value, x) * 3
    same.discard_output_and_register_recompute(output)
    assert x.untyped_storage().nbytes() == x.nbytes
    twice = CheckpointWithoutOutput()
    result = twice.checkpoint(torch.exp, x).sum()
    result.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="can run only once"):
        result.backward()
    with pytest.raises(ValueError, match="distribute_saved_activations is True"):
        checkpoint(torch.exp, True, x)


def test_names_and_states_of_streams() -> None:
    tracker = get_cuda_rng_tracker(False, False, True)
    tracker.reset()
    assert not tracker.is_initialized()
    with pytest.raises(ValueError, match="there are no random-number streams"):
        get_all_rng_states()
    model_parallel_cuda_manual_seed(3, False, False, True, 1, 2, 0, force_reset_rng=True)
    names = {"model-parallel-rng", get_expert_parallel_rng_tracker_name(), get_data_parallel_rng_tracker_name()}
    assert set(get_all_rng_states()) == names and tracker.is_initialized()
    for one in ("gtp_remat_rank", "egtp_remat_world_size"):
        with pytest.raises(ValueError, match=f"model_parallel_cuda_manual_seed: {one} is 1"):
            model_parallel_cuda_manual_seed(3, **{one: 1})
    with pytest.raises(ValueError, match="is_inference_rng_tracker is True"):
        type(tracker)(False, True)


def test_a_reentrant_function_refuses_gradients_of_chosen_tensors() -> None:
    x = torch.randn(3, requires_grad=True)
    with pytest.raises(RuntimeError, match="call backward"):
        torch.autograd.grad(CheckpointFunction.apply(torch.exp, False, x).sum(), x)


@pytest.mark.parametrize("wrong", [{"fp8": True}, {"retain_input_tensors": True}, {"ckpt_manager": object()}])
def test_a_discarded_output_refuses_options_without_an_effect(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} is "):
        CheckpointWithoutOutput(**wrong)
