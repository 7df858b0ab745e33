"""Checks calls of data parallelism and optimizers on two ranks, written as scripts for Megatron and apex write them."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import model_sharded_tensors
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBuffer, partition_buckets
from megatron.core.distributed.torch_fully_sharded_data_parallel import TorchFullyShardedDataParallel
from megatron.core.distributed.torch_fully_sharded_data_parallel_config import TorchFullyShardedDataParallelConfig
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.optimizer import (
    ChainedOptimizer,
    DistributedFusedAdam,
    DistributedOptimizer,
    OptimizerConfig,
    get_megatron_optimizer,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from tests.harness import run_on_ranks
from tests.unit_tests.core.optimizer.reference import microbatches, tiny_model

SHARDED = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)


def _wrapped(dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Any:
    # Positional arguments, as in Megatron's get_model.
    group = dist.group.WORLD
    groups = ProcessGroupCollection(dp=group, dp_cp=group)
    return DistributedDataParallel(ModelParallelConfig(), SHARDED, tiny_model(dtype, seed), False, groups, None)


def _step(model: Any, optimizer: Any, number: int) -> Any:
    optimizer.zero_grad(set_to_none=True)
    (x,) = microbatches(10 * number + dist.get_rank(), dtype=next(model.parameters()).dtype)
    model(x).float().square().mean().backward()
    model.finish_grad_sync()
    return optimizer.step()


def _distributed(model: Any) -> DistributedOptimizer:
    torch_optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
    config = OptimizerConfig(lr=0.01, bf16=True, weight_decay=0.0)
    buffers = {0: model.buffers}
    return DistributedOptimizer(
        torch_optimizer,
        config,
        None,
        lambda optimizer, config=None: None,
        [model],
        buffers,
        dist.group.WORLD,
        None,
        0,
        0,
    )


def test_a_distributed_optimizer_over_a_torch_optimizer_steps_as_ours() -> None:
    run_on_ranks(_steps_as_ours, 2)


def _steps_as_ours() -> None:
    one, other = _wrapped(), _wrapped()
    torchs = _distributed(one)
    ours = get_megatron_optimizer(OptimizerConfig(lr=0.01, bf16=True, weight_decay=0.0), [other], {})
    for number in range(3):
        assert _step(one, torchs, number)[1] == _step(other, ours, number)[1]
    for a, b in zip(one.parameters(), other.parameters()):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-4)
    # Masters are fp32. Each element is on one rank, in the part of the parameter that this rank owns.
    for optimizer, model in ((torchs, one), (ours, other)):
        for param in model.parameters():
            own = 0 if param.main_param is None else param.main_param.numel()
            total = torch.tensor(own)
            dist.all_reduce(total)
            assert param.main_param_sharded and total == param.numel()
        assert len(optimizer.get_parameters()) == len(optimizer.state)
    assert "state" not in torchs.state_dict()
    with pytest.raises(ValueError, match="per_model_buffers has {} buffers"):
        DistributedOptimizer(
            torch.optim.SGD(other.parameters(), lr=0.1), ours.config, None, None, [other], {}, dist.group.WORLD
        )


def test_parameter_state_is_saved_and_loaded_apart(tmp_path: Path) -> None:
    run_on_ranks(_saves_parameter_state, 2, tmp_path)


def _saves_parameter_state(folder: Path) -> None:
    runs = []
    for seed in (0, 3):
        model = _wrapped(seed=seed)
        runs.append((model, get_megatron_optimizer(OptimizerConfig(lr=0.01, bf16=True), [model])))
    optimizer: Any
    other: Any
    (model, optimizer), (resumed, other) = runs
    for number in range(2):
        _step(model, optimizer, number)
    filename = str(folder / "state.pt")
    chained = ChainedOptimizer([optimizer])
    chained.save_parameter_state(filename)
    state = optimizer.get_parameter_state_dp_zero(return_on_all_ranks=True)
    assert state[0]["0.weight"]["exp_avg"].numel() == 35 and set(state[0]["0.weight"]) == {
        "exp_avg",
        "exp_avg_sq",
        "fp32_param",
    }
    empty = optimizer.get_parameter_state_dp_zero(empty_data=True)
    assert (empty is None) == (dist.get_rank() > 0) and (empty is None or empty[0]["0.weight"]["exp_avg"].is_meta)
    other.load_parameter_state(filename)
    other.load_state_dict(optimizer.state_dict())
    for number in range(2, 4):
        assert _step(model, optimizer, number) == _step(resumed, other, number)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), resumed.parameters()))
    with pytest.raises((ValueError, RuntimeError), match="parameter state|rank 0"):
        other.load_parameter_state_from_dp_zero([{}])


def test_a_sharded_state_dict_of_the_distributed_optimizer_continues_a_run(tmp_path: Path) -> None:
    run_on_ranks(_continues, 2, tmp_path)


def _continues(folder: Path) -> None:
    model = _wrapped()
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.01, bf16=True), [model])
    _step(model, optimizer, 0)
    items = model_sharded_tensors(model)
    saved = {"model": items, "optimizer": optimizer.sharded_state_dict(items, False)}
    dist_checkpointing.save(saved, str(folder / "c"))
    resumed = _wrapped(seed=3)
    other = get_megatron_optimizer(OptimizerConfig(lr=0.01, bf16=True), [resumed])
    items = model_sharded_tensors(resumed)
    state = other.sharded_state_dict(
        items, is_loading=True, metadata={"distrib_optim_sharding_type": "fully_reshardable"}
    )
    loaded = dist_checkpointing.load({"model": items, "optimizer": state}, str(folder / "c"))
    other.load_state_dict(loaded["optimizer"])
    with pytest.raises(ValueError, match="is_loading=True"):
        other.load_state_dict(loaded["optimizer"])
    assert _step(model, optimizer, 1) == _step(resumed, other, 1)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), resumed.parameters()))


def test_a_layout_computed_without_groups_is_that_of_the_wrapper() -> None:
    run_on_ranks(_layouts, 2)


def _layouts() -> None:
    groups = ProcessGroupCollection(dp_cp=dist.group.WORLD)
    for ranks in (2, 4):
        params = list(tiny_model(torch.bfloat16).parameters())
        layout = DistributedOptimizer.compute_full_param_layout(params, None, ranks, SHARDED)
        if ranks == 2:
            DistributedDataParallel(
                ModelParallelConfig(), SHARDED, tiny_model(torch.bfloat16), False, groups, layout
            ).release()
        else:
            with pytest.raises(ValueError, match="full_param_layout is "):
                DistributedDataParallel(
                    ModelParallelConfig(), SHARDED, tiny_model(torch.bfloat16), False, groups, layout
                )


def test_buffers_and_groups_of_a_script_reduce_and_gather_by_themselves() -> None:
    run_on_ranks(_buffers_alone, 2)


def _buffers_alone() -> None:
    model: Any = tiny_model()
    named = [(param, name) for name, param in model.named_parameters()]
    names = dict(named)
    config = DistributedDataParallelConfig(use_distributed_optimizer=True, overlap_grad_reduce=True)
    buffer = _ParamAndGradBuffer(
        config, torch.float32, torch.float32, named, dist.group.WORLD, 40, names, 0.5, list(range(len(named))), False
    )
    rank = dist.get_rank()
    for group in partition_buckets([buffer]):
        assert group.collective_group is dist.group.WORLD and group.ddp_config is config
        for bucket in group.buckets:
            param: Any
            for param in bucket.params_list:
                param.main_grad.fill_(rank + 1.0)
        group.start_grad_sync()
        group.finish_grad_sync()
        for bucket in group.buckets:
            own = bucket.owned_part
            # The mean of 1 and 2, since each was multiplied by 0.5 before the sum.
            assert set(bucket.grad_data[own.start : own.end].unique().tolist()) <= {0.0, 1.5}
            bucket.param_data[own.start : own.end].fill_(rank + 7.0)
        group.start_param_sync()
        group.finish_param_sync()
        for bucket in group.buckets:
            assert bucket.param_data.unique().tolist() == [7.0, 8.0]
        with pytest.raises(ValueError, match="force_all_reduce and use_distributed_optimizer are both set"):
            group.start_grad_sync(force_all_reduce=True)


def test_offloaded_gradients_come_back_and_forward_waits_for_them() -> None:
    run_on_ranks(_offloads, 2)


def _offloads() -> None:
    model = _wrapped(torch.float32)
    (x,) = microbatches(dist.get_rank())
    model(x).square().mean().backward()
    model.finish_grad_sync()
    before = [buffer.grad_data.clone() for buffer in model.all_buffers]
    model.offload_grad_buffers()
    assert not any(buffer.grad_data.untyped_storage().nbytes() for buffer in model.all_buffers)
    with pytest.raises(RuntimeError, match="call restore_grad_buffers"):
        model(x)
    model.restore_grad_buffers()
    assert all(torch.equal(a, buffer.grad_data) for a, buffer in zip(before, model.all_buffers))
    model.free_overlap_buffers()
    # This rank changes its shard, so the parameters must be gathered again.
    model.start_param_sync(force_sync=True)
    for buffer in model.all_buffers:
        for span in buffer.owned_spans():
            buffer.param_data[span.start : span.end].fill_(5.0)
    model.mark_params_stale()
    model.start_param_sync(force_sync=True)
    assert all((param == 5.0).all() for param in model.parameters())


def test_fully_sharded_parameters_take_a_process_group() -> None:
    run_on_ranks(_fully_sharded, 2)


def _fully_sharded() -> None:
    config = TorchFullyShardedDataParallelConfig()
    model = TorchFullyShardedDataParallel(ModelParallelConfig(), config, tiny_model(), None, False, dist.group.WORLD)
    (x,) = microbatches(dist.get_rank())
    model(x).square().mean().backward()
    model.finish_grad_sync(False)
    assert model.pg_collection.dp_cp is dist.group.WORLD


def test_fused_adam_has_the_attributes_of_apex_and_sends_bits() -> None:
    run_on_ranks(_fused_adam, 2)


def _fused_adam() -> None:
    results = []
    for sync in (None, torch.int16, torch.uint8):
        model = tiny_model(torch.bfloat16)
        optimizer: Any = DistributedFusedAdam(model.parameters(), lr=0.01, param_sync_dtype=sync, bucket_cap_mb=1.0)
        assert list(optimizer.parameters()) == list(model.parameters())
        assert optimizer.dtype == optimizer.grad_sync_dtype == torch.float32 and optimizer.bucket_cap_mb == 1.0
        assert optimizer.param_sync_dtype == (sync or torch.bfloat16) and optimizer.distributed_size == 2
        assert optimizer.distributed_process_group is dist.group.WORLD and optimizer.redundant_process_group is None
        assert optimizer.store_params and optimizer.state["step"] == 0
        for number in range(2):
            (x,) = microbatches(10 * number + dist.get_rank(), dtype=torch.bfloat16)
            optimizer.zero_grad()
            model(x).float().square().mean().backward()
            optimizer.step()
        assert optimizer.state["step"] == 2
        gathered = optimizer.state_dict(gather_on_root=True)
        assert (gathered is None) == (dist.get_rank() > 0)
        again: Any = DistributedFusedAdam(tiny_model(torch.bfloat16).parameters(), lr=0.01)
        again.load_state_dict(optimizer.state_dict(gather_on_root=False))
        assert again.state["step"] == 2
        results.append([param.detach().clone() for param in model.parameters()])
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other))
    with pytest.raises(ValueError, match="param_sync_dtype torch.int64, which has more bytes: must have at most 2"):
        DistributedFusedAdam(tiny_model(torch.bfloat16).parameters(), param_sync_dtype=torch.int64)
    with pytest.raises(ValueError, match="gather_on_root is True with state_dict_format 2"):
        optimizer.state_dict(state_dict_format=2, gather_on_root=True)
