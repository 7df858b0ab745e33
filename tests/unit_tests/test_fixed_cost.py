"""benchmarks/fixed_cost.py: its count of operations agrees with torch's count for the plain model."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.fixed_cost import operations_of_step
from benchmarks.plain_model import PlainConfig, PlainModel


@pytest.mark.parametrize("num_layers", [1, 3])
@pytest.mark.parametrize("topk", [1, 2])
def test_operations_of_a_step_are_those_that_torch_counts(num_layers: int, topk: int) -> None:
    config = PlainConfig(num_layers=num_layers, topk=topk, hidden_size=64, ffn_hidden_size=96, vocab_size=128)
    tokens = torch.randint(config.vocab_size, (2, 33))
    with FlopCounterMode(display=False) as counter:
        PlainModel(config)(tokens[:, :-1], tokens[:, 1:]).backward()
    # The embedding is trained, so every GEMM has gradients of both operands. Attention is excluded, because torch
    # does not count its kernel as causal.
    counted = sum(count for operator, count in counter.get_flop_counts()["Global"].items() if "mm" in str(operator))
    without_attention = operations_of_step(config, tokens=64, sequence=0)
    assert counted == without_attention
    attention = operations_of_step(config, tokens=64, sequence=32) - without_attention
    # Two GEMMs in forward and four in backward, [S, D] x [D, S] per head, of which causal attention needs half.
    assert attention == num_layers * 2 * config.num_heads * 6 * (2 * 32 * 32 * 16) // 2
