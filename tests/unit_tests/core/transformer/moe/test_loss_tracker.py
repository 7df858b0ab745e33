"""Losses of all layers under Megatron's names, as read and logged by scripts."""

import copy
import gc
from collections.abc import Iterator
from unittest.mock import Mock

import pytest
import torch

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.loss_tracker import default_tracker
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from tests.unit_tests.core.models.small_models import LLAMA_LIKE, loss_of, small_config, small_model

GROUPS = ProcessGroupCollection()


@pytest.fixture(autouse=True)
def new_tracker() -> Iterator[None]:
    gc.collect()
    default_tracker.cache_clear()
    yield
    default_tracker.cache_clear()


def model_with_losses() -> torch.nn.Module:
    return small_model(small_config(num_moe_experts=4, moe_aux_loss_coeff=0.05, moe_z_loss_coeff=0.01, **LLAMA_LIKE))


def test_losses_of_routers_and_saved_ones_are_in_the_tracker_until_cleared() -> None:
    model = model_with_losses()
    for _ in range(2):
        loss_of(model)
    expected = model.aux_losses.sums[0].clone()
    moe_utils.save_to_aux_losses_tracker("own_loss", torch.tensor(3.0), 2, 3)
    moe_utils.save_to_aux_losses_tracker("own_loss", torch.tensor(4.0), None, 3)
    tracker = moe_utils.get_moe_layer_wise_logging_tracker()
    assert tracker.keys() == {"load_balancing_loss", "z_loss", "own_loss"}
    assert torch.equal(tracker["load_balancing_loss"]["values"], expected) and expected.min() > 1
    assert tracker["own_loss"]["values"].tolist() == [0, 3, 0] and tracker["own_loss"]["reduce_group"] is None
    moe_utils.clear_aux_losses_tracker()
    assert all((entry["values"] == 0).all() for entry in moe_utils.get_moe_layer_wise_logging_tracker().values())
    with pytest.raises(ValueError, match="layer_number is 4: must be between 1 and num_layers .3"):
        moe_utils.save_to_aux_losses_tracker("own_loss", torch.tensor(3.0), 4, 3)


def test_a_copy_of_a_model_is_tracked_and_has_recorded_nothing() -> None:
    model = model_with_losses()
    loss_of(model)
    expected = model.aux_losses.sums[0].clone()
    twin = copy.deepcopy(model)
    assert torch.equal(moe_utils.get_moe_layer_wise_logging_tracker()["load_balancing_loss"]["values"], expected)
    MoEAuxLossAutoScaler.set_loss_scale(torch.tensor(0.125))
    assert model.aux_losses.backward_scale.item() == twin.aux_losses.backward_scale.item() == 0.125
    loss_of(twin)
    both = moe_utils.get_moe_layer_wise_logging_tracker()["load_balancing_loss"]["values"]
    torch.testing.assert_close(both, 2 * expected)
    assert twin.bfloat16().aux_losses.sums.dtype == torch.float32


@pytest.mark.parametrize(("freq", "count"), [(None, 2), (2, 1), ([0, 1], 1)])
def test_metrics_are_means_over_layers_with_experts(freq: int | list[int] | None, count: int) -> None:
    model = model_with_losses()
    loss_of(model)
    sums = model.aux_losses.sums[0].clone()
    writer, wandb, totals = Mock(), Mock(), {"load_balancing_loss": torch.tensor(1.0)}
    moe_utils.track_moe_metrics(
        0.5,
        7,
        writer,
        wandb,
        totals,
        per_layer_logging=True,
        track_names="load_balancing_loss",
        num_layers=2,
        moe_layer_freq=freq,
        pg_collection=GROUPS,
    )
    mean = 0.5 * sums.sum().item() / count
    assert totals["load_balancing_loss"].item() == pytest.approx(1 + mean)
    logged = {call.args[0]: (call.args[1].item(), call.args[2]) for call in writer.add_scalar.call_args_list}
    assert logged["load_balancing_loss"] == (pytest.approx(mean), 7)
    assert logged["moe/load_balancing_loss_layer_1"] == (pytest.approx(0.5 * sums[1].item()), 7)
    assert len(logged) == wandb.log.call_count == 3 and model.aux_losses.sums.count_nonzero() == 0


def test_a_stage_without_experts_takes_part() -> None:
    totals: dict[str, torch.Tensor] = {}
    options = {"track_names": ["z_loss"], "num_layers": 4, "force_initialize": True, "pg_collection": GROUPS}
    moe_utils.track_moe_metrics(1.0, 1, total_loss_dict=totals, **options)
    assert totals == {"z_loss": 0}
    with pytest.raises(ValueError, match="force_initialize requires track_names and num_layers"):
        moe_utils.track_moe_metrics(1.0, 1, force_initialize=True, pg_collection=GROUPS)


def test_a_loss_of_a_plug_in_gets_the_scale_as_its_gradient() -> None:
    def attached() -> torch.Tensor:
        x = torch.ones(3, requires_grad=True)
        output = MoEAuxLossAutoScaler.apply(torch.zeros(2, requires_grad=True), (x * x).sum())
        assert torch.equal(output, torch.zeros(2))
        output.sum().backward()
        return x.grad

    assert attached().tolist() == [2, 2, 2]
    model = model_with_losses()
    MoEAuxLossAutoScaler.set_loss_scale(torch.tensor([4.0]))
    assert attached().tolist() == [8, 8, 8] and model.aux_losses.backward_scale.item() == 4
    model.set_aux_loss_scale(torch.tensor(0.5))  # simulates a schedule
    assert attached().tolist() == [1, 1, 1]
