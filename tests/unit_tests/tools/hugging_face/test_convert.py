"""A round trip from Hugging Face keeps all bytes, with one tensor in memory at a time; invalid files are named."""

import contextlib
import json
import shutil
import sys
import weakref
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron.core.dist_checkpointing import list_tensors, load_common, verify
from megatron.tools.checkpoint import main
from megatron.tools.safetensors_files import INDEX_FILE, TensorFiles
from megatron.training.checkpointing.folder import find_checkpoint
from megatron.training.checkpointing.run_values import load_run_values
from tests.unit_tests.tools.hugging_face.conversions import contents, convert, told
from tests.unit_tests.tools.hugging_face.small_hub import LAYERS, SMALL, saved, small_model

# A model with experts and one with tied embeddings, for tests that do not depend on the family.
SPARSE, TIED = "qwen3-30b-a3b", "llama3.2-1b"


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SMALL)
def test_there_and_back_is_the_identity_on_bytes(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    hub = saved(small_model(name, dtype=dtype), tmp_path / "hub")
    back = convert(convert(hub, tmp_path / "run"), tmp_path / "back", "--max-shard-size", "1e-4", back=True)
    assert len(list(hub.glob("*.safetensors"))) > 2 and len(list(back.glob("*.safetensors"))) > 2
    assert contents(back) == contents(hub)
    for file in ("config.json", "generation_config.json"):
        assert (back / file).read_bytes() == (hub / file).read_bytes()
    # Repeats both conversions with the files written above.
    assert contents(convert(convert(back, tmp_path / "again"), tmp_path / "twice", back=True)) == contents(hub)


@pytest.mark.parametrize("name", [SPARSE, TIED])
def test_logits_are_compared(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    hub = saved(small_model(name), tmp_path / "hub")
    run = convert(hub, tmp_path / "run", "--verify")
    convert(run, tmp_path / "back", "--verify", back=True)
    assert capsys.readouterr().out.count("random tokens agree") == 2
    # A model with different weights is detected.
    with patch("megatron.tools.checkpoint.from_hub", lambda *_, **__: run):
        other = small_model(name)
        other.model.norm.weight.data.mul_(1.01)
        saved(other, tmp_path / "other")
        words = ["--load", str(tmp_path / "other"), "--save", str(run), "--verify"]
        assert main(["convert", "--from", "hf", "--to", "megatron", *words]) == 1
    assert "random tokens DIFFER" in capsys.readouterr().out


def test_weights_take_the_type_that_is_asked_for(tmp_path: Path) -> None:
    model = small_model("glm-4.5")
    hub = saved(model, tmp_path / "hub")
    run = convert(hub, tmp_path / "run", "--dtype", "bf16")
    stored = list_tensors(run / "release")
    bias = "decoder.layers.1.mlp.router.expert_bias"
    assert {dtype for key, (_, dtype) in stored.items() if not key.endswith("expert_bias")} == {torch.bfloat16}
    # Half precision would lose its small updates.
    assert stored[bias][1] == torch.float32
    assert load_common(run / "release")["args"]["bf16"] is True
    half = convert(run, tmp_path / "half", back=True)
    assert json.loads((half / "config.json").read_text())["dtype"] == "bfloat16"
    rounded = {name: value.bfloat16() for name, value in load_one(hub).items()}
    assert all(
        torch.equal(value, rounded[name].to(value.dtype))
        for name, value in load_one(half).items()
        if "e_score" not in name
    )
    back = convert(run, tmp_path / "back", "--dtype", "fp32", back=True)
    assert {value.dtype for value in load_one(back).values()} == {torch.float32}
    assert (back / "config.json").read_bytes() == (hub / "config.json").read_bytes()


def load_one(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def test_files_beside_the_weights_come_back_untouched(tmp_path: Path) -> None:
    hub = saved(small_model(TIED), tmp_path / "hub")
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"):
        (hub / name).write_text(f"{{ {name} }}")
    (hub / "original").mkdir()
    (hub / "pytorch_model.bin").write_bytes(b"weights")
    run = convert(hub, tmp_path / "run")
    back = convert(run, tmp_path / "back", back=True)
    beside = {path.name: path.read_bytes() for path in hub.iterdir() if path.suffix in (".json", ".jinja")}
    del beside[INDEX_FILE]
    assert {path.name: path.read_bytes() for path in back.iterdir() if path.suffix != ".safetensors"} == beside
    arguments = load_common(run / "release")["args"]
    assert arguments["tokenizer_type"] == "HuggingFaceTokenizer"
    assert Path(arguments["tokenizer_model"]) == run / "hugging_face"
    # Without the copied files, an equivalent config.json is created, and --hf-reference supplies the other files.
    shutil.rmtree(run / "hugging_face")
    bare = convert(run, tmp_path / "bare", back=True)
    assert sorted(path.name for path in bare.iterdir()) == ["config.json", "model.safetensors"]
    again = convert(bare, tmp_path / "again")
    assert list_tensors(again / "release") == list_tensors(run / "release")
    whole = convert(run, tmp_path / "whole", "--hf-reference", str(hub), back=True)
    assert (whole / "tokenizer.json").read_bytes() == beside["tokenizer.json"]


def test_one_tensor_is_in_memory_at_a_time(tmp_path: Path) -> None:
    """Tracks live tensor bytes as tensors are created and freed, for a model of many equal layers."""
    hub = saved(small_model(SPARSE), tmp_path / "hub")
    files = TensorFiles(hub)
    largest = max(kind.num_bytes for kind in files.kinds.values())
    total = sum(kind.num_bytes for kind in files.kinds.values())
    assert total > 10 * largest
    with counted_storage() as peak:
        run = convert(hub, tmp_path / "run")
    assert peak[0] == largest
    with counted_storage() as peak:
        convert(run, tmp_path / "half", "--dtype", "bf16", back=True)
    # The tensor that is read, and its converted copy.
    assert peak[0] <= 2 * largest


@contextlib.contextmanager
def counted_storage() -> Any:
    """Yields a list whose element is the peak number of live bytes in tensors of torch.empty and TensorFiles.read."""
    peak, live, empty, read = [0], [0], torch.empty, TensorFiles.read

    def count(tensor: torch.Tensor) -> torch.Tensor:
        live[0] += tensor.nbytes
        peak[0] = max(peak[0], live[0])
        weakref.finalize(tensor.untyped_storage(), lambda size=tensor.nbytes: live.__setitem__(0, live[0] - size))
        return tensor

    def counting(*arguments: Any, **options: Any) -> torch.Tensor:
        tensor = empty(*arguments, **options)
        # Tensors that only describe a frame of torch.save; their memory is never touched.
        if sys._getframe(1).f_code.co_name == "_frame":
            return tensor
        return count(tensor)

    with (
        patch("torch.empty", counting),
        patch.object(TensorFiles, "read", lambda files, name: count(read(files, name))),
    ):
        yield peak


def test_a_checkpoint_to_start_from_is_found_and_whole(tmp_path: Path) -> None:
    run = convert(saved(small_model(SPARSE), tmp_path / "hub"), tmp_path / "run")
    found = find_checkpoint(str(run))
    assert found is not None and found.is_release
    verify(found.path)
    assert main(["inspect", str(run)]) == 0
    arguments = load_common(found.path)["args"]
    assert (arguments["num_layers"], arguments["vocab_size"], arguments["moe_layer_freq"]) == (
        LAYERS,
        300,
        [1, 1, 0, 1],
    )


def test_a_missing_shard_or_tensor_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hub = saved(small_model(SPARSE), tmp_path / "hub")
    shard = sorted(hub.glob("*.safetensors"))[1]
    content = shard.read_bytes()
    shard.unlink()
    assert f"{hub} does not contain {shard.name}" in told(capsys, hub, tmp_path / "run")
    shard.write_bytes(content[:-10])
    assert f"{shard} is not a safetensors file, or is truncated or corrupt" in told(capsys, hub, tmp_path / "run")
    tensors = load_file(sorted(hub.glob("*.safetensors"))[0])
    first = sorted(tensors)[0]
    shard.write_bytes(content)
    save_file({name: value for name, value in tensors.items() if name != first}, sorted(hub.glob("*.safetensors"))[0])
    assert f"does not contain {first}, which {INDEX_FILE} lists" in told(capsys, hub, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"num_hidden_layers": LAYERS - 1}, "unused model.layers.3."),
        ({"num_hidden_layers": LAYERS + 1}, "there is no model.layers.4.input_layernorm.weight"),
        ({"num_key_value_heads": 1}, r"model.layers.0.self_attn.k_proj.weight has shape [48, 64]: must be [24, 64]"),
        ({"vocab_size": 299}, "has shape [300, 64], but vocab_size is 299 in config.json"),
        ({"tie_word_embeddings": True}, "unused lm_head.weight"),
        ({"num_local_experts": 4}, "mlp.gate.weight has shape [8, 64]: must be [4, 64]"),
        ({"architectures": ["LlamaForCausalLM"]}, "there is no model.layers.0.mlp.gate_proj.weight"),
        ({"architectures": ["BertModel"]}, "the architecture is BertModel: must be one of"),
        ({"architectures": 1}, "architectures is 1: must be a list of names"),
        ({"hidden_size": "64"}, "hidden_size is '64': must be a whole number, 1 or more"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step is 0: must be a whole number, 1 or more"),
        ({"norm_topk_prob": 1}, "norm_topk_prob is 1: must be true or false"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan: must be a number above 0"),
        ({"mlp_only_layers": 2}, "mlp_only_layers is 2: must be a list of layers"),
        ({"rope_parameters": {"rope_type": "linear", "factor": "4"}}, "factor is '4': must be a number above 0"),
        ({"layer_types": ["chunked_attention"] * LAYERS}, "must be a list of full_attention and sliding_attention"),
        ({"layer_types": ["full_attention"]}, "layer_types lists 1 layers, but num_hidden_layers is 4"),
    ],
)
def test_a_config_json_of_another_model_is_named(
    tmp_path: Path, changes: dict[str, Any], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    hub = saved(small_model(SPARSE), tmp_path / "hub")
    config = json.loads((hub / "config.json").read_text())
    (hub / "config.json").write_text(json.dumps({**config, **changes}))
    assert error in told(capsys, hub, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["model.layers", "model.layers.x.weight", "model.layers.0.foo"])
def test_a_tensor_too_many_is_named(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    hub = saved(small_model(TIED), tmp_path / "hub", max_shard_size="1GB")
    tensors = load_file(hub / "model.safetensors")
    save_file({**tensors, name: torch.zeros(1)}, hub / "model.safetensors")
    assert f"unused {name}" in told(capsys, hub, tmp_path / "run")


def test_wrong_folders_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hub = saved(small_model(TIED), tmp_path / "hub")
    run = convert(hub, tmp_path / "run")
    assert f"--save is {run}: it already contains checkpoints" in told(capsys, hub, run)
    assert f"--save is {hub}: it already exists" in told(capsys, run, hub, back=True)
    assert f"{run} contains no config.json" in told(capsys, run, tmp_path / "other")
    assert f"--load is {hub}: no checkpoint found" in told(capsys, hub, tmp_path / "other", back=True)
    assert f"{tmp_path / 'none'} contains no config.json" in told(capsys, tmp_path / "none", tmp_path / "other")
    # Tokenizer and configuration files of a different model.
    other = saved(small_model("qwen3-8b"), tmp_path / "qwen")
    error = told(capsys, run, tmp_path / "back", "--hf-reference", str(other), back=True)
    assert "Qwen3ForCausalLM of the files next to the checkpoint differs in" in error and "--qk-layernorm" in error
    (hub / "config.json").write_text("[")
    assert f"{hub / 'config.json'} is not a JSON object" in told(capsys, hub, tmp_path / "other")
    with pytest.raises(SystemExit):
        main(["convert", "--from", "hf", "--to", "torch", "--load", str(hub), "--save", str(tmp_path / "other")])
    assert "hf can only be converted to and from megatron" in capsys.readouterr().err


def test_tied_weights_are_stored_once(tmp_path: Path) -> None:
    hub = saved(small_model(TIED), tmp_path / "hub", max_shard_size="5GB")
    run = convert(hub, tmp_path / "run")
    assert "output_layer.weight" not in list_tensors(run / "release")
    # Some files with tied embeddings contain the output layer nevertheless.
    file = hub / "model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, file)
    twice = convert(hub, tmp_path / "twice")
    assert list_tensors(twice / "release") == list_tensors(run / "release")


@pytest.fixture
def foresighted(tmp_path: Path) -> Path:
    """Saves a small DeepSeek-V3 with a multi-token prediction layer, as on the Hub. Transformers omits this layer."""
    hub = saved(small_model("deepseek-v3"), tmp_path / "hub", max_shard_size="5GB")
    tensors = load_file(hub / "model.safetensors")
    last, further = f"model.layers.{LAYERS - 1}.", f"model.layers.{LAYERS}."
    more = {
        further + name.removeprefix(last): torch.randn_like(value)
        for name, value in tensors.items()
        if name.startswith(last)
    }
    more |= {f"{further}{name}.weight": torch.randn(64) for name in ("enorm", "hnorm", "shared_head.norm")}
    more[f"{further}eh_proj.weight"] = torch.randn(64, 128)
    more[f"{further}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    more[f"{further}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file({**tensors, **more}, hub / "model.safetensors", metadata={"format": "pt"})
    return hub


def test_layers_of_multi_token_prediction_are_converted(foresighted: Path, tmp_path: Path) -> None:
    run = convert(foresighted, tmp_path / "run", "--verify")
    stored = list_tensors(run / "release")
    assert load_common(run / "release")["args"]["mtp_num_layers"] == 1
    assert stored["mtp.layers.0.eh_proj.weight"][0] == (64, 128)
    back = convert(run, tmp_path / "back", back=True)
    assert contents(back) == contents(foresighted)
    assert (back / "config.json").read_bytes() == (foresighted / "config.json").read_bytes()
    # Saved by transformers, the model has no such layer.
    without = convert(saved(small_model("deepseek-v3"), tmp_path / "without"), tmp_path / "run without")
    assert load_common(without / "release")["args"]["mtp_num_layers"] is None


def test_a_copy_that_is_none_is_named(foresighted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, copy = foresighted / "model.safetensors", f"model.layers.{LAYERS}.shared_head.head.weight"
    tensors = load_file(file)
    # Files may omit this copy.
    save_file({name: value for name, value in tensors.items() if name != copy}, file)
    convert(foresighted, tmp_path / "run")
    tensors[copy][7, 7] += 1
    save_file(tensors, file)
    assert f"{copy} and lm_head.weight differ" in told(capsys, foresighted, tmp_path / "other")


@pytest.mark.parametrize("name", [SPARSE, TIED])
def test_norms_stored_minus_one_get_their_one_back(tmp_path: Path, name: str) -> None:
    run = convert(saved(small_model(name), tmp_path / "hub"), tmp_path / "run")
    plain = load_one(convert(run, tmp_path / "plain", back=True))
    changed = []

    def as_stored_minus_one(path: Path) -> dict:
        values = load_run_values(path)
        return {**values, "args": {**values["args"], "layernorm_zero_centered_gamma": True}}

    with patch("megatron.tools.hugging_face.convert.load_run_values", as_stored_minus_one):
        moved = load_one(convert(run, tmp_path / "moved", back=True))
    for key, tensor in plain.items():
        if "norm" in key:
            changed.append(key)
            assert torch.equal(moved[key], tensor + 1), key
        else:
            assert torch.equal(moved[key], tensor), key
    assert (
        len(changed) >= 5
        and (tmp_path / "moved" / "config.json").read_bytes() == (tmp_path / "plain" / "config.json").read_bytes()
    )


def test_factors_of_the_width_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = convert(saved(small_model(TIED), tmp_path / "hub"), tmp_path / "run")

    def as_wide(path: Path) -> dict:
        values = load_run_values(path)
        return {**values, "args": {**values["args"], "use_mup": True, "mup_width_mult": 2.0}}

    with patch("megatron.tools.hugging_face.convert.load_run_values", as_wide):
        assert "--use-mup (False, True here), --mup-width-mult (1.0, 2.0 here)" in told(
            capsys, run, tmp_path / "back", back=True
        )
