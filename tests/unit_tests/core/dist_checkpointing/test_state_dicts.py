"""save and load with Megatron-Core's arguments, and fields and constructors of its sharded items."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.core.dist_checkpointing import (
    CheckpointError,
    ShardedObject,
    ShardedTensor,
    StrictHandling,
    list_tensors,
    load,
    load_common_state_dict,
    load_content_metadata,
    save,
)

WEIGHT = torch.arange(12.0).reshape(3, 4)


def without_data() -> ShardedTensor:
    return dataclasses.replace(ShardedTensor.whole("w", WEIGHT), data=None)


def state_of(weight: torch.Tensor, step: Any = None) -> dict[str, Any]:
    return {
        "model": {"weight": ShardedTensor.from_rank_offsets("weight", weight, (0, 0, 1))},
        "groups": [{"state": ShardedTensor.whole("state", weight.clone()), "lr": 0.1}, {"betas": (0.9, 0.95)}],
        "step": ShardedObject("step", step),
        "args": {"layers": 2},
    }


def test_load_returns_the_saved_values_with_the_data_in_their_places(tmp_path: Path) -> None:
    save(state_of(WEIGHT, step=[1, 2]), tmp_path / "c", content_metadata={"kind": "test"})
    target = torch.zeros(3, 4)
    loaded = load({**state_of(target), "args": {"layers": 7}, "more": 1}, tmp_path / "c")
    assert loaded["model"]["weight"] is target and torch.equal(target, WEIGHT)
    assert torch.equal(loaded["groups"][0]["state"], WEIGHT) and loaded["groups"][0]["lr"] == 0.1
    assert loaded["groups"][1] == {"betas": [0.9, 0.95]} and loaded["step"] == [1, 2]
    assert loaded["args"] == {"layers": 2} and loaded.keys() == {"model", "groups", "step", "args"}
    assert load_content_metadata(tmp_path / "c") == {"kind": "test"}
    assert load_common_state_dict(tmp_path / "c")["args"] == {"layers": 2}


def test_items_without_data_are_allocated_by_load(tmp_path: Path) -> None:
    save({"w": ShardedTensor.whole("w", WEIGHT)}, tmp_path / "c")
    loaded = load({"w": without_data()}, tmp_path / "c")
    assert torch.equal(loaded["w"], WEIGHT)


def test_a_prepended_axis_stacks_layers(tmp_path: Path) -> None:
    layers = [torch.full((2, 3), float(number)) for number in range(4)]
    items = {
        str(number): ShardedTensor.from_rank_offsets("layers", layer, (0, number, 4), prepend_axis_num=1)
        for number, layer in enumerate(layers)
    }
    assert items["2"].global_shape == (4, 2, 3) and items["2"].global_offset == (2, 0, 0)
    save(items, tmp_path / "c")
    assert list_tensors(tmp_path / "c") == {"layers": ((4, 2, 3), torch.float32)}
    whole = load({"all": ShardedTensor.whole("layers", torch.zeros(4, 2, 3))}, tmp_path / "c")["all"]
    assert torch.equal(whole, torch.stack(layers))


def test_flat_ranges_of_a_part_are_saved_and_loaded(tmp_path: Path) -> None:
    flat = WEIGHT.reshape(-1)
    ranges = [slice(0, 5), slice(5, 12)]
    fields = (torch.float32, (3, 4), (3, 4), (0, 0))
    save({str(r.start): ShardedTensor("w", flat[r], *fields, flattened_range=r) for r in ranges}, tmp_path / "c")
    cut = slice(2, 7)
    part = ShardedTensor("w", torch.zeros(5), *fields, flattened_range=cut)
    assert torch.equal(load({"part": part}, tmp_path / "c")["part"], flat[cut])
    assert torch.equal(load({"w": ShardedTensor.whole("w", torch.zeros(3, 4))}, tmp_path / "c")["w"], WEIGHT)


def test_only_the_main_replica_is_written(tmp_path: Path) -> None:
    copies = {
        str(number): ShardedTensor.from_rank_offsets("w", WEIGHT + number, replica_id=(0, number)) for number in (1, 0)
    }
    save({**copies, "o": ShardedObject("o", 5), "p": ShardedObject("o", 6, replica_id=1)}, tmp_path / "c")
    loaded = load({"w": ShardedTensor.whole("w", torch.zeros(3, 4)), "o": ShardedObject("o", None)}, tmp_path / "c")
    assert torch.equal(loaded["w"], WEIGHT) and loaded["o"] == 5


def test_a_tensor_without_a_main_replica_is_refused(tmp_path: Path) -> None:
    half = ShardedTensor.from_rank_offsets("w", WEIGHT, (0, 1, 2))
    other = ShardedTensor.from_rank_offsets("w", WEIGHT, (0, 0, 2), replica_id=1)
    with pytest.raises((ValueError, CheckpointError), match="w: no rank saves some elements"):
        save({"a": half, "b": other}, tmp_path / "c")


def test_allow_shape_mismatch_reads_what_is_stored(tmp_path: Path) -> None:
    save({"w": ShardedTensor.whole("w", WEIGHT)}, tmp_path / "c")
    larger = torch.full((5, 4), -1.0)
    loaded = load({"w": ShardedTensor.from_rank_offsets("w", larger, allow_shape_mismatch=True)}, tmp_path / "c")["w"]
    assert torch.equal(loaded[:3], WEIGHT) and torch.equal(loaded[3:], torch.full((2, 4), -1.0))
    with pytest.raises(ValueError, match="w has shape"):
        load({"w": ShardedTensor.from_rank_offsets("w", larger)}, tmp_path / "c")


def test_objects_of_a_grid_are_stored_separately(tmp_path: Path) -> None:
    grid = {str(place): ShardedObject("rng", [place], (2, 2), divmod(place, 2)) for place in range(4)}
    assert grid["2"].unique_key == "rng/shard_1.0_2.2"
    save(grid, tmp_path / "c")
    assert load({"x": ShardedObject("rng", None, (2, 2), (1, 0))}, tmp_path / "c") == {"x": [2]}


@pytest.mark.parametrize("strict", StrictHandling)
def test_strict_says_what_happens_with_other_keys(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], strict: StrictHandling
) -> None:
    save({"a": ShardedTensor.whole("a", WEIGHT), "b": ShardedTensor.whole("b", WEIGHT)}, tmp_path / "c")
    asked = {"a": ShardedTensor.whole("a", torch.zeros(3, 4)), "c": ShardedTensor.whole("c", torch.zeros(3, 4))}
    if strict.raises:
        with pytest.raises(ValueError, match="the checkpoint lacks c"):
            load(asked, tmp_path / "c", strict=strict)
        return
    loaded = load(asked, tmp_path / "c", strict=strict)
    if strict.returns:
        loaded, missing, unexpected = loaded
        assert unexpected == {"c"} and missing == ({"b"} if strict is StrictHandling.RETURN_ALL else set())
    assert loaded.keys() == {"a"} and torch.equal(loaded["a"], WEIGHT)
    printed = capsys.readouterr().out
    assert ("the checkpoint lacks c" in printed) == strict.logs
    assert ("no item requests b" in printed) == (strict is StrictHandling.LOG_ALL)


def test_raise_all_refuses_keys_that_nothing_asks_for(tmp_path: Path) -> None:
    save({"a": ShardedTensor.whole("a", WEIGHT), "b": ShardedTensor.whole("b", WEIGHT)}, tmp_path / "c")
    asked = {"a": ShardedTensor.whole("a", torch.zeros(3, 4))}
    with pytest.raises(ValueError, match="no item requests b"):
        load(asked, tmp_path / "c", strict=StrictHandling.RAISE_ALL)
    assert not asked["a"].data.any()


def test_an_async_save_keeps_the_values_of_its_call(tmp_path: Path) -> None:
    weight = WEIGHT.clone()
    pending = save({"w": ShardedTensor.whole("w", weight)}, tmp_path / "c", async_sharded_save=True)
    weight.zero_()
    assert pending is not None
    pending.finish()
    assert torch.equal(load({"w": ShardedTensor.whole("w", weight)}, tmp_path / "c")["w"], WEIGHT)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"a": {"b": WEIGHT}}, "a.b is a Tensor"),
        ({"a": [object()]}, "a.0 is a object"),
        ({"a": {3: 1}}, "a has the key 3"),
        ({"w": without_data()}, "w has no data"),
    ],
)
def test_values_that_cannot_be_stored_are_named(tmp_path: Path, state: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        save(state, tmp_path / "c")
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("arguments", [{"sharded_strategy": ("zarr", 1)}, {"validate_access_integrity": False}])
def test_strategies_are_refused_by_name(tmp_path: Path, arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(arguments))):
        save({}, tmp_path / "c", **arguments)
    save({}, tmp_path / "c")
    with pytest.raises(ValueError, match=next(iter(arguments))):
        load({}, tmp_path / "c", **arguments)


def test_narrow_is_a_view_of_every_rank_s_part() -> None:
    item = ShardedTensor.from_rank_offsets("w", WEIGHT, (0, 1, 2))
    (narrowed,) = item.narrow(0, 1, 1)
    assert (narrowed.global_shape, narrowed.global_offset, narrowed.local_shape) == ((2, 4), (1, 0), (1, 4))
    assert narrowed.data.data_ptr() == WEIGHT[1].data_ptr() and narrowed.axis_fragmentations == (2, 1)


@pytest.mark.parametrize("offsets", [(2, 0, 2), (0, 2, 2), (0, -1, 2)])
def test_rank_offsets_outside_of_the_tensor_are_refused(offsets: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="w: rank offset"):
        ShardedTensor.from_rank_offsets("w", WEIGHT, offsets)


def test_fields_that_contradict_the_data_are_refused() -> None:
    with pytest.raises(ValueError, match="the field dtype is torch.float16"):
        ShardedTensor("w", WEIGHT, torch.float16, (3, 4), (3, 4), (0, 0))
    with pytest.raises(ValueError, match="the data has shape"):
        ShardedTensor("w", WEIGHT, torch.float32, (4, 3), (4, 3), (0, 0))
    with pytest.raises(ValueError, match="global_offset is"):
        ShardedObject("o", 1, (2,), (2,))
