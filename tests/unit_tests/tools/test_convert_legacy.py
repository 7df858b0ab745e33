"""Conversion between Megatron files of each rank, split by hand, and canonical checkpoints keeps all weights."""

import argparse
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import model_sharded_tensors
from megatron.tools import convert_legacy
from megatron.tools.checkpoint import main
from megatron.tools.legacy_checkpoint import write_legacy
from megatron.training.checkpointing.legacy_files import read_legacy
from tests.unit_tests.tools.harmful import Harmful
from tests.unit_tests.tools.rank_files import ITERATION, SHAPE, files_of, whole_model, write_files

LATENT: dict[str, Any] = {
    **SHAPE,
    "group_query_attention": False,
    "num_query_groups": None,
    "kv_channels": None,
    "add_qkv_bias": False,
    "multi_latent_attention": True,
    "qk_layernorm": True,
    "q_lora_rank": 6,
    "kv_lora_rank": 5,
    "qk_head_dim": 3,
    "qk_pos_emb_head_dim": 2,
    "v_head_dim": 4,
}


def convert(source: str, target: str, load: Path, save: Path, *more: str) -> None:
    main(["convert", "--from", source, "--to", target, "--load", str(load), "--save", str(save), *more])


def differences(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> list[str]:
    return [
        name
        for name in {**one, **other}
        if name not in one or name not in other or not torch.equal(one[name], other[name])
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "style"),
    [(SHAPE, "local"), (SHAPE, "engine"), (SHAPE, "grouped"), (LATENT, "local"), (LATENT, "engine")],
    ids=["local", "engine", "grouped", "latent, local", "latent, engine"],
)
def test_files_of_every_rank_become_one_checkpoint_and_files_again(
    shape: dict[str, Any], style: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = whole_model(shape)
    write_files(model, tmp_path / "legacy", style, shape=shape)
    convert("torch", "torch_dist", tmp_path / "legacy", tmp_path / "ours")
    assert "optimizer states are not converted: continue with --no-load-optim" in capsys.readouterr().out
    folder = tmp_path / "ours" / f"iter_{ITERATION:07d}"
    loaded = whole_model(shape)
    for tensor in loaded.state_dict().values():
        tensor.zero_()
    dist_checkpointing.load_items(model_sharded_tensors(loaded), folder)
    assert not differences(loaded.state_dict(), model.state_dict())
    values = dist_checkpointing.load_common(folder)
    assert values["iteration"] == ITERATION and values["train_state"]["consumed_train_samples"] == 99

    implementation = "transformer_engine" if style == "engine" else "local"
    sizes = [f"--target-{name}-parallel-size=2" for name in ("tensor", "pipeline", "expert")]
    convert(
        "torch_dist",
        "torch",
        tmp_path / "ours",
        tmp_path / "again",
        *sizes,
        "--target-transformer-impl",
        implementation,
    )
    expected = dict(files_of(model, "local" if style == "grouped" else style))
    written = tmp_path / "again" / f"iter_{ITERATION:07d}"
    assert sorted(path.name for path in written.iterdir()) == sorted(expected)
    for name, chunk in expected.items():
        kept = {key: tensor for key, tensor in chunk.items() if not key.endswith("_extra_state")}
        assert not differences(read_legacy(written / name / "model_optim_rng.pt").chunks[0], kept)
    # A round trip through a different layout returns the same weights.
    convert("torch_dist", "torch", tmp_path / "ours", tmp_path / "other", "--target-pipeline-parallel-size", "4")
    convert("torch", "torch_dist", tmp_path / "other", tmp_path / "last")
    dist_checkpointing.load_items(model_sharded_tensors(loaded), tmp_path / "last" / folder.name)
    assert not differences(loaded.state_dict(), model.state_dict())
    # An existing checkpoint is not overwritten, because it may contain optimizer state.
    with pytest.raises(SystemExit):
        convert("torch", "torch_dist", tmp_path / "other", tmp_path / "last")


def test_a_conversion_that_cannot_be_written_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_files(whole_model(SHAPE), tmp_path / "legacy", "local")
    convert("torch", "torch_dist", tmp_path / "legacy", tmp_path / "ours")
    written: list[Path] = []

    def fill_the_disk(path: Path, *more: Any, **options: Any) -> None:
        if written:
            raise OSError(28, "No space left on device")
        written.append(path)
        write_legacy(path, *more, **options)

    monkeypatch.setattr(convert_legacy, "write_legacy", fill_the_disk)
    with pytest.raises(SystemExit):
        convert("torch_dist", "torch", tmp_path / "ours", tmp_path / "again", "--target-pipeline-parallel-size", "2")
    assert written and not list((tmp_path / "again").iterdir())


def test_values_of_a_file_that_are_unknown_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_files(whole_model(SHAPE), tmp_path / "legacy", "local")
    first = sorted((tmp_path / "legacy").glob("iter_*/*/model_optim_rng.pt"))[0]
    known = {"optimizer": {}, "rng_state": [], "opt_param_scheduler": {}, "num_floating_point_operations_so_far": 0}
    content = torch.load(first, weights_only=False)
    torch.save({**content, **known, "tokens_seen": 3, "dataloader_state": {}}, first)
    convert("torch", "torch_dist", tmp_path / "legacy", tmp_path / "ours")
    assert "not converted, because it is unknown: dataloader_state, tokens_seen\n" in capsys.readouterr().out


@pytest.mark.slow
def test_what_is_no_such_checkpoint_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = whole_model(SHAPE)
    write_files(model, tmp_path / "legacy", "local")
    files = sorted((tmp_path / "legacy").glob("iter_*/*/model_optim_rng.pt"))
    content = torch.load(files[3], weights_only=False)

    def refusal(*more: str) -> str:
        with pytest.raises(SystemExit) as stopped:
            convert("torch", "torch_dist", tmp_path / "legacy", tmp_path / "ours", *more)
        assert stopped.value.code == 1 and not list((tmp_path / "ours").glob("iter_*"))
        return capsys.readouterr().err

    key = "decoder.layers.0.self_attention.linear_proj.weight"
    # The file belongs to the second stage.
    named = key.replace("0", "2")
    torch.save({**content, "model": {**content["model"], key: torch.ones(3)}}, files[3])
    assert f"{files[3]} has {named} with shape [3]: must be [16, 8]" in refusal()
    torch.save(
        {**content, "model": {key: tensor for key, tensor in content["model"].items() if "proj" not in key}}, files[3]
    )
    assert f"{files[3]} has no {named}" in refusal()
    monkeypatch.setenv("HARM", str(tmp_path / "harm"))
    torch.save({**content, "more": Harmful()}, files[3])
    assert f"{files[3]} cannot be read" in refusal() and not (tmp_path / "harm").exists()
    files[3].write_bytes(files[0].read_bytes()[:999])
    assert f"{files[3]} cannot be read" in refusal()
    files[3].write_bytes(pickle.dumps(content["iteration"]))
    assert f"{files[3]} cannot be read" in refusal()
    for changes, message in (
        ({"args": 3}, "args is 3"),
        ({"iteration": "x"}, "iteration is 'x'"),
        ({"checkpoint_version": torch.ones(2)}, "has checkpoint_version tensor"),
        ({"model": 3}, "holds a model without named parameters"),
        ({"model": {3: torch.ones(1)}}, "holds a model without named parameters"),
        ({"model": {key: torch.ones(16, 8).to_sparse()}}, f"torch.sparse_coo tensor on cpu as {key}"),
        ({"model": {key: torch.ones(16, 8).int()}}, f"int32 torch.strided tensor on cpu as {key}"),
    ):
        torch.save({**content, **changes}, files[3])
        assert message in refusal()
    first = torch.load(files[0], weights_only=False)
    for name, value in (("tensor_model_parallel_size", 1 << 62), ("pipeline_model_parallel_size", True)):
        changed = argparse.Namespace(**{**vars(first["args"]), name: value})
        torch.save({**first, "args": changed}, files[0])
        assert "has no mp_rank_02" in refusal() if value == 1 << 62 else f"args.{name} is True" in refusal()
    torch.save(first, files[0])
    files[3].unlink()
    assert f"has no {files[3].parent.name}/model_optim_rng.pt" in refusal()
    assert "iter_0000009 has no mp_rank_XX" in refusal("--ckpt-step", "9")
    (tmp_path / "legacy" / "latest_checkpointed_iteration.txt").write_text("soon")
    assert "contains 'soon': must be an iteration number or 'release'" in refusal()
