"""Megatron's files of one rank each, cut by hand here, and canonical checkpoints give the same weights both ways."""

import argparse
import os
import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import model_sharded_tensors
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.enums import AttnBackend
from megatron.training.arguments import parse_args
from megatron.training.gpt_builder import build_gpt
from tools import convert_legacy
from tools.checkpoint import main
from tools.legacy_checkpoint import read_legacy, write_legacy

# Two groups of two query heads; layers 0 and 2 dense, 1 and 3 of four experts; two padding rows on each of two ranks.
HIDDEN, HEADS, GROUPS, WIDTH, FFN, EXPERTS, LAYERS, VOCAB, PADDED = 16, 4, 2, 4, 24, 4, 4, 61, 64
SHAPE: dict[str, Any] = {
    "num_layers": LAYERS,
    "hidden_size": HIDDEN,
    "ffn_hidden_size": FFN,
    "num_attention_heads": HEADS,
    "group_query_attention": True,
    "num_query_groups": GROUPS,
    "kv_channels": WIDTH,
    "add_bias_linear": False,
    "add_qkv_bias": True,
    "swiglu": True,
    "normalization": "RMSNorm",
    "untie_embeddings_and_output_weights": True,
    "position_embedding_type": "rope",
    "max_position_embeddings": 32,
    "seq_length": 32,
    "num_experts": EXPERTS,
    "moe_layer_freq": [0, 1, 0, 1],
    "moe_ffn_hidden_size": FFN,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_shared_expert_intermediate_size": 8,
}
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
# Norms inside the linear layers behind them.
INSIDE = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "self_attention.q_layernorm.weight": "self_attention.linear_q_up_proj.layer_norm_weight",
    "self_attention.kv_layernorm.weight": "self_attention.linear_kv_up_proj.layer_norm_weight",
}
ITERATION = 7
TENSOR = PIPELINE = EXPERT = 2


def whole_model(shape: dict[str, Any]) -> GPTModel:
    args = parse_args(argv=[])
    vars(args).update(shape, padded_vocab_size=VOCAB, unpadded_vocab_size=VOCAB, params_dtype=torch.float32)
    torch.manual_seed(3)
    model = build_gpt(args)
    for tensor in model.state_dict().values():
        torch.nn.init.normal_(tensor)
    return model


def cut(tensor: Tensor, dim: int, *, rank: int, size: int) -> Tensor:
    return tensor.chunk(size, dim)[rank].clone()


def of_rank(name: str, whole: Tensor, tensor_rank: int) -> Tensor:
    """What a tensor-parallel rank has of a parameter that is in every kind of layer."""
    if name.startswith(("embedding.word", "output_layer")):
        padded = torch.cat([whole, torch.zeros(PADDED - VOCAB, HIDDEN)])
        return cut(padded, 0, rank=tensor_rank, size=TENSOR)
    if "linear_qkv" in name or name.endswith("up_proj.weight"):
        # A rank has whole groups of query heads.
        return cut(whole, 0, rank=tensor_rank, size=TENSOR)
    if name.endswith("linear_fc1.weight"):
        return torch.cat([cut(half, 0, rank=tensor_rank, size=TENSOR) for half in whole.chunk(2)])
    if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
        return cut(whole, 1, rank=tensor_rank, size=TENSOR)
    return whole.clone()


def files_of(model: GPTModel, style: str) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Folder and parameters of each rank. style: as one of Megatron's implementations names and stacks them."""
    state = model.state_dict()
    for tensor in range(TENSOR):
        for stage in range(PIPELINE):
            for expert in range(EXPERT):
                chunk: dict[str, Tensor] = {}
                for name, whole in state.items():
                    is_latent = "decoder.layers.0.self_attention.linear_kv_up_proj.weight" in state
                    options = {"tensor": tensor, "style": style, "is_latent": is_latent}
                    for legacy, part in legacy_names(name, whole, stage, expert, **options):
                        chunk[legacy] = part
                if style == "grouped":
                    stack_experts(chunk)
                yield f"mp_rank_{tensor:02d}_{stage:03d}_{expert:03d}", chunk


def legacy_names(
    name: str, whole: Tensor, stage: int, expert: int, *, tensor: int, style: str, is_latent: bool
) -> Iterator[tuple[str, Tensor]]:
    is_last = name.startswith(("decoder.final", "output_layer"))
    if not name.startswith("decoder.layers"):
        if stage == (PIPELINE - 1 if is_last else 0):
            yield name, of_rank(name, whole, tensor)
        return
    _, _, layer, inner = name.split(".", 3)
    if int(layer) // 2 != stage:
        return
    prefix, part = f"decoder.layers.{int(layer) % 2}.", of_rank(name, whole, tensor)
    if ".local_experts." in name:
        number, rest = inner.removeprefix("mlp.experts.local_experts.").split(".", 1)
        here = int(number) - expert * (EXPERTS // EXPERT)
        if not 0 <= here < EXPERTS // EXPERT:
            return
        inner = f"mlp.experts.{rest}{here}" if style == "engine" else f"mlp.experts.local_experts.{here}.{rest}"
    elif style == "engine" and inner in INSIDE and (is_latent != inner.startswith("input")):
        inner = INSIDE[inner]
        yield prefix + inner.replace("layer_norm_weight", "_extra_state"), part  # not a weight, whatever it is
    elif style == "engine" and inner == "pre_mlp_layernorm.weight" and int(layer) % 2 == 0:
        inner = "mlp.linear_fc1.layer_norm_weight"
    yield prefix + inner, part


def stack_experts(chunk: dict[str, Tensor]) -> None:
    prefix, local = "decoder.layers.1.mlp.experts.", EXPERTS // EXPERT
    first, second = (
        torch.stack([chunk.pop(f"{prefix}local_experts.{i}.linear_fc{n}.weight").t() for i in range(local)])
        for n in (1, 2)
    )
    chunk[prefix + "weight1"] = first.reshape(HIDDEN, -1)
    chunk[prefix + "weight2"] = second.reshape(-1, HIDDEN)


def write_files(model: GPTModel, folder: Path, style: str, *, shape: dict[str, Any] = SHAPE, **changes: Any) -> None:
    args = {
        **shape,
        "tensor_model_parallel_size": TENSOR,
        "pipeline_model_parallel_size": PIPELINE,
        "expert_model_parallel_size": EXPERT,
        "virtual_pipeline_model_parallel_size": None,
        "sequence_parallel": True,
        "padded_vocab_size": PADDED,
        "vocab_size": VOCAB,
        "consumed_train_samples": 99,
        "attention_backend": AttnBackend.flash,
        "make_vocab_size_divisible_by": 2,
        **changes,
    }
    for name, chunk in files_of(model, style):
        path = folder / f"iter_{ITERATION:07d}" / name / "model_optim_rng.pt"
        path.parent.mkdir(parents=True)
        content = {
            "args": argparse.Namespace(**args),
            "checkpoint_version": 3.0,
            "iteration": ITERATION,
            "model": chunk,
            "optimizer": {"state": {0: {"exp_avg": torch.ones(3)}}, "param_groups": [{"lr": 0.1, "params": [0]}]},
        }
        torch.save(content, path)
    (folder / "latest_checkpointed_iteration.txt").write_text(str(ITERATION))


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
    assert "the optimizer's state was left behind: go on with --no-load-optim" in capsys.readouterr().out
    folder = tmp_path / "ours" / f"iter_{ITERATION:07d}"
    loaded = whole_model(shape)
    for tensor in loaded.state_dict().values():
        tensor.zero_()
    dist_checkpointing.load(model_sharded_tensors(loaded), folder)
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
    # Another layout holds the same: back again it is what it was.
    convert("torch_dist", "torch", tmp_path / "ours", tmp_path / "other", "--target-pipeline-parallel-size", "4")
    convert("torch", "torch_dist", tmp_path / "other", tmp_path / "last")
    dist_checkpointing.load(model_sharded_tensors(loaded), tmp_path / "last" / folder.name)
    assert not differences(loaded.state_dict(), model.state_dict())
    # What is there may be a run's own, with its optimizer's state.
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


class _Harmful:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (os.environ["HARM"],)


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
    # The file is of the second stage.
    named = key.replace("0", "2")
    torch.save({**content, "model": {**content["model"], key: torch.ones(3)}}, files[3])
    assert f"{files[3]} has {named} with shape [3]: must be [16, 8]" in refusal()
    torch.save(
        {**content, "model": {key: tensor for key, tensor in content["model"].items() if "proj" not in key}}, files[3]
    )
    assert f"{files[3]} has no {named}" in refusal()
    monkeypatch.setenv("HARM", str(tmp_path / "harm"))
    torch.save({**content, "more": _Harmful()}, files[3])
    assert f"{files[3]} cannot be read" in refusal() and not (tmp_path / "harm").exists()
    files[3].write_bytes(files[0].read_bytes()[:999])
    assert f"{files[3]} cannot be read" in refusal()
    files[3].write_bytes(pickle.dumps(content["iteration"]))
    assert f"{files[3]} cannot be read" in refusal()
    for changes, message in (
        ({"args": 3}, "holds 3 as args"),
        ({"iteration": "x"}, "'x' as iteration"),
        ({"checkpoint_version": torch.ones(2)}, "is of checkpoint_version tensor"),
        ({"model": 3}, "has no parameters by name"),
        ({"model": {3: torch.ones(1)}}, "has no parameters by name"),
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
