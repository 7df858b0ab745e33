"""fp32_residual_connection: half-precision layers with an fp32 residual stream, compared with plain torch."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_layer import TransformerLayer
from tests.unit_tests.core.models.small_models import LLAMA_LIKE, loss_of, small_batch, small_config, small_model

BF16: dict[str, Any] = {"bf16": True, "params_dtype": torch.bfloat16, "num_layers": 3, "init_method_std": 0.1}
FP32_STREAM: dict[str, Any] = {**BF16, "fp32_residual_connection": True}
LAYER_NORM: dict[str, Any] = {"normalization": "LayerNorm"}
KINDS: dict[str, dict[str, Any]] = {
    "rms": LLAMA_LIKE,
    "layer norm": {**LLAMA_LIKE, **LAYER_NORM},
    "stored minus 1": {**LLAMA_LIKE, "layernorm_zero_centered_gamma": True},
    "layer norm stored minus 1": {**LLAMA_LIKE, **LAYER_NORM, "layernorm_zero_centered_gamma": True},
}


def half_model(**fields: Any) -> GPTModel:
    model = small_model(small_config(**fields))
    Float16Module(model.config, model)
    return model


def stream_of(model: GPTModel) -> list[Tensor]:
    """Runs forward and backward. Returns the input of the first layer and the outputs of all layers."""
    seen: list[Tensor] = []
    layers = [layer for layer in model.decoder.layers if isinstance(layer, TransformerLayer)]
    hooks = [
        layers[0].register_forward_pre_hook(lambda _, __, given: seen.append(given["hidden_states"]), with_kwargs=True)
    ]
    hooks += [layer.register_forward_hook(lambda _, __, output: seen.append(output[0])) for layer in layers]
    loss_of(model).backward()
    for hook in hooks:
        hook.remove()
    return seen


def plain_stream(model: GPTModel, *, stream: torch.dtype) -> list[Tensor]:
    """Computes stream_of in plain torch, with bf16 layers. The model must not use rotation. stream: its dtype."""
    config, half = model.config, torch.bfloat16
    weights = {name: value.detach() for name, value in model.named_parameters()}
    tokens, positions, _ = small_batch()
    at = weights["embedding.position_embeddings.weight"][positions]
    x = (weights["embedding.word_embeddings.weight"][tokens] + at).to(stream)
    found = [x]
    one = 1 if config.layernorm_zero_centered_gamma else 0
    for number in range(config.num_layers):
        w = {k.removeprefix(p): v for p in [f"decoder.layers.{number}."] for k, v in weights.items() if k.startswith(p)}

        def normed(name: str, x: Tensor = x, w: dict[str, Tensor] = w) -> Tensor:
            wide, scale = x.float(), w[f"{name}.weight"].float() + one
            if config.normalization == "RMSNorm":
                return F.rms_norm(wide, scale.shape, scale, config.layernorm_epsilon).to(half)
            return F.layer_norm(wide, scale.shape, scale, w[f"{name}.bias"].float(), config.layernorm_epsilon).to(half)

        mixed = F.linear(normed("input_layernorm"), w["self_attention.linear_qkv.weight"]).unflatten(-1, (4, 3, 8))
        query, key, value = (mixed[..., i, :].transpose(1, 2) for i in range(3))
        context = F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2)
        x = x + F.linear(context, w["self_attention.linear_proj.weight"])
        gate, up = F.linear(normed("pre_mlp_layernorm", x), w["mlp.linear_fc1.weight"]).float().chunk(2, -1)
        x = x + F.linear((F.silu(gate) * up).to(half), w["mlp.linear_fc2.weight"])
        found.append(x)
    return [one.transpose(0, 1) for one in found]


@pytest.mark.parametrize("kind", KINDS)
def test_the_stream_is_that_of_plain_torch_in_fp32(kind: str) -> None:
    model = small_model(small_config(**KINDS[kind], **FP32_STREAM), position_embedding_type="learned_absolute")
    Float16Module(model.config, model)
    # With such large embeddings, a bf16 stream loses most of each layer's contribution.
    model.embedding.word_embeddings.weight.data.mul_(100)
    stream, plain, rounded = stream_of(model), *(plain_stream(model, stream=d) for d in (torch.float32, torch.bfloat16))
    assert {one.dtype for one in stream} == {torch.float32}
    added, wanted = stream[-1] - stream[0], plain[-1] - plain[0]
    assert torch.equal(stream[0], plain[0])
    assert (added - wanted).norm() < 0.02 * wanted.norm()
    assert (rounded[-1].float() - rounded[0].float() - wanted).norm() > 0.2 * wanted.norm()
    assert {param.grad.dtype for param in model.parameters() if param.grad is not None} == {torch.bfloat16}


def test_without_the_flag_the_stream_has_the_parameters_precision() -> None:
    assert {one.dtype for one in stream_of(half_model(**LLAMA_LIKE, **BF16))} == {torch.bfloat16}


@pytest.mark.parametrize(
    "fields",
    [
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "layernorm", "mlp"]},
    ],
)
def test_recompute_changes_nothing(fields: dict[str, Any]) -> None:
    plain, saving = half_model(**LLAMA_LIKE, **FP32_STREAM), half_model(**LLAMA_LIKE, **FP32_STREAM, **fields)
    for model in (plain, saving):
        loss_of(model).backward()
    for (name, param), other in zip(plain.named_parameters(), saving.parameters(), strict=True):
        assert param.grad is not None and other.grad is not None and torch.equal(param.grad, other.grad), name


@pytest.mark.slow
def test_experts_and_multi_token_prediction_read_the_parameters_precision() -> None:
    model = half_model(**LLAMA_LIKE, **FP32_STREAM, num_moe_experts=4, moe_grouped_gemm=True, mtp_num_layers=2)
    inner = [layer for layer in model.modules() if isinstance(layer, TransformerLayer)]
    assert len(inner) == 5
    dtypes: list[torch.dtype] = []
    for layer in inner:
        layer.register_forward_hook(lambda _, __, output: dtypes.append(output[0].dtype))
        layer.mlp.register_forward_pre_hook(lambda _, args: dtypes.append(args[0].dtype))
    loss_of(model).backward()
    assert sorted(map(str, dtypes)) == ["torch.bfloat16"] * 5 + ["torch.float32"] * 5
    assert all(param.grad is not None for param in model.parameters())


def test_a_given_decoder_input_is_widened() -> None:
    model = half_model(**LLAMA_LIKE, **FP32_STREAM)
    tokens, positions, _ = small_batch()
    embedded = model.embedding(tokens, positions)
    logits = model(tokens, positions, None)
    assert torch.equal(model(None, None, None, decoder_input=embedded.bfloat16()), logits)


def test_a_stage_without_the_loss_returns_the_stream() -> None:
    config = small_config(**LLAMA_LIKE, **FP32_STREAM)
    stage = Float16Module(config, small_model(config, post_process=False), post_process=False)
    tokens, positions, _ = small_batch()
    assert stage(tokens, positions, None).dtype == torch.float32
    assert config.hidden_dtype == torch.float32 and small_config(**BF16).hidden_dtype == torch.bfloat16


def test_in_fp32_it_changes_nothing() -> None:
    losses = [loss_of(small_model(small_config(fp32_residual_connection=on))) for on in (False, True)]
    assert torch.equal(*losses)


def test_stages_that_would_round_the_stream_are_refused() -> None:
    with pytest.raises(ValueError, match=r"pipeline_dtype is torch.bfloat16 and fp32_residual_connection is True"):
        small_config(**FP32_STREAM, pipeline_dtype=torch.bfloat16)
