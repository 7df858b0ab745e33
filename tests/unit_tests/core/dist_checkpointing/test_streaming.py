"""Checkpoints written box by box equal regular ones, and boxes that do not cover their tensors are rejected."""

import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megatron.core.dist_checkpointing import ShardedTensor, StreamReader, load_items, save_stream, verify


def halves(key: str, tensor: torch.Tensor) -> list[ShardedTensor]:
    """Splits a tensor into two boxes along its first dimension."""
    middle = len(tensor) // 2
    offsets = ((0, tensor[:middle]), (middle, tensor[middle:]))
    return [ShardedTensor.at(key, part, tuple(tensor.shape), (start, 0)) for start, part in offsets]


@pytest.mark.parametrize("file_bytes", [1, 160, 1 << 30])
def test_boxes_come_back_whole_and_in_parts(tmp_path: Path, file_bytes: int) -> None:
    tensors = {"a": torch.randn(6, 4), "b": torch.randn(4, 8).bfloat16().t(), "c": torch.tensor(3)}
    boxes = [*halves("a", tensors["a"]), *halves("b", tensors["b"]), ShardedTensor.whole("c", tensors["c"])]
    save_stream(iter(boxes), tmp_path / "one", common={"x": 1}, file_bytes=file_bytes)
    num_files = len(list((tmp_path / "one").glob("*.distcp")))
    assert num_files == (5 if file_bytes == 1 else 1 if file_bytes > 160 else 2)
    found = {key: torch.zeros_like(value) for key, value in tensors.items()}
    assert load_items([ShardedTensor.whole(key, value) for key, value in found.items()], tmp_path / "one") == {"x": 1}
    assert all(torch.equal(found[key], value) for key, value in tensors.items())
    reader = StreamReader(verify(tmp_path / "one"))
    rows = torch.zeros(2, 4, dtype=torch.float64)
    reader.fill([ShardedTensor.at("a", rows, (6, 4), (2, 0), allow_cast=True)])
    assert torch.equal(rows, tensors["a"][2:4].double())
    with pytest.raises(ValueError, match="d is not in it"):
        reader.fill([ShardedTensor.whole("d", rows)])


def test_each_box_is_let_go_of_before_the_next_is_made(tmp_path: Path) -> None:
    made: list[weakref.ref] = []

    def boxes() -> Iterator[ShardedTensor]:
        for number in range(4):
            assert all(storage() is None for storage in made), f"{len(made)} boxes are still referenced"
            tensor = torch.full((1, 8), float(number))
            made.append(weakref.ref(tensor.untyped_storage()))
            box = ShardedTensor.at("a", tensor, (4, 8), (number, 0))
            del tensor
            yield box
            del box

    save_stream(boxes(), tmp_path / "one", common={}, file_bytes=64)
    assert len(made) == 4


def test_a_checkpoint_whose_folder_was_made_meanwhile_leaves_nothing(tmp_path: Path) -> None:
    def boxes() -> Iterator[ShardedTensor]:
        yield ShardedTensor.whole("a", torch.ones(4))
        (tmp_path / "one").mkdir()
        (tmp_path / "one" / "file").write_text("of another program")

    with pytest.raises(OSError):
        save_stream(boxes(), tmp_path / "one", common={})
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")] == ["one", "one/file"]


@pytest.mark.parametrize(
    ("boxes", "error"),
    [
        (halves("a", torch.ones(4, 2))[:1], r"a: boxes contain 4 elements of \[4, 2\]"),
        (halves("a", torch.ones(4, 2)) * 2, r"a: boxes contain 16 elements of \[4, 2\]"),
        (
            [*halves("a", torch.ones(4, 2)), *halves("a", torch.ones(4, 3))],
            r"a is \[4, 2\] of torch.float32 in its first box, but \[4, 3\]",
        ),
    ],
)
def test_what_does_not_fill_its_tensor_is_refused(tmp_path: Path, boxes: list[ShardedTensor], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        save_stream(boxes, tmp_path / "one", common={})
    assert list(tmp_path.iterdir()) == []
