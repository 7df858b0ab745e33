"""Router choices are recorded and replayed, in forward and in recomputed layers."""

import copy
import gc
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from tests.unit_tests.core.models.small_models import LLAMA_LIKE, loss_of, small_config, small_model

RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


@pytest.fixture(autouse=True)
def no_other_routers() -> Iterator[None]:
    gc.collect()
    assert RouterReplay.instances() == []
    yield


def build(**fields: object) -> torch.nn.Module:
    return small_model(
        small_config(num_moe_experts=4, moe_router_topk=2, moe_enable_routing_replay=True, **LLAMA_LIKE, **fields)
    )


def routers(model: torch.nn.Module) -> list[torch.nn.Module]:
    return [layer.mlp.router for layer in model.decoder.layers]


@pytest.mark.parametrize("kind", ["softmax", "losses", "sigmoid", "sinkhorn"])
def test_replay_gives_the_recorded_experts_after_weights_changed(kind: str) -> None:
    fields = {
        "losses": {"moe_aux_loss_coeff": 0.1},
        "sigmoid": {"moe_router_score_function": "sigmoid"},
        "sinkhorn": {"moe_router_load_balancing_type": "sinkhorn"},
    }
    model = build(**fields.get(kind, {}))
    RouterReplay.set_global_router_replay_action(RouterReplayAction.RECORD)
    plain = loss_of(model)
    recorded = RouterReplay.get_recorded_data()
    assert [tuple(one.shape)[1] for one in recorded] == [2, 2]
    seen: list[Tensor] = []
    for router in routers(model):
        with torch.no_grad():
            router.weight.neg_()
        router.register_forward_hook(lambda module, args, out: seen.append(out))
    RouterReplay.clear_global_router_replay_action()
    loss_of(model)
    assert not torch.equal(seen[0].indices, recorded[0])
    seen.clear()
    RouterReplay.set_replay_data([one.int() for one in recorded])
    RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    loss = loss_of(model)
    for found, wanted in zip(seen, recorded, strict=True):
        assert torch.equal(found.indices, wanted)
    assert loss.item() != plain.item(), "weights must come from the current scores"
    loss.backward()
    assert all(router.weight.grad.abs().sum() > 0 for router in routers(model))


def test_recomputed_layers_choose_what_their_forward_chose() -> None:
    plain, model = build(), build(**RECOMPUTE)
    model.load_state_dict(plain.state_dict())
    forced = [torch.arange(2).expand(len(one), 2) + 1 for one in _recorded(plain)]
    for chosen in (plain, model):
        other = model if chosen is plain else plain
        for router in routers(other):
            router.router_replay.clear_router_replay_action()
        for router, indices in zip(routers(chosen), forced, strict=True):
            router.router_replay.set_target_indices(indices)
            router.router_replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        loss = loss_of(chosen)
        for router in routers(chosen):
            # Targets of a different microbatch, which backward must not use.
            router.router_replay.set_target_indices(torch.zeros(1, 2, dtype=torch.int64))
            router.router_replay.set_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)
        loss.backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=0)


def _recorded(model: torch.nn.Module) -> list[Tensor]:
    for router in routers(model):
        router.router_replay.set_router_replay_action(RouterReplayAction.RECORD)
    with torch.no_grad():
        loss_of(model)
    found = [router.router_replay.get_recorded_indices() for router in routers(model)]
    RouterReplay.clear_global_indices()
    assert all(router.router_replay.get_recorded_indices() is None for router in routers(model))
    return found


def test_wrong_uses_are_named() -> None:
    model = build()
    with pytest.raises(ValueError, match="has 1 tensors: must contain one for each of the 2 routers"):
        RouterReplay.set_replay_data([torch.zeros(4, 2, dtype=torch.int64)])
    with pytest.raises(ValueError, match="router_replay_action is 'record': must be one of RouterReplayAction.RECORD"):
        RouterReplay.set_global_router_replay_action("record")
    with pytest.raises(ValueError, match=r"topk_indices has shape \[4\] and dtype torch.int64: must be"):
        routers(model)[0].router_replay.set_target_indices(torch.zeros(4, dtype=torch.int64))
    RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    with pytest.raises(ValueError, match="there are no target indices: call set_replay_data first"):
        loss_of(model)
    RouterReplay.set_replay_data([torch.zeros(3, 2, dtype=torch.int64)] * 2)
    with pytest.raises(ValueError, match="the target indices cover 3 tokens"):
        loss_of(model)
    RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)
    with pytest.raises(ValueError, match="REPLAY_BACKWARD in a forward that recomputes no earlier one"):
        loss_of(model)


def test_a_copy_of_a_model_has_instances_of_its_own_and_none_outlives_its_model() -> None:
    model = build()
    twin = copy.deepcopy(model)
    assert len(RouterReplay.instances()) == 4
    assert routers(twin)[0].router_replay is not routers(model)[0].router_replay
    del model, twin
    gc.collect()
    assert RouterReplay.instances() == []
