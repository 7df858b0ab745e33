"""GPTModel against Llama and Mixtral of the transformers library, same weights: logits, loss and every gradient."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from tests.unit_tests.core.models.small_models import (
    LLAMA_LIKE,
    SEQ,
    VOCAB,
    from_hugging_face,
    gradients,
    small_batch,
    small_config,
    small_model,
)

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": SEQ,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}


def assert_agree(theirs: Any, *, tied: bool, **fields: Any) -> None:
    """Copies the weights and compares within 1e-4, in fp32, in evaluation mode."""
    config = small_config(**LLAMA_LIKE, **fields)
    ours = small_model(config, share_embeddings_and_output_weights=tied).eval()
    theirs.eval()
    weights = {name: value.detach() for name, value in theirs.named_parameters()}
    missing = ours.load_state_dict(from_hugging_face(weights, config), strict=False).missing_keys
    assert missing == []
    input_ids, position_ids, labels = small_batch()
    logits = ours(input_ids, position_ids, None)
    expected = theirs(input_ids).logits
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    loss = ours(input_ids, position_ids, None, labels=labels).mean()
    expected_loss = torch.nn.functional.cross_entropy(expected.flatten(0, 1), labels.flatten())
    torch.testing.assert_close(loss, expected_loss, atol=1e-4, rtol=1e-4)
    loss.backward()
    expected_loss.backward()
    wanted = from_hugging_face(gradients(theirs), config)
    found = gradients(ours)
    assert found.keys() == wanted.keys()
    for name, grad in wanted.items():
        torch.testing.assert_close(
            found[name], grad, atol=1e-4, rtol=1e-4, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_dense_model_agrees_with_llama(groups: int, tied: bool) -> None:
    torch.manual_seed(0)
    llama = LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=groups, tie_word_embeddings=tied))
    assert_agree(llama, tied=tied, num_query_groups=groups)


@pytest.mark.parametrize("topk", [1, 2, 3])
def test_expert_model_agrees_with_mixtral(topk: int) -> None:
    torch.manual_seed(0)
    mixtral = MixtralForCausalLM(
        MixtralConfig(
            **SIZES, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=topk, tie_word_embeddings=False
        )
    )
    assert_agree(
        mixtral, tied=False, num_query_groups=2, num_moe_experts=4, moe_router_topk=topk, moe_grouped_gemm=True
    )
