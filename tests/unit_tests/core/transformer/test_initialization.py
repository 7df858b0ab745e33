"""Initial values of parameter ranges equal the whole model's values, wherever the model is split."""

from random import Random

import pytest
import torch
from torch import nn

from megatron.core.model_parallel_config import XavierUniformInit
from megatron.core.transformer.transformer_config import NormalInit
from tests.unit_tests.core.models.small_models import LLAMA_LIKE, small_config, small_model

MOE = {**LLAMA_LIKE, "num_moe_experts": 4, "moe_router_topk": 2, "moe_shared_expert_intermediate_size": 16}
XAVIER = dict.fromkeys(("init_method", "output_layer_init_method"), XavierUniformInit())
FIELDS = [{}, {**MOE, "moe_grouped_gemm": True}, MOE, {"init_method": nn.init.xavier_uniform_}, {**MOE, **XAVIER}]


@pytest.mark.parametrize("fields", FIELDS, ids=["dense", "grouped experts", "experts", "init_method", "xavier"])
@pytest.mark.parametrize("params_dtype", [torch.float32, torch.bfloat16])
def test_ranges_of_any_cut_are_those_of_the_whole_model(fields: dict, params_dtype: torch.dtype) -> None:
    random = Random(0)
    config = small_config(**fields, params_dtype=params_dtype)
    model = small_model(config, unpadded_vocab_size=91)
    values = model.initial_values()
    for name, param in model.named_parameters():
        assert values.covers(name), name
        flat = param.detach().view(-1)
        ends = sorted({0, flat.numel(), *(random.randrange(flat.numel()) for _ in range(3))})
        # Padding rows of embedding tables are zero at first.
        parts = [torch.zeros(end - start, dtype=params_dtype) for start, end in zip(ends, ends[1:])]
        values.fill([(name, start, part) for start, part in zip(ends, parts)])
        assert torch.equal(torch.cat(parts), flat), name


def test_names_that_no_module_knows_are_not_covered() -> None:
    model = small_model(small_config())
    model.extra = nn.Linear(2, 2)
    values = model.initial_values()
    assert not values.covers("extra.weight") and values.covers("output_layer.weight")


def test_xavier_takes_the_fans_of_the_whole_matrix() -> None:
    model = small_model(small_config(**XAVIER, embedding_init_method_std=0.5))
    for name, matrix in model.decoder.named_parameters():
        if matrix.ndim == 2:
            wanted = torch.nn.init.xavier_uniform_(torch.empty_like(matrix)).std()
            bound = (6 / sum(matrix.shape)) ** 0.5
            assert 0.9 * bound < matrix.abs().max() <= bound, name
            torch.testing.assert_close(matrix.std(), wanted, rtol=0.1, atol=0)


def test_grouped_and_sequential_experts_start_alike_with_xavier() -> None:
    stored = []
    for grouped in (True, False):
        model = small_model(small_config(**MOE, **XAVIER, moe_grouped_gemm=grouped))
        values = [param.detach().double() for name, param in model.named_parameters() if ".experts." in name]
        stored.append(torch.cat([value.flatten().sort().values for value in values]).sort().values)
    assert torch.equal(*stored)


@pytest.mark.parametrize("tied", [True, False])
def test_embeddings_have_a_deviation_of_their_own(tied: bool) -> None:
    fields = {"embedding_init_method_std": 1.0, "init_method_std": 0.01}
    changed = small_model(small_config(**fields), share_embeddings_and_output_weights=tied)
    plain = small_model(small_config(init_method_std=0.01), share_embeddings_and_output_weights=tied)
    others = dict(plain.named_parameters())
    for name, param in changed.named_parameters():
        # The same random numbers, scaled by 100.
        torch.testing.assert_close(param, others[name] * (100 if name.startswith("embedding.") else 1))


def test_embeddings_take_a_method_of_the_user_or_else_that_of_other_weights() -> None:
    assert small_config(init_method=nn.init.ones_).embedding_init_method is nn.init.ones_
    assert small_config(init_method=nn.init.ones_, embedding_init_method_std=2.0).embedding_init_method == NormalInit(2)
    model = small_model(small_config(embedding_init_method=nn.init.ones_))
    weights = dict(model.named_parameters())
    assert bool(torch.all(weights["embedding.word_embeddings.weight"][:91] == 1))
    assert not bool(torch.any(weights["decoder.layers.0.mlp.linear_fc1.weight"] == 1))
