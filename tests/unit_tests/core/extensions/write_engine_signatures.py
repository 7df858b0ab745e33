"""Writes engine_signatures.json, the parameters of transformer_engine.pytorch, from its wheel without running it.

    python -m tests.unit_tests.core.extensions.write_engine_signatures transformer_engine-VERSION-py3-none-any.whl

Download the wheel from the package registry with `pip download --no-deps transformer-engine==VERSION`.
"""

import ast
import json
import sys
import zipfile
from pathlib import Path
from typing import Any

SIGNATURES_FILE = Path(__file__).with_name("engine_signatures.json")
_PACKAGE = "transformer_engine/pytorch/"
# Files that define each class, followed by those of the classes that receive its other keywords.
_CLASSES = {
    "Linear": ["module/linear.py"],
    "LayerNorm": ["module/layernorm.py", "ops/basic/layer_norm.py"],
    "RMSNorm": ["module/rmsnorm.py", "ops/basic/rmsnorm.py"],
    "DotProductAttention": ["attention/dot_product_attention/dot_product_attention.py"],
}


def signatures(wheel: Path) -> dict[str, Any]:
    """Returns the version, and each method's parameters in order by class. "required" lists those without a default."""
    found: dict[str, Any] = {"version": wheel.name.split("-")[1], "classes": {}}
    with zipfile.ZipFile(wheel) as package:
        for name, files in _CLASSES.items():
            trees = [ast.parse(package.read(_PACKAGE + file)) for file in files]
            own, *bases = [_methods(tree, name) for tree in trees]
            for base in bases:
                # **kwargs are passed on to the operation that the class is built from.
                known = {*own["__init__"]["parameters"], "normalized_shape"}
                own["__init__"]["parameters"] += [p for p in base["__init__"]["parameters"] if p not in known]
            found["classes"][name] = {"__init__": own["__init__"], "forward": own.get("forward", _UNARY)}
    return found


# Operations are called with only their input.
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
