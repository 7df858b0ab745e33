"""P2PCommunicator: sends activations and gradients between the stages of a pipeline, in batches.

transfers.py decides when each transfer is posted. Stages agree on the shape of tensors once, so shapes are not sent.
"""

from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.device import default_device
from megatron.core.device.trace_ranges import trace_range
from megatron.core.group_collectives import gather_objects, is_fake
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.pipeline_parallel.transfers import Direction, Transfer
from megatron.core.pipeline_parallel.validation import MAX_BATCHES
from megatron.core.process_groups_config import group_rank, group_size


class P2PCommunicator:
    """Executes the transfers of one stage in one step.

    Sent tensors are kept alive until their batch completes; at most MAX_BATCHES batches are in flight.
    """

    def __init__(self, pp_group: dist.ProcessGroup | None, config: ModelParallelConfig) -> None:
        self.pp_group = pp_group
        # Dtype of all tensors that stages exchange.
        self.dtype = config.pipeline_dtype or config.hidden_dtype
        self.stage, self.num_stages = group_rank(pp_group), group_size(pp_group)
        # A fake backend writes nothing to the tensors that it receives.
        self._new_tensor = torch.zeros if is_fake(pp_group) else torch.empty
        self._shape: tuple[int, ...] = ()
        self._batches: deque[_Batch] = deque()
        self._received: dict[Transfer, tuple[_Batch, Tensor]] = {}

    @property
    def is_pp_first_stage(self) -> bool:
        """Whether this rank is the first stage."""
        return self.stage == 0

    @property
    def is_pp_last_stage(self) -> bool:
        """Whether this rank is the last stage."""
        return self.stage == self.num_stages - 1

    @property
    def total_stages(self) -> int:
        """Number of stages."""
        return self.num_stages

    @property
    def current_stage(self) -> int:
        """Stage of this rank, from 0."""
        return self.stage

    def agree_on_shape(self, shape: tuple[int, ...]) -> None:
        """Sets the shape of all tensors that stages exchange. Collective over the stages, once for each shape.

        Raises ValueError on all stages if the shapes differ.
        """
        if self.num_stages > 1:
            _check_same_everywhere(self.pp_group, (shape, str(self.dtype)))
        self._shape = shape

    @trace_range("P2PCommunicator.post")
    def post(self, transfers: Sequence[Transfer], outputs: dict[Transfer, Tensor], *, device: torch.device) -> None:
        """Starts the transfers together. outputs: tensors to send, [*agreed shape], dtype pipeline_dtype.

        Raises ValueError if an output has the wrong shape or dtype.
        """
        while len(self._batches) >= MAX_BATCHES:
            self._batches.popleft().wait()
        tensors = []
        for transfer in transfers:
            if transfer.direction is Direction.SEND:
                tensors.append(self.checked(outputs[transfer], transfer))
            else:
                tensors.append(self._new_tensor(self._shape, dtype=self.dtype, device=device))
        batch = _Batch(
            [
                dist.P2POp(
                    dist.isend if transfer.direction is Direction.SEND else dist.irecv,
                    tensor,
                    group=self.pp_group,
                    group_peer=transfer.peer,
                )
                for transfer, tensor in zip(transfers, tensors, strict=True)
            ]
        )
        self._batches.append(batch)
        for transfer, tensor in zip(transfers, tensors, strict=True):
            if transfer.direction is Direction.RECEIVE:
                self._received[transfer] = (batch, tensor)

    @trace_range("P2PCommunicator.receive")
    def receive(self, transfer: Transfer) -> Tensor:
        """Waits for a posted transfer and returns its tensor: [*agreed shape], dtype pipeline_dtype."""
        batch, tensor = self._received.pop(transfer)
        batch.wait()
        return tensor

    def finish(self) -> None:
        """Waits for all posted transfers."""
        while self._batches:
            self._batches.popleft().wait()

    # For custom schedules, as written by Megatron's users. Each call returns when its transfers are complete. Sent
    # tensors have any shape, received tensors have [*shape], and both have dtype pipeline_dtype. Lists of tensors are
    # accepted and returned. At the ends of the pipeline, None replaces each received tensor.

    def recv_forward(self, tensor_shapes: Any, is_first_stage: bool) -> Any:
        """Receives the previous stage's outputs, through which gradients flow back.

        tensor_shapes: one shape, or a list.
        """
        return self._with_neighbour(-1, shapes=tensor_shapes, is_end=is_first_stage)

    def recv_backward(self, tensor_shapes: Any, is_last_stage: bool) -> Any:
        """Receives the gradients of this stage's outputs from the next stage. tensor_shapes: one shape, or a list."""
        return self._with_neighbour(1, shapes=tensor_shapes, is_end=is_last_stage)

    def send_forward(self, output_tensors: Any, is_last_stage: bool) -> None:
        """Sends outputs to the next stage. output_tensors: one tensor, or a list."""
        self._with_neighbour(1, sent=output_tensors, is_end=is_last_stage)

    def send_backward(self, input_tensor_grads: Any, is_first_stage: bool) -> None:
        """Sends gradients of inputs to the previous stage. input_tensor_grads: one tensor, or a list."""
        self._with_neighbour(-1, sent=input_tensor_grads, is_end=is_first_stage)

    def send_forward_recv_backward(self, output_tensors: Any, tensor_shapes: Any, is_last_stage: bool) -> Any:
        """Runs send_forward and recv_backward concurrently."""
        return self._with_neighbour(1, sent=output_tensors, shapes=tensor_shapes, is_end=is_last_stage)

    def send_backward_recv_forward(self, input_tensor_grads: Any, tensor_shapes: Any, is_first_stage: bool) -> Any:
        """Runs send_backward and recv_forward concurrently."""
        return self._with_neighbour(-1, sent=input_tensor_grads, shapes=tensor_shapes, is_end=is_first_stage)

    def send_forward_recv_forward(
        self, output_tensor: Tensor | None, recv_prev: bool, tensor_shape: Any, overlap_p2p_comm: bool = False
    ) -> Any:
        """Sends an output to the next stage and receives the previous stage's output; the first stage follows the last.

        output_tensor: any shape, dtype pipeline_dtype, or None to send nothing. recv_prev: whether to receive a tensor.
        Returns the received tensor, [*tensor_shape], or None. overlap_p2p_comm: returns immediately, with a list of
        work handles that the caller must wait for before it uses the tensors.
        """
        batch, arrived = self._exchange(to_next=output_tensor, from_previous=recv_prev, shape=tensor_shape)
        return self._returned(batch, arrived[0], is_running=overlap_p2p_comm)

    def send_backward_recv_backward(
        self, input_tensor_grad: Tensor | None, recv_next: bool, tensor_shape: Any, overlap_p2p_comm: bool = False
    ) -> Any:
        """Sends a gradient to the previous stage and receives the next stage's gradient; see send_forward_recv_forward.

        input_tensor_grad: any shape, dtype pipeline_dtype, or None.
        """
        batch, arrived = self._exchange(to_previous=input_tensor_grad, from_next=recv_next, shape=tensor_shape)
        return self._returned(batch, arrived[1], is_running=overlap_p2p_comm)

    def send_forward_backward_recv_forward_backward(
        self,
        output_tensor: Tensor | None,
        input_tensor_grad: Tensor | None,
        recv_prev: bool,
        recv_next: bool,
        tensor_shape: Any,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Sends an output and a gradient to the neighbors, and receives an output and a gradient from them.

        output_tensor, input_tensor_grad: any shape, dtype pipeline_dtype, or None to send nothing. Returns the previous
        stage's output and the next stage's gradient, [*tensor_shape], or None for each.
        """
        batch, arrived = self._exchange(
            to_next=output_tensor,
            to_previous=input_tensor_grad,
            from_previous=recv_prev,
            from_next=recv_next,
            shape=tensor_shape,
        )
        batch.wait()
        return arrived

    def _exchange(
        self,
        *,
        shape: Any,
        to_next: Tensor | None = None,
        to_previous: Tensor | None = None,
        from_previous: bool = False,
        from_next: bool = False,
    ) -> "tuple[_Batch, tuple[Tensor | None, Tensor | None]]":
        """Starts transfers with both neighbors.

        Returns the batch of transfers, and the tensors being received from the previous and the next stage.
        """
        following, before = (self.stage + 1) % self.num_stages, (self.stage - 1) % self.num_stages
        arrived = [
            self._new_tensor(tuple(shape), dtype=self.dtype, device=default_device()) if wanted else None
            for wanted in (from_previous, from_next)
        ]
        # With two stages both neighbors are the same rank, which must receive in the order in which this rank sends.
        operations = [
            dist.P2POp(dist.isend, tensor.contiguous(), group=self.pp_group, group_peer=peer)
            for tensor, peer in ((to_next, following), (to_previous, before))
            if tensor is not None
        ]
        operations += [
            dist.P2POp(dist.irecv, tensor, group=self.pp_group, group_peer=peer)
            for tensor, peer in zip(arrived, (before, following), strict=True)
            if tensor is not None
        ]
        batch = _Batch(operations)
        for tensor in arrived:
            if tensor is not None:
                tensor.requires_grad_()
        return batch, (arrived[0], arrived[1])

    @staticmethod
    def _returned(batch: "_Batch", tensor: Tensor | None, *, is_running: bool) -> Any:
        if is_running:
            return tensor, [batch]
        batch.wait()
        return tensor

    def _with_neighbour(self, distance: int, *, is_end: bool, sent: Any = (), shapes: Any = ()) -> Any:
        sending = list(sent) if isinstance(sent, (list, tuple)) else [sent]
        is_single = len(shapes) > 0 and isinstance(shapes[0], int)
        wanted = [shapes] if is_single else list(shapes)
        if is_end:
            return None if is_single else [None] * len(wanted)
        arrived = [self._new_tensor(tuple(shape), dtype=self.dtype, device=default_device()) for shape in wanted]
        peer = (self.stage + distance) % self.num_stages
        operations = [dist.P2POp(dist.isend, t.contiguous(), group=self.pp_group, group_peer=peer) for t in sending]
        operations += [dist.P2POp(dist.irecv, t, group=self.pp_group, group_peer=peer) for t in arrived]
        _Batch(operations).wait()
        for tensor in arrived:
            # Leaves, in which the gradients for the neighbor accumulate.
            tensor.requires_grad_()
        return arrived[0] if is_single else arrived

    def checked(self, output: Tensor, transfer: Transfer) -> Tensor:
        """Returns the output as it is sent: [*agreed shape], dtype pipeline_dtype, contiguous.

        Raises ValueError for another shape or dtype.
        """
        if tuple(output.shape) != self._shape or output.dtype != self.dtype:
            raise ValueError(
                f"pipeline stage {self.stage} would {transfer}: {output.dtype} of shape {list(output.shape)}, but "
                f"stages exchange {self.dtype} of shape {list(self._shape)} (sequence, micro-batch, hidden): check "
                "seq_length and micro_batch_size, and that the model returns its hidden states"
            )
        return output.contiguous()


class _Batch:
    """Transfers started together."""

    def __init__(self, operations: list[dist.P2POp]) -> None:
        # Kept alive, because a backend may read a tensor until its work completes.
        self._operations = operations
        self._works = dist.batch_isend_irecv(operations) if operations else []

    def wait(self) -> None:
        """Waits until all transfers have completed; does nothing on the second call."""
        for work in self._works:
            work.wait()
        self._works, self._operations = [], []


@lru_cache(maxsize=8)
def _check_same_everywhere(group: dist.ProcessGroup, value: tuple[tuple[int, ...], str]) -> None:
    """Raises ValueError unless all stages pass the same value. Collective.

    The first call also creates NCCL's communicator, which a batch between two stages could not do.
    """
    everyone = gather_objects(value, group)
    if any(other != value for other in everyone):
        raise ValueError(
            f"pipeline stages would exchange different tensors: {', '.join(map(str, everyone))} (shape and dtype by "
            "stage): seq_length, micro_batch_size and hidden_size must be the same on all stages"
        )
