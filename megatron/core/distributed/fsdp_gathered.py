"""GatheredParams: parameters that stay gathered over an update would be of before it; here they are let go in time."""

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from megatron.core.distributed.backward_end import is_in_backward
from megatron.core.distributed.fully_shard_state import ParamShard, fsdp_modules, reshard_all


class GatheredParams:
    """Watches the gathered parameters of a module that fully_shard has cut. shards: all there are, frozen ones too.

    [Note: kept gathered] Between microbatches, and after a forward without backward, parameters may stay gathered:
    root's do, and others with reshard_after_forward False or set_reshard_after_backward(False), whoever calls that. If
    shards change meanwhile, modules would go on with what was. So before each forward, of the module or of one inside
    that is called by itself, all is let go of if an optimizer of torch's has stepped since, or shards were written to
    (loaded weights, an optimizer of somebody's). The wrapper's own moments of update (`drop`) come on top, for kernels
    that nothing sees write. After a forward without autograd nothing is kept: what is done next to parameters, as by
    the one that builds an optimizer, is to be done to the shards.
    """

    def __init__(self, module: nn.Module, shards: Sequence[ParamShard]) -> None:
        self._module, self._shards = module, shards
        self._is_stale, self._is_in_forward = False, False
        self._versions = self._current_versions()
        # Before fully_shard's own, which asks for the parameters.
        module.register_forward_pre_hook(self._before_forward, prepend=True)
        module.register_forward_hook(self._after_forward, always_call=True)
        inside = [owner for shard in shards for owner, _ in shard.places]
        for other in dict.fromkeys([*fsdp_modules(module), *inside]):
            if other is not module:
                other.register_forward_pre_hook(self._before_one, prepend=True)
        # Of all optimizers: a foreign one is not known. It must not keep the model alive.
        hook = register_optimizer_step_post_hook(_StepHook(weakref.ref(self)))
        weakref.finalize(self, hook.remove)

    def drop(self) -> None:
        """Lets go of all gathered parameters."""
        reshard_all(self._module)
        self._is_stale, self._versions = False, self._current_versions()

    def note_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Records that a torch optimizer has stepped."""
        # Not at once: it may do so in a backward that has yet to read some of them.
        self._is_stale = True

    def _before_forward(self, *unused: Any) -> None:
        self._before_one()
        self._is_in_forward = True

    def _before_one(self, *unused: Any) -> None:
        # In a backward, activations are computed again: nothing was updated that is still read.
        if self._is_in_forward or is_in_backward():
            return
        if self._is_stale or self._versions != self._current_versions():
            self.drop()

    def _after_forward(self, *unused: Any) -> None:
        self._is_in_forward = False
        if not torch.is_grad_enabled() and not is_in_backward():
            self.drop()

    def _current_versions(self) -> list[int]:
        # Of the parameters, and of the flat tensors that their rows lie in.
        return [shard.version for shard in self._shards]


class _StepHook:
    def __init__(self, gathered: "weakref.ref[GatheredParams]") -> None:
        self._gathered = gathered

    def __call__(self, optimizer: torch.optim.Optimizer, *unused: Any) -> None:
        gathered = self._gathered()
        if gathered is not None:
            gathered.note_step(optimizer)
