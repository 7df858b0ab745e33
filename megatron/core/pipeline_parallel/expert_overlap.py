"""ExpertOverlap: what computes while the MoE layers of a step exchange rows, as the configuration selects.

With overlap_moe_expert_parallel_comm the passes of a pair take turns (pass_turns.py). With delay_wgrad_compute, or
overlap_dispatch_backward_with_experts_wgrad for experts only, a backward computes its weight gradients during its
exchanges (tensor_parallel/weight_grads.py).

[Note: what covers an exchange] In a pair, a layer's exchanges alternate with these parts of its backward and of the
other pass's forward, from top to bottom:

    forward                          backward
                                     launch the gradients of combine
    router, launch dispatch
                                     experts, launch the gradients of dispatch
    experts, launch combine
                                     router, attention

Layers with static buffers send row counts with the rows. In dropless layers the host must read them before the rows are
sent. This exchange needs a cover as well, so pairs with such layers always hold weight gradients:

    forward                          backward
                                     launch the gradients of combine
    router, launch row counts
                                     held weight gradients
    launch dispatch
                                     experts, launch the gradients of dispatch, held weight gradients
    experts, launch combine
                                     router, attention

A stage's last layer holds no weight gradients yet, so the experts cover its row counts, and their weight gradients
cover the rows:

    forward                          backward
                                     launch the gradients of combine
    router, launch row counts
                                     experts, launch the gradients of dispatch
    launch dispatch
                                     held weight gradients
    experts, launch combine
                                     router, attention

In the other layers this would be slower. Dispatch is launched after the gradients of dispatch and shares the link with
them, so the backward would have to cover two exchanges with the weight gradients of its experts.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, Protocol, runtime_checkable

from torch import nn
from torch.distributed.tensor import DTensor

from megatron.core.model_parallel_config import ExpertOverlapConfig
from megatron.core.pipeline_parallel.pass_turns import PassTurns
from megatron.core.tensor_parallel.weight_grads import WeightGradQueue


@runtime_checkable
class ExchangesRows(Protocol):
    """A MoE layer.

    experts: the module whose rows are exchanged. exchanges_dropless_rows: see TransformerConfig.
    """

    experts: nn.Module
    exchanges_dropless_rows: bool

    def set_exchange_cover(self, cover: Any) -> None:
        """Sets the object whose methods run during the layer's exchanges, see ExchangeCover in moe/dispatch.py."""


@contextmanager
def expert_overlap(
    config: ExpertOverlapConfig, model: Sequence[nn.Module], *, queue: WeightGradQueue | None = None
) -> Iterator["ExpertOverlap | None"]:
    """Context that covers the exchanges of `model`; None if the configuration selects nothing.

    queue: serves all parameters already, for weight passes of the schedule.
    """
    if not (
        config.overlap_moe_expert_parallel_comm
        or config.delay_wgrad_compute
        or config.overlap_dispatch_backward_with_experts_wgrad
    ):
        yield None
        return
    overlap = ExpertOverlap(config)
    try:
        overlap.open(model, queue)
        yield overlap
    finally:
        overlap.close()


class ExpertOverlap:
    """Covers the exchanges of MoE layers between `open` and `close`. Implements ExchangeCover of moe/dispatch.py.

    A copy of the model, made in a step, has None instead: its passes wait for their exchanges.
    """

    def __init__(self, config: ExpertOverlapConfig) -> None:
        self._config, self._layers = config, list[ExchangesRows]()
        self._turns = PassTurns() if config.overlap_moe_expert_parallel_comm else None
        # Holds weight gradients during exchanges, and is released at the end if it is this object's own.
        self._queue: WeightGradQueue | None = None
        self._own_queue: WeightGradQueue | None = None
        # Whether the turn that covers row counts is still to come, after the experts, because no weight gradients came
        # before them. The same on all ranks, whatever hooks make one of them compute its weight gradients immediately.
        self._delays_turn = False

    def open(self, model: Sequence[nn.Module], queue: WeightGradQueue | None = None) -> None:
        """Covers the exchanges of the chunks of `model`. Raises ValueError if a weight's gradients cannot be held.

        queue: see expert_overlap.
        """
        if self._turns is not None and any(
            isinstance(param, DTensor) for chunk in model for param in chunk.parameters()
        ):
            raise ValueError(
                "overlap_moe_expert_parallel_comm is True, but parameters are DTensors, as in "
                "TorchFullyShardedDataParallel: the backward of one micro-batch would release parameters that the "
                "forward of another still uses, so omit --overlap-moe-expert-parallel-comm, or --use-torch-fsdp2"
            )
        layers = [
            (name, module)
            for chunk in model
            for name, module in chunk.named_modules()
            if isinstance(module, ExchangesRows)
        ]
        # See [Note: what covers an exchange].
        needs_queue = self._turns is not None and any(layer.exchanges_dropless_rows for _, layer in layers)
        if queue is not None:
            self._queue = queue if self._config.delay_wgrad_compute or needs_queue else None
        elif self._config.delay_wgrad_compute or needs_queue:
            given = "delay-wgrad-compute" if self._config.delay_wgrad_compute else "overlap-moe-expert-parallel-comm"
            self._queue = self._own_queue = WeightGradQueue(f"--{given}")
            for chunk in model:
                self._queue.serve(chunk.named_parameters())
        elif self._config.overlap_dispatch_backward_with_experts_wgrad:
            self._queue = self._own_queue = WeightGradQueue("--overlap-dispatch-backward-with-experts-wgrad")
            for name, layer in layers:
                self._queue.serve(layer.experts.named_parameters(prefix=f"{name}.experts"))
        for _, layer in layers:
            layer.set_exchange_cover(self)
            self._layers.append(layer)

    def close(self) -> None:
        """Leaves the layers as they were."""
        for layer in self._layers:
            layer.set_exchange_cover(None)
        if self._own_queue is not None:
            self._own_queue.release()
        if self._turns is not None:
            self._turns.close()

    def __reduce__(self) -> Any:
        """Makes deepcopy and pickle replace this object by None."""
        return _nothing, ()

    def run_backward(self, backward: Callable[[], None]) -> None:
        """Runs a backward that holds its weight gradients until its next exchange."""
        with nullcontext() if self._queue is None else self._queue.holding():
            backward()

    def run_pair(self, backward: Callable[[], None], forward: Callable[[], None]) -> None:
        """Runs the passes of a pair in turns."""
        assert self._turns is not None, "only overlap_moe_expert_parallel_comm makes pairs"
        self._turns.run_pair(partial(self.run_backward, backward), forward)

    # See [Note: what covers an exchange].

    def before_counts(self) -> None:
        """Hands over while row counts are exchanged."""
        self._hand_over()

    def before_rows(self) -> None:
        """Hands over while rows are exchanged."""
        self._hand_over()

    def before_row_gradients(self, *, follows_counts: bool) -> None:
        """Computes held weight gradients, and hands over, while gradients of rows are exchanged."""
        if self._queue is not None:
            if follows_counts:
                self._delays_turn = self._queue.num_delivered == 0
                if not self._delays_turn:
                    self._hand_over()
            elif self._delays_turn:
                self._delays_turn = False
                self._hand_over()
            self._queue.run()
        self._hand_over()

    def _hand_over(self) -> None:
        if self._turns is not None:
            self._turns.hand_over()


def _nothing() -> None:
    pass
