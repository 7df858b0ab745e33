"""Tensor- and sequence-parallel training agrees with one process in fp64: losses, norms, gradients, weights."""

from functools import cache

import pytest

from tests.counts import slow, soak_only
from tests.distributed.parity import WholeRun, assert_same_run, run_layout
from tests.functional_tests.case import Flags

# Features that are split in addition to the layers: biases and tied embeddings; query groups, gates, head norms and
# sinks.
MODELS: dict[str, Flags] = {
    "dense": {"add-qkv-bias": True},
    "llama": {
        "num-query-groups": 4,
        "qk-layernorm": True,
        "untie-embeddings-and-output-weights": True,
        "softmax-type": "learnable",
    },
}
# Norms and initial weights that differ from the default.
STARTS: Flags = {
    "apply-layernorm-1p": True,
    "qk-layernorm": True,
    "init-method-xavier-uniform": True,
    "embedding-init-method-std": 0.05,
}
# Flags that change the numbers, and flags that must not.
FEATURES: dict[str, tuple[Flags, Flags]] = {
    "recomputed parts": (
        {"window-size": "5,0", "softmax-type": "learnable"},
        {"recompute-granularity": "selective", "recompute-modules": ["core_attn", "layernorm", "mlp"]},
    ),
    "recomputed layers": (
        {"reset-position-ids": True, "reset-attention-mask": True, "calculate-per-token-loss": True},
        {"recompute-granularity": "full", "recompute-method": "uniform", "recompute-num-layers": 2},
    ),
    "offloaded parts": (
        {},
        {
            "fine-grained-activation-offloading": True,
            "offload-modules": ["attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm"],
            "min-offloaded-tensor-size": 1,
        },
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("base", "ranks", "tp", "sequence"),
    [
        ("llama", 2, 2, False),
        slow("dense", 4, 4, True),
        slow("llama", 4, 2, True),
        # Other pairs of the models and layouts above; the cases above cover each model and each layout.
        soak_only("dense", 2, 2, False),
        soak_only("dense", 2, 2, True),
        soak_only("llama", 2, 2, True),
        soak_only("llama", 4, 4, True),
        soak_only("dense", 4, 2, True),
    ],
)
def test_training_agrees_with_one_process(base: str, ranks: int, tp: int, sequence: bool) -> None:
    layout: Flags = {"tensor-model-parallel-size": tp, "sequence-parallel": sequence}
    assert_same_run(run_layout(base, ranks, {**MODELS[base], **layout}), _reference(base))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("feature", "sequence"),
    [
        ("recomputed parts", True),
        slow("recomputed layers", False),
        slow("offloaded parts", True),
        # Each feature with the other setting of sequence parallelism; test_training_agrees_with_one_process covers
        # both.
        soak_only("recomputed parts", False),
        soak_only("recomputed layers", True),
        soak_only("offloaded parts", False),
    ],
)
def test_memory_saving_changes_nothing_in_split_layers(feature: str, sequence: bool) -> None:
    numbers, memory = FEATURES[feature]
    layout: Flags = {"tensor-model-parallel-size": 2, "sequence-parallel": sequence}
    # One microbatch; test_training_agrees_with_one_process covers several.
    flags = {**MODELS["dense"], **numbers, "global-batch-size": 2}
    assert_same_run(run_layout("dense", 2, {**flags, **memory, **layout}), run_layout("dense", 1, flags))


@pytest.mark.slow
@pytest.mark.parametrize("split", ["tensor", "pipeline"])
def test_other_norms_and_first_weights_agree_with_one_process(split: str) -> None:
    layout: Flags = {f"{split}-model-parallel-size": 2, "sequence-parallel": split == "tensor"}
    assert_same_run(run_layout("dense", 2, {**STARTS, **layout}), run_layout("dense", 1, STARTS))


@pytest.mark.slow
@pytest.mark.parametrize("split", ["tensor", slow("context"), slow("pipeline")])
def test_gates_over_attention_agree_with_one_process(split: str) -> None:
    flags: Flags = {"attention-output-gate": True}
    layout: Flags = {f"{split}-{'' if split == 'context' else 'model-'}parallel-size": 2}
    assert_same_run(run_layout("llama", 2, {**flags, **layout}), run_layout("llama", 1, flags))


@cache
def _reference(base: str) -> WholeRun:
    return run_layout(base, 1, MODELS[base])
