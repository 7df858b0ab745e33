"""A model that exceeds memory raises an error before its layers are built. A model that fits does not."""

import pytest
import torch

from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.meters import memory
from megatron.training.meters.memory import check_weights_fit

LARGE = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
MOE = {**LARGE, "num_moe_experts": 8, "moe_ffn_hidden_size": 64, "moe_layer_freq": [0, 1]}
# Per layer 2 x 64 x 64 for attention and 2 x 64 x 256 or 8 x 2 x 64 x 64 for the MLP; 100 x 64 embeddings; fp32.
DENSE_BYTES = 4 * (2 * 2 * 64 * 64 + 2 * 2 * 64 * 256 + 100 * 64)
MOE_BYTES = 4 * (2 * 2 * 64 * 64 + 2 * 64 * 256 + 8 * 2 * 64 * 64 + 100 * 64)


@pytest.mark.parametrize(("fields", "needed"), [(LARGE, DENSE_BYTES), (MOE, MOE_BYTES)], ids=["dense", "experts"])
def test_weights_beyond_the_memory_of_the_machine_are_refused(
    fields: dict, needed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = TransformerConfig(**fields, use_cpu_initialization=True)
    monkeypatch.setattr(memory, "total_memory_bytes", lambda device: needed)
    check_weights_fit(config, 100)
    monkeypatch.setattr(memory, "total_memory_bytes", lambda device: needed - 1)
    with pytest.raises(ValueError, match=r"num_layers \(2\), hidden_size \(64\)"):
        check_weights_fit(config, 100)
    with torch.device("meta"):
        check_weights_fit(config, 100)
    check_weights_fit(TransformerConfig(**fields, init_model_with_meta_device=True), 100)
