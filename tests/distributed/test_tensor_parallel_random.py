"""Dropout in split layers: ranks drop independently in their own parts and identically in replicated tensors."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import ColumnParallelLinear, model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_block import output_of
from tests.harness import run_on_ranks
from tests.unit_tests.core.models.small_models import gradients, loss_of, small_batch, small_config, small_model

RANKS = 2


@pytest.mark.parametrize("sequence", [False, True])
def test_ranks_drop_their_own_heads_and_tokens_apart_and_what_they_share_alike(sequence: bool) -> None:
    whole_parts, heads = zip(*run_on_ranks(_dropped, RANKS, sequence))
    # All tokens are equal in embeddings and residual streams, so zeros mark dropped elements.
    for name, first in whole_parts[0].items():
        assert torch.equal(first, whole_parts[1][name]) != sequence, name
    assert not torch.equal(heads[0], heads[1])


def _dropped(sequence: bool) -> tuple[dict[str, Tensor], Tensor]:
    """Returns activations of a model in which all tokens and all heads are equal except for dropout."""
    model = _model(sequence, hidden_dropout=0.5, attention_dropout=0.5)
    seen: dict[str, Tensor] = {}
    layer: Any = model.decoder.layers[0]
    watched = {"embedding": model.embedding, "layer": layer, "heads": layer.self_attention.core_attention}
    for name, module in watched.items():
        module.register_forward_hook(lambda _, __, output, name=name: seen.update({name: output_of(output).detach()}))
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(0.01)
        input_ids, positions, labels = small_batch()
        model(input_ids.fill_(3), positions, None, labels=labels)
    heads = seen.pop("heads")
    return {name: value == 0 if name == "embedding" else value for name, value in seen.items()}, heads


@pytest.mark.parametrize("sequence", [False, True])
def test_recomputed_dropout_is_that_of_the_first_pass(sequence: bool) -> None:
    for kept, *recomputed in run_on_ranks(_gradients_by_recompute, RANKS, sequence):
        assert all(torch.equal(kept[name], again[name]) for again in recomputed for name in kept)


def _gradients_by_recompute(sequence: bool) -> list[dict[str, Tensor]]:
    results = []
    parts = ["core_attn", "layernorm", "mlp"]
    for fields in (
        {},
        {"recompute_granularity": "selective", "recompute_modules": parts},
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    ):
        model = _model(sequence, hidden_dropout=0.3, attention_dropout=0.3, **fields)
        loss_of(model).backward()
        results.append(gradients(model))
    return results


def test_layers_built_alone_draw_other_weights_on_each_rank() -> None:
    first, second = run_on_ranks(_fresh_weight, RANKS)
    assert not torch.equal(first, second)


def _fresh_weight() -> Tensor:
    model_parallel_cuda_manual_seed(7, tp_rank=dist.get_rank())
    config = small_config()
    assert config.init_method is not None
    layer = ColumnParallelLinear(4, 4, config=config, init_method=config.init_method, tp_group=dist.group.WORLD)
    assert layer.weight is not None
    return layer.weight.detach()


def _model(sequence: bool, **fields: Any) -> GPTModel:
    model_parallel_cuda_manual_seed(7, tp_rank=dist.get_rank())
    config = small_config(tensor_model_parallel_size=RANKS, sequence_parallel=sequence, **fields)
    return small_model(config, pg_collection=ProcessGroupCollection(tp=dist.group.WORLD))
