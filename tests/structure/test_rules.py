"""Each rule reports a small file that breaks it, and accepts a similar file that does not."""

from pathlib import Path

import pytest

from tests.structure.layers import folder_cycles, import_cycles, upward_imports
from tests.structure.measure import Source, percentile
from tests.structure.rules import ANY_CODE_RULES, PRODUCT_RULES


def source(text: str, path: str = "megatron/core/sample.py") -> Source:
    return Source(Path(path), text)


def breaks(rule: str, *texts: str) -> bool:
    return bool(list({**PRODUCT_RULES, **ANY_CODE_RULES}[rule]([source(text) for text in texts])))


@pytest.mark.parametrize(
    ("rule", "bad", "good"),
    [
        ("todo", "a = 1  # TODO: later", "a = 1  # done"),
        ("todo", "# FIXME", "# TODO(#12): later"),
        ("tensor_docstring", 'def f(a: Tensor): "bf16"', 'def f(a: Tensor): "a: [T, H], bf16"'),
        ("tensor_docstring", 'def f(a: "list[torch.Tensor]"): "[T]"', "def _f(a: Tensor): pass"),
        ("tensor_docstring", 'def f(param_grad: Tensor): ""', 'def f(param: Tensor, params: list[Tensor]): ""'),
        ("docstring_start", 'def f(): "See g."', 'def f(): "Seeds the random streams."'),
        ("docstring_start", 'class A:\n    """\n    Of each step: its rows."""', '"""Often empty. See g."""'),
        ("docstring_start", '"""That of y = x W^T."""', "# Of a comment nobody asks this"),
        ("module_state", "def f():\n    global a", "def f():\n    nonlocal_ = 1"),
        ("module_state", "CACHE: dict = {}", "TABLE = {1: 2}"),
        ("module_state", "TURNS = itertools.count()", "def f():\n    turns = itertools.count()"),
        ("module_state", "A = [2, 1]\ndef f(): A.sort()", "A = [2, 1]\ndef f(): return sorted(A)"),
        ("module_state", "QUEUE = collections.deque()", "def f():\n    queue = deque()"),
        ("module_state", "SEEN = {1}\ndef f(a): SEEN.add(a)", "SEEN = {1}\ndef f(a): return a in SEEN"),
        ("module_state", "T = {1: 2}\ndef f(a): T[a] = 1", "T = {1: 2}\ndef f(T): T[1] = 1"),
        ("stated_dtype", "a = torch.zeros(3, device=device)", "a = torch.zeros(3, dtype=dtype); b = torch.arange(3)"),
        ("tools_import", "from tools.ports import free_port", "from megatron.tools.ports import free_port"),
        ("tools_import", "def f():\n    import tools.ports", "import megatron.tools, toolset"),
        ("bare_except", "try: f()\nexcept (OSError, Exception): pass", "try: f()\nexcept OSError: pass"),
        ("bare_except", "try: f()\nexcept: pass", "try: f()\nexcept BaseException as error: log(error)"),
    ],
)
def test_a_rule_tells_bad_from_good(rule: str, bad: str, good: str) -> None:
    assert breaks(rule, bad)
    assert not breaks(rule, good)


@pytest.mark.parametrize(
    ("path", "text", "bad"),
    [
        ("megatron/training/training.py", "def f(t): return t.sum().item()", True),
        ("megatron/training/training.py", "def f(t): return t.items()", False),
        ("megatron/core/transformer/moe/router.py", "a = b.cpu()", True),
        ("megatron/core/transformer/moe/router.py", "a = b.nonzero()", True),
        ("megatron/core/transformer/moe/router.py", "torch.cuda.synchronize()", True),
        ("megatron/core/transformer/moe/router.py", "def _wait_sync_all(a): return a.item()", False),
        ("megatron/core/optimizer/clip_grads.py", "def f_sync(t): return [g.tolist() for g in t]", False),
        ("megatron/training/checkpointing/rng_state.py", "a = b.tolist()", False),
        ("megatron/training/step/update.py", "a = b.item()", True),
        ("megatron/core/fusions/gated_activation.py", "a = b.numpy()", True),
        ("pretrain_gpt.py", "a = b.item()", True),
        ("megatron/core/datasets/gpt_dataset.py", "a = b.tolist()", False),
    ],
)
def test_a_step_reads_the_device_where_the_name_says_so(path: str, text: str, bad: bool) -> None:
    assert bool(list(PRODUCT_RULES["host_sync"]([source(text, path)]))) is bad


def test_complexity_of_a_function_leaves_out_the_functions_inside_it() -> None:
    outer, inner = source("def f(a):\n    def g(b):\n        if b: pass\n    return [c for c in a if c]").functions
    assert (outer.complexity, inner.complexity) == (3, 2)


def test_docstrings_and_comments_are_no_code_lines() -> None:
    text = '"""Doc\nstring."""\n\n# why\na = [\n    1,  # one\n]  # noqa: E501\n'
    assert (source(text).num_code_lines, list(source(text).comments)) == (3, [4, 6])


@pytest.mark.parametrize(
    ("importer", "statement", "allowed"),
    [
        ("megatron/core/optimizer/clip_grads.py", "import megatron.core.distributed.layout", True),
        ("megatron/core/optimizer/clip_grads.py", "from megatron.core.transformer import mlp", False),
        ("megatron/core/models/gpt/gpt_model.py", "from megatron.core.transformer import mlp", True),
        ("megatron/core/distributed/layout.py", "from megatron.core.transformer import mlp", False),
        ("megatron/core/transformer/moe/router.py", "from ..mlp import MLP", True),
        ("megatron/core/transformer/mlp.py", "from .moe.router import Router", False),
        (
            "megatron/core/transformer/moe/moe_layer.py",
            "from megatron.core.transformer.moe_config import A",
            True,
        ),
        ("megatron/core/transformer/moe/paged_stash/cpu_kernels.py", "from megatron.core import device", False),
        ("megatron/training/training.py", "def f():\n    import megatron.tools.generate", False),
        ("megatron/training/training.py", "from megatron.core import optimizer", True),
        ("megatron/core/new_thing.py", "import torch", False),
    ],
)
def test_imports_go_downwards_only(importer: str, statement: str, allowed: bool) -> None:
    others = "optimizer/__init__ distributed/layout transformer/mlp transformer/moe/router device".split()
    known = [source("", f"megatron/core/{other}.py") for other in others]
    assert (upward_imports([*known, source(statement, importer)]) == []) is allowed


def test_import_cycles_are_found_in_functions_too() -> None:
    a, b = source("import megatron.b", "megatron/a.py"), source("def f():\n    from megatron import a", "megatron/b.py")
    assert import_cycles([a, b]) == [["megatron.a", "megatron.b"]]
    assert import_cycles([a, source("", "megatron/b.py")]) == []


def test_import_cycles_of_folders_need_no_cycle_of_modules() -> None:
    a, b = source("import megatron.y.b", "megatron/x/a.py"), source("", "megatron/y/b.py")
    back = source("from megatron.x import c", "megatron/y/d.py")
    inside = source("import megatron.x.a", "megatron/x/c.py")
    assert import_cycles([a, b, back, inside]) == []
    assert folder_cycles([a, b, back, inside]) == [["megatron/x", "megatron/y"]]
    assert folder_cycles([a, b, inside]) == []


def test_percentiles_are_values_that_occur() -> None:
    assert [percentile(range(1, 11), fraction) for fraction in (0.5, 0.9)] == [5, 9]
    assert percentile([], 0.5) == 0
