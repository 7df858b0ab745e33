"""Plans of several simulated ranks: tensors saved in any boxes load in any other boxes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.planner import WriteItemType

from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.planner import HeldItems, assign_writes, check_wanted, plan_reads
from megatron.core.dist_checkpointing.storage import (
    PieceReader,
    data_file,
    read_metadata,
    stored_pieces,
    write_metadata,
    write_pieces,
)
from megatron.core.logical_tensors import whole
from tests.unit_tests.core.dist_checkpointing.cuts import random_tensors, strided_copy


def offers_of(ranks):
    return [HeldItems(items).offers() for items in ranks]


def save_as(ranks, folder):
    """Saves like begin_save in a process group, simulating the ranks one after the other."""
    written, metadata = assign_writes(offers_of(ranks))
    files = {}
    for rank, (items, writes) in enumerate(zip(ranks, written, strict=True)):
        contents = (HeldItems(items).content(item) for item in writes)
        contents = [(key, box, content if box is None else content.contiguous()) for key, box, content in contents]
        files[data_file(rank)] = write_pieces(folder / data_file(rank), contents)
    write_metadata(folder, metadata, files=files)
    return files


def load_as(items, folder, files):
    metadata = read_metadata(folder)
    check_wanted(items, metadata)
    for read in plan_reads(items, stored_pieces(files, metadata)):
        with PieceReader(folder / read.name) as reader:
            dtype = metadata.state_dict_metadata[read.piece.key].properties.dtype
            target = read.tensor.data[read.window.relative_to(read.tensor.box)]
            reader.read(read.piece, read.window, dtype=dtype, target=target)


@pytest.mark.slow
@given(st.randoms(use_true_random=False), st.integers(1, 5), st.integers(1, 5))
def test_any_cut_over_any_ranks_loads_as_any_other(tmp_path_factory, random, num_writers, num_readers):
    folder = tmp_path_factory.mktemp("checkpoint")
    tensors = random_tensors(random)
    files = save_as(tensors.cut(random, num_writers), folder)
    for rank_items in tensors.cut(random, num_readers):
        wanted = [strided_copy(random, item) for item in rank_items]
        load_as(wanted, folder, files)
        for item, loaded in zip(rank_items, wanted, strict=True):
            assert torch.equal(item.data, loaded.data), item.key


@given(st.randoms(use_true_random=False), st.integers(1, 6))
def test_every_element_is_written_once(random, num_ranks):
    written, metadata = assign_writes(offers_of(random_tensors(random).cut(random, num_ranks)))
    for key, entry in metadata.state_dict_metadata.items():
        marks = torch.zeros(entry.size)
        for item in (item for items in written for item in items if item.index.fqn == key):
            chunk = item.tensor_data.chunk
            box = whole(tuple(chunk.sizes))._replace(offset=tuple(chunk.offsets))
            marks[box.relative_to(whole(tuple(entry.size)))] += 1
        assert (marks == 1).all()
        assert len(entry.chunks) == sum(item.index.fqn == key for items in written for item in items)


def test_replicas_are_spread_evenly():
    items = [ShardedTensor.whole(f"t{i}", torch.zeros(n)) for i, n in enumerate([900, 800, 700, 90, 80, 70, 60, 50])]
    written, _ = assign_writes(offers_of([items] * 3))
    sizes = [sum(item.tensor_storage_size() for item in items) for items in written]
    assert max(sizes) - min(sizes) <= 4 * 120


def test_an_object_is_written_by_one_rank():
    written, _ = assign_writes(offers_of([[], [ShardedObject("o", 1)], [ShardedObject("o", 1)]]))
    assert [[item.type for item in items] for items in written] == [[], [WriteItemType.BYTE_IO], []]


ROWS = torch.zeros(2, 3)


@pytest.mark.parametrize(
    "ranks, message",
    [
        ([[ShardedTensor.at("k", ROWS, (4, 3), (0, 0))], []], "k: no rank saves some elements of .4, 3."),
        (
            [[ShardedTensor.whole("k", ROWS)], [ShardedTensor.whole("k", ROWS.half())]],
            "rank 0 saves .* rank 1 saves .*float16",
        ),
        (
            [[ShardedTensor.whole("k", ROWS)], [ShardedTensor.at("k", ROWS, (4, 3), (2, 0))]],
            "rank 0 saves .* rank 1 saves",
        ),
        ([[ShardedTensor.whole("k", ROWS)], [ShardedObject("k", 1)]], "rank 1 saves|rank 0 saves"),
    ],
)
def test_ranks_that_disagree_are_named(ranks, message):
    with pytest.raises(ValueError, match=message):
        assign_writes(offers_of(ranks))


def test_boxes_outside_their_tensor_are_refused():
    with pytest.raises(ValueError, match="exceeds the global tensor"):
        ShardedTensor.at("k", ROWS, (4, 3), (3, 0))
    with pytest.raises(ValueError, match="must have one offset"):
        ShardedTensor.at("k", ROWS, (4, 3), (0,))
