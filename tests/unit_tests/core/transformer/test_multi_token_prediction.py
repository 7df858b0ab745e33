"""Losses of multi-token prediction compared with explicit formulas. test_mtp_parity tests layouts."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlock
from tests.unit_tests.core.models.small_models import LLAMA_LIKE, SEQ, gradients, small_batch, small_config, small_model

FACTOR = 0.5
RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
EXPERTS = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 16}


def build(depths: int = 2, **fields: Any) -> GPTModel:
    config = small_config(
        mtp_num_layers=depths, mtp_loss_scaling_factor=FACTOR, params_dtype=torch.float64, **LLAMA_LIKE, **fields
    )
    return small_model(config)


def losses_written_out(model: GPTModel) -> tuple[Tensor, list[Tensor]]:
    """Returns the next-token loss [2, S], and the losses of depths 1, 2, ..., each [2, S - depth]."""
    tokens, positions, labels = small_batch()
    assert model.embedding is not None and model.mtp is not None and model.rotary_pos_emb is not None
    rotary, weight = model.rotary_pos_emb(SEQ), model.shared_embedding_or_output_weight()
    hidden = model.decoder(model.embedding(tokens, positions), None, rotary_pos_emb=rotary)

    def loss(states: Tensor, targets: Tensor) -> Tensor:
        logits = (states @ weight.t()).permute(1, 2, 0)  # [B, V, S]
        return F.cross_entropy(logits, targets, reduction="none")

    further, deeper = [], hidden
    for depth, layer in enumerate(model.mtp.layers, 1):
        ahead = torch.cat([tokens[:, depth:], tokens.new_zeros(len(tokens), depth)], dim=1)
        joined = torch.cat([layer.enorm(model.embedding(ahead, positions)), layer.hnorm(deeper)], dim=-1)
        deeper, _ = layer.transformer_layer(joined @ layer.eh_proj.weight.t(), None, rotary_pos_emb=rotary)
        deeper = layer.final_layernorm(deeper)
        further.append(loss(deeper[:-depth], labels[:, depth:]))
    return loss(hidden, labels), further


def run(model: GPTModel, **arguments: Any) -> Tensor:
    tokens, positions, labels = small_batch()
    losses: Tensor = model(tokens, positions, arguments.pop("attention_mask", None), labels=labels, **arguments)
    return losses


@pytest.mark.parametrize(
    "fields", [{}, EXPERTS, {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2}]
)
def test_losses_and_gradients_are_those_of_the_formula(fields: dict[str, Any]) -> None:
    model = build(**fields)
    reference = copy.deepcopy(model)
    run(model).mean().backward()
    following, further = losses_written_out(reference)
    total = following.mean() + FACTOR / len(further) * torch.stack([loss.mean() for loss in further]).sum()
    total.backward()
    expected = gradients(reference)
    assert gradients(model).keys() == expected.keys()
    for name, grad in gradients(model).items():
        torch.testing.assert_close(grad, expected[name], rtol=1e-9, atol=1e-12, msg=name)
    recorded = model.aux_losses.take_totals()
    for depth, loss in enumerate(further, 1):
        total_loss, count = recorded[f"mtp_{depth} loss"].tolist()
        assert count == loss.numel() and total_loss == pytest.approx(loss.sum().item(), rel=1e-9)


@pytest.mark.parametrize("per_token", [False, True])
def test_losses_of_unequal_micro_batches_are_sums_over_tokens(per_token: bool) -> None:
    """Weights of 1, of a few tokens, of none, and fractions."""
    model = build(calculate_per_token_loss=per_token)
    reference = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(2)
    weights = [(torch.rand(2, SEQ, generator=generator) < share).float() for share in (1.0, 0.1, 0.0)]
    weights.append(torch.rand(2, SEQ, generator=generator))
    sums, counts = [0.0, 0.0], [0.0, 0.0]
    for mask in weights:
        # The loss of the next token is left out.
        (run(model, loss_mask=mask) * 0).sum().backward()
        expected = []
        for depth, losses in enumerate(losses_written_out(reference)[1], 1):
            total, count = (losses * mask[:, depth:]).sum(), mask[:, depth:].sum()
            sums[depth - 1] += total.item()
            counts[depth - 1] += count.item()
            expected.append(FACTOR / 2 * total / (1 if per_token else count.clamp(min=1)))
        torch.stack(expected).sum().backward()
    recorded = model.aux_losses.take_totals()
    for depth, (total, count) in enumerate(zip(sums, counts, strict=True), 1):
        assert recorded[f"mtp_{depth} loss"].tolist() == pytest.approx([total, count], rel=1e-6)
    found = gradients(model)
    for name, grad in gradients(reference).items():
        torch.testing.assert_close(found[name], grad, rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.parametrize(("layers_before", "again"), [(2, []), (1, [3]), (0, [3, 4])])
def test_layers_that_are_recomputed_as_a_block_are_first_those_before(layers_before: int, again: list[int]) -> None:
    fields = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2}
    config = small_config(mtp_num_layers=2, **LLAMA_LIKE, **fields)
    spec = get_gpt_mtp_block_spec(config, get_gpt_decoder_block_spec(config))
    assert spec is not None
    block = MultiTokenPredictionBlock(config, spec, layers_before=layers_before)
    assert list(block.recomputed_layers()) == again


def test_the_next_token_is_predicted_as_without_it() -> None:
    model = build()
    plain = small_model(small_config(params_dtype=torch.float64, **LLAMA_LIKE))
    plain.load_state_dict({name: value for name, value in model.state_dict().items() if not name.startswith("mtp.")})
    assert torch.equal(run(model), run(plain))


def test_evaluation_predicts_nothing_further() -> None:
    model = build()
    with torch.no_grad():
        run(model)
    model.eval()
    run(model)
    assert not any(total.any() for total in model.aux_losses.take_totals().values())


def test_documents_that_are_packed_learn_as_each_alone() -> None:
    tokens, positions, labels = small_batch()
    model, apart = build(), build()
    borders = [0, 5, SEQ, SEQ + 9, 2 * SEQ]
    packed = PackedSeqParams(cu_seqlens_q=torch.tensor(borders, dtype=torch.int32))
    inside = [(row, slice(start, end)) for row, start, end in ((0, 0, 5), (0, 5, SEQ), (1, 0, 9), (1, 9, SEQ))]
    places = torch.cat([torch.arange(end - start) for start, end in zip(borders, borders[1:])]).view(2, SEQ)
    # Rotary embeddings depend only on distances, so positions need not restart in each document.
    model(tokens, places, None, labels=labels, packed_seq_params=packed)
    for row, where in inside:
        document = [t[row : row + 1, where] for t in (tokens, positions, labels)]
        apart(document[0], document[1], None, labels=document[2])
    found, expected = model.aux_losses.take_totals(), apart.aux_losses.take_totals()
    for depth in (1, 2):
        torch.testing.assert_close(found[f"mtp_{depth} loss"], expected[f"mtp_{depth} loss"], rtol=1e-9, atol=0)


def test_the_routers_of_further_layers_count_and_balance() -> None:
    model = build(
        depths=1,
        moe_router_load_balancing_type="aux_loss",
        moe_aux_loss_coeff=0.1,
        moe_per_layer_logging=True,
        **EXPERTS,
    )
    run(model).mean().backward()
    tokens = model.aux_losses.layer_totals().tokens_per_expert
    assert tokens.sum(dim=1).tolist() == [2 * SEQ * 2] * 3
    assert model.mtp is not None
    router = model.mtp.layers[0].transformer_layer.mlp.router
    assert router.layer_number == 3 and router.weight.grad.any()


def test_a_spec_of_other_depths_is_refused() -> None:
    config = small_config(mtp_num_layers=2)
    layers = get_gpt_decoder_block_spec(config)
    spec = get_gpt_mtp_block_spec(config, layers)
    assert spec is not None
    spec.layer_specs.pop()
    with pytest.raises(ValueError, match=r"has 1 layers: must be mtp_num_layers \(2\)"):
        small_model(config, mtp_block_spec=spec)


def test_no_layers_have_no_spec() -> None:
    config = small_config(mtp_num_layers=0)
    assert get_gpt_mtp_block_spec(config, get_gpt_decoder_block_spec(config)) is None
    assert small_model(config).mtp is None


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("Et|tL", "contains 0 times m .*must contain it mtp_num_layers .1"),
        ("Et|tmmL", "contains 2 times m"),
        ("Etm|tL", "before the loss, in the same stage"),
    ],
)
def test_layouts_that_place_other_layers_are_refused(layout: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        small_config(
            mtp_num_layers=1,
            pipeline_model_parallel_size=2,
            pipeline_model_parallel_layout=layout,
            pipeline_dtype=torch.float32,
        )
