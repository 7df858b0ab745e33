"""Initial values of ranges of parameters: those of the whole model, wherever it is cut."""

from random import Random

import pytest
import torch
from torch import nn

from tests.unit_tests.core.models.small_models import LLAMA_LIKE, small_config, small_model

MOE = {**LLAMA_LIKE, "num_moe_experts": 4, "moe_router_topk": 2, "moe_shared_expert_intermediate_size": 16}
FIELDS = [{}, {**MOE, "moe_grouped_gemm": True}, MOE, {"init_method": nn.init.xavier_uniform_}]


@pytest.mark.parametrize("fields", FIELDS, ids=["dense", "grouped experts", "experts", "init_method"])
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
        # Padding rows of tables start as zeros.
        parts = [torch.zeros(end - start, dtype=params_dtype) for start, end in zip(ends, ends[1:])]
        values.fill([(name, start, part) for start, part in zip(ends, parts)])
        assert torch.equal(torch.cat(parts), flat), name


def test_names_that_no_module_knows_are_not_covered() -> None:
    model = small_model(small_config())
    model.extra = nn.Linear(2, 2)
    values = model.initial_values()
    assert not values.covers("extra.weight") and values.covers("output_layer.weight")
