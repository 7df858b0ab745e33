"""Each rule sees what it should: a small file that breaks it, and one beside it that does not."""

from pathlib import Path

import pytest

from tests.structure.layers import import_cycles, upward_imports
from tests.structure.measure import Source, percentile
from tests.structure.rules import ANY_CODE_RULES, PRODUCT_RULES

LONG_BODY = "\n".join(f"    a = {index}" for index in range(80))
MANY_IFS = "    if a and b: pass\n" * 8
MANY_FIELDS = "\n".join(f"    field_{index}: int = 0" for index in range(26))
CONFIG = "@dataclass\nclass TinyConfig:\n"


def source(text: str, path: str = "megatron/core/sample.py") -> Source:
    return Source(Path(path), text)


def breaks(rule: str, *texts: str) -> bool:
    return bool(list({**PRODUCT_RULES, **ANY_CODE_RULES}[rule]([source(text) for text in texts])))


@pytest.mark.parametrize(
    ("rule", "bad", "good"),
    [
        ("file_length", "a = 1\n" * 501, "a = 1\n" * 500),
        ("module_docstring", "a = 1", '"""Words."""\na = 1'),
        ("ascii_only", "a = '\u00e4'", "a = 'ae'"),
        ("todo", "a = 1  # TODO: later", "a = 1  # done"),
        ("todo", "a = 1\n" * 1000 + "# TODO: later", "a = 1\n" * 1000 + "# TODO(#12): later"),
        ("function_length", f"def f():\n{LONG_BODY}", f"def f():\n{LONG_BODY[:-10]}"),
        ("function_length", f"def train_step():\n{LONG_BODY[:1000]}", f"def train_step():\n{LONG_BODY[:500]}"),
        ("complexity", f"def f(a, b):\n{MANY_IFS}", f"def f(a, b):\n{MANY_IFS[:-21]}"),
        (
            "parameters",
            "def f(*, a, b, c, d, e, g, h, i, j, k, m): pass",
            "def f(*, a, b, c, d, e, g, h, i, j, k): pass",
        ),
        ("keyword_only", "def f(a, b, c): pass", "def f(a, b, *rest, c): pass"),
        ("keyword_only", "class A:\n    def f(self, a, b, c): pass", "class A:\n    def f(self, a, b): pass"),
        ("keyword_only", "def forward(a, b, c): pass", "class A:\n    def forward(self, a, b, c): pass"),
        ("keyword_only", "@cached\ndef f(a, b, c): pass", "@triton.jit\ndef f(a, b, c): pass"),
        ("return_values", "def f(): return 1, 2, 3, 4", "def f(): return 1, 2, 3"),
        ("tensor_docstring", 'def f(a: Tensor): "bf16"', 'def f(a: Tensor): "a: [T, H], bf16"'),
        ("tensor_docstring", 'def f(a: "list[torch.Tensor]"): "[T]"', "def _f(a: Tensor): pass"),
        ("import_in_function", "def f():\n    import json", "def f():\n    import triton.language"),
        ("config_fields", CONFIG + MANY_FIELDS, CONFIG + MANY_FIELDS[:-25]),
        (
            "post_init",
            CONFIG + "    def __post_init__(self):\n        validate_fields(" + "\n" * 30 + ")",
            "def __post_init__():\n    validate()",
        ),
        (
            "post_init",
            CONFIG + "    def __post_init__(self): pass",
            CONFIG + "    def __post_init__(self): validate_fields(self)",
        ),
        ("global_names", "def f():\n    global a", "def f():\n    nonlocal_ = 1"),
        ("module_state", "CACHE: dict = {}", "TABLE = {1: 2}"),
        ("module_state", "QUEUE = collections.deque()", "def f():\n    queue = deque()"),
        ("broad_except", "try: f()\nexcept (OSError, Exception): pass", "try: f()\nexcept OSError: pass"),
        ("broad_except", "try: f()\nexcept: pass", "try: f()\nfinally: pass"),
        ("torch_cuda", "torch.cuda.is_available()", "torch.accelerator.is_available()"),
        ("torch_cuda", "from torch import cuda", "from torch import nn"),
        ("registry_in_megatron", "args = get_args()", "args = typing.get_args(hint)"),
        ("attribute_by_name", "getattr(a, 'b')", "a.b"),
        ("comment_ratio", "a = 1\n" * 10, "a = 1\n" * 9 + "a = 1  # why"),
        ("statistics", "def f():\n" + LONG_BODY[:150], "def f():\n" + LONG_BODY[:100]),
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
        ("megatron/core/optimizer/clip_grads.py", "def f_sync(t): return [g.tolist() for g in t]", False),
        ("megatron/training/rng_state.py", "a = b.tolist()", False),
        ("megatron/core/datasets/gpt_dataset.py", "a = b.tolist()", False),
    ],
)
def test_a_step_reads_the_device_where_the_name_says_so(path: str, text: str, bad: bool) -> None:
    assert bool(list(PRODUCT_RULES["device_read"]([source(text, path)]))) is bad


def test_folders_are_counted_under_core() -> None:
    rule = PRODUCT_RULES["folder_depth"]
    assert not list(rule([source("", "megatron/core/transformer/moe/paged_stash/page_pool.py")]))
    assert list(rule([source("", "megatron/core/transformer/moe/paged_stash/more/page_pool.py")]))


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
            "megatron/core/transformer/transformer_config.py",
            "from megatron.core.transformer.moe.moe_config import A",
            True,
        ),
        ("megatron/core/transformer/moe/paged_stash/kernels.py", "from megatron.core import device", False),
        ("megatron/training/training.py", "def f():\n    import tools.generate", False),
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


def test_percentiles_are_values_that_occur() -> None:
    assert [percentile(range(1, 11), fraction) for fraction in (0.5, 0.9)] == [5, 9]
    assert percentile([], 0.5) == 0
