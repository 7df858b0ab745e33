"""Quantized weights are read as the values that they represent; unsupported formats are rejected by name."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from megatron.tools.hugging_face.quantized import PlainFiles
from megatron.tools.safetensors_files import ONE_FILE, TensorFiles
from tests.unit_tests.tools.hugging_face.conversions import contents, convert, told
from tests.unit_tests.tools.hugging_face.small_hub import saved, small_model

BLOCK = 24  # no width of the model is a multiple
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]}


def rewritten(hub: Path, tensors: dict[str, torch.Tensor], quantization: dict) -> Path:
    """Replaces the tensors in a folder, adds the quantization to its config.json, and returns the folder."""
    save_file(tensors, hub / ONE_FILE)
    config = json.loads((hub / "config.json").read_text())
    (hub / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    return hub


def in_fp8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantizes to [R, C] fp8 with fp32 scales per block. Returns the values, the scales and the dequantized values."""
    rows, columns = (-(-size // BLOCK) for size in weight.shape)
    values, factors = torch.empty_like(weight, dtype=torch.float8_e4m3fn), torch.empty(rows, columns)
    meant = torch.empty_like(weight)
    for row in range(rows):
        for column in range(columns):
            part = slice(row * BLOCK, (row + 1) * BLOCK), slice(column * BLOCK, (column + 1) * BLOCK)
            factors[row, column] = weight[part].abs().max() / 448
            values[part] = (weight[part] / factors[row, column]).to(torch.float8_e4m3fn)
            meant[part] = values[part].float() * factors[row, column]
    return values, factors, meant


@pytest.mark.slow
def test_fp8_in_blocks(tmp_path: Path) -> None:
    hub = saved(small_model("deepseek-v3", dtype=torch.bfloat16), tmp_path / "hub", max_shard_size="5GB")
    tensors, expected = load_file(hub / ONE_FILE), {}
    for name, value in list(tensors.items()):
        if "proj" in name:
            tensors[name], tensors[f"{name}_scale_inv"], expected[name] = in_fp8(value.float())
    back = convert(convert(rewritten(hub, tensors, FP8), tmp_path / "run"), tmp_path / "back", back=True)
    found = load_file(back / ONE_FILE)
    assert found.keys() == {name for name in tensors if not name.endswith("_scale_inv")}
    assert len(expected) > 100 and {value.dtype for value in found.values()} == {torch.bfloat16}
    for name, value in found.items():
        assert torch.equal(value, expected.get(name, tensors[name]).to(value.dtype)), name
    # The converted model is no longer quantized.
    assert "quantization_config" not in json.loads((back / "config.json").read_text())
    assert contents(convert(convert(back, tmp_path / "again"), tmp_path / "twice", back=True)) == contents(back)


def test_mxfp4(tmp_path: Path) -> None:
    """Compares dequantized MXFP4 tensors with transformers' results."""
    generator = torch.Generator().manual_seed(1)
    blocks = torch.randint(0, 256, (3, 6, 2, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(115, 131, (3, 6, 2), generator=generator, dtype=torch.uint8)
    save_file({"a.down_proj_blocks": blocks, "a.down_proj_scales": scales, "b": torch.ones(2)}, tmp_path / ONE_FILE)
    files = PlainFiles(TensorFiles(tmp_path), {"quantization_config": {"quant_method": "mxfp4"}})
    assert {name: (kind.shape, kind.dtype) for name, kind in files.kinds.items()} == {
        "a.down_proj": ((3, 64, 6), torch.bfloat16),
        "b": ((2,), torch.float32),
    }
    assert files.file_of("a.down_proj") == tmp_path / ONE_FILE
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
    assert torch.equal(files.read("a.down_proj"), expected)


def test_mxfp4_of_a_model(tmp_path: Path) -> None:
    hub = saved(small_model("gpt-oss-20b", dtype=torch.bfloat16), tmp_path / "hub", max_shard_size="5GB")
    tensors, expected = load_file(hub / ONE_FILE), {}
    for name, value in list(tensors.items()):
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, inner, outer = value.shape
            blocks = torch.randint(0, 256, (experts, outer, inner // 32, 16), dtype=torch.uint8)
            scales = torch.randint(118, 124, (experts, outer, inner // 32), dtype=torch.uint8)
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            expected[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
            del tensors[name]
    rewritten(hub, tensors, {"quant_method": "mxfp4"})
    back = convert(convert(hub, tmp_path / "run"), tmp_path / "back", "--verify", back=True)
    found = load_file(back / ONE_FILE)
    assert len(expected) == 8 and all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize(
    "quantization",
    [{"quant_method": "gptq"}, {"quant_method": "fp8"}, *({**FP8, "weight_block_size": b} for b in (None, [BLOCK, 0]))],
)
def test_other_kinds_are_refused(tmp_path: Path, quantization: dict, capsys: pytest.CaptureFixture[str]) -> None:
    hub = saved(small_model("deepseek-v3"), tmp_path / "hub", max_shard_size="5GB")
    rewritten(hub, load_file(hub / ONE_FILE), quantization)
    words = f"quantization_config is {quantization['quant_method']}: weights must be plain numbers, FP8 in blocks"
    assert words in told(capsys, hub, tmp_path / "run")


@pytest.mark.parametrize("shape", [(2, 3), (3, 2), (3,)])
def test_factors_of_other_blocks_are_named(tmp_path: Path, shape: tuple[int, ...]) -> None:
    tensors = {"a": torch.zeros(60, 70, dtype=torch.float8_e4m3fn), "a_scale_inv": torch.ones(shape)}
    save_file(tensors, tmp_path / ONE_FILE)
    with pytest.raises(ValueError, match=r"a_scale_inv has shape .*: must be \[3, 3\], .* \[24, 24\] of a, \[60, 70\]"):
        PlainFiles(TensorFiles(tmp_path), {"quantization_config": FP8})


@pytest.mark.parametrize(
    ("blocks", "scales"),
    [
        (torch.zeros(3, 6, 2, 8, dtype=torch.uint8), torch.zeros(3, 6, 2, dtype=torch.uint8)),
        (torch.zeros(3, 6, 2, 16, dtype=torch.uint8), torch.zeros(3, 6, 1, dtype=torch.uint8)),
        (torch.zeros(6, 2, 16, dtype=torch.uint8), torch.zeros(6, 2, dtype=torch.uint8)),
        (torch.zeros(3, 6, 2, 16, dtype=torch.uint8), torch.zeros(3, 6, 2)),
    ],
)
def test_mxfp4_of_other_shapes_or_types_is_named(tmp_path: Path, blocks: torch.Tensor, scales: torch.Tensor) -> None:
    save_file({"a_blocks": blocks, "a_scales": scales}, tmp_path / ONE_FILE)
    with pytest.raises(
        ValueError, match="a_scales is .* and a_blocks .*: must be uint8 .experts, rows, groups., and 16"
    ):
        PlainFiles(TensorFiles(tmp_path), {"quantization_config": {"quant_method": "mxfp4"}})
