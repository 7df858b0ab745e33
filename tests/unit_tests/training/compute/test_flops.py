"""FLOP counts compared with torch's count for a real model, and the numbers of total and active parameters."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron.core.datasets.padding import count_padding_sync
from megatron.training.command_line.config_builder import run_config_of
from megatron.training.compute.flops import count_parameters, num_operations_of_samples
from megatron.training.training import num_floating_point_operations
from tests.unit_tests.training.flag_models import model_of_flags

# Other kernels pad values to the width of keys, and torch counts the padding.
LATENT = (
    "--multi-latent-attention --position-embedding-type rope --kv-lora-rank 12 --qk-head-dim 10 "
    "--qk-pos-emb-head-dim 6 --v-head-dim 9 --attention-backend unfused --attention-dropout 0"
)
EXPERTS = "--num-experts 4 --moe-ffn-hidden-size 24 --moe-router-topk 3 --disable-bias-linear"


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--group-query-attention --num-query-groups 2 --kv-channels 12 --swiglu --ffn-hidden-size 40",
        f"{EXPERTS} --swiglu --position-embedding-type rope",
        f"{EXPERTS} --moe-shared-expert-intermediate-size 40 --moe-shared-expert-gate",
        f"{LATENT} --q-lora-rank 20",
        f"{LATENT} {EXPERTS} --swiglu",
        f"{EXPERTS} --moe-layer-freq [0,1,1] --untie-embeddings-and-output-weights",
        "--group-query-attention",
    ],
)
def test_operations_are_those_that_torch_counts_with_half_of_attention(flags: str) -> None:
    args, model = model_of_flags(flags)
    assert num_floating_point_operations(args, 2) == counted(model)


@pytest.mark.parametrize("lengths", [[16, 16], [16, 5], [1, 2], [9, 13, 7, 16]])
@pytest.mark.parametrize("flags", ["", f"{EXPERTS} --swiglu --position-embedding-type rope", LATENT])
def test_padding_costs_no_operations(flags: str, lengths: list[int]) -> None:
    """Samples of 16 tokens of which only the first ones are real cost as much as sequences of these alone."""
    args, model = model_of_flags(flags)
    mask = torch.arange(16) >= torch.tensor(lengths).unsqueeze(1)
    padding = count_padding_sync({"padding_mask": mask})
    expected = sum(counted(model, num_samples=1, length=length) for length in lengths)
    assert num_operations_of_samples(run_config_of(args), len(lengths), padding) == pytest.approx(expected, rel=1e-12)


def counted(model: torch.nn.Module, *, num_samples: int = 2, length: int = 16) -> float:
    """Counts the FLOPs of forward and backward over samples, two of 16 tokens by default."""
    tokens = torch.randint(100, (num_samples, length))
    with FlopCounterMode(display=False) as counter:
        positions = torch.arange(length).expand(num_samples, length)
        model(tokens, positions, None, labels=tokens).mean().backward()
    # Only attention uses batched GEMMs. Torch counts the masked half, too.
    counts = {str(op): count for op, count in counter.get_flop_counts()["Global"].items()}
    attention = sum(count for op, count in counts.items() if "bmm" in op or "attention" in op)
    assert attention > 0
    return sum(counts.values()) - attention / 2


def test_frozen_weights_have_no_gradients_to_compute() -> None:
    args, model = model_of_flags("--lora-rank 2")
    tokens, hidden, rank = 2 * 16, 32, 2
    # Input and output widths of the adapted layers: qkv, proj, fc1 and fc2.
    widths = (1 + 3) * hidden + (1 + 1) * hidden + 2 * (1 + 4) * hidden
    adapters = 3 * 2 * tokens * 3 * rank * widths
    # The first layer's input requires no gradient, because embeddings are frozen.
    unneeded = 2 * tokens * (hidden * 3 * hidden + hidden * rank)
    assert num_floating_point_operations(args, 2) == counted(model) - adapters + unneeded


def test_a_token_meets_the_chosen_experts_only() -> None:
    args, model = model_of_flags(f"{EXPERTS} --moe-layer-freq [0,1,1]")
    total, active = count_parameters([model], run_config_of(args).transformer)
    unused = (args.padded_vocab_size - args.unpadded_vocab_size) * 32
    assert total == sum(param.numel() for param in model.parameters()) - unused
    assert total - active == 2 * (4 - 3) * (2 * 32 * 24)
    args, model = model_of_flags("")
    assert len(set(count_parameters([model], run_config_of(args).transformer))) == 1


def test_packed_documents_count_their_own_lengths() -> None:
    args, _ = model_of_flags("")
    whole = num_floating_point_operations(args, 2)
    assert num_floating_point_operations(args, 2, 2 * args.seq_length**2, 2 * args.seq_length) == whole
    # Two documents in each sample need half of the attention scores, and all other GEMMs.
    halves = num_floating_point_operations(args, 2, 4 * (args.seq_length / 2) ** 2)
    scores = 2 * (whole - halves)
    assert num_floating_point_operations(args, 2, 0.0) == whole - scores > 0
    assert num_floating_point_operations(args, 2, 0.0, args.seq_length) == (whole - scores) / 2
