"""Omitted groups default to those of parallel_state, ALONE is a single rank, and sizes must match the configuration."""

import copy
import pickle
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import GroupMember

from megatron.core import tensor_parallel as tp
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_mlp_module_spec
from megatron.core.parallel_state import get_process_groups, initialize_model_parallel
from megatron.core.process_groups_config import ALONE, ProcessGroupCollection, group_rank, group_size
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.token_dispatcher import MoEAllGatherTokenDispatcher, MoEAlltoAllTokenDispatcher
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.unit_tests.core.fake_world import fake_world
from tests.unit_tests.core.models.small_models import LLAMA_LIKE, small_config, small_model

EXPERTS = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 16}
SIZES: dict[str, Any] = {
    "tensor_model_parallel_size": 2,
    "expert_model_parallel_size": 2,
    "expert_tensor_parallel_size": 1,
}
SIZES |= {"sequence_parallel": True, "perform_initialization": False}


def build_layer(kind: type[nn.Module], config: TransformerConfig, groups: ProcessGroupCollection | None) -> nn.Module:
    return kind(8, 4, config=config, init_method=nn.init.zeros_, tp_group=groups and groups.tp)


BUILDERS: list[Callable[..., nn.Module]] = [
    lambda config, groups: TransformerBlock(config, get_gpt_decoder_block_spec(config), False, True, True, groups),
    lambda config, groups: MoELayer(config, get_mlp_module_spec(False, 4, True).submodules, 3, pg_collection=groups),
    partial(build_layer, tp.ColumnParallelLinear),
    partial(build_layer, tp.RowParallelLinear),
    partial(build_layer, tp.VocabParallelEmbedding),
]


@pytest.mark.parametrize("build", BUILDERS)
def test_groups_left_out_are_those_of_parallel_state(build: Callable[..., nn.Module]) -> None:
    whole = build(small_config(**LLAMA_LIKE, **EXPERTS), None)
    with fake_world(1, 2):
        initialize_model_parallel(2, expert_model_parallel_size=2, expert_tensor_parallel_size=1)
        config = small_config(**LLAMA_LIKE, **EXPERTS, **SIZES)
        given, left_out = build(config, get_process_groups()), build(config, None)
        assert shapes(left_out) == shapes(given) != shapes(whole)
        for one, other in zip(left_out.modules(), given.modules(), strict=True):
            for name in ("tp_group", "group", "sequence_group"):
                assert vars(one).get(name) is vars(other).get(name)


def shapes(module: nn.Module) -> dict[str, torch.Size]:
    return {name: parameter.shape for name, parameter in module.named_parameters()}


def test_a_collection_without_groups_is_a_rank_alone_whatever_parallel_state_says() -> None:
    whole = shapes(small_model(small_config(), position_embedding_type="learned_absolute"))
    with fake_world(1, 2):
        initialize_model_parallel(2)
        model = small_model(
            small_config(), position_embedding_type="learned_absolute", pg_collection=ProcessGroupCollection()
        )
        assert shapes(model) == whole
    copied = pickle.loads(pickle.dumps(copy.deepcopy(model).output_layer.tp_group))
    assert copied is ALONE and (group_rank(copied), group_size(copied)) == (0, 1)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"context_parallel_size": 2}, "context_parallel_size is 2, but pg_collection.cp has 1 ranks"),
        ({"pipeline_model_parallel_size": 2}, "pipeline_model_parallel_size is 2, but pg_collection.pp has 1 ranks"),
    ],
)
def test_sizes_that_are_not_the_groups_are_refused(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        small_model(small_config(**sizes))
    with fake_world(0, 2):
        initialize_model_parallel(**sizes)
        with pytest.raises(ValueError, match=f"{next(iter(sizes))} is 1, but pg_collection.[cp]p has 2 ranks"):
            small_model(small_config())


def test_a_tied_weight_on_two_stages_needs_their_group() -> None:
    with fake_world(0, 2):
        initialize_model_parallel(1, 2)
        config = small_config(pipeline_model_parallel_size=2, pipeline_dtype=torch.float32)
        tied: dict[str, Any] = {"share_embeddings_and_output_weights": True, "post_process": False}
        small_model(config, **tied)
        with pytest.raises(
            ValueError, match="pg_collection.embd is None, and share_embeddings_and_output_weights is True"
        ):
            small_model(config, **tied, pg_collection=replace(get_process_groups(), embd=None))


@pytest.mark.parametrize("dispatcher", [MoEAllGatherTokenDispatcher, MoEAlltoAllTokenDispatcher])
def test_dispatchers_take_what_a_rank_has_of_the_experts(dispatcher: type) -> None:
    config = small_config(**EXPERTS)
    assert dispatcher(4, [0, 1, 2, 3], config)
    with pytest.raises(ValueError, match=r"\[2, 3\]: must be 4 and \[0, 1, 2, 3\]"):
        dispatcher(4, [2, 3], config)


def test_a_group_without_this_rank_is_an_error_that_names_its_field() -> None:
    with pytest.raises(ValueError, match=r"ProcessGroupCollection\.ep is GroupMember\.NON_GROUP_MEMBER"):
        ProcessGroupCollection(ep=GroupMember.NON_GROUP_MEMBER)


def test_groups_can_be_replaced_by_name_alone() -> None:
    with fake_world(0, 4):
        initialize_model_parallel(2)
        existing = get_process_groups()
        groups = ProcessGroupCollection(tp=existing.tp, gtp_remat=None)
        assert groups.tp is existing.tp and groups.pp is None and groups.hcp == ()
        groups.dp = existing.dp
        assert group_size(groups.dp) == 2 and copy.copy(groups) == groups
        with pytest.raises(
            AttributeError, match="ProcessGroupCollection has no group 'tpp': must be one of tp, pp, dp"
        ):
            groups.tpp = existing.tp
        with pytest.raises(ValueError, match=r"ProcessGroupCollection\.cp is GroupMember\.NON_GROUP_MEMBER"):
            groups.cp = GroupMember.NON_GROUP_MEMBER
        with pytest.raises(ValueError, match="unknown groups etp, world: must be among tp, pp, dp"):
            ProcessGroupCollection(world=None, etp=None)
        with pytest.raises(ValueError, match="dp_cp_ag is .*: all-gathers use the same group as reductions here; keep"):
            groups.dp_cp_ag = existing.dp


def test_the_groups_of_parallel_state_are_copied_into_a_new_collection() -> None:
    assert ProcessGroupCollection.use_mpu_process_groups() == ProcessGroupCollection()
    with fake_world(0, 4):
        initialize_model_parallel(2, context_parallel_size=2, hierarchical_context_parallel_sizes=[2, 1])
        existing = get_process_groups()
        groups = ProcessGroupCollection.use_mpu_process_groups()
        assert groups == existing
        groups.tp = None
        assert existing.tp is not None
        some = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["cp", "hcp", "dp_cp_gtp_remat"])
        assert some == ProcessGroupCollection(cp=existing.cp, hcp=existing.hcp)
        with pytest.raises(ValueError, match="required_pgs contains world: must be among tp, pp"):
            ProcessGroupCollection.use_mpu_process_groups(["tp", "world"])
