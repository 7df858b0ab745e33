"""LateBuffer: a buffer of parameters that stay in their own memory until they are told to move in.

What is collected and sent of their gradients meanwhile is transient_grads.py's.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from megatron.core.dense_memory import shaped_view
from megatron.core.distributed.flat_buffer import BufferKind, BufferSettings
from megatron.core.distributed.transient_buffer import MemoryPolicy, ParamMemory, TransientBuffer


class LateBuffer(TransientBuffer):
    """A TransientBuffer whose flat parameters, where `memory` asks for these, are allocated by `move_in`.

    Where buffers are made behind a first backward the model has whole gradients: a second copy of all parameters, for
    as long as they are moved, has room when these are reduced and freed.
    """

    def __init__(
        self,
        kind: BufferKind,
        named_params: Sequence[tuple[str, nn.Parameter]],
        *,
        settings: BufferSettings,
        memory: MemoryPolicy,
    ) -> None:
        super().__init__(kind, named_params, settings=settings, memory=replace(memory, params=ParamMemory.OWN))
        self._asked = memory

    @torch.no_grad()
    def move_in(self) -> None:
        """Makes parameters views of param_data, if they are to be; each frees the memory it had."""
        if self._asked.params is self.memory.params:
            return
        self.memory = self._asked
        device = self.slots[0].param.device
        self.param_data = torch.zeros(self.layout.numel, dtype=self.kind.param_dtype, device=device)
        for slot in self.slots:
            place = shaped_view(self.param_data[slot.span.start : slot.span.end], slot.param)
            place.copy_(slot.param.detach())
            # The parameter object stays, and with it hooks, ties and whoever holds it.
            slot.param.data = place
