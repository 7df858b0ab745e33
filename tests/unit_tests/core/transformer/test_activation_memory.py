"""Recomputed and offloaded models: bit-identical results, with the planned number of saved bytes."""

from collections import Counter
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from benchmarks.live_bytes import LiveBytes
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_submodules, get_mlp_module_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.activation_offload import plan_offload
from megatron.core.transformer.offload_config import OffloadConfig
from megatron.core.transformer.recompute import LayerRecompute, may_draw, plan_recompute
from megatron.core.transformer.recompute_config import RecomputeConfig
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_layer import TransformerLayer
from tests.unit_tests.core.models.small_models import LATENT, LLAMA_LIKE, gradients, loss_of, small_config, small_model

DENSE: dict[str, Any] = {"num_layers": 4, "hidden_dropout": 0.2, "attention_dropout": 0.2}
MOE: dict[str, Any] = {
    **DENSE,
    **LLAMA_LIKE,
    "num_moe_experts": 4,
    "moe_layer_freq": [0, 1, 1, 1],
    "moe_grouped_gemm": True,
    "moe_aux_loss_coeff": 0.01,
    "moe_z_loss_coeff": 1e-3,
    "moe_shared_expert_intermediate_size": 16,
}
OF_LATENTS: dict[str, Any] = {**DENSE, **LATENT}
HIDDEN_BYTES, NUM_LAYERS = 16 * 2 * 32 * 4, 4


def full(method: str, layers: int) -> dict[str, Any]:
    return {"recompute_granularity": "full", "recompute_method": method, "recompute_num_layers": layers}


def selective(*modules: str) -> dict[str, Any]:
    return {"recompute_granularity": "selective", "recompute_modules": list(modules)}


def offload(*modules: str, **fields: Any) -> dict[str, Any]:
    return {
        "fine_grained_activation_offloading": True,
        "offload_modules": list(modules),
        "min_offloaded_tensor_size": 0,
        **fields,
    }


OF_ATTENTION = ("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm")
WHOLE_LAYERS = {"cpu_offloading_num_layers": 3, "min_offloaded_tensor_size": 0}
SAVERS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (MOE, full("uniform", 3)),
    (DENSE, full("block", 2)),
    (DENSE, {"recompute_activations": True}),
    (DENSE, selective("layernorm", "mlp")),
    (MOE, selective("layernorm", "shared_experts", "core_attn")),
    (MOE, selective("mlp", "moe", "layernorm")),
    (MOE, {"moe_layer_recompute": True}),
    (MOE, offload(*OF_ATTENTION, "expert_fc1", "moe_act")),
    (DENSE, offload(*OF_ATTENTION, activation_offload_fraction=0.5)),
    (MOE, offload("attn_norm", "core_attn", "moe_act", **selective("layernorm", "core_attn"))),
    (MOE, WHOLE_LAYERS),
    (DENSE, WHOLE_LAYERS),
    (OF_LATENTS, selective("mla_up_proj", "core_attn", "layernorm")),
    ({**OF_LATENTS, "q_lora_rank": None}, selective("mla_up_proj", "layernorm")),
    (OF_LATENTS, offload(*OF_ATTENTION)),
    (OF_LATENTS, offload("qkv_linear", "attn_norm", **selective("mla_up_proj"))),
]


def trained(fields: dict[str, Any], *, frozen: str = "") -> dict[str, Any]:
    """Returns losses, gradients, router losses, hook calls and the next random number after three microbatches."""
    torch.manual_seed(11)
    config = small_config(**fields)
    model = small_model(config)
    calls: Counter[str] = Counter()
    for name, parameter in model.named_parameters():
        if frozen and frozen in name:
            parameter.requires_grad_(False)
        else:
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: calls.update([name]))
    losses = [step(model) for _ in range(3)]
    with torch.no_grad():
        losses.append(loss_of(model.eval()))
    totals = model.aux_losses.take_totals()
    return {"losses": losses, "grads": gradients(model), "aux": totals, "next": torch.rand(3), "calls": calls}


def step(model: GPTModel) -> torch.Tensor:
    loss = loss_of(model)
    loss.backward()
    return loss.detach()


@pytest.mark.slow
@pytest.mark.parametrize("freeze", [False, True])
@pytest.mark.parametrize("case", range(len(SAVERS)))
def test_numbers_are_those_of_the_plain_model(case: int, freeze: bool) -> None:
    base, saver = SAVERS[case]
    frozen = ("layernorm", "linear_qkv", "embedding")[case % 3] if freeze else ""
    precision: dict[str, Any] = {"bf16": True, "params_dtype": torch.bfloat16} if case % 2 else {}
    plain, saved = trained({**base, **precision}, frozen=frozen), trained({**base, **precision, **saver}, frozen=frozen)
    assert saved["calls"] == plain["calls"] and set(plain["calls"].values()) == {3}
    for part in ("losses", "grads", "aux", "next"):
        torch.testing.assert_close(saved[part], plain[part], rtol=0, atol=0)


def live_bytes(**fields: Any) -> int:
    """Bytes saved for backward in a forward pass, excluding persistent host buffers."""
    model = small_model(small_config(**{"num_layers": NUM_LAYERS, **fields}))
    loss_of(model).backward()
    with LiveBytes() as made:
        loss = loss_of(model)
    waiting = made.total()
    loss.backward()
    assert made.total() == loss.nbytes
    return waiting


@pytest.mark.slow
def test_recompute_keeps_the_bytes_it_should() -> None:
    plain = live_bytes()
    layer = plain - live_bytes(num_layers=NUM_LAYERS - 1)
    rest = plain - NUM_LAYERS * layer
    assert layer > 10 * HIDDEN_BYTES
    for count in range(1, NUM_LAYERS + 1):
        assert live_bytes(**full("uniform", count)) == rest + -(-NUM_LAYERS // count) * HIDDEN_BYTES
        assert live_bytes(**full("block", count)) == plain - count * (layer - HIDDEN_BYTES)
    # The outputs of two norms, and their statistics [S, B]: a mean and a reciprocal deviation each.
    assert live_bytes(**selective("layernorm")) == plain - NUM_LAYERS * 2 * (HIDDEN_BYTES + 2 * HIDDEN_BYTES // 32)
    # What the feed-forward layer saves in addition to its input: fc1's output with its bias.
    assert live_bytes(**selective("mlp")) == plain - NUM_LAYERS * HIDDEN_BYTES * 48 // 32
    latent = {**OF_LATENTS, **NOTHING_DRAWN}
    # Queries and keys of 4 heads, the normalized latents, and their statistics. The attention kernel saves values
    # padded to the width of keys.
    dropped = NUM_LAYERS * HIDDEN_BYTES * (4 * (10 + 10) + (12 + 1) + (10 + 1)) // 32
    assert live_bytes(**latent, **selective("mla_up_proj")) == live_bytes(**latent) - dropped
    moe = {**MOE, "moe_layer_freq": 1, "hidden_dropout": 0.0, "attention_dropout": 0.0}
    # Two rows per token: each saves x and gate_up, in addition to the layer's input.
    rows = NUM_LAYERS * 2 * HIDDEN_BYTES * (32 + 2 * 48) // 32
    assert live_bytes(**moe, **selective("moe")) < live_bytes(**moe) - rows


# Feed-forward layers of hidden size 32 and width 48, by the module that is measured.
FEED_FORWARD: dict[str, dict[str, Any]] = {
    "dense": {},
    "sequential": {"moe_grouped_gemm": False},
    "dropless": {"moe_grouped_gemm": True},
    "static": {"moe_grouped_gemm": True, "moe_expert_rank_capacity_factor": 4.0},
    "shared": {"moe_shared_expert_intermediate_size": 48},
}


def saved_row_bytes(kind: str, *, dtype: torch.dtype, **fields: Any) -> float:
    """Returns the bytes per row, without routing weights, that a feed-forward layer saves besides its parameters."""
    num_experts = None if kind == "dense" else 4
    config = small_config(**FEED_FORWARD[kind], **fields, num_moe_experts=num_experts, params_dtype=dtype)
    layer = build_module(get_mlp_module_spec(False, num_experts, config.moe_grouped_gemm), config=config)
    rows, counts = torch.randn(12, 1, 32, dtype=dtype).requires_grad_(), torch.tensor([5, 0, 4, 3])
    run = {"dense": layer, "shared": getattr(layer, "shared_experts", None)}.get(kind)
    own = {parameter.data_ptr() for parameter in layer.parameters()}
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() not in own and tensor.dim() > 1:
            saved[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        if run is not None:
            run(rows)
        else:
            layer.experts(rows.flatten(0, 1), counts, torch.rand(12).requires_grad_())
    return sum(saved.values()) / 12


@pytest.mark.parametrize("kind", FEED_FORWARD)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_result_of_the_activation_is_not_saved(kind: str, dtype: torch.dtype) -> None:
    hidden, ffn = 32, 48
    assert saved_row_bytes(kind, dtype=dtype, **LLAMA_LIKE) == dtype.itemsize * (hidden + 2 * ffn)
    plain = {"add_bias_linear": False, "activation_func": F.gelu}
    assert saved_row_bytes(kind, dtype=dtype, **plain) == dtype.itemsize * (hidden + ffn)


class Forbidden:
    """A generator without methods, so that any use raises AttributeError."""


class OwnLayer(TransformerLayer):
    """A user-defined layer, which may or may not draw random numbers."""


NOTHING_DRAWN: dict[str, Any] = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
DRAWERS: list[tuple[dict[str, Any], dict[str, Any], bool]] = [
    (full("block", 2), {}, False),
    (selective("core_attn", "moe", "layernorm"), {}, False),
    (selective("shared_experts"), {"moe_input_jitter_eps": 0.1, "hidden_dropout": 0.1}, False),
    (full("uniform", 3), {"moe_input_jitter_eps": 0.1}, True),
    (full("block", 1), {"hidden_dropout": 0.1}, True),
    (selective("moe"), {"moe_input_jitter_eps": 0.1}, True),
    (selective("core_attn"), {"attention_dropout": 0.1}, True),
]


@pytest.mark.parametrize(("saver", "draws", "is_asked"), DRAWERS)
def test_generators_are_asked_for_states_only_where_what_runs_again_draws(
    saver: dict[str, Any], draws: dict[str, Any], is_asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = {**MOE, **NOTHING_DRAWN, **draws}
    plain, saved = trained(fields), trained({**fields, **saver})
    torch.testing.assert_close(saved["grads"], plain["grads"], rtol=0, atol=0)
    model = small_model(small_config(**fields, **saver))
    # All torch functions that read or set the CPU generator's state use this name.
    monkeypatch.setattr(torch.random, "default_generator", Forbidden())
    with pytest.raises(AttributeError, match="get_state") if is_asked else nullcontext():
        step(model)


def test_layers_from_elsewhere_are_taken_to_draw() -> None:
    config = small_config()
    layer = TransformerLayer(config, get_gpt_layer_local_submodules())
    own = OwnLayer(config, get_gpt_layer_local_submodules())
    assert [may_draw([one]) for one in (layer, own, nn.ModuleList([layer, own]), nn.Dropout(0.5))] == [
        False,
        *[True] * 3,
    ]


def test_offloading_frees_all_but_the_last_layer() -> None:
    plain = live_bytes()
    layer = plain - live_bytes(num_layers=NUM_LAYERS - 1)
    assert live_bytes(**offload("qkv_linear")) == plain - 3 * HIDDEN_BYTES
    assert live_bytes(**offload("qkv_linear", activation_offload_fraction=0.3)) == plain - HIDDEN_BYTES
    whole = live_bytes(cpu_offloading_num_layers=3, min_offloaded_tensor_size=0)
    # A layer's output is the input of the next layer, so the last offloaded output is kept by the layer after it.
    assert plain - 3 * layer <= whole <= plain - 2 * layer
    assert live_bytes(**offload("qkv_linear", min_offloaded_tensor_size=HIDDEN_BYTES // 4)) == plain - 3 * HIDDEN_BYTES
    with pytest.raises(ValueError, match="min_offloaded_tensor_size is 1025 elements, but the largest .* has 1024"):
        live_bytes(**offload("qkv_linear", min_offloaded_tensor_size=HIDDEN_BYTES // 4 + 1))


def test_plans_are_decided_layer_by_layer() -> None:
    def modules(*names: str) -> LayerRecompute:
        return LayerRecompute(modules=frozenset(names))

    plans = [
        ({}, [modules()] * 5),
        (full("uniform", 2), [LayerRecompute(segment=number) for number in (0, 0, 1, 1, 2)]),
        (full("block", 2), [LayerRecompute(segment=number) for number in (0, 1, None, None, None)]),
        (
            selective("mlp", "shared_experts", "core_attn"),
            [modules("mlp", "core_attn"), *[modules("shared_experts", "core_attn")] * 4],
        ),
        (selective("moe", "shared_experts"), [modules(), *[modules("moe")] * 4]),
        (selective("moe_act"), [modules()] * 5),
    ]
    for fields, plan in plans:
        assert plan_recompute(RecomputeConfig(**fields), [False, True, True, True, True]) == plan
    config = OffloadConfig(**offload("expert_fc1", "core_attn", activation_offload_fraction=0.6))
    both, one = frozenset({"core_attn", "expert_fc1"}), frozenset({"core_attn"})
    assert plan_offload(config, [False, True, True, True]) == [one, both, frozenset(), frozenset()]
    assert plan_offload(OffloadConfig(cpu_offloading_num_layers=1), [True, True]) == [frozenset({"layer"}), frozenset()]


@pytest.mark.parametrize(
    ("base", "fields", "message"),
    [
        (DENSE, {"recompute_granularity": "full"}, "recompute_num_layers None: set both"),
        (DENSE, full("block", 5), "recompute_num_layers is 5: must be at most num_layers .4."),
        (DENSE, {"recompute_method": "uniform"}, "recompute_method is uniform and recompute_granularity is None"),
        (
            DENSE,
            {**selective("mlp"), "recompute_num_layers": 1},
            "recompute_num_layers is 1 .* requires recompute_granularity full",
        ),
        (DENSE, {"recompute_modules": ["mlp"]}, "recompute_modules is mlp and recompute_granularity is None"),
        (DENSE, {**full("block", 1), "recompute_activations": True}, "recompute_activations implies .* selective"),
        (DENSE, selective("mlps"), "must be one of core_attn, moe_act, layernorm, mla_up_proj, mlp, moe, shared_exp"),
        (OF_LATENTS, offload("core_attn", **selective("mla_up_proj")), "contains core_attn .recomputed by mla_up_proj"),
        (DENSE, selective("moe"), "recompute_modules contains moe: requires a layer with experts"),
        ({**MOE, "moe_layer_freq": 1}, selective("mlp"), "recompute_modules contains mlp: requires a dense layer"),
        ({**MOE, "moe_grouped_gemm": False}, selective("moe_act"), "requires grouped experts"),
        (DENSE, {"fine_grained_activation_offloading": True}, "offload_modules is empty"),
        (DENSE, {"offload_modules": ["core_attn"]}, "is core_attn: requires fine_grained_activation_offloading"),
        (DENSE, {"min_offloaded_tensor_size": 1}, "requires fine_grained_activation_offloading or cpu_offloading"),
        (DENSE, offload("attn_proj"), "attn_proj without core_attn"),
        (DENSE, offload("expert_fc1"), "requires grouped experts"),
        ({**MOE, "moe_layer_freq": [0, 0, 0, 1]}, offload("moe_act"), "is moe_act, but only the last layer"),
        (
            {**MOE, "moe_layer_freq": [0, 1, 0, 1]},
            offload("moe_act", pipeline_model_parallel_size=2),
            "nothing would be offloaded",
        ),
        (DENSE, offload("core_attn", num_layers=1), "num_layers 1 would offload nothing"),
        (DENSE, offload("core_attn", **WHOLE_LAYERS), "choose one of them"),
        (DENSE, {"cpu_offloading_num_layers": 4}, "cpu_offloading_num_layers is 4: must be less than num_layers .4."),
        (DENSE, {**WHOLE_LAYERS, "recompute_activations": True}, "cpu_offloading_num_layers is 3 and recompute_gran"),
        (DENSE, offload("core_attn", **full("block", 1)), "full, which leaves no activations"),
        (MOE, offload("moe_act", **selective("moe")), "offload_modules contains moe_act .recomputed by moe."),
    ],
)
def test_contradictions_are_refused(base: dict[str, Any], fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        small_config(**{**base, **fields})
