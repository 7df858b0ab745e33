"""docs/torch_versions.md lists the private interfaces of torch that the code uses, and the installed torch has them."""

import ast
import importlib
from pathlib import Path

import pytest
import torch

from tests.structure.measure import PRODUCT, Source, read_sources
from tests.structure.private_interfaces import listed_interfaces, private_interfaces


def test_the_page_lists_the_private_interfaces_in_use_with_their_files() -> None:
    listed, used = listed_interfaces(), private_interfaces(read_sources(*PRODUCT))
    assert {name: files for name, files in used.items() if listed.get(name) != files} == {}, "missing, or other files"
    assert listed.keys() - used.keys() == set(), "no longer used"


NAMES = [name for name in listed_interfaces(in_cpu_builds=torch.version.cuda is None) if not name.startswith(".")]


@pytest.mark.parametrize("name", NAMES)
def test_the_installed_torch_has_the_interface(name: str) -> None:
    assert has(name), f"torch {torch.__version__} has no {name}"


def has(name: str) -> bool:
    """Returns whether torch has something of this dotted name, which is a module or in a module."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:count]))
        except ImportError:
            continue
        for part in parts[count:]:
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False


def test_interfaces_of_other_versions_are_not_found() -> None:
    assert has("torch._C._current_graph_task_id") and not has("torch._C._current_graph_task_name")
    assert has("torch.utils._pytree") and not has("torch.utils._trees.tree_map")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("import torch\ntorch._C._current_graph_task_id()", {"torch._C._current_graph_task_id"}),
        ("import torch\ntorch._C._autograd._profiler_enabled()", {"torch._C._autograd._profiler_enabled"}),
        ("from torch.utils._pytree import tree_map as over", {"torch.utils._pytree.tree_map"}),
        (
            "import torch.distributed as dist\ndist.distributed_c10d._world.pg_map.get(1)",
            {"torch.distributed.distributed_c10d._world.pg_map"},
        ),
        ("from torch._C import _distributed_c10d as c10d\nc10d.Work.wait", {"torch._C._distributed_c10d.Work"}),
        ("import torch\ntorch.ops.aten._to_copy.default(x)", {"torch.ops.aten._to_copy"}),
        ("import triton\ntriton.runtime._allocation", {"triton.runtime._allocation"}),
        ("x.storage()._cdata", {"._cdata"}),
        ("getattr(x, '_base')", {"._base"}),
        ("attrgetter('_base')(x)", {"._base"}),
        ("vars(x)['_state'], vars(x).get('_old')", {"._state", "._old"}),
        ("module._parameters", {"._parameters"}),
        ("class Own:\n    def _parameters(self): return self._parameters()", set()),
        ("class Own:\n    def __init__(self): self._base = 1\nx._base", set()),
        ("import os, sys\nos._exit(1), sys._getframe()", set()),
        ("import torch\ntorch.nn.Module.__call__, torch.compile", set()),
        ("pair._asdict()", set()),
    ],
)
def test_uses_are_found(text: str, expected: set[str]) -> None:
    source = Source(Path("megatron/example.py"), text)
    assert ast.parse(text) and private_interfaces([source]) == {name: {"megatron/example.py"} for name in expected}
