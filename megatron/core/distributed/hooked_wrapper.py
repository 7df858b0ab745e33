"""HookedWrapper: what wrappers that reduce gradients offer to users who want them as soon as they are reduced.

Which hook is due when is grad_hooks.py's, when a bucket is reduced the wrapper's.
"""

from collections.abc import Iterable

from torch import nn
from torch.utils.hooks import RemovableHandle

from megatron.core.distributed.grad_hooks import BucketHook, GradHooks, ParamHook, PostBackwardHook
from megatron.core.distributed.hand_out import GradConsumer, HandOut, StateProvider
from megatron.core.utils import ModelWrapper


class HookedWrapper(ModelWrapper):
    """A wrapper with hooks on reduced gradients; docs/hooks.md says when and in which order they run.

    All fire once in an iteration, on all ranks, after the backward that reduces (never in `no_sync`). Hooks that are on
    a parameter when it is wrapped are taken over, for its reduced gradient.
    """

    _hand_out: HandOut

    @property
    def grad_hooks(self) -> GradHooks:
        """The registry."""
        return self._hand_out.hooks

    def owned_shard(self, param: nn.Parameter) -> nn.Parameter:
        """What this rank owns and steps of a parameter, any shape and dtype: always the same object, whose `.grad` is
        set for the time of a post-accumulate hook. Of replicas it is the parameter itself; of ZeRO-1 and ZeRO-2 [n], a
        view; of FSDP2 the sharded parameter, a DTensor.
        """
        return self._hand_out.owned_shard(param)

    def set_consumer(self, consumer: GradConsumer | None) -> None:
        """Attaches an optimizer that takes each bucket after the hooks; None: takes it off."""
        self._hand_out.consumer = consumer

    def set_state_provider(self, provider: StateProvider) -> None:
        """Lets `ReadyBucket.states` say what an optimizer keeps: the last one given, for as long as it is in use."""
        self._hand_out.set_state_provider(provider)

    def hand_out_completed(self) -> None:
        """Lets hooks have gradients that were not complete when they were reduced: complete_model_grads says when."""
        self._hand_out.complete()

    def register_post_accumulate_grad_hook(self, param: nn.Parameter, hook: ParamHook) -> RemovableHandle:
        """Calls `hook(owned_shard(param))` when the gradient of a parameter, any shape and dtype, is reduced."""
        return self.grad_hooks.register_post_accumulate_grad_hook(param, hook)

    def register_bucket_ready_hook(self, hook: BucketHook) -> RemovableHandle:
        """Calls `hook` with each bucket when it is reduced, as a ReadyBucket."""
        return self.grad_hooks.register_bucket_ready_hook(hook)

    def register_post_backward_hook(
        self, params: nn.Parameter | Iterable[nn.Parameter], hook: PostBackwardHook
    ) -> RemovableHandle:
        """Calls `hook` when all of `params`, any shapes and dtypes, are reduced, with a list of ReadyBucket that hold
        these alone.
        """
        return self.grad_hooks.register_post_backward_hook(params, hook)
