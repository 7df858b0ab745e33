"""Exports only the weights of a checkpoint to safetensors files that are listed in the index."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.tools.checkpoint import main
from megatron.tools.safetensors_files import INDEX_FILE


def test_weights_are_exported_in_shards(tmp_path: Path) -> None:
    weights = {
        "embedding.weight": torch.randn(40, 4),
        "layer.weight": torch.randn(3, 5, dtype=torch.bfloat16),
        "layer.count": torch.arange(7),
        "scalar": torch.tensor(2.5),
    }
    others = {"optimizer.exp_avg.layer.weight": torch.ones(3, 5), "rng.torch": torch.zeros(2, dtype=torch.uint8)}
    tensors = [ShardedTensor.whole(key, tensor) for key, tensor in {**weights, **others}.items()]
    dist_checkpointing.save_items(tensors, tmp_path / "run" / "iter_0000012", common={})
    command = ["convert", "--from", "torch_dist", "--to", "safetensors", "--load", str(tmp_path / "run")]
    main([*command, "--save", str(tmp_path / "out"), "--max-shard-size", "100e-9"])
    index = json.loads((tmp_path / "out" / INDEX_FILE).read_text())
    # The embedding is larger than the shard limit, so it is stored in a separate shard.
    assert sorted(path.name for path in (tmp_path / "out").glob("*.safetensors")) == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]
    assert index["metadata"] == {"total_size": 40 * 4 * 4 + 15 * 2 + 7 * 8 + 4, "iteration": 12}
    assert index["weight_map"].keys() == weights.keys()
    for key, tensor in weights.items():
        stored = load_file(tmp_path / "out" / index["weight_map"][key])[key]
        assert stored.dtype == tensor.dtype and torch.equal(stored, tensor)
    with pytest.raises(SystemExit):
        main([*command, "--save", str(tmp_path / "out")])


def test_what_cannot_be_exported_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, told in (
        (["--from", "torch_dist"], f"--load is {tmp_path}: no checkpoint found"),
        (["--from", "torch"], "--to safetensors requires --from torch_dist, but --from is torch"),
        (
            ["--from", "torch_dist", "--max-shard-size", "inf"],
            "--max-shard-size is inf: must be above 0 and at most",
        ),
        (["--from", "torch_dist", "--vocab-size", "1"], "--vocab-size is 1: requires --from torch or"),
        (["--from", "torch", "--to", "torch_dist", "--vocab-size", "0"], "--vocab-size is 0: must be at least 1"),
        (
            ["--from", "torch_dist", "--to", "torch", "--target-tensor-parallel-size", "0"],
            "--target-tensor-parallel-size is 0: must be",
        ),
    ):
        with pytest.raises(SystemExit):
            main(["convert", "--to", "safetensors", *words, "--load", str(tmp_path), "--save", str(tmp_path / "out")])
        assert told in capsys.readouterr().err
