"""Megatron's older checkpoints, with one hand-split file per rank. Contains no tests."""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.enums import AttnBackend
from megatron.training.arguments import parse_args
from megatron.training.gpt_builder import build_gpt

# Two groups of two query heads; layers 0 and 2 are dense, 1 and 3 have four experts. Two ranks have padding rows.
HIDDEN, HEADS, GROUPS, WIDTH, FFN, EXPERTS, LAYERS, VOCAB, PADDED = 16, 4, 2, 4, 24, 4, 4, 61, 64
SHAPE: dict[str, Any] = {
    "num_layers": LAYERS,
    "hidden_size": HIDDEN,
    "ffn_hidden_size": FFN,
    "num_attention_heads": HEADS,
    "group_query_attention": True,
    "num_query_groups": GROUPS,
    "kv_channels": WIDTH,
    "add_bias_linear": False,
    "add_qkv_bias": True,
    "swiglu": True,
    "normalization": "RMSNorm",
    "untie_embeddings_and_output_weights": True,
    "position_embedding_type": "rope",
    "max_position_embeddings": 32,
    "seq_length": 32,
    "num_experts": EXPERTS,
    "moe_layer_freq": [0, 1, 0, 1],
    "moe_ffn_hidden_size": FFN,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_shared_expert_intermediate_size": 8,
}
# Norms that are stored inside the linear layers that follow them.
INSIDE = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "self_attention.q_layernorm.weight": "self_attention.linear_q_up_proj.layer_norm_weight",
    "self_attention.kv_layernorm.weight": "self_attention.linear_kv_up_proj.layer_norm_weight",
}
ITERATION = 7
TENSOR = PIPELINE = EXPERT = 2


def whole_model(shape: dict[str, Any]) -> GPTModel:
    """Builds the model stored in the files, with random weights from a fixed seed."""
    args = parse_args(argv=[])
    vars(args).update(shape, padded_vocab_size=VOCAB, unpadded_vocab_size=VOCAB, params_dtype=torch.float32)
    torch.manual_seed(3)
    model = build_gpt(args)
    for tensor in model.state_dict().values():
        torch.nn.init.normal_(tensor)
    return model


def _cut(tensor: Tensor, dim: int, *, rank: int, size: int) -> Tensor:
    return tensor.chunk(size, dim)[rank].clone()


def _of_rank(name: str, whole: Tensor, tensor_rank: int) -> Tensor:
    """Returns a tensor-parallel rank's part of a parameter that exists in dense and in expert layers."""
    if name.startswith(("embedding.word", "output_layer")):
        padded = torch.cat([whole, torch.zeros(PADDED - VOCAB, HIDDEN)])
        return _cut(padded, 0, rank=tensor_rank, size=TENSOR)
    if "linear_qkv" in name or name.endswith("up_proj.weight"):
        # Each rank has whole groups of query heads.
        return _cut(whole, 0, rank=tensor_rank, size=TENSOR)
    if name.endswith("linear_fc1.weight"):
        return torch.cat([_cut(half, 0, rank=tensor_rank, size=TENSOR) for half in whole.chunk(2)])
    if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
        return _cut(whole, 1, rank=tensor_rank, size=TENSOR)
    return whole.clone()


def files_of(model: GPTModel, style: str) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yields folder and parameters of each rank. style: Megatron implementation whose names and stacking are used."""
    state = model.state_dict()
    for tensor in range(TENSOR):
        for stage in range(PIPELINE):
            for expert in range(EXPERT):
                chunk: dict[str, Tensor] = {}
                for name, whole in state.items():
                    is_latent = "decoder.layers.0.self_attention.linear_kv_up_proj.weight" in state
                    options = {"tensor": tensor, "style": style, "is_latent": is_latent}
                    for legacy, part in _legacy_names(name, whole, stage, expert, **options):
                        chunk[legacy] = part
                if style == "grouped":
                    _stack_experts(chunk)
                yield f"mp_rank_{tensor:02d}_{stage:03d}_{expert:03d}", chunk


def _legacy_names(
    name: str, whole: Tensor, stage: int, expert: int, *, tensor: int, style: str, is_latent: bool
) -> Iterator[tuple[str, Tensor]]:
    is_last = name.startswith(("decoder.final", "output_layer"))
    if not name.startswith("decoder.layers"):
        if stage == (PIPELINE - 1 if is_last else 0):
            yield name, _of_rank(name, whole, tensor)
        return
    _, _, layer, inner = name.split(".", 3)
    if int(layer) // 2 != stage:
        return
    prefix, part = f"decoder.layers.{int(layer) % 2}.", _of_rank(name, whole, tensor)
    if ".local_experts." in name:
        number, rest = inner.removeprefix("mlp.experts.local_experts.").split(".", 1)
        here = int(number) - expert * (EXPERTS // EXPERT)
        if not 0 <= here < EXPERTS // EXPERT:
            return
        inner = f"mlp.experts.{rest}{here}" if style == "engine" else f"mlp.experts.local_experts.{here}.{rest}"
    elif style == "engine" and inner in INSIDE and (is_latent != inner.startswith("input")):
        inner = INSIDE[inner]
        yield prefix + inner.replace("layer_norm_weight", "_extra_state"), part  # never a weight
    elif style == "engine" and inner == "pre_mlp_layernorm.weight" and int(layer) % 2 == 0:
        inner = "mlp.linear_fc1.layer_norm_weight"
    yield prefix + inner, part


def _stack_experts(chunk: dict[str, Tensor]) -> None:
    prefix, local = "decoder.layers.1.mlp.experts.", EXPERTS // EXPERT
    first, second = (
        torch.stack([chunk.pop(f"{prefix}local_experts.{i}.linear_fc{n}.weight").t() for i in range(local)])
        for n in (1, 2)
    )
    chunk[prefix + "weight1"] = first.reshape(HIDDEN, -1)
    chunk[prefix + "weight2"] = second.reshape(-1, HIDDEN)


def write_files(model: GPTModel, folder: Path, style: str, *, shape: dict[str, Any] = SHAPE, **changes: Any) -> None:
    """Writes the files of all ranks into a folder. changes: modified arguments in the files."""
    args = {
        **shape,
        "tensor_model_parallel_size": TENSOR,
        "pipeline_model_parallel_size": PIPELINE,
        "expert_model_parallel_size": EXPERT,
        "virtual_pipeline_model_parallel_size": None,
        "sequence_parallel": True,
        "padded_vocab_size": PADDED,
        "vocab_size": VOCAB,
        "consumed_train_samples": 99,
        "attention_backend": AttnBackend.flash,
        "make_vocab_size_divisible_by": 2,
        **changes,
    }
    for name, chunk in files_of(model, style):
        path = folder / f"iter_{ITERATION:07d}" / name / "model_optim_rng.pt"
        path.parent.mkdir(parents=True)
        content = {
            "args": argparse.Namespace(**args),
            "checkpoint_version": 3.0,
            "iteration": ITERATION,
            "model": chunk,
            "optimizer": {"state": {0: {"exp_avg": torch.ones(3)}}, "param_groups": [{"lr": 0.1, "params": [0]}]},
        }
        torch.save(content, path)
    (folder / "latest_checkpointed_iteration.txt").write_text(str(ITERATION))
