"""Writes engine_signatures.json, what transformer_engine.pytorch takes, from its published wheel; nothing is run.

    python -m tests.unit_tests.core.extensions.write_engine_signatures transformer_engine-VERSION-py3-none-any.whl

The wheel comes from the package registry: `pip download --no-deps transformer-engine==VERSION`.
"""

import ast
import json
import sys
import zipfile
from pathlib import Path
from typing import Any

SIGNATURES_FILE = Path(__file__).with_name("engine_signatures.json")
_PACKAGE = "transformer_engine/pytorch/"
# Where each class is, and of which others it hands its further keywords to.
_CLASSES = {
    "Linear": ["module/linear.py"],
    "LayerNorm": ["module/layernorm.py", "ops/basic/layer_norm.py"],
    "RMSNorm": ["module/rmsnorm.py", "ops/basic/rmsnorm.py"],
    "DotProductAttention": ["attention/dot_product_attention/dot_product_attention.py"],
}


def signatures(wheel: Path) -> dict[str, Any]:
    """The version, and of each class its methods' parameters in order; "required" are those without a default."""
    found: dict[str, Any] = {"version": wheel.name.split("-")[1], "classes": {}}
    with zipfile.ZipFile(wheel) as package:
        for name, files in _CLASSES.items():
            trees = [ast.parse(package.read(_PACKAGE + file)) for file in files]
            own, *bases = [_methods(tree, name) for tree in trees]
            for base in bases:
                # Behind **kwargs are the keywords of the operation that the class is made of.
                known = {*own["__init__"]["parameters"], "normalized_shape"}
                own["__init__"]["parameters"] += [p for p in base["__init__"]["parameters"] if p not in known]
            found["classes"][name] = {"__init__": own["__init__"], "forward": own.get("forward", _UNARY)}
    return found


# Operations are called with their input alone.
_UNARY = {"parameters": ["input"], "required": ["input"]}


def _methods(tree: ast.Module, name: str) -> dict[str, dict[str, list[str]]]:
    node = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    return {
        item.name: _parameters(item.args)
        for item in node.body
        if isinstance(item, ast.FunctionDef) and item.name in ("__init__", "forward")
    }


def _parameters(arguments: ast.arguments) -> dict[str, list[str]]:
    plain = [argument.arg for argument in arguments.args][1:]
    named = [argument.arg for argument in arguments.kwonlyargs]
    required = plain[: len(plain) - len(arguments.defaults)]
    required += [name for name, default in zip(named, arguments.kw_defaults, strict=True) if default is None]
    return {"parameters": plain + named, "required": required}


if __name__ == "__main__":
    SIGNATURES_FILE.write_text(json.dumps(signatures(Path(sys.argv[1])), indent=1) + "\n")
