"""A merged checkpoint belongs to a model without adapters, and yields the same outputs as the model with adapters."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import model_sharded_tensors
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.tools import checkpoint
from megatron.tools.merge_adapters import merge_adapters
from megatron.training.checkpointing.train_state import TrainState
from tests.unit_tests.core.models.small_models import LATENT, LLAMA_LIKE, loss_of, small_config, small_model

RANK, ALPHA = 4, 8.0
LATENT_KEYS = ["linear_kv_down_proj", "linear_kv_up_proj", "linear_proj"]
EXPERTS = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 16}


def build(*, rank: int | None, **fields: Any) -> GPTModel:
    adapters = {} if rank is None else {"lora_rank": rank, "lora_alpha": ALPHA}
    return small_model(small_config(**{**LLAMA_LIKE, **adapters, **fields}))


def save_run(model: GPTModel, folder: Path, *, rank: int | None) -> None:
    arguments = {"lora_rank": rank, "lora_alpha": ALPHA}
    contents = {"optimizer": False, "rng": False}
    state = TrainState(iteration=3).state_dict()
    common = {"iteration": 3, "args": arguments, "train_state": state, "contents": contents, "frozen": ["x"]}
    dist_checkpointing.save_items(model_sharded_tensors(model), folder / "iter_0000003", common=common)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"num_query_groups": 2, "add_qkv_bias": True},
        {"add_bias_linear": True, "gated_linear_unit": False},
        {**EXPERTS, "moe_layer_freq": [0, 1], "moe_shared_expert_intermediate_size": 16},
        {**EXPERTS, "moe_grouped_gemm": True},
        {**LATENT, "lora_target_modules": ["linear_q_down_proj", "linear_q_up_proj", *LATENT_KEYS]},
    ],
)
def test_a_merged_model_computes_what_the_adapted_one_does(fields: dict[str, Any], tmp_path: Path) -> None:
    adapted = build(rank=RANK, **fields)
    for name, param in adapted.named_parameters():
        if name.endswith("lora_b"):
            torch.nn.init.normal_(param.data, std=0.1)
    expected = loss_of(adapted)
    save_run(adapted, tmp_path / "run", rank=RANK)
    assert checkpoint.main(["merge", "--load", str(tmp_path / "run"), "--save", str(tmp_path / "merged")]) == 0
    merged, begun = build(rank=None, **fields), loss_of(build(rank=None, **fields))
    common = dist_checkpointing.load_items(model_sharded_tensors(merged), tmp_path / "merged" / "release")
    torch.testing.assert_close(loss_of(merged), expected, rtol=1e-5, atol=0)
    assert abs(begun - expected) > 1e-3
    assert common["args"]["lora_rank"] is None and common["frozen"] == []


def test_what_cannot_be_merged_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no checkpoint found"):
        merge_adapters(tmp_path / "none", tmp_path / "merged")
    save_run(build(rank=None), tmp_path / "run", rank=None)
    with pytest.raises(ValueError, match="its checkpoint has no adapters to merge"):
        merge_adapters(tmp_path / "run", tmp_path / "merged")
    save_run(build(rank=RANK), tmp_path / "adapted", rank=RANK)
    with pytest.raises(ValueError, match="it already contains checkpoints"):
        merge_adapters(tmp_path / "adapted", tmp_path / "run")
