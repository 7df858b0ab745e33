"""The model and the training step on a GPU agree with the CPU. Skipped without a GPU."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import pretrain_gpt
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer import TransformerConfig
from tests.harness import run_on_ranks

pytestmark = pytest.mark.gpu

FLAGS = """
--num-layers 2 --hidden-size 64 --num-attention-heads 4 --num-experts 4 --moe-grouped-gemm --moe-aux-loss-coeff 1e-2
--moe-z-loss-coeff 1e-3 --swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope
--seq-length 64 --micro-batch-size 2 --global-batch-size 8 --mock-data --tokenizer-type NullTokenizer --vocab-size 256
--lr 1e-3 --train-iters 8 --eval-iters 1 --hidden-dropout 0 --attention-dropout 0 --num-workers 0
"""
# Attention over documents of variable length, whose boundaries the loader leaves on the CPU.
BORDERS = "--bf16 --reset-attention-mask --no-create-attention-mask-in-dataloader --eod-mask-loss"


def build_model(**changes: object) -> GPTModel:
    """Builds a model with two layers of four experts, always with the same weights."""
    values = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_moe_experts": 4, "init_seed": 1}
    values |= {"gated_linear_unit": True, "activation_func": nn.functional.silu, "add_bias_linear": False}
    values |= {"moe_grouped_gemm": True, "moe_aux_loss_coeff": 1e-2, "hidden_dropout": 0.0, "attention_dropout": 0.0}
    config = TransformerConfig(**{**values, **changes})  # type: ignore[arg-type]
    return GPTModel(config, get_gpt_decoder_block_spec(config), 256, 64, position_embedding_type="rope")


def gradients(device: str) -> dict[str, torch.Tensor]:
    """Returns the fp32 gradients of one batch's mean loss, by parameter name, on the CPU."""
    model = build_model().to(device)
    tokens = torch.arange(2 * 65).remainder(256).view(2, 65).to(device)
    positions = torch.arange(64, device=device).expand(2, 64)
    model(tokens[:, :-1].contiguous(), positions, None, labels=tokens[:, 1:].contiguous()).mean().backward()
    return {name: p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None}


def train(folder: str, extra: str) -> list[float]:
    """Runs pretrain_gpt.py in this process and returns the losses."""
    pretrain_gpt.main([*FLAGS.split(), *extra.split(), "--tensorboard-dir", folder])
    lines = [json.loads(line) for line in Path(folder, "steps.jsonl").read_text().splitlines()]
    return [line["lm_loss"] for line in lines if "lm_loss" in line]


def test_gradients_agree_with_the_cpu() -> None:
    expected, found = gradients("cpu"), gradients("cuda")
    whole = torch.stack([value.norm() for value in expected.values()]).norm()
    for name, value in expected.items():
        if value.norm() > 1e-6 * whole:
            assert (found[name] - value).norm() <= 5e-5 * value.norm(), name


@pytest.mark.parametrize("precision", ["", "--bf16", "--fp16", "--deterministic-mode", BORDERS])
def test_a_run_learns_saves_and_resumes(precision: str, tmp_path: Path) -> None:
    save = f"{precision} --save {tmp_path / 'saved'} --load {tmp_path / 'saved'}"
    (whole,) = run_on_ranks(train, 1, str(tmp_path / "whole"), precision, backend=None)
    run_on_ranks(train, 1, str(tmp_path / "parts"), f"{save} --exit-interval 5", backend=None)
    (parts,) = run_on_ranks(train, 1, str(tmp_path / "parts"), save, backend=None)
    assert whole[-1] < whole[0]
    assert parts == (whole if precision == "--deterministic-mode" else pytest.approx(whole, rel=1e-2))


def test_every_gpu_takes_part(tmp_path: Path) -> None:
    ranks = torch.cuda.device_count()
    losses = run_on_ranks(train, ranks, str(tmp_path), "--global-batch-size 16", backend=None)
    assert losses[0][-1] < losses[0][0]
