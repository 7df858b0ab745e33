"""GPTModel's options, names, padding and initial weights. Agreement with other libraries is tested separately."""

from functools import partial
from typing import Any

import pytest
import torch

from benchmarks.plain_model import PlainConfig, PlainGroupedMoE, PlainModel, copy_weights
from megatron.core.logical_tensors import model_logical_pieces
from megatron.core.models.gpt.gpt_config import GPTModelConfig, transformer_fields
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tokenizers import vocab_size_with_padding
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.module import Float16Module
from tests.unit_tests.core.models.small_models import (
    LATENT,
    LLAMA_LIKE,
    SEQ,
    gradients,
    loss_of,
    small_batch,
    small_config,
    small_model,
)

EXPERTS: dict[str, Any] = {**LLAMA_LIKE, "num_moe_experts": 4, "moe_aux_loss_coeff": 0.01, "moe_z_loss_coeff": 1e-3}


def logical_values(model: GPTModel) -> dict[tuple[str, tuple[int, ...]], torch.Tensor]:
    """Returns the values that a checkpoint would store, expert by expert, by (key, offset)."""
    values = {}
    parameters = dict(model.named_parameters())
    for name, pieces in model_logical_pieces(model).items():
        for piece in pieces:
            view = piece.view_of(parameters[name].detach())
            stacked = ".experts." in piece.key
            for index, rows in enumerate(view.split(1) if stacked else [view]):
                values[piece.key, (piece.global_offset[0] + index,)] = rows
    return values


def grouped_like(plain: PlainModel, sizes: dict[str, Any], *, shift: int) -> PlainModel:
    """Returns a plain model with the same weights and grouped experts, forced to the router's choices plus `shift`."""
    grouped = PlainModel(PlainConfig(**sizes, grouped=True))
    state = {name: value for name, value in plain.state_dict().items() if ".experts." not in name}
    for number, layer in enumerate(plain.layers):
        for name in ("fc1", "fc2"):
            state[f"layers.{number}.moe.{name}"] = torch.stack([getattr(e, name).weight for e in layer.moe.experts])
    grouped.load_state_dict(state)
    for layer in grouped.layers:
        layer.moe.register_forward_pre_hook(partial(force_choices, shift=shift))
    return grouped


def force_choices(moe: PlainGroupedMoE, args: tuple[torch.Tensor], *, shift: int) -> None:
    tokens = args[0].reshape(-1, args[0].shape[-1])
    moe.forced = (moe.router(tokens).topk(moe.config.topk, dim=-1).indices + shift) % moe.config.num_experts


def test_parameters_have_megatrons_names_and_shapes() -> None:
    config = small_config(**LLAMA_LIKE, num_query_groups=2, num_moe_experts=4, moe_layer_freq=[0, 1])
    grouped = small_model(small_config(**LLAMA_LIKE, num_moe_experts=4, moe_grouped_gemm=True))
    shapes = {name: tuple(value.shape) for name, value in small_model(config).named_parameters()}
    assert shapes["embedding.word_embeddings.weight"] == (96, 32)
    assert shapes["decoder.layers.0.self_attention.linear_qkv.weight"] == (2 * (2 + 2) * 8, 32)
    assert shapes["decoder.layers.0.self_attention.linear_proj.weight"] == (32, 32)
    assert shapes["decoder.layers.0.input_layernorm.weight"] == (32,)
    assert shapes["decoder.layers.0.mlp.linear_fc1.weight"] == (96, 32)
    assert shapes["decoder.layers.1.pre_mlp_layernorm.weight"] == (32,)
    assert shapes["decoder.layers.1.mlp.router.weight"] == (4, 32)
    assert shapes["decoder.layers.1.mlp.experts.local_experts.3.linear_fc2.weight"] == (32, 48)
    assert shapes["decoder.final_layernorm.weight"] == (32,)
    assert shapes["output_layer.weight"] == (96, 32)
    assert grouped.get_parameter("decoder.layers.1.mlp.experts.weight1").shape == (32, 4 * 96)
    assert grouped.get_parameter("decoder.layers.1.mlp.experts.weight2").shape == (4 * 48, 32)


@pytest.mark.parametrize(
    ("fields", "of_plain"),
    [
        ({}, {}),
        (
            {"num_query_groups": 2, "kv_channels": 16, "qk_layernorm": True},
            {"num_groups": 2, "head_width": 16, "qk_norm": True},
        ),
    ],
    ids=["heads", "groups-of-wide-heads-with-norms"],
)
def test_agrees_with_the_plain_model_of_the_benchmarks(fields: dict[str, Any], of_plain: dict[str, Any]) -> None:
    sizes: dict[str, Any] = {"num_layers": 2, "hidden_size": 32, "num_experts": 4, "topk": 2, **of_plain}
    sizes |= {"num_heads": 4, "ffn_hidden_size": 48, "vocab_size": 96}
    plain = PlainModel(PlainConfig(**sizes))
    config = small_config(**LLAMA_LIKE, num_moe_experts=4, **fields)
    sequential, grouped = (
        small_model(config),
        small_model(small_config(**LLAMA_LIKE, num_moe_experts=4, moe_grouped_gemm=True, **fields)),
    )
    copy_weights(plain, dict(sequential.named_parameters()))
    input_ids, _, labels = small_batch()
    expected = plain(input_ids, labels)
    torch.testing.assert_close(grouped_like(plain, sizes, shift=0)(input_ids, labels), expected)
    assert not torch.allclose(grouped_like(plain, sizes, shift=1)(input_ids, labels), expected)
    expected.backward()
    for model in (sequential, grouped):
        loss = loss_of(model)
        loss.backward()
        torch.testing.assert_close(loss, expected)
        for name, theirs in (("output_layer", plain.output), ("embedding.word_embeddings", plain.embedding)):
            torch.testing.assert_close(
                model.get_parameter(f"{name}.weight").grad, theirs.weight.grad, atol=1e-6, rtol=1e-4
            )


@pytest.mark.parametrize("positions", ["rope", "learned_absolute", "none"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "fields",
    [
        {**LATENT, "window_size": (4, 0)},
        {},
        {"add_bias_linear": False, "add_qkv_bias": True, "num_query_groups": 2},
        {"normalization": "RMSNorm", "num_query_groups": 1, "kv_channels": 16},
        LLAMA_LIKE,
        {**LLAMA_LIKE, "qk_layernorm": True, "window_size": (4, 0), "rotary_interleaved": True},
        {**EXPERTS, "moe_grouped_gemm": True},
        {**EXPERTS, "add_bias_linear": True, "moe_layer_freq": 2},
    ],
    ids=[
        "latent",
        "gelu-biases",
        "qkv-bias",
        "rmsnorm-wide-heads",
        "llama",
        "norms-and-window",
        "grouped",
        "sequential-biases",
    ],
)
def test_fp32_gradients_agree_with_fp64(fields: dict[str, Any], tied: bool, positions: str) -> None:
    if "multi_latent_attention" in fields:
        positions = "rope"
    arguments = {"share_embeddings_and_output_weights": tied, "position_embedding_type": positions}
    model = small_model(small_config(**fields), **arguments)
    reference = small_model(small_config(**fields, params_dtype=torch.float64), **arguments)
    reference.load_state_dict(model.state_dict())
    loss, expected = loss_of(model), loss_of(reference)
    loss.backward()
    expected.backward()
    assert expected.dtype == torch.float64
    torch.testing.assert_close(loss.double(), expected, atol=1e-5, rtol=1e-5)
    total = torch.cat([grad.flatten() for grad in gradients(reference).values()]).norm()
    for name, grad in gradients(reference).items():
        if grad.norm() > 1e-6 * total:  # smaller gradients, such as the key bias's, are zero up to noise
            error = (gradients(model)[name].double() - grad).norm() / grad.norm()
            assert error < 5e-5, f"{name}: {error}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_follows_fp32(dtype: torch.dtype) -> None:
    half = {torch.bfloat16: {"bf16": True}, torch.float16: {"fp16": True}}[dtype]
    fields = {**EXPERTS, "moe_grouped_gemm": True, "init_method_std": 0.05}
    reference, config = small_model(small_config(**fields)), small_config(**fields, **half)
    wrapped = Float16Module(config, small_model(config))
    assert {parameter.dtype for parameter in wrapped.parameters()} == {dtype}
    assert wrapped.module.rotary_pos_emb.cos.dtype == torch.float32
    input_ids, position_ids, labels = small_batch()
    loss = wrapped(input_ids, position_ids, None, labels=labels)
    assert loss.dtype == torch.float32 and loss.shape == labels.shape
    assert wrapped(input_ids, position_ids, None).dtype == torch.float32
    torch.testing.assert_close(loss.mean(), loss_of(reference), atol=2e-2, rtol=0)
    loss.mean().backward()
    assert all(torch.isfinite(grad).all() for grad in gradients(wrapped).values())


@pytest.mark.parametrize("tied", [False, True])
def test_vocabulary_padding_takes_no_part(tied: bool) -> None:
    config = small_config(**LLAMA_LIKE)
    arguments = {"share_embeddings_and_output_weights": tied}
    exact = small_model(config, vocab_size=90, **arguments)
    padded = small_model(
        config, vocab_size=vocab_size_with_padding(90, divisible_by=64), unpadded_vocab_size=90, **arguments
    )
    for model in (exact, padded):
        loss_of(model).backward()
    torch.testing.assert_close(loss_of(padded), loss_of(exact), rtol=0, atol=0)
    for name in ["embedding.word_embeddings.weight"] + ([] if tied else ["output_layer.weight"]):
        weight = padded.get_parameter(name)
        assert weight.shape[0] == 128 and weight.grad is not None
        assert not weight[90:].any() and not weight.grad[90:].any()
        torch.testing.assert_close(weight[:90], exact.get_parameter(name), rtol=0, atol=0)
        torch.testing.assert_close(weight.grad[:90], exact.get_parameter(name).grad)
    assert model_logical_pieces(padded)["embedding.word_embeddings.weight"][0].global_shape == (90, 32)


def test_initial_weights_do_not_depend_on_how_experts_are_computed() -> None:
    grouped = logical_values(small_model(small_config(**EXPERTS, moe_grouped_gemm=True)))
    sequential = logical_values(small_model(small_config(**EXPERTS)))
    assert grouped.keys() == sequential.keys()
    for key, values in grouped.items():
        torch.testing.assert_close(values, sequential[key], rtol=0, atol=0)


def test_initial_weights_depend_on_the_seed_and_leave_torchs_generator_alone() -> None:
    before = torch.get_rng_state()
    first, same = small_model(small_config(init_seed=1)), small_model(small_config(init_seed=1))
    other = small_model(small_config(init_seed=2))
    assert torch.equal(torch.get_rng_state(), before)
    weights = [model.output_layer.weight for model in (first, same, other)]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])
    layers = first.decoder.layers
    assert not torch.equal(layers[0].mlp.linear_fc1.weight, layers[1].mlp.linear_fc1.weight)


def test_initial_weights_have_megatrons_deviations() -> None:
    config = small_config(**LLAMA_LIKE, hidden_size=256, ffn_hidden_size=512, init_method_std=0.02, num_layers=2)
    model = small_model(config, vocab_size=1024)
    layer = model.decoder.layers[0]
    for weight in (
        model.embedding.word_embeddings.weight,
        layer.mlp.linear_fc1.weight,
        layer.self_attention.linear_qkv.weight,
    ):
        assert weight.std().item() == pytest.approx(0.02, rel=0.02)
        assert abs(weight.mean().item()) < 1e-3
    for weight in (layer.mlp.linear_fc2.weight, layer.self_attention.linear_proj.weight):
        assert weight.std().item() == pytest.approx(0.01, rel=0.02)


def test_a_users_init_method_fills_every_parameter_it_is_for() -> None:
    config = small_config(**LLAMA_LIKE, init_method=lambda weight: weight.fill_(3.0))
    model = small_model(config)
    assert (model.output_layer.weight == 3).all()
    assert (model.decoder.layers[1].mlp.linear_fc2.weight != 3).all()


def test_an_explicit_causal_mask_is_the_default() -> None:
    model = small_model(small_config(**LLAMA_LIKE, num_query_groups=2))
    forbidden = torch.ones(1, 1, SEQ, SEQ, dtype=torch.bool).triu(1)
    torch.testing.assert_close(loss_of(model, attention_mask=forbidden), loss_of(model))
    # Without a head dimension, the mask of as many samples as heads would be applied per head.
    for wrong in (forbidden.float(), forbidden[0].expand(2, SEQ, SEQ), forbidden[..., :-1]):
        with pytest.raises(ValueError, match=r"attention_mask is torch.* must be torch.bool.* \[2, 1, 16, 16\]"):
            loss_of(model, attention_mask=wrong)


@pytest.mark.parametrize("backend", list(AttnBackend))
def test_attention_backends_agree(backend: AttnBackend) -> None:
    model = small_model(small_config(**LLAMA_LIKE, num_query_groups=2, attention_backend=backend))
    reference = small_model(small_config(**LLAMA_LIKE, num_query_groups=2, params_dtype=torch.float64))
    reference.load_state_dict(model.state_dict())
    torch.testing.assert_close(loss_of(model).double(), loss_of(reference), atol=1e-5, rtol=1e-5)


def test_negative_labels_are_not_learned() -> None:
    model, (tokens, positions, labels) = small_model(small_config()), small_batch()
    keep = torch.arange(labels.numel()).view_as(labels) % 3 > 0
    masked = model(tokens, positions, None, labels=labels) * keep
    ignored = model(tokens, positions, None, labels=labels.where(keep, -100))
    assert torch.equal(ignored, masked)
    grads = [torch.autograd.grad(losses.sum(), list(model.parameters())) for losses in (ignored, masked)]
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*grads, strict=True))


def test_dropout_acts_in_training_only() -> None:
    model = small_model(small_config(hidden_dropout=0.5, attention_dropout=0.5))
    assert loss_of(model) != loss_of(model)
    model.eval()
    assert loss_of(model) == loss_of(model)


def test_a_later_token_does_not_change_an_earlier_logit() -> None:
    model = small_model(small_config(**EXPERTS, moe_grouped_gemm=True)).eval()
    input_ids, position_ids, _ = small_batch()
    changed = input_ids.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 96
    logits, others = model(input_ids, position_ids, None), model(changed, position_ids, None)
    torch.testing.assert_close(logits[:, :9], others[:, :9], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(logits[:, 9:], others[:, 9:])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"position_embedding_type": "mrope"}, "position_embedding_type is 'mrope'"),
        ({"unpadded_vocab_size": 97}, r"unpadded_vocab_size is 97.*96"),
        ({"vp_stage": 1}, "stage 0 and vp_stage 1: must be below"),
        ({"fp16_lm_cross_entropy": True}, "fp16_lm_cross_entropy is True"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        small_model(small_config(), **arguments)


@pytest.mark.parametrize("positions", ["rope", "learned_absolute"])
def test_too_long_a_sequence_is_refused(positions: str) -> None:
    ids = torch.zeros(1, SEQ + 1, dtype=torch.int64)
    with pytest.raises(ValueError, match=f"{SEQ + 1} positions.*{SEQ}"):
        small_model(small_config(), position_embedding_type=positions)(ids, ids, None)


@pytest.mark.parametrize(
    "fields, messages",
    [
        ({"rope_scaling_factor": 4}, ["GPTModelConfig.rope_scaling_factor needs use_rope_scaling"]),
        (
            {"rotary_percent": 0.5, "use_rope_scaling": True, "rotary_seq_len_interpolation_factor": 2},
            [
                "GPTModelConfig.rotary_percent needs position_embedding_type rope",
                "GPTModelConfig.rotary_seq_len_interpolation_factor needs position_embedding_type rope",
                "GPTModelConfig.use_rope_scaling needs position_embedding_type rope",
            ],
        ),
        ({"add_position_embedding": False}, ["--no-position-embedding alone is no longer supported"]),
        (
            {"spec": ["module"], "swiglu": True, "squared_relu": True, "rope_scaling_factor": 4},
            ["GPTModelConfig.spec is", "GPTModelConfig.swiglu and", "GPTModelConfig.rope_scaling_factor needs"],
        ),
    ],
)
def test_contradictory_settings_are_reported_together(fields: dict[str, Any], messages: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        GPTModelConfig(**fields)
    lines = str(caught.value).splitlines()
    assert len(lines) == len(messages) and all(map(str.startswith, lines, messages)), lines


@pytest.mark.parametrize("positions", ["rope", "yarn"])
def test_rotary_settings_are_accepted_with_rotary_positions(positions: str) -> None:
    config = GPTModelConfig(position_embedding_type=positions, rotary_percent=0.5, add_position_embedding=False)
    assert (config.position_embedding_type, config.rotary_percent) == (positions, 0.5)


def test_command_line_settings_become_transformer_fields() -> None:
    arguments = {**vars(GPTModelConfig()), "hidden_size": 256, "ffn_hidden_size": None, "num_query_groups": 2}
    assert transformer_fields({**arguments, "swiglu": True})["ffn_hidden_size"] == 640
    assert transformer_fields(arguments)["ffn_hidden_size"] == 1024
    assert transformer_fields(arguments)["num_query_groups"] is None
    assert transformer_fields({**arguments, "group_query_attention": True})["num_query_groups"] == 2
