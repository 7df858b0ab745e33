"""Tests passes that take turns on a modelled GPU, for whose backwards torch's autograd has a thread of its own."""

from typing import Any

from tests.device_model.host import on_modelled_gpus


def gradients_of_both() -> tuple[list[float], list[float]]:
    """Runs a forward that computes a gradient itself, between the turns of a backward; returns both gradients."""
    import torch

    from megatron.core.pipeline_parallel.pass_turns import PassTurns
    from tests.device_model.cuda_api import install

    install()
    turns, x = PassTurns(), torch.ones(2, device="cuda", requires_grad=True)
    inside: list[float] = []

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            turns.hand_over()
            return grad * 2

    def forward() -> None:
        y = torch.full((2,), 3.0, device="cuda", requires_grad=True)
        inside.extend(torch.autograd.grad((y * y).sum(), y)[0].tolist())
        turns.hand_over()

    turns.run_pair(lambda: Doubled.apply(x).sum().backward(), forward)
    turns.close()
    return inside, x.grad.tolist()


def test_a_backward_inside_the_forward_does_not_wait_for_the_backward_that_waits_for_its_turn() -> None:
    assert on_modelled_gpus(gradients_of_both, 1, timeout=60) == [([6.0, 6.0], [2.0, 2.0])]
