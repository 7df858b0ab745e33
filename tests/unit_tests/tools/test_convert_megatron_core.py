"""Megatron-Core's distributed checkpoints become canonical ones. Keys, shapes and boxes come from real checkpoints.

megatron_core_facts.json describes checkpoints written by the package. See write_megatron_core_facts.py.
"""

import argparse
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import model_sharded_tensors
from megatron.core.models.gpt import GPTModel
from megatron.tools.checkpoint import main
from megatron.tools.convert_legacy import model_args
from megatron.training.checkpointing.megatron_core import megatron_core_values
from megatron.training.gpt_builder import build_gpt
from tests.unit_tests.tools.harmful import Harmful
from tests.unit_tests.tools.megatron_core_writer import Boxes, write_megatron_core

FACTS: dict[str, Any] = json.loads((Path(__file__).parent / "megatron_core_facts.json").read_text())["cases"]
SINGLE = "experts, each piece by itself"
GATED = "gated, tensor-parallel 2"
ITERATION = 5


def model_of(case: str) -> GPTModel:
    stored = FACTS[case]["args"]
    args = model_args(stored)
    args.padded_vocab_size = args.unpadded_vocab_size = stored["vocab_size"]
    torch.manual_seed(3)
    model = build_gpt(args)
    for tensor in model.state_dict().values():
        torch.nn.init.normal_(tensor)
    return model


def stored_as(name: str, tensor: Tensor, case: str) -> list[tuple[str, tuple[int, ...], Tensor]]:
    """Returns (key, index among stacked layers and experts, value) of a model tensor in Megatron-Core's format."""
    if name.startswith(("embedding.word", "output_layer")):
        padding = tensor.new_zeros(FACTS[case]["args"]["padded_vocab_size"] - len(tensor), tensor.shape[1])
        return [(name, (), torch.cat([tensor, padding]))]
    row: tuple[int, ...] = ()
    if not FACTS[case]["args"].get("multi_latent_attention"):
        name = name.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
        name = name.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
    if name.startswith("decoder.layers.") and case != SINGLE:
        _, _, layer, inner = name.split(".", 3)
        name, row = f"decoder.layers.{inner}", (int(layer),)
    if ".local_experts." in name:
        before, after = name.split(".local_experts.")
        number, inner = after.split(".", 1)
        if case == SINGLE:
            name = f"{before}.experts.{number}.{inner}"
        else:
            name, row = f"{before}.experts.{inner}", (*row, int(number))
    if case == SINGLE and name.endswith("linear_fc1.weight"):
        return [(f"{name}_{letter}", row, half) for letter, half in zip("wv", tensor.chunk(2), strict=True)]
    return [(name, row, tensor)]


def stored_tensors(model: GPTModel, case: str) -> dict[str, tuple[Tensor, Boxes]]:
    """Returns the tensors that Megatron-Core would write for the model, with the boxes of its real checkpoints."""
    rows: dict[str, dict[tuple[int, ...], Tensor]] = {}
    for name, tensor in model.state_dict().items():
        for key, row, value in stored_as(name, tensor, case):
            rows.setdefault(key, {})[row] = value
    found = {}
    for key, parts in rows.items():
        last = max(parts)
        sizes = tuple(i + 1 for i in last)
        whole = torch.stack([parts[row] for row in sorted(parts)]).view(*sizes, *parts[last].shape)
        found[key] = whole, [(tuple(offset), tuple(shape)) for offset, shape in FACTS[case]["tensors"][key][1]]
    return found


def convert(load: Path, save: Path, *more: str) -> None:
    command = ["--from", "torch_dist_mcore", "--to", "torch_dist", "--load", str(load), "--save", str(save)]
    assert main(["convert", *command, *more]) == 0


def loaded(case: str, folder: Path) -> dict[str, Tensor]:
    model = model_of(case)
    for tensor in model.state_dict().values():
        tensor.zero_()
    dist_checkpointing.load_items(model_sharded_tensors(model), folder)
    return model.state_dict()


@pytest.mark.parametrize("case", FACTS)
def test_checkpoints_in_the_layouts_of_the_real_package_load_bit_for_bit(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = model_of(case)
    tensors = stored_tensors(model, case)
    # Exactly the tensors that the real package wrote.
    assert {key: list(whole.shape) for key, (whole, _) in tensors.items()} == {
        key: shape for key, (shape, _) in FACTS[case]["tensors"].items()
    }
    source = tmp_path / "theirs" / f"iter_{ITERATION:07d}"
    write_megatron_core(source, tensors, args=FACTS[case]["args"], iteration=ITERATION)
    (source.parent / "latest_checkpointed_iteration.txt").write_text(str(ITERATION))
    convert(source.parent, tmp_path / "ours")
    assert "not converted: 3 entries that are not weights" in capsys.readouterr().out
    folder = tmp_path / "ours" / source.name
    state = loaded(case, folder)
    assert [name for name, tensor in model.state_dict().items() if not torch.equal(state[name], tensor)] == []
    values = dist_checkpointing.load_common(folder)
    assert values["iteration"] == ITERATION and values["train_state"]["consumed_train_samples"] == 11
    assert (tmp_path / "ours" / "latest_checkpointed_iteration.txt").read_text() == str(ITERATION)


INSIDE = {
    "decoder.layers.self_attention.q_layernorm.weight": "self_attention.linear_q_up_proj.layer_norm_weight",
    "decoder.layers.self_attention.kv_layernorm.weight": "self_attention.linear_kv_up_proj.layer_norm_weight",
    "decoder.layers.pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
    "mtp.layers.0.transformer_layer.pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}


@pytest.mark.parametrize("case", ["experts, tensor-parallel 2", "latent attention, multi-token prediction"])
def test_norms_are_found_under_the_names_of_either_implementation_of_layers(case: str, tmp_path: Path) -> None:
    """Transformer Engine stores norms in the linear layer that follows, except for the norm before a router."""
    model = model_of(case)
    tensors = stored_tensors(model, case)
    if case.startswith("experts"):
        key = "decoder.layers.mlp.linear_fc1.layer_norm_weight"
        tensors["decoder.layers.pre_mlp_layernorm.weight"] = tensors.pop(key)
    else:
        layers = ("decoder.layers.", "mtp.layers.0.transformer_layer.")
        for key, inner in INSIDE.items():
            if key in tensors:
                prefix = next(one for one in layers if key.startswith(one))
                tensors[prefix + inner] = tensors.pop(key)
    write_megatron_core(tmp_path / "theirs", tensors, args=FACTS[case]["args"], iteration=ITERATION)
    convert(tmp_path / "theirs", tmp_path / "ours")
    state = loaded(case, tmp_path / "ours" / f"iter_{ITERATION:07d}")
    assert [name for name, tensor in model.state_dict().items() if not torch.equal(state[name], tensor)] == []


def test_a_run_that_loads_such_files_as_they_are_is_told_what_to_do(tmp_path: Path) -> None:
    folder = tmp_path / f"iter_{ITERATION:07d}"
    write_megatron_core(folder, stored_tensors(model_of(GATED), GATED), args=None, iteration=ITERATION)
    with pytest.raises(ValueError, match="has no manifest.json; Megatron wrote it: .* --from torch_dist_mcore"):
        dist_checkpointing.verify(folder)
    legacy = tmp_path / "legacy"
    (legacy / "mp_rank_00").mkdir(parents=True)
    with pytest.raises(ValueError, match="tools/checkpoint.py convert --from torch --to torch_dist"):
        dist_checkpointing.verify(legacy)


def test_without_arguments_the_flags_of_the_model_come_from_a_file(tmp_path: Path) -> None:
    """Reads a checkpoint of a program that uses only Megatron-Core: no iteration, keys of a wrapped model, bf16."""
    model = model_of(GATED).bfloat16()
    tensors = {f"module.{key}": value for key, value in stored_tensors(model, GATED).items()}
    write_megatron_core(tmp_path / "theirs", tensors, args=None, iteration=None)
    flags = {name: value for name, value in FACTS[GATED]["args"].items() if name in MODEL_FLAGS}
    (tmp_path / "model.yaml").write_text(yaml.safe_dump(flags))
    convert(tmp_path / "theirs", tmp_path / "ours", "--model-config", str(tmp_path / "model.yaml"))
    folder = tmp_path / "ours" / "release"
    stored = dist_checkpointing.list_tensors(folder)
    assert {dtype for _, dtype in stored.values()} == {torch.bfloat16}
    target = model_of(GATED).bfloat16()
    dist_checkpointing.load_items(model_sharded_tensors(target), folder)
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in target.state_dict().items())


MODEL_FLAGS = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "group_query_attention", "vocab_size"),
    *("num_query_groups", "swiglu", "add_qkv_bias", "normalization", "qk_layernorm", "position_embedding_type"),
    *("untie_embeddings_and_output_weights", "max_position_embeddings", "seq_length", "add_bias_linear"),
)


Tensors = dict[str, tuple[Tensor, Boxes]]
NORM, OUTPUT = "decoder.final_layernorm.weight", "output_layer.weight"


def without(tensors: Tensors) -> None:
    del tensors[NORM]


def with_more(tensors: Tensors) -> None:
    tensors["decoder.other.weight"] = (torch.zeros(2), [((0,), (2,))])


def narrower(tensors: Tensors) -> None:
    tensors[NORM] = (torch.zeros(31), [((0,), (31,))])


def in_eight_bits(tensors: Tensors) -> None:
    whole, boxes = tensors[OUTPUT]
    tensors[OUTPUT] = (whole.to(torch.float8_e4m3fn), boxes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without, f"has no {NORM}: parameter {NORM} of its model is missing"),
        (with_more, "has decoder.other.weight, which does not belong to the model that its arguments describe"),
        (narrower, f"has {NORM} with shape [31]: must be [32] according to its arguments"),
        (in_eight_bits, f"holds {OUTPUT} as torch.float8_e4m3fn: must be fp64, fp32, bf16 or fp16"),
    ],
)
def test_tensors_of_another_model_are_named(
    change: Callable[[Tensors], None], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = stored_tensors(model_of(GATED), GATED)
    change(tensors)
    write_megatron_core(tmp_path / "theirs", tensors, args=FACTS[GATED]["args"], iteration=ITERATION)
    assert message in refusal(tmp_path, capsys)


def refusal(tmp_path: Path, capsys: pytest.CaptureFixture[str], *more: str) -> str:
    with pytest.raises(SystemExit) as stopped:
        convert(tmp_path / "theirs", tmp_path / "ours", *more)
    assert stopped.value.code == 1 and not list((tmp_path / "ours").glob("*"))
    return capsys.readouterr().err


@pytest.mark.slow
def test_damaged_files_and_other_formats_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, args = tmp_path / "theirs", FACTS[GATED]["args"]
    write_megatron_core(folder, stored_tensors(model_of(GATED), GATED), args=args, iteration=ITERATION)
    kept = {path: path.read_bytes() for path in folder.iterdir()}
    data = folder / "__0_0.distcp"

    def refused_with(path: Path, content: bytes | None, *more: str) -> str:
        path.unlink() if content is None else path.write_bytes(content)
        message = refusal(tmp_path, capsys, *more)
        path.write_bytes(kept[path])
        return message

    # Flips a bit of a weight, since padding between tensors is never read.
    weights = stored_tensors(model_of(GATED), GATED)[OUTPUT][0]
    place = kept[data].index(weights[:1].numpy().tobytes())
    flipped = kept[data][:place] + bytes([kept[data][place] ^ 1]) + kept[data][place + 1 :]
    assert f"{data} is corrupt: " in refused_with(data, flipped)
    assert "no file contains this range" in refused_with(data, kept[data][: len(kept[data]) // 2])
    assert "no file contains this range" in refused_with(data, None)
    config, common, account = (folder / name for name in ("metadata.json", "common.pt", ".metadata"))
    assert "sharded_backend is 'zarr': must be 'torch_dist'" in refused_with(config, b'{"sharded_backend": "zarr"}')
    assert f"--load is {folder}: no checkpoint found" in refused_with(config, None)
    assert f"{config} is corrupt" in refused_with(config, b"{")
    assert "has neither common.pt nor common_state/shard_0_1 in .metadata" in refused_with(common, None)
    assert "has no .metadata" in refused_with(account, None)
    # No code in a file is executed.
    monkeypatch.setenv("HARM", str(tmp_path / "harm"))
    assert f"refers to {os.mkdir.__module__}.mkdir" in refused_with(account, pickle.dumps(Harmful()))
    assert f"{common} cannot be read" in refused_with(common, pickle.dumps(Harmful()))
    assert not (tmp_path / "harm").exists()
    # Contents of common.pt.
    for content, message in (
        ({"iteration": -1}, "holds -1 as iteration: must be a non-negative integer"),
        ({"iteration": ITERATION, "args": 3}, "holds 3 as args: must be the Namespace"),
    ):
        torch.save(content, common)
        assert message in refused_with(common, common.read_bytes())
    # Arguments.
    for changes, message in (
        ({"qk_l2_norm": True}, "qk_l2_norm is True: must be unset"),
        ({"hidden_size": "64"}, "args.hidden_size is '64'"),
        ({"hidden_size": 64}, "must be [128, 64] according to its arguments"),
        ({"vocab_size": None}, "does not contain the tokenizer's vocabulary size: give --vocab-size"),
        ({"vocab_size": 129}, "the vocabulary has 129 tokens: must be from 1 to 128, the number of rows"),
        (None, "contains no arguments: give --model-config"),
    ):
        write_common(common, None if changes is None else {**args, **changes})
        assert message in refused_with(common, common.read_bytes())
    for name in ("layernorm_zero_centered_gamma", "apply_layernorm_1p"):
        write_common(common, {**args, name: True})
        assert megatron_core_values(common.parent)["args"]["layernorm_zero_centered_gamma"] is True
    with pytest.raises(SystemExit):
        convert(folder, tmp_path / "ours", "--ckpt-step", "9")
    assert f"--load {folder} is a single checkpoint" in capsys.readouterr().err
    convert(folder, tmp_path / "ours")
    with pytest.raises(SystemExit):
        convert(folder, tmp_path / "ours")
    assert "already exists and is not overwritten; give a new folder" in capsys.readouterr().err


def test_expert_parallel_ranks_of_a_dense_model_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The optimizer of a dense model is not chained, so common.pt has no entry for keys of chained optimizers."""
    args = FACTS[GATED]["args"]
    write_megatron_core(tmp_path / "came", stored_tensors(model_of(GATED), GATED), args=args, iteration=ITERATION)
    convert(tmp_path / "came", tmp_path / "ours")
    words = ["convert", "--from", "torch_dist", "--to", "torch_dist_mcore", "--load", str(tmp_path / "ours")]
    with pytest.raises(SystemExit):
        main([*words, "--save", str(tmp_path / "went"), "--target-expert-parallel-size", "2"])
    assert "--target-expert-parallel-size is 2: must be 1 for a model without experts" in capsys.readouterr().err
    assert not (tmp_path / "went").exists()


def write_common(path: Path, args: dict[str, Any] | None) -> None:
    content = {"iteration": ITERATION}
    torch.save(content if args is None else {**content, "args": argparse.Namespace(**args)}, path)
