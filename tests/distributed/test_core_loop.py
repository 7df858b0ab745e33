"""Tests a custom loop over Megatron Core's parts, like its first tutorial: datasets, schedule, model, checkpoint."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

from megatron.core import dist_checkpointing, parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
from megatron.core.datasets.utils import compile_helpers
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.tokenizers import MegatronTokenizer
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.harness import run_on_ranks

EXPERTS = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_grouped_gemm": False, "add_bias_linear": False}


def _model(vocab_size: int, **fields: Any) -> GPTModel:
    config = TransformerConfig(
        num_layers=2,
        hidden_size=16,
        num_attention_heads=4,
        use_cpu_initialization=True,
        pipeline_dtype=torch.float32,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        **fields,
    )
    return GPTModel(config, get_gpt_layer_local_spec(config.num_moe_experts), vocab_size, max_sequence_length=32)


def _batches() -> Iterator[dict[str, Tensor]]:
    tokenizer = MegatronTokenizer.from_pretrained(metadata_path={"library": "null-text"}, vocab_size=63)
    config = GPTDatasetConfig(
        random_seed=0,
        sequence_length=32,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        tokenizer=tokenizer,
    )
    train = BlendedMegatronDatasetBuilder(MockGPTDataset, [100, None, None], lambda: True, config).build()[0]
    return iter(DataLoader(train, batch_size=4, shuffle=False))


def _forward_step(batches: Iterator[dict[str, Tensor]], model: torch.nn.Module) -> tuple[Tensor, Any]:
    def loss_of(mask: Tensor, output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        loss = (output.float().view(-1) * mask.view(-1)).sum() / mask.sum()
        return loss, {"lm loss": loss.detach()}

    data = next(batches)
    output = model(data["tokens"], data["position_ids"], data["attention_mask"], labels=data["labels"])
    return output, partial(loss_of, data["loss_mask"])


def _train(tensor: int, fields: dict[str, Any], folder: str | None) -> list[float]:
    """Trains three steps and returns the losses.

    The tensor-parallel size is taken from the groups; the configuration need not set it.
    """
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tensor)
    torch.manual_seed(7)
    model_parallel_cuda_manual_seed(123)
    compile_helpers()
    inner = _model(64, **fields)
    assert inner.config.tensor_model_parallel_size == tensor
    model = DistributedDataParallel(inner.config, DistributedDataParallelConfig(), inner)
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.01), [model])
    batches, run, losses = _batches(), get_forward_backward_func(), []
    for _ in range(3):
        optimizer.zero_grad()
        model.zero_grad_buffer()
        reduced = run(
            forward_step_func=_forward_step,
            data_iterator=batches,
            model=model,
            num_microbatches=1,
            seq_length=32,
            micro_batch_size=4,
            decoder_seq_length=32,
            forward_only=False,
        )
        finalize_model_grads([model])
        optimizer.step()
        losses.append(reduced[0]["lm loss"].item())
    if folder is not None:
        dist_checkpointing.save(inner.sharded_state_dict(prefix=""), folder)
        other = _model(64, **fields)
        with torch.no_grad():
            for param in other.parameters():
                param.fill_(9.0)
        other.load_state_dict(dist_checkpointing.load(other.sharded_state_dict(prefix=""), folder))
        assert all(map(torch.equal, inner.parameters(), other.parameters()))
    parallel_state.destroy_model_parallel()
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{}, {**EXPERTS, "sequence_parallel": True, "tensor_model_parallel_size": 2}])
def test_a_loop_without_sizes_in_its_configuration_trains(fields: dict[str, Any], tmp_path: Path) -> None:
    alone = {name: value for name, value in fields.items() if name in EXPERTS}
    (expected,) = run_on_ranks(_train, 1, 1, alone, None)
    first, second = run_on_ranks(_train, 2, 2, fields, str(tmp_path))
    assert first == second == pytest.approx(expected, rel=1e-5)
    assert first[0] != first[2]


def _uneven() -> None:
    parallel_state.initialize_model_parallel(dist.get_world_size())
    with pytest.raises(ValueError, match="num_attention_heads is 4: must be a multiple of tensor_model_parallel_size"):
        _model(63)
    dist.barrier()  # no rank exits while another still connects to it


def test_layers_that_the_groups_cannot_split_are_refused() -> None:
    run_on_ranks(_uneven, 3)
