"""Maximal update parametrization: no change at the base width, and update sizes that do not grow with the width."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, ParamGroupOverride, ParamKey, get_megatron_optimizer
from megatron.core.tensor_parallel.param_attributes import param_facts
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.transformer_config import NormalInit
from tests.unit_tests.core.models.small_models import LLAMA_LIKE, loss_of, small_batch, small_config, small_model
from tests.unit_tests.core.optimizer.reference import wrap

MOE = {**LLAMA_LIKE, "num_moe_experts": 4, "moe_router_topk": 2, "moe_shared_expert_intermediate_size": 16}
LATENT = {
    **{name: value for name, value in LLAMA_LIKE.items() if name != "num_query_groups"},
    "multi_latent_attention": True,
    "kv_lora_rank": 10,
    "qk_head_dim": 6,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 7,
}
BASE = 16


def rates_of(model: GPTModel, **settings: Any) -> dict[str, float]:
    """Returns each parameter's learning rate by name, relative to OptimizerConfig.lr."""
    overrides = settings.pop("config_overrides", None)
    wrapped = wrap(model)
    optimizer = get_megatron_optimizer(OptimizerConfig(**{"lr": 0.5, **settings}), [wrapped], overrides)
    parts = [(part, group) for group in optimizer.param_groups for part in group["params"]]
    return {
        name: next(group["lr"] / 0.5 for part, group in parts if _holds(part, param))
        for name, param in model.named_parameters()
    }


def _holds(part: Tensor, param: Tensor) -> bool:
    return part.data_ptr() <= param.data_ptr() < part.data_ptr() + part.nbytes


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("fields", [{}, MOE, LATENT], ids=["dense", "experts", "latent"])
def test_nothing_changes_at_the_base_width(fields: dict[str, Any], tied: bool) -> None:
    stepped = []
    for use in ({}, {"use_mup": True, "mup_base_hidden_size": 32}):
        model = small_model(small_config(**fields, **use), share_embeddings_and_output_weights=tied)
        wrapped = wrap(model)
        optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.01), [wrapped])
        for _ in range(3):
            optimizer.zero_grad()
            loss_of(model).backward()
            wrapped.finish_grad_sync()
            optimizer.step()
        stepped.append([loss_of(model), *model.parameters()])
    assert all(torch.equal(plain, other) for plain, other in zip(*stepped, strict=True))


@pytest.mark.parametrize("fields", [{}, {**MOE, "mtp_num_layers": 1}, LATENT], ids=["dense", "experts", "latent"])
def test_matrices_between_widths_learn_slower_and_nothing_else(fields: dict[str, Any]) -> None:
    model = small_model(small_config(**fields, use_mup=True, mup_base_hidden_size=BASE))
    tables = ("embedding.word_embeddings.weight", "output_layer.weight")
    for name, rate in rates_of(model).items():
        is_matrix = model.get_parameter(name).dim() > 1 and not name.endswith((*tables, "bias", "bias1", "bias2"))
        assert rate == (0.5 if is_matrix else 1.0), name


@pytest.mark.parametrize("mode, rate", [("spectral", 4**-0.5), ("unit_rms_norm", 1.0), ("shape_scaling", 1.0)])
def test_muon_divides_by_as_much_as_its_scale_grows(mode: str, rate: float) -> None:
    model = small_model(small_config(use_mup=True, mup_width_mult=4))
    plain = small_model(small_config())
    found, others = (rates_of(one, optimizer="muon", muon_scale_mode=mode) for one in (model, plain))
    for name, own in found.items():
        is_hidden = name.endswith("weight") and "layernorm" not in name and name.startswith("decoder")
        assert own == pytest.approx(others[name] * (rate if is_hidden else 1)), name


def test_a_script_replaces_the_rate_of_a_matrix() -> None:
    model = small_model(small_config(use_mup=True, mup_width_mult=4))
    name = "decoder.layers.0.mlp.linear_fc1.weight"
    found = rates_of(model, config_overrides={ParamKey(name=name): ParamGroupOverride(lr_mult=3)})
    assert found[name] == 3 and found["decoder.layers.1.mlp.linear_fc1.weight"] == 0.25


def test_sgd_is_refused() -> None:
    model = small_model(small_config(use_mup=True, mup_width_mult=4))
    with pytest.raises(ValueError, match="optimizer is sgd and use_mup .* relative width 4"):
        get_megatron_optimizer(OptimizerConfig(lr=0.1, optimizer="sgd"), [wrap(model)])


def test_matrices_start_smaller_and_tables_do_not() -> None:
    config = small_config(use_mup=True, mup_base_hidden_size=BASE, embedding_init_method_std=None)
    assert config.mup_width_mult == 2
    assert config.init_method == NormalInit(0.2 / 2**0.5)
    assert config.output_layer_init_method == NormalInit(0.2 / 2**0.5 / 2)
    assert config.embedding_init_method == config.unscaled_init_method == NormalInit(0.2)
    assert replace(config) == config
    mup, plain = small_model(config), small_model(small_config())
    for name, param in mup.named_parameters():
        factor = param_facts(param).width_mult ** -0.5
        torch.testing.assert_close(param, plain.get_parameter(name) * (factor if param.dim() > 1 else 1), msg=name)


@pytest.mark.parametrize("tied", [False, True])
def test_logits_and_embeddings_have_their_factors(tied: bool) -> None:
    tokens, positions, labels = small_batch()
    fields = {"use_mup": True, "mup_width_mult": 4, "mup_output_mult": 2.0}
    model: Any
    plain: Any
    model, plain = (
        small_model(small_config(**own), share_embeddings_and_output_weights=tied)
        for own in ({**fields, "mup_embedding_mult": 3.0}, {})
    )
    plain.load_state_dict(model.state_dict())
    torch.testing.assert_close(model.embedding(tokens, positions), plain.embedding(tokens, positions) * 3)
    with torch.no_grad():
        plain.embedding.word_embeddings.weight.mul_(3)
    wanted = plain(tokens, positions, None) / 2
    if tied:
        wanted /= 3
    torch.testing.assert_close(model(tokens, positions, None), wanted, rtol=1e-4, atol=1e-5)
    loss = torch.nn.functional.cross_entropy(wanted.flatten(0, 1), labels.flatten())
    torch.testing.assert_close(loss_of(model), loss, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("power, wanted", [(1.0, 2**0.5 / 8), (0.5, 8**-0.5), (0.0, 2**-0.5)])
def test_scores_have_the_scale_of_the_base_head(power: float, wanted: float) -> None:
    fields = {"use_mup": True, "mup_base_head_dim": 2.0, "mup_attn_scale_power": power}
    config = small_config(**fields)
    assert DotProductAttention(config, 1).softmax_scale == pytest.approx(wanted)
    assert replace(config).softmax_scale == config.softmax_scale
    latent: Any = small_model(small_config(**LATENT, **fields))
    # The head width is 10.
    assert latent.decoder.layers[0].self_attention.core_attention.softmax_scale == pytest.approx(
        2 ** (power - 0.5) / 10**power
    )
    unchanged = small_config(**{**fields, "mup_base_head_dim": 8.0})
    assert DotProductAttention(unchanged, 1).softmax_scale == 1 / math.sqrt(8)


def test_coordinates_do_not_grow_with_the_width() -> None:
    changes = {use: [_changes(width, use_mup=use) for width in (32, 128, 512)] for use in (True, False)}
    for part in range(2):
        own, plain = ([change[part] for change in changes[use]] for use in (True, False))
        # The random initialization contributes a larger share in the narrowest model.
        assert own[0] / 3 < own[1] < 1.2 * own[0] and own[1] / 1.5 < own[2] < 1.2 * own[1], own
        assert plain[2] > 2.5 * plain[0] and plain[2] > plain[1] > plain[0], plain


def _changes(width: int, *, use_mup: bool) -> tuple[float, float]:
    """Returns the RMS change, after three steps, of the last hidden states before the norm and of the logits."""
    base = {"use_mup": True, "mup_base_hidden_size": 32} if use_mup else {}
    config = small_config(
        hidden_size=width, ffn_hidden_size=2 * width, num_attention_heads=width // 8, init_method_std=0.1, **base
    )
    model: Any = small_model(config)
    wrapped = wrap(model)
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.005, clip_grad=0.0), [wrapped])
    tokens, positions, _ = small_batch()
    hidden: list[Tensor] = []
    model.decoder.final_layernorm.register_forward_pre_hook(lambda _, given: hidden.append(given[0].detach()))
    logits = [model(tokens, positions, None).detach()]
    for _ in range(3):
        optimizer.zero_grad()
        loss_of(model).backward()
        wrapped.finish_grad_sync()
        optimizer.step()
    logits.append(model(tokens, positions, None).detach())
    return _rms(hidden[-1] - hidden[0]), _rms(logits[1] - logits[0])


def _rms(values: Tensor) -> float:
    return float(values.square().mean().sqrt())


@pytest.mark.parametrize(
    "fields, message",
    [
        (
            {"mup_width_mult": 2.0},
            "mup_width_mult is 2.0, but use_mup is False: set use_mup, or leave mup_width_mult at its default 1.0",
        ),
        ({"mup_base_head_dim": 4.0}, "mup_base_head_dim is 4.0, but use_mup is False"),
        ({"use_mup": True, "mup_width_mult": 3.0, "mup_base_hidden_size": 16}, "mup_width_mult is 3.0, but .* is 2.0"),
        ({"use_mup": True, "mup_attn_scale_power": 0.5}, "mup_attn_scale_power is 0.5 and mup_base_head_dim is None"),
        ({"use_mup": True, "mup_base_head_dim": 2.0, "softmax_scale": 1.0}, "softmax_scale is 1.0 and mup_base_head"),
        ({"use_mup": True, "lora_rank": 2}, "use_mup is True and lora_rank is set"),
        ({"use_mup": True, "mup_width_mult": 0.0}, "mup_width_mult is 0.0: must be more than 0"),
    ],
)
def test_settings_that_cannot_be_honoured_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        small_config(**fields)
