"""tools/checkpoint.py: output for complete, damaged and different checkpoints, and for too many of them."""

from pathlib import Path

import pytest
import torch

from megatron.core.dist_checkpointing import ShardedTensor, save_items
from megatron.core.dist_checkpointing.manifest import read_manifest
from megatron.tools.checkpoint import main
from megatron.training.checkpointing.folder import complete_iterations, iteration_folder, write_tracker

LAYER = "decoder.layers.0.mlp.linear_fc2.weight"
TENSORS = {
    LAYER: torch.arange(6.0).view(2, 3),
    f"optimizer.exp_avg.{LAYER}": torch.ones(2, 3),
    "rng.torch": torch.ones(4),
}


def write(root: Path, iteration: int, changed: dict[str, torch.Tensor] | None = None) -> Path:
    """Writes a checkpoint of two tensors and a random generator. changed: replaced or added tensors by key."""
    tensors = [ShardedTensor.whole(key, value.clone()) for key, value in {**TENSORS, **(changed or {})}.items()]
    common = {"iteration": iteration, "args": {"world_size": 1, "lr": 0.1}, "frozen": []}
    save_items(tensors, iteration_folder(root, iteration), common={**common, "train_state": {}, "contents": {}})
    write_tracker(str(root), iteration)
    return iteration_folder(root, iteration)


def flip(folder: Path, key: str) -> str:
    """Flips one bit of a tensor's piece, and returns the file name."""
    for name, entry in read_manifest(folder).items():
        for piece in entry.pieces:
            if piece.key == key:
                content = bytearray((folder / name).read_bytes())
                content[piece.end - 1] ^= 1
                (folder / name).write_bytes(content)
                return name
    raise AssertionError(f"{key} is not stored")


def test_inspect_says_what_is_stored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, 3)
    write(tmp_path, 6)
    assert main(["inspect", str(tmp_path), "--tensors"]) == 0
    output = capsys.readouterr().out
    assert f"{iteration_folder(tmp_path, 6)}: 3 files" in output
    assert "iteration 6" in output and "world_size 1" in output
    assert any("weights" in line and "6" in line and "24" in line for line in output.splitlines())
    assert any(LAYER in line and "[2, 3]" in line and "__0_0.distcp" in line for line in output.splitlines())
    assert main(["inspect", str(tmp_path), "--ckpt-step", "3"]) == 0
    assert "iteration 3" in capsys.readouterr().out


def test_verify_names_each_damaged_file_and_tensor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, 3)
    folder = write(tmp_path, 6)
    assert main(["verify", str(tmp_path)]) == 0
    assert capsys.readouterr().out.count("undamaged") == 2
    name = flip(folder, LAYER)
    assert main(["verify", str(tmp_path)]) == 1
    output = capsys.readouterr().out
    assert f"{iteration_folder(tmp_path, 3)}: undamaged" in output
    assert f"{folder / name} is corrupt: {LAYER}[0:2, 0:3]" in output
    assert "rng.torch" not in output
    assert main(["verify", str(tmp_path), "--ckpt-step", "3"]) == 0
    capsys.readouterr()
    (folder / name).unlink()
    assert main(["verify", str(folder)]) == 1
    output = capsys.readouterr().out
    assert f"{folder / name} is missing" in output and LAYER in output and "rng.torch" in output


def test_verify_misses_what_the_tracker_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, 3)
    write_tracker(str(tmp_path), 9)
    assert main(["verify", str(tmp_path)]) == 1
    assert "iter_0000009 does not exist" in capsys.readouterr().out


def test_diff_names_tensors_and_the_largest_difference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = write(tmp_path / "a", 3)
    same = write(tmp_path / "same", 3)
    assert main(["diff", str(a), str(same)]) == 0
    assert "All tensors are bitwise equal" in capsys.readouterr().out
    changed = TENSORS[LAYER].clone()
    changed[1, 2] += 0.5
    b = write(tmp_path / "b", 3, {LAYER: changed, "rng.torch": torch.ones(5), "more": torch.ones(1)})
    assert main(["diff", str(tmp_path / "a"), str(b)]) == 1
    output = capsys.readouterr().out
    assert any(LAYER in line and "1 of 6" in line and "5.000e-01" in line for line in output.splitlines())
    assert "only in B" in output and "[4] float32 in A, [5] float32 in B" in output
    assert f"3 tensors differ; the largest difference is 5.000e-01, in {LAYER}" in output
    assert main(["diff", str(a), str(b), "--ignore", "rng.*", "--ignore", "more", "--ignore", "decoder.*"]) == 0
    capsys.readouterr()
    assert main(["diff", str(a), str(b), "--ignore", "decoder.*"]) == 1
    output = capsys.readouterr().out
    assert "2 tensors differ, all of them in shape or dtype or on one side only" in output
    assert "largest difference is" not in output


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -0.0])
def test_diff_tells_numbers_that_arithmetic_does_not(value: float, tmp_path: Path) -> None:
    zero, other = (write(tmp_path / name, 3, {"x": torch.tensor(v)}) for name, v in (("a", 0.0), ("b", value)))
    again = write(tmp_path / "c", 3, {"x": torch.tensor(value)})
    assert main(["diff", str(zero), str(other)]) == 1
    assert main(["diff", str(other), str(again)]) == 0


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_diff_looks_at_both_parts_of_complex_numbers(
    dtype: torch.dtype, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = (write(tmp_path / f"{i}", 3, {"x": torch.tensor([1 + 1j, 2 + i * 1j], dtype=dtype)}) for i in (1, 3))
    assert main(["diff", str(a), str(b)]) == 1
    output = capsys.readouterr().out
    assert "1 of 4" in output and "the largest difference is 2.000e+00, in x" in output


def test_diff_of_what_cannot_be_read_is_no_difference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = write(tmp_path / "a", 3)
    flip(a, LAYER)
    with pytest.raises(SystemExit) as exit_info:
        main(["diff", str(a), str(a)])
    assert exit_info.value.code == 2
    assert f"is corrupt: {LAYER}" in capsys.readouterr().err


def test_prune_keeps_the_latest_and_what_divides(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for iteration in (2, 4, 5, 6, 8, 9):
        write(tmp_path, iteration)
    command = ["prune", str(tmp_path), "--keep-latest", "2", "--keep-interval", "4"]
    assert main([*command, "--dry-run"]) == 0
    assert "would delete" in capsys.readouterr().out
    assert complete_iterations(tmp_path) == [2, 4, 5, 6, 8, 9]
    write_tracker(str(tmp_path), 5)
    assert main(command) == 0
    assert "kept: 4, 5, 8, 9" in capsys.readouterr().out
    assert complete_iterations(tmp_path) == [4, 5, 8, 9]


def test_prune_of_one_checkpoint_asks_for_the_folder_that_holds_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write(tmp_path, 3)
    with pytest.raises(SystemExit):
        main(["prune", str(folder), "--keep-latest", "1"])
    assert f"{folder} is a single checkpoint: give its parent folder" in capsys.readouterr().err


def test_prune_deletes_nothing_while_the_newest_is_damaged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, 3)
    flip(write(tmp_path, 6), LAYER)
    with pytest.raises(SystemExit):
        main(["prune", str(tmp_path), "--keep-latest", "1"])
    assert "nothing is deleted while the newest checkpoint is damaged" in capsys.readouterr().err
    assert complete_iterations(tmp_path) == [3, 6]


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (
            "--from hf --to megatron --target-tensor-parallel-size 2",
            "--target-tensor-parallel-size is 2: requires --to torch or torch_dist_mcore, but --to is megatron",
        ),
        (
            "--from hf --to megatron --vocab-size 300",
            "--vocab-size is 300: requires --from torch or torch_dist_mcore",
        ),
        ("--from hf --to megatron --hf-reference x", "--hf-reference is x: requires --to hf, but --to is megatron"),
        ("--from torch --to torch_dist --dtype bf16", "--dtype is bf16: requires --from hf or --to hf"),
    ],
)
def test_an_option_of_another_conversion_is_refused(
    words: str, error: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["convert", *words.split(), "--load", str(tmp_path), "--save", str(tmp_path / "new")])
    assert f"error: {error}" in capsys.readouterr().err
