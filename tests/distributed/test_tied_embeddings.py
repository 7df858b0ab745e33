"""TRAPS B9: a tied embedding has a copy on the first and the last stage, and training keeps both copies equal."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.group_collectives import RemoteRankError
from megatron.core.logical_tensors import canonical_name
from megatron.core.optimizer import OptimizerConfig, ParamGroupOverride, ParamKey, get_megatron_optimizer
from megatron.core.tensor_parallel.param_attributes import gradient_of, mark_shared
from megatron.training.training import run_step
from tests.counts import long_count, soak_only
from tests.distributed.parity import (
    FLAGS,
    Box,
    boxes_of_weights,
    fp64_forward_step,
    fp64_model,
    put_together,
    relative_errors,
)
from tests.distributed.tiny_runs import gather_parameters, started_run
from tests.functional_tests.case import Flags, command_line, read_bases
from tests.harness import run_on_ranks
from tests.unit_tests.core.models.small_models import small_config, small_model
from tests.unit_tests.core.optimizer.reference import wrap

STEPS = long_count(3, soak=20)
# Adam in fp64, with all settings that could make the copies differ: decay, clipping, a separate learning rate.
TRAINING: Flags = {
    **FLAGS,
    "num-layers": 4,
    "global-batch-size": 6,
    "micro-batch-size": 1,
    "train-iters": STEPS,
    "optimizer": "adam",
    "lr": 0.01,
    "clip-grad": 0.5,
    "decoupled-lr": 0.02,
}
# The copies have different offsets in the buffers and shards of the two stages.
MODES: list[Flags] = [
    {},
    {
        "use-distributed-optimizer": True,
        "overlap-grad-reduce": True,
        "overlap-param-gather": True,
        "overlap-param-gather-with-optimizer-step": True,
        "ddp-bucket-size": 1001,
    },
]
TABLES = ("embedding.word_embeddings.weight", "output_layer.weight")


@pytest.mark.slow
@pytest.mark.parametrize(("stages", "copies", "schedule"), [(2, 3, "1f1b"), (2, 2, "zbv"), soak_only(4, 3, "1f1b")])
def test_b9_both_copies_stay_bit_equal_and_equal_to_one_process(stages: int, copies: int, schedule: str) -> None:
    argv = command_line({**read_bases()["dense"], **TRAINING})
    [[reference]] = run_on_ranks(_tables, 1, [argv])
    layout = ["--pipeline-model-parallel-size", str(stages), "--pipeline-schedule", schedule]
    argvs = [[*argv, *layout, *command_line(mode)] for mode in MODES]
    tables = run_on_ranks(_tables, stages * copies, argvs, timeout=300)
    held = [table for rank in tables for table in rank]
    assert len(held) == 2 * copies * len(MODES)
    assert all(torch.equal(table, held[0]) for table in held)
    torch.testing.assert_close(held[0], reference, rtol=0, atol=1e-8 * reference.norm().item())


def _summed_in_fp32(use_distributed_optimizer: bool) -> Tensor:
    """Returns the fp32 gradient of a table on two stages, where the stage of rank r contributes r + 1."""
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    table = nn.Linear(64, 2, bias=False, dtype=torch.bfloat16)
    mark_shared(table.weight, is_copy=dist.get_rank() == 1)
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=False,
        param_name_patterns_for_fp32_local_accumulation=["weight"],
        use_distributed_optimizer=use_distributed_optimizer,
    )
    wrapped = DistributedDataParallel(small_config(), settings, table)
    wrapped.zero_grad_buffer()
    wrapped(torch.full([1, 64], dist.get_rank() + 1.0, dtype=torch.bfloat16)).sum().backward()
    finalize_model_grads([wrapped])
    return gradient_of(table.weight)


@pytest.mark.parametrize("use_distributed_optimizer", [False, True])
def test_both_copies_get_the_sum_where_gradients_add_up_in_fp32_beside_a_bf16_buffer(
    use_distributed_optimizer: bool,
) -> None:
    for grad in run_on_ranks(_summed_in_fp32, 2, use_distributed_optimizer):
        assert grad.dtype == torch.float32 and torch.equal(grad, torch.full([2, 64], 3.0))


def _tables(argvs: list[list[str]]) -> list[Tensor]:
    """Returns this rank's copies of the vocabulary table after training, for each run in turn."""
    return [table for argv in argvs for table in _tables_of_a_run(argv)]


def _tables_of_a_run(argv: list[str]) -> list[Tensor]:
    with started_run(argv, forward_step=fp64_forward_step, model_provider=fp64_model) as run:
        start = [p.detach().clone() for chunk in run.model for p in chunk.parameters()]
        for _ in range(STEPS):
            run_step(run)
        gather_parameters(run)
        assert any(not torch.equal(a, b) for a, b in zip(start, (p for c in run.model for p in c.parameters())))
        named = (item for chunk in run.model for item in chunk.named_parameters())
        return [param.detach().clone() for name, param in named if canonical_name(name) in TABLES]


@pytest.mark.parametrize("frozen_on", [0, 1])
def test_b9_the_copy_starts_as_its_owner_and_trains_if_the_owner_does(frozen_on: int) -> None:
    (first, trains), (last, copy_trains) = run_on_ranks(_wrapped_ends, 2, frozen_on)
    assert torch.equal(first, last) and trains == copy_trains == (frozen_on != 0)


def _wrapped_ends(frozen_on: int) -> tuple[Tensor, bool]:
    """Builds a tied weight with a custom init method, seeded differently per stage, and freezes it on one stage."""
    parallel_state.initialize_model_parallel(1, 2)
    groups, rank = parallel_state.get_process_groups(), dist.get_rank()
    config = small_config(pipeline_model_parallel_size=2, init_method=lambda weight: weight.uniform_(-1, 1))
    ends = {"pre_process": rank == 0, "post_process": rank == 1, "share_embeddings_and_output_weights": True}
    torch.manual_seed(3)
    weights = [_table(small_model(config, pg_collection=groups, **ends))]
    torch.manual_seed(3 + rank)
    model = small_model(config, pg_collection=groups, **ends)
    _table(model).requires_grad = rank != frozen_on
    with pytest.raises(ValueError, match="pg_collection.embd is None: must be .* stages that share .*weight"):
        wrap(model, groups.dp_cp)
    wrap(model, pg_collection=groups)
    weights.append(_table(model))
    return torch.stack(weights).detach(), _table(model).requires_grad


def test_b9_the_copy_on_the_same_stage_starts_as_its_owner() -> None:
    (first, copy), rest = run_on_ranks(_ends_of_a_v, 2)
    assert torch.equal(first, copy) and rest == []


def _ends_of_a_v() -> list[Tensor]:
    """Builds a model in a V and its optimizer; returns the tied weights of this stage, which have differed before."""
    parallel_state.initialize_model_parallel(1, 2, 2, pipeline_schedule="zbv")
    config = small_config(
        num_layers=4,
        pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=2,
        pipeline_schedule="zbv",
    )
    model = [
        small_model(
            config,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=chunk),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=chunk),
            share_embeddings_and_output_weights=True,
            vp_stage=chunk,
        )
        for chunk in range(2)
    ]
    if dist.get_rank() == 0:
        # As if a script had loaded weights into one chunk only.
        _table(model[0]).data.fill_(2.0)
    wrapped = [wrap(chunk, pg_collection=parallel_state.get_process_groups()) for chunk in model]
    get_megatron_optimizer(OptimizerConfig(lr=0.01), wrapped)
    return [_table(chunk).detach() for chunk in model] if dist.get_rank() == 0 else []


def _table(model: nn.Module) -> nn.Parameter:
    return next(param for name, param in model.named_parameters() if name in TABLES)


# Keys that match on one stage only: a layer of the first stage; the owner's name and a module of the last stage; the
# copy's parameter, through an attribute that only the owner has; and experts of the last stage.
OVERRIDES = {
    ParamKey(name="decoder.layers.0.*"): ParamGroupOverride(lr_mult=0.5),
    ParamKey(name=("*word_embeddings.weight", "*final_layernorm*")): ParamGroupOverride(wd_mult=3.0),
    ParamKey(attr="is_special"): ParamGroupOverride(lr_mult=2.0),
    ParamKey(name="*.router.weight"): ParamGroupOverride(wd_mult=0.0),
}


@pytest.mark.slow
def test_overrides_are_for_the_whole_model_and_a_copy_has_its_owners() -> None:
    experts: Flags = {"untie-embeddings-and-output-weights": None, "moe-layer-freq": "[0,1]", "num-layers": 2}
    argv = command_line({**read_bases()["moe"], **TRAINING, **experts, "train-iters": 3})
    [reference] = run_on_ranks(_train_with_overrides, 1, argv)
    ranks = run_on_ranks(_train_with_overrides, 2, [*argv, "--pipeline-model-parallel-size", "2"])
    final = [put_together(boxes) for boxes in (reference, [box for rank in ranks for box in rank])]
    assert max(relative_errors(*final).values()) <= 1e-8


def _train_with_overrides(argv: list[str]) -> list[Box]:
    parts: dict[str, Any] = {"forward_step": fp64_forward_step, "model_provider": _model_with_a_special_weight}
    for mistake, message in MISTAKES.items():
        with pytest.raises((ValueError, RemoteRankError), match=message):
            with started_run(argv, **parts, config_overrides={mistake[0]: mistake[1]}):
                pass
    with started_run(argv, **parts, config_overrides=OVERRIDES) as run:
        for _ in range(3):
            run_step(run)
        return boxes_of_weights(run)


# By key and override; the second is an error on one stage only.
MISTAKES = {
    (ParamKey(name="*.nothing"), ParamGroupOverride(lr_mult=2.0)): r"name='\*.nothing'.* matches no parameter",
    (ParamKey(name="*layers.1.*"), ParamGroupOverride(min_lr=9.0)): "min_lr is 9.0: must be at most max_lr",
}


def _model_with_a_special_weight(pre_process: bool = True, post_process: bool = True) -> nn.Module:
    model = fp64_model(pre_process, post_process)
    for name, param in model.named_parameters():
        vars(param)["is_special"] = name == "embedding.word_embeddings.weight"
    return model
