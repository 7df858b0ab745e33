"""Reads of a part of a stored tensor: exact, of few bytes, into little memory besides the target."""

import pytest
import torch

from megatron.core.dist_checkpointing import ShardedTensor, load, save, storage
from megatron.core.dist_checkpointing.boxes import Box, whole


@pytest.fixture
def reads(monkeypatch):
    """Sizes in bytes of the memory that is read into, in order."""
    sizes, bytes_of = [], storage.bytes_of

    def note(tensor):
        sizes.append(tensor.nbytes)
        return bytes_of(tensor)

    monkeypatch.setattr(storage, "bytes_of", note)
    return sizes


ROWS, COLUMNS = 1024, 512  # 2 MiB of fp32
BOUND = 64 << 10


@pytest.mark.parametrize(
    ("box", "dtype", "most_bytes"),
    [
        # Rows of a contiguous target of the same dtype go straight to where they belong.
        (Box((100, 0), (300, COLUMNS)), torch.float32, 300 * COLUMNS * 4),
        (Box((100, 0), (300, COLUMNS)), torch.float64, 300 * COLUMNS * 4),
        # Of columns whole rows are read, some of them at a time.
        (Box((0, 17), (ROWS, 3)), torch.float32, ROWS * COLUMNS * 4),
        (Box((7, 17), (20, 30)), torch.bfloat16, 20 * COLUMNS * 4),
    ],
)
def test_a_slice_is_read_without_a_copy_of_the_tensor(tmp_path, monkeypatch, reads, box, dtype, most_bytes):
    monkeypatch.setattr(storage, "_READ_BYTES", BOUND)
    values = torch.randn(ROWS, COLUMNS)
    save(ShardedTensor.whole("w", values), tmp_path / "c", common={})
    reads.clear()
    target = torch.zeros(box.shape, dtype=dtype)
    load(ShardedTensor("w", target, (ROWS, COLUMNS), box.offset, allow_cast=True), tmp_path / "c")
    assert torch.equal(target, values[box.relative_to(whole((ROWS, COLUMNS)))].to(dtype))
    assert sum(reads) <= most_bytes
    beside = [size for size in reads if size != target.nbytes or dtype != torch.float32]
    assert max(beside, default=0) <= BOUND


def test_an_expert_of_a_stack_is_read_alone_where_one_is_larger_than_the_bound(tmp_path, monkeypatch, reads):
    monkeypatch.setattr(storage, "_READ_BYTES", BOUND)
    stack = torch.randn(4, 128, 256)  # an expert has 128 KiB
    save(ShardedTensor.whole("experts", stack), tmp_path / "c", common={})
    reads.clear()
    target = torch.zeros(2, 64, 200)
    load(ShardedTensor("experts", target, (4, 128, 256), (1, 10, 30)), tmp_path / "c")
    assert torch.equal(target, stack[1:3, 10:74, 30:230])
    assert max(reads) <= BOUND and sum(reads) == 2 * 64 * 256 * 4
