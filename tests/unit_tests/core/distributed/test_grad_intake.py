"""Gradient hooks call their owner, and keep only the given objects alive."""

import gc

import torch
from torch import nn

from megatron.core.distributed.grad_intake import ParamHooks, is_watched


class Owner:
    def __init__(self, *, kept: bool) -> None:
        self.seen: list[nn.Parameter] = []
        self.hooks = ParamHooks(self.add, kept=self if kept else None)

    def add(self, param: nn.Parameter) -> None:
        assert param.grad is not None
        self.seen.append(param)


def backward_of(*params: nn.Parameter) -> None:
    sum(param.square().sum() for param in params).backward()


def test_the_owner_gets_each_parameter_until_release() -> None:
    params = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))]
    owner = Owner(kept=False)
    owner.hooks.watch(params)
    backward_of(*params)
    assert {*owner.seen} == {*params} and all(map(is_watched, params))
    owner.hooks.release()
    backward_of(*params)
    assert len(owner.seen) == 2 and not any(map(is_watched, params))


def test_hooks_keep_no_owner_alive_unless_told_to() -> None:
    param, kept_for = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    Owner(kept=False).hooks.watch([param])
    owner = Owner(kept=True)
    owner.hooks.watch([kept_for])
    seen = owner.seen
    del owner
    gc.collect()
    assert not is_watched(param) and is_watched(kept_for)
    backward_of(param, kept_for)
    assert param.grad is not None and seen == [kept_for]


def test_hooks_of_others_are_not_taken_for_ours() -> None:
    param = nn.Parameter(torch.ones(2))
    param.register_post_accumulate_grad_hook(lambda param: None)
    assert not is_watched(param)
