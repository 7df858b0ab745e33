"""Tests --spec: a script's layers, written for Megatron-LM, over tensor-parallel ranks and pipeline stages."""

from typing import Any

import pytest

from megatron.training.arguments import parse_args, validate_args
from megatron.training.gpt_builder import build_gpt
from tests.distributed.tiny_runs import started_run, train_steps
from tests.functional_tests.case import Flags, command_line, read_bases
from tests.harness import run_on_ranks

MODULE = "tests.unit_tests.core.transformer.foreign_modules"
LAYOUTS: dict[str, Flags] = {
    "tensor parallel": {"tensor-model-parallel-size": 2},
    "tensor and sequence parallel": {"tensor-model-parallel-size": 2, "sequence-parallel": True},
    "pipeline": {"pipeline-model-parallel-size": 2},
    "context parallel": {"context-parallel-size": 2, "cp-comm-type": "a2a"},
}


def _argv(flags: Flags, name: str | None) -> list[str]:
    spec: Flags = {} if name is None else {"spec": [MODULE, name]}
    return command_line({**read_bases()["llama"], "attention-backend": "unfused", **flags, **spec})


def _losses(argvs: list[list[str]]) -> list[Any]:
    found = []
    for argv in argvs:
        with started_run(argv) as run:
            steps = train_steps(run, 2)
            classes = {type(module).__name__ for chunk in run.model for module in chunk.modules()}
            found.append((classes, [step["losses"] | {"norm": float(step["grad_norm"])} for step in steps]))
    return found


@pytest.mark.slow
def test_a_foreign_core_trains_as_ours_in_each_layout() -> None:
    argvs = [_argv(flags, name) for flags in LAYOUTS.values() for name in (None, "FOREIGN_CORE")]
    for of_rank in run_on_ranks(_losses, 2, argvs, timeout=240):
        for (_, ours), (classes, foreign) in zip(of_rank[::2], of_rank[1::2], strict=True):
            assert "ForeignCore" in classes and "DotProductAttention" not in classes
            for step, reference in zip(foreign, ours, strict=True):
                assert step == pytest.approx(reference, rel=2e-5)


@pytest.mark.slow
def test_whole_foreign_parts_train_alike_over_stages_and_ranks() -> None:
    names = ["pipeline", "tensor parallel"]
    argvs = [_argv(LAYOUTS[name], "foreign_layers") for name in names]
    for of_rank in run_on_ranks(_losses, 2, argvs, timeout=240):
        for classes, steps in of_rank:
            assert {"ForeignAttention", "ForeignMLP"} < classes
            assert all(step["norm"] > 0 for step in steps)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ([MODULE], "--spec is .*must be a Python module and a name"),
        (["no.such.module", "x"], "no.such.module cannot be imported"),
        ([MODULE, "no_such"], "has no 'no_such'"),
        ([MODULE, "math"], "must be a ModuleSpec or TransformerBlockSubmodules"),
    ],
)
def test_what_is_no_spec_is_refused(spec: list[str], message: str) -> None:
    with pytest.raises((ValueError, SystemExit), match=message):
        args = validate_args(parse_args(argv=command_line({**read_bases()["llama"], "spec": spec})))
        args.padded_vocab_size = args.unpadded_vocab_size = 128
        build_gpt(args)
