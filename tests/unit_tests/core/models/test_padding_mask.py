"""padding_mask of GPTModel: routers exclude padding from losses and loads, as in plain formulas."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.moe.aux_losses import MTP_LOSS
from megatron.core.transformer.moe.moe_layer import BaseMoELayer
from megatron.core.transformer.spec_utils import ModuleSpec
from tests.unit_tests.core.models.small_models import (
    BATCH,
    LLAMA_LIKE,
    SEQ,
    VOCAB,
    gradients,
    loss_of,
    small_batch,
    small_config,
    small_model,
)
from tests.unit_tests.core.transformer.moe import naive_router as naive

EXPERTS = 4
COEFFICIENTS = {"load_balancing_loss": 0.3, "seq_load_balancing_loss": 0.5, "global_load_balancing_loss": 0.7}
LOSSES: dict[str, Any] = {
    "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss", "global_aux_loss"],
    "moe_aux_loss_coeff": list(COEFFICIENTS.values()),
    "moe_z_loss_coeff": 0.2,
}
LENGTHS = [SEQ - 3, SEQ - 9]
PADDING = torch.arange(SEQ) >= torch.tensor(LENGTHS).unsqueeze(1)  # [B, S]


def _config(**fields: Any) -> Any:
    return small_config(num_moe_experts=EXPERTS, params_dtype=torch.float64, **{**LLAMA_LIKE, **fields})


def _watch(model: GPTModel) -> list[Tensor]:
    """Records the logits of each router's forward in the returned list: [S, B, E], fp64."""
    found: list[Tensor] = []
    for module in model.modules():
        if type(module).__name__ == "TopKRouter":
            gating = module.gating

            def watched(tokens: Tensor, gating: Any = gating) -> Tensor:
                logits = gating(tokens)
                found.append(logits.view(SEQ, BATCH, EXPERTS))
                return logits

            vars(module)["gating"] = watched
    return found


def _plain_losses(logits: Tensor, padding: Tensor, config: Any) -> dict[str, Tensor]:
    """Returns the losses of one router, excluding padding tokens: [B, S]."""
    sequences = [logits[~padding[b], b] for b in range(BATCH)]
    valid = torch.cat(sequences)
    whole = naive.balancing_loss(*naive.shares(valid, config), config)
    by_sequence = [naive.balancing_loss(*naive.shares(one, config), config) for one in sequences]
    return {
        "load_balancing_loss": whole,
        "seq_load_balancing_loss": sum(by_sequence) / BATCH,
        "global_load_balancing_loss": whole,
        "z_loss": valid.logsumexp(1).square().mean(),
    }


def test_losses_loads_and_gradients_leave_padding_out_and_the_output_does_not_change() -> None:
    config = _config(**LOSSES)
    model, plain = small_model(config), small_model(_config())
    loss = loss_of(model, padding_mask=PADDING)
    loss.backward()
    totals = model.aux_losses.take_totals()
    logits = _watch(plain)
    plain_loss = loss_of(plain)
    assert torch.equal(loss, plain_loss) and len(logits) == config.num_layers
    by_layer = [_plain_losses(one, PADDING, config) for one in logits]
    expected = {name: sum(losses[name] for losses in by_layer) for name in by_layer[0]}
    for name, value in expected.items():
        assert totals[name][0].item() == pytest.approx(value.item(), rel=1e-6), name
    coefficients = {**COEFFICIENTS, "z_loss": 0.2}
    (plain_loss + sum(coefficients[name] * value for name, value in expected.items())).backward()
    theirs = gradients(plain)
    for name, grad in gradients(model).items():
        torch.testing.assert_close(grad, theirs[name], msg=name)
    tokens = model.aux_losses.layer_totals().tokens_per_expert
    for layer, one in enumerate(logits):
        valid = torch.cat([one[:length, b] for b, length in enumerate(LENGTHS)])
        assert tokens[layer].tolist() == naive.shares(valid, config)[1]


def test_layers_that_predict_further_tokens_leave_out_padding_here_and_ahead() -> None:
    config = _config(mtp_num_layers=2, moe_aux_loss_coeff=0.1)
    model = small_model(config)
    logits = _watch(model)
    loss_of(model, padding_mask=PADDING).backward()
    tokens = model.aux_losses.layer_totals().tokens_per_expert
    assert len(logits) == len(tokens) == config.num_layers + 2
    for depth in (1, 2):
        # Tokens after the end are not padding, so the mask has no entries for them.
        ahead = PADDING.roll(-depth, dims=1)
        ahead[:, -depth:] = False
        outside = PADDING | ahead
        one = logits[config.num_layers + depth - 1]
        valid = torch.cat([one[~outside[b], b] for b in range(BATCH)])
        assert tokens[config.num_layers + depth - 1].tolist() == naive.shares(valid, config)[1]
    assert MTP_LOSS.format(1) in model.aux_losses.recorded_names


def test_the_bias_of_experts_follows_tokens_that_count() -> None:
    fields = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
    config = _config(**fields, moe_router_bias_update_rate=0.5)
    model = small_model(config)
    logits = _watch(model)
    loss_of(model, padding_mask=PADDING).backward()
    model.finalize_step(None)
    for layer, one in zip(model.decoder.layers, logits, strict=True):
        valid = torch.cat([one[:length, b] for b, length in enumerate(LENGTHS)])
        counts = naive.shares(valid, config)[1]
        mean = sum(counts) / EXPERTS
        expected = [0.5 * ((count < mean) - (count > mean)) for count in counts]
        assert layer.mlp.router.expert_bias.tolist() == expected


def test_all_tokens_may_be_padding() -> None:
    model, everything = small_model(_config(**LOSSES)), torch.ones(BATCH, SEQ, dtype=torch.bool)
    loss_of(model, padding_mask=everything).backward()
    assert not model.aux_losses.layer_totals().tokens_per_expert.any()
    assert all(total[0] == 0 for total in model.aux_losses.take_totals().values())
    assert all(grad.isfinite().all() for grad in gradients(model).values())


def test_dense_layers_compute_padding_like_other_tokens() -> None:
    model = small_model(small_config(**LLAMA_LIKE))
    assert torch.equal(loss_of(model, padding_mask=PADDING), loss_of(model))
    with pytest.raises(ValueError, match="MLP.forward: no_such is"):
        model.decoder.layers[0].mlp(torch.ones(1, 1, 32), no_such=1)


class _Plain(nn.Module):
    """A user's dense feed-forward layer that does not support padding masks."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(config.hidden_size))

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, None]:
        """hidden_states: [S, B, H], fp32. Returns the same and no bias."""
        return hidden_states @ self.weight, None


class _Experts(BaseMoELayer):
    """A user's expert layer, whose router does not receive the padding mask."""

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, None]:
        """hidden_states: [S, B, H], fp32. Returns the same and no bias."""
        return hidden_states, None


def test_feed_forward_layers_from_elsewhere_get_padding_if_they_take_it() -> None:
    config = small_config(num_moe_experts=EXPERTS)

    def model_of(mlp: type[nn.Module]) -> GPTModel:
        spec = get_gpt_layer_local_spec()
        spec.submodules.mlp = ModuleSpec(mlp)
        return GPTModel(config, spec, VOCAB, SEQ)

    loss_of(model_of(_Plain), padding_mask=PADDING)
    with pytest.raises(ValueError, match="padding_mask is given but the forward of _Experts does not accept it"):
        loss_of(model_of(_Experts), padding_mask=PADDING)


def test_masks_that_do_not_fit_are_refused() -> None:
    model, batch = small_model(_config()), small_batch()
    for wrong in (PADDING.t(), PADDING[:, 1:], PADDING.long()):
        with pytest.raises(ValueError, match=r"padding_mask has .*: must be bool \[2, 16\], True for padding"):
            model(*batch[:2], None, labels=batch[2], padding_mask=wrong)
