"""Conversions of Hugging Face models in both directions, and the tensors of their files. Contains no tests."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from megatron.tools.checkpoint import main


def convert(source: Path, target: Path, *words: str, back: bool = False) -> Path:
    """Converts from the Hugging Face format, or to it if `back`, and returns the target folder."""
    formats = ["--from", "megatron", "--to", "hf"] if back else ["--from", "hf", "--to", "megatron"]
    assert main(["convert", *formats, "--load", str(source), "--save", str(target), *words]) == 0
    return target


def told(capsys: pytest.CaptureFixture[str], *arguments: Any, **options: Any) -> str:
    """Returns the error message of a conversion that fails."""
    with pytest.raises(SystemExit):
        convert(*arguments, **options)
    error = capsys.readouterr().err
    assert "Traceback" not in error
    return error


def contents(folder: Path) -> dict[str, tuple[torch.dtype, tuple[int, ...], bytes]]:
    """Returns the dtype, shape and bytes of every tensor, as read by the library safetensors."""
    found = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for name in file.keys():
                tensor = file.get_tensor(name)
                values = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
                found[name] = (tensor.dtype, tuple(tensor.shape), values)
    return found
