"""All-to-all of rows through torch's symmetric memory: buffers of the GPUs of one machine that all of them can read.

A RowTransport of token_exchange.py; which rows go where is dispatch_static.py's matter. No GPU has run it yet.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.core.parallel_state import existing_process_groups
from megatron.core.process_groups_config import ProcessGroupCollection, group_size, or_alone
from megatron.core.transformer.moe.dispatch_static import MoEStaticAlltoAllTokenDispatcher, Wire
from megatron.core.transformer.moe.static_parts import padded_parts
from megatron.core.transformer.moe.token_exchange import RowsUnderWay
from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass(frozen=True)
class SymmetricTransport:
    """Each rank lays its rows into its buffer, and the others fetch their parts from there.

    All layers share the one buffer that torch keeps for `group`: rows are in it no longer than `launch` takes, whose
    two barriers are kernels of the current stream, so that the host waits for nobody. What comes has memory of its own,
    which autograd may keep.
    """

    group: ProcessGroup

    def launch(self, rows: Tensor, *, send: list[int] | None, receive: list[int] | None) -> RowsUnderWay:
        """Sends rows, [ranks x P, *], any dtype, P to each rank, through the shared buffer.

        A larger size than all before makes the buffer grow, for which the ranks' hosts wait for each other.
        """
        assert send is None and receive is None, "parts that symmetric memory carries have one size"
        received = rows.new_empty(rows.shape)
        part = rows.unflatten(0, (group_size(self.group), -1))[0]
        if part.numel():
            buffer = self.workspace(rows.nbytes)
            buffer.get_buffer(buffer.rank, rows.shape, rows.dtype).copy_(rows)
            # All ranks' rows are there.
            buffer.barrier()
            here = buffer.rank * part.numel()
            for sender, target in enumerate(received.chunk(group_size(self.group))):
                target.copy_(buffer.get_buffer(sender, part.shape, rows.dtype, here))
            # All ranks have fetched theirs: without it the next exchange could overwrite what another still reads.
            buffer.barrier()
        return RowsUnderWay(rows, received)

    def workspace(self, num_bytes: int) -> Any:
        """The group's buffer with at least so many bytes on each rank, as torch describes it. Collective when it grows.

        Raises RuntimeError where the GPUs of the group cannot read each other's memory.
        """
        return symmetric_memory.get_symm_mem_workspace(self.group.group_name, num_bytes)


def build_symmetric_dispatcher(
    num_local_experts: int,
    local_expert_indices: Sequence[int],
    *,
    config: TransformerConfig,
    pg_collection: ProcessGroupCollection | None = None,
    row_alignment: int = 1,
) -> MoEStaticAlltoAllTokenDispatcher:
    """Sends parts of one size, on any device, through memory that the ranks share. Collective.

    Raises ValueError where the group's GPUs have no such memory.
    """
    groups = pg_collection or existing_process_groups()
    transport = SymmetricTransport(or_alone(groups.tp_ep))
    try:
        transport.workspace(1)
    except RuntimeError as error:
        raise ValueError(
            f"moe_flex_dispatcher_backend is symm_mem, but the GPUs of the experts share no memory ({error}): give "
            "--moe-token-dispatcher-type alltoall"
        ) from error
    return MoEStaticAlltoAllTokenDispatcher(
        num_local_experts,
        local_expert_indices,
        config=config,
        pg_collection=pg_collection,
        row_alignment=row_alignment,
        # The host must not have to know how many rows a part has.
        wire=Wire(transport, padded_parts),
    )
