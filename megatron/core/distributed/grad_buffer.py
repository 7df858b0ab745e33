"""Gradients of many parameters back to back in one tensor, filled as backward produces them.

Knows no process group: plain_data_parallel.py reduces the storage.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from megatron.core.distributed.layout import Span
from megatron.core.tensor_parallel.param_attributes import set_main_grad


def lay_out(sizes: list[int]) -> list[Span]:
    """Places tensors of `sizes` elements one after the other, each start a multiple of ALIGNMENT."""
    # Padding behind each parameter, the last one too: shards and runs may then end at any parameter.
    spans: list[Span] = []
    for size in sizes:
        spans.append(Span(spans[-1].padded_end if spans else 0, size))
    return spans


@dataclass(frozen=True)
class GradEntry:
    """One parameter and its place; grad: [*parameter shape], the buffer's dtype, a view of the storage."""

    name: str
    param: nn.Parameter
    span: Span
    grad: torch.Tensor


class GradBuffer:
    """Standing gradients in `dtype`; a hook moves each new gradient in and frees autograd's own tensor.

    The first gradient after `clear` overwrites and later ones add, so that nothing is zeroed in advance and
    microbatches accumulate in `dtype` whatever the parameter's own. named_params: at least one, of one dtype. scale:
    factor of every gradient, applied in the pass that moves it. storage: [sum of padded sizes], `dtype`; each
    parameter's place in it is its `main_grad`. The parameters move into param_data: the same places, their dtype.
    is_expert: their gradients are summed over other ranks than the rest's.
    """

    is_sharded = False
    data_parallel_group = None

    def __init__(
        self,
        named_params: list[tuple[str, nn.Parameter]],
        dtype: torch.dtype,
        *,
        scale: float = 1.0,
        is_expert: bool = False,
    ):
        self.is_expert = is_expert
        spans = lay_out([param.numel() for _, param in named_params])
        # Zeros once: padding is never written again, so that sums over the storage are right.
        self.storage = torch.zeros(spans[-1].padded_end, dtype=dtype, device=named_params[0][1].device)
        self.entries = [
            GradEntry(name, param, span, self.storage[span.start : span.end].view(param.shape))
            for (name, param), span in zip(named_params, spans)
        ]
        self.grad_data = self.storage
        self.param_data = torch.zeros_like(self.storage, dtype=named_params[0][1].dtype)
        for entry in self.entries:
            view = self.param_data[entry.span.start : entry.span.end].view(entry.param.shape)
            view.copy_(entry.param.detach())
            # The parameter object stays, and with it hooks, ties and whoever holds it.
            entry.param.data = view
        # For the hook, which autograd hands the parameter alone.
        self._grads = {entry.param: entry.grad for entry in self.entries}
        self._scale = scale
        # Since `clear`. A parameter used twice in re-entrant backward passes may come twice.
        self._filled: set[nn.Parameter] = set()
        for entry in self.entries:
            # Hooks of the tensor, unlike those of its autograd node, survive module.to().
            entry.param.register_post_accumulate_grad_hook(self._take)
            set_main_grad(entry.param, entry.grad)

    def owned_spans(self) -> list[Span]:
        """What this rank steps: everything."""
        return [Span(0, self.storage.numel())]

    def clear(self) -> None:
        """Forgets all gradients; costs no pass over memory."""
        self._filled.clear()

    def fill_missing(self) -> None:
        """Makes the gradients of parameters that backward did not reach zero."""
        for param, grad in self._grads.items():
            # Only these are zeroed; the others have been overwritten.
            if param not in self._filled:
                grad.zero_()
                self._filled.add(param)

    def named_grads(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Each parameter's name and gradient: [*parameter shape], the buffer's dtype."""
        return ((entry.name, entry.grad) for entry in self.entries)

    def _take(self, param: torch.Tensor) -> None:
        assert isinstance(param, nn.Parameter) and param.grad is not None
        grad = self._grads[param]
        if param in self._filled:
            grad.add_(param.grad, alpha=self._scale)
        elif param.grad.dtype == grad.dtype:
            torch.mul(param.grad, self._scale, out=grad)
        else:
            # mul would round the product to the narrower type first.
            grad.copy_(param.grad).mul_(self._scale)
        self._filled.add(param)
        # Frees autograd's tensor while it is still in the cache, for the next one to take its place.
        param.grad = None
