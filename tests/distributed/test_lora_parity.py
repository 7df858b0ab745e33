"""Checks that adapters agree with one process in fp64 under every layout, and that frozen weights never change."""

from functools import cache

import pytest
import torch

from tests.counts import long_count, slow
from tests.distributed.parity import WholeRun, assert_layouts_agree, assert_same_run, layout, run_layout, run_layouts
from tests.distributed.stash_runs import stash
from tests.functional_tests.case import Flags

RANK: Flags = {"num-layers": 2, "lora-rank": 2, "lora-alpha": 8}
ADAPTERS: Flags = {**RANK, "num-query-groups": 4}
LATENT_KEYS = ["linear_kv_down_proj", "linear_kv_up_proj", "linear_proj"]
MODELS: dict[str, Flags] = {
    "llama": ADAPTERS,
    # The reference runs experts one after the other instead of as a grouped GEMM.
    "moe": {**ADAPTERS, "lora-rank": 4, "moe-grouped-gemm": None, "moe-shared-expert-intermediate-size": 16},
}
IN_SOAK = long_count(0, soak=1)
SPLIT_WHOLE: list[Flags] = [layout(2, sequence_parallel=False)]
LATENT: dict[str, tuple[Flags, list[Flags]]] = {
    "queries of low rank": (
        {**RANK, "lora-target-modules": ["linear_q_down_proj", "linear_q_up_proj", *LATENT_KEYS]},
        [layout(2, recompute_granularity="selective", recompute_modules=["mla_up_proj"]), *SPLIT_WHOLE[:IN_SOAK]],
    ),
    "whole queries": (
        {**RANK, "q-lora-rank": None, "lora-target-modules": ["linear_q_proj", *LATENT_KEYS]},
        SPLIT_WHOLE,
    ),
}
GROUPED: dict[str, Flags] = {
    "tp2, sp": {**layout(2, etp=1), "expert-tensor-parallel-size": 1},
    "ep2": {**layout(ep=2), "moe-token-dispatcher-type": "alltoall"},
    # Few enough pages that gate_up must be recomputed.
    "ep2, stash": {**layout(ep=2), **stash(0.3), "moe-expert-rank-capacity-factor": 8},
}
RECOMPUTED: Flags = {"recompute-granularity": "full", "recompute-method": "uniform", "recompute-num-layers": 1}
LAYOUTS: dict[str, tuple[int, Flags]] = {
    "tp2": (2, layout(2, sequence_parallel=False)),
    "tp2, sp": (2, {**layout(2, etp=1), "expert-tensor-parallel-size": 1}),
    "pp2": (2, layout(pp=2)),
    "cp2, recomputed": (2, {**layout(cp=2), **RECOMPUTED}),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("base", "kind"),
    [
        ("llama", "tp2"),
        slow("moe", "tp2, sp"),
        slow("llama", "cp2, recomputed"),
        slow("llama", "pp2"),
    ],
)
def test_training_agrees_with_one_process(base: str, kind: str) -> None:
    ranks, flags = LAYOUTS[kind]
    run, reference = run_layout(base, ranks, {**MODELS[base], **flags}), _reference(base)
    assert_same_run(run, reference)
    assert all(name.endswith(("lora_a", "lora_b", "lora_b.gate", "lora_b.up")) for name in run.grads[0])
    assert all(grad.any() for name, grad in run.grads[-1].items() if ".experts." not in name)


@pytest.mark.slow
def test_grouped_experts_agree_with_sequential_ones() -> None:
    runs = run_layouts("moe", 2, [{**MODELS["moe"], "moe-grouped-gemm": True, **flags} for flags in GROUPED.values()])
    for kind, run in zip(GROUPED, runs, strict=True):
        assert_same_run(run, _reference("moe"))
        of_experts = [name for name in run.grads[-1] if ".experts." in name]
        assert len(of_experts) == 2 * 5, kind


@pytest.mark.slow
@pytest.mark.parametrize("queries", LATENT)
def test_projections_of_latent_attention_agree_with_one_process(queries: str) -> None:
    flags, layouts = LATENT[queries]
    reference = run_layout("latent", 1, flags)
    assert_layouts_agree("latent", flags, 2, layouts, reference=reference)
    adapted = {name.rsplit(".", 2)[1] for name in reference.grads[-1]}
    assert adapted == set(flags["lora-target-modules"])
    assert all(grad.any() for grad in reference.grads[-1].values())


@cache
def _reference(base: str) -> WholeRun:
    return run_layout(base, 1, MODELS[base])


def test_what_is_frozen_stays_to_the_bit() -> None:
    slower = run_layout("llama", 1, {**MODELS["llama"], "lr": 0.05}).final
    faster = _reference("llama").final
    for name, weight in slower.items():
        assert torch.equal(weight, faster[name]) == ("lora_" not in name), name
