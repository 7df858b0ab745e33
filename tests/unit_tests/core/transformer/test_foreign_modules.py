"""Modules written for Megatron-LM that replace submodules of a layer."""

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_decoder_layer_specs,
    get_gpt_layer_local_spec,
    get_gpt_layer_local_submodules,
    get_gpt_layer_with_transformer_engine_submodules,
    get_mlp_module_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.norms import LayerNorm, Norm, RMSNorm
from megatron.core.transformer.spec_utils import ModuleSpec, build_module, get_module
from megatron.core.transformer.transformer_layer import TransformerLayer
from tests.unit_tests.core.models.small_models import (
    LLAMA_LIKE,
    gradients,
    loss_of,
    small_batch,
    small_config,
    small_model,
)
from tests.unit_tests.core.transformer.foreign_modules import (
    ForeignActivation,
    ForeignAttention,
    ForeignCore,
    ForeignMLP,
    spec_with,
)


def model_of(spec: Any, config: Any) -> GPTModel:
    torch.manual_seed(3)
    return GPTModel(config, spec, 128, 16, position_embedding_type="rope")


@pytest.mark.parametrize("core", [ForeignCore, ModuleSpec(module=ForeignCore, params={"attention_dropout": 0.0})])
@pytest.mark.parametrize("recompute", [{}, {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}])
def test_a_foreign_core_gives_the_losses_and_gradients_of_ours(core: Any, recompute: dict[str, Any]) -> None:
    config = small_config(**{**LLAMA_LIKE, **recompute})
    results = []
    for spec in (get_gpt_layer_local_spec(), spec_with(core=core)):
        model = model_of(spec, config)
        loss = loss_of(model)
        loss.backward()
        results.append((loss.detach(), gradients(model)))
    assert ForeignCore.calls > 0
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)


def test_a_foreign_core_gets_packed_samples_as_rows_of_tokens() -> None:
    tokens, positions, labels = small_batch()
    batch, length = tokens.shape
    borders = [0] + [start + end for start in range(0, batch * length, length) for end in (length // 3, length)]
    packed = PackedSeqParams(cu_seqlens_q=torch.tensor(borders, dtype=torch.int32))
    config = small_config(**LLAMA_LIKE)
    losses = [
        model_of(spec, config)(tokens, positions, None, labels=labels, packed_seq_params=packed)
        for spec in (get_gpt_layer_local_spec(), spec_with(core=ForeignCore))
    ]
    torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-6)


def test_whole_foreign_attention_and_feed_forward_layers_train() -> None:
    config = small_config()
    model = model_of(spec_with(self_attention=ForeignAttention, mlp=ModuleSpec(ForeignMLP)), config)
    assert [layer.self_attention.layer_number for layer in model.decoder.layers] == [1, 2]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.1
    layer = model.decoder.layers[0]
    assert layer.mlp.up.weight.grad.abs().sum() > 0 and layer.self_attention.qkv.weight.grad.abs().sum() > 0


def test_an_activation_module_and_a_partial_builder_take_the_place_of_the_function() -> None:
    config = small_config(**LLAMA_LIKE)
    dense = get_mlp_module_spec(False).submodules
    other = functools.partial(MLP.as_mlp_submodule, replace(dense, activation_func=ForeignActivation))
    named = functools.partial(MLP.as_mlp_submodule, submodules=dense)
    losses = [loss_of(model_of(spec_with(**parts), config)) for parts in ({}, {"mlp": other}, {"mlp": named})]
    torch.testing.assert_close(losses[1], losses[0])
    assert torch.equal(losses[2], losses[0])


class Returning(TransformerLayer):
    """A user's layer that returns only hidden states."""

    def __init__(self, config: Any, submodules: Any, layer_number: int = 1, pg_collection: Any = None) -> None:
        super().__init__(config, submodules, layer_number, pg_collection=pg_collection)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Returns [S, B, H], parameter dtype."""
        return super().forward(*args, **kwargs)[0]


def test_layers_return_a_context_and_a_block_takes_layers_that_return_none() -> None:
    config = small_config()
    spec = ModuleSpec(Returning, submodules=get_gpt_layer_local_submodules())
    losses = [loss_of(model_of(one, config)) for one in (spec, get_gpt_layer_local_spec())]
    assert torch.equal(*losses)
    layer = build_module(get_gpt_layer_local_spec(), config=config, layer_number=2, name="decoder.layers.1")
    hidden = torch.randn(4, 2, config.hidden_size)
    output, context = layer(hidden_states=hidden, attention_mask=None, context=None, inference_context=None)
    assert context is None and output.shape == hidden.shape and layer.layer_number == 2
    for wrong in ("context", "context_mask", "inference_params", "no_such"):
        with pytest.raises(ValueError, match=f"TransformerLayer.forward: {wrong} is"):
            layer(hidden, **{wrong: 1})
    for wrong in ("key_value_states", "attention_bias"):
        with pytest.raises(ValueError, match=f"attention: {wrong} is"):
            layer.self_attention(hidden, None, **{wrong: hidden})
    with pytest.raises(ValueError, match="cross_attention is"):
        TransformerLayer(config, replace(get_gpt_layer_local_submodules(), cross_attention=ForeignAttention))


def test_layers_of_a_later_stage_are_numbered_over_the_whole_model() -> None:
    config = small_config(num_layers=6, pipeline_model_parallel_size=2)
    submodules = get_gpt_layer_local_submodules()
    assert TransformerLayer(config, submodules, 2, pp_layer_offset=3).layer_number == 5
    assert TransformerLayer(config, submodules, 2, pp_layer_offset=3, add_layer_offset=False).layer_number == 2
    assert len(get_gpt_decoder_block_spec(config, False, pp_rank=1).layer_specs) == 3
    assert len(get_gpt_decoder_block_spec(config, False).layer_specs) == 6


def test_queries_keys_and_values_are_not_rotated_and_may_stay_joined() -> None:
    config = small_config(**LLAMA_LIKE)
    attention = model_of(get_gpt_layer_local_spec(), config).decoder.layers[0].self_attention
    hidden = torch.randn(5, 2, config.hidden_size)
    query, key, value = attention.get_query_key_value_tensors(hidden)
    mixed, widths = attention.get_query_key_value_tensors(hidden, split_qkv=False)
    for part, expected in zip(mixed.split(widths, dim=-1), (query, key, value), strict=True):
        assert torch.equal(part.reshape(expected.shape), expected)
    with pytest.raises(ValueError, match="output_gate is True"):
        attention.get_query_key_value_tensors(hidden, None, True)


def test_specs_name_what_they_do_not_have() -> None:
    assert ModuleSpec(IdentityOp).metainfo == {} and get_module(ModuleSpec(IdentityOp), config=1) is IdentityOp
    kinds = [get_gpt_layer_local_submodules(normalization=n).input_layernorm for n in (None, "LayerNorm", "RMSNorm")]
    assert kinds == [Norm, LayerNorm, RMSNorm]
    with pytest.raises(ValueError, match="normalization is 'L1'"):
        get_gpt_layer_local_spec(normalization="L1")
    for name, value in {"fp8": "hybrid", "qk_l2_norm": True, "use_kitchen": True}.items():
        for function in (get_gpt_layer_local_submodules, get_gpt_layer_with_transformer_engine_submodules):
            with pytest.raises(ValueError, match=f"{name} is"):
                function(**{name: value})
    with pytest.raises(ImportError, match="transformer_engine cannot be imported"):
        get_mlp_module_spec()
    config = small_config(num_moe_experts=4, moe_layer_freq=[0, 1])
    dense, experts = get_gpt_decoder_layer_specs(config, False)
    assert dense.submodules.mlp.module is MLP and experts.submodules.mlp.module is not MLP


def test_embedded_tokens_and_gathered_logits_are_given_at_the_call() -> None:
    model = small_model(small_config(**LLAMA_LIKE))
    tokens, positions, labels = small_batch()
    expected = model(tokens, positions, None, None, labels)
    embedded = model.embedding(tokens, positions)
    assert torch.equal(model(None, None, None, embedded, labels, loss_mask=None), expected)
    logits = model(tokens, positions, None, runtime_gather_output=True, extra_block_kwargs={"context": None})
    assert torch.equal(logits, model(tokens, positions, None))
    for name in ("output_processor", "inference_params"):
        with pytest.raises(ValueError, match=f"GPTModel.forward: {name} is"):
            model(tokens, positions, None, **{name: 1})
    for name, value in {"logit_dtype": torch.float32, "scatter_embedding_sequence_parallel": False}.items():
        with pytest.raises(ValueError, match=f"GPTModel: {name} is"):
            GPTModel(small_config(), get_gpt_layer_local_spec(), 64, 16, **{name: value})


def test_boxes_of_a_part_have_the_names_of_the_whole_model() -> None:
    model = small_model(small_config(**LLAMA_LIKE))
    whole, inner = model.sharded_state_dict(), model.decoder.sharded_state_dict(prefix="decoder.")
    assert set(inner) == {name for name in whole if name.startswith("decoder.")} and set(inner) < set(whole)
    qkv = inner["decoder.layers.0.self_attention.linear_qkv.weight"]
    assert [box.key.rpartition(".")[2] for box in qkv] == ["q", "k", "v"]
    norm = inner["decoder.final_layernorm.weight"]
    assert (
        norm.key == "decoder.final_layernorm.weight"
        and norm.data.data_ptr() == model.decoder.final_layernorm.weight.data_ptr()
    )
    spec = get_gpt_layer_local_submodules()
    spec.sharded_state_dict_keys_map = {"mlp.": "feed_forward."}
    layer = TransformerLayer(small_config(), spec)
    assert any(name.startswith("layer.feed_forward.linear_fc1") for name in layer.sharded_state_dict("layer."))
    with pytest.raises(ValueError, match="sharded_offsets is"):
        layer.sharded_state_dict("layer.", ((0, 1, 2),))
    assert set(layer.state_dict_for_save_checkpoint("x.")) == {f"x.{name}" for name in layer.state_dict()}


class _NamedMLP(MLP):
    """A subclass as in plug-ins: adds an argument and passes on the others."""

    def __init__(self, *args: Any, label: str = "", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.label = label


def test_a_subclass_that_passes_keywords_on_gets_those_that_its_base_class_takes() -> None:
    spec = get_gpt_layer_local_spec()
    spec.submodules.mlp = ModuleSpec(_NamedMLP, {"label": "mine"}, submodules=spec.submodules.mlp.submodules)
    config = small_config(**LLAMA_LIKE)
    ours, named = (model_of(one, config) for one in (get_gpt_layer_local_spec(), spec))
    assert [layer.mlp.label for layer in named.decoder.layers] == ["mine", "mine"]
    assert torch.equal(loss_of(ours), loss_of(named))
