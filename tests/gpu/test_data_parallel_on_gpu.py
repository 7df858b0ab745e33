"""DistributedDataParallel and the sharded optimizer on a GPU, with one rank over NCCL. Skipped without a GPU.

Two ranks cannot share a GPU under NCCL, so tests with two ranks use gloo, which can all-reduce tensors of a GPU.
"""

import itertools
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron.core import parallel_state
from megatron.core.device import SideStream, Writers, default_device, memory_bytes, prepare_device, synchronize
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, collectives
from megatron.core.distributed.collectives import _OrderedReduceScatter, shard_of
from megatron.core.distributed.event_log import EventLog, launched_before_next_was_ready
from megatron.core.group_collectives import all_gather_single, reduce_scatter_single
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from tests.gpu.joined import join
from tests.harness import run_on_ranks

pytestmark = pytest.mark.gpu

SHARDED = {"use_distributed_optimizer": True}
GRAD = {**SHARDED, "overlap_grad_reduce": True, "bucket_size": 1}
BOTH = {**GRAD, "overlap_param_gather": True}
MODES = [{}, {"overlap_grad_reduce": True, "bucket_size": 1}, SHARDED, GRAD, BOTH]
MODES += [{**BOTH, "overlap_param_gather_with_optimizer_step": True}]
WIDTH, LAYERS = 256, 4


def wrap(settings, *, dtype=torch.bfloat16, deterministic=True, **optimizer):
    torch.manual_seed(1)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]).to(default_device(), dtype)
    config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, **settings)
    ddp = DistributedDataParallel(ModelParallelConfig(deterministic_mode=deterministic), config, model)
    half = {"bf16": dtype == torch.bfloat16}
    return ddp, get_megatron_optimizer(OptimizerConfig(lr=1e-3, clip_grad=0.1, **half, **optimizer), [ddp])


def step(ddp, optimizer, number=0):
    x = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(number))
    x = x.to(default_device(), next(ddp.parameters()).dtype)
    optimizer.zero_grad()
    with ddp.no_sync():
        ddp(x).float().square().mean().backward()
    ddp(x.flip(0)).float().square().mean().backward()
    ddp.finish_grad_sync()
    return optimizer.step()[1]


def trained(settings, **kwargs):
    """Trains five steps, and returns the gradient norms and the parameters on the CPU."""
    ddp, optimizer = wrap(settings, **kwargs)
    norms = [step(ddp, optimizer, number) for number in range(5)]
    ddp.wait_params(ddp.parameters())
    return norms, torch.cat([param.detach().float().flatten().cpu() for param in ddp.parameters()])


def compare_modes(dtype):
    join()
    norms, weights = trained(MODES[0], dtype=dtype)
    for settings in MODES[1:]:
        other_norms, other = trained(settings, dtype=dtype)
        assert other_norms == norms and torch.equal(other, weights), settings


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_all_modes_have_the_same_bits(dtype):
    run_on_ranks(compare_modes, 1, dtype, backend=None)


def compare_offload():
    join()
    for settings, fraction in itertools.product([{}, BOTH], [0.5, 1.0]):
        norms, weights = trained(settings)
        offload = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": fraction}
        other_norms, other = trained(settings, **offload)
        # Kernels of the two devices round differently. The parameters may differ by at most an update.
        assert other_norms == pytest.approx(norms, rel=1e-2)
        assert (other - weights).abs().max() <= 1e-2


def test_states_in_the_hosts_memory_train_alike():
    run_on_ranks(compare_offload, 1, backend=None)


def measure_memory():
    device = join()
    torch.empty(1, device=device)
    before = memory_bytes(device)["allocated"]
    ddp, optimizer = wrap(BOTH)
    numel = sum(buffer.numel for buffer in ddp.all_buffers)
    # bf16 parameters, fp32 gradients, masters and two moments. Other tensors are small.
    assert (memory_bytes(device)["allocated"] - before) / numel == pytest.approx(2 + 4 + 12, rel=0.01)
    for number in range(2):
        step(ddp, optimizer, number)
    held = memory_bytes(device)["allocated"]
    for number in range(3):
        step(ddp, optimizer, number)
    synchronize(device)
    assert memory_bytes(device)["allocated"] == held


def test_memory_is_what_the_formula_says_and_does_not_grow():
    run_on_ranks(measure_memory, 1, backend=None)


def log_a_step():
    device = join()
    ddp, optimizer = wrap(BOTH, deterministic=False)
    log = EventLog(device)
    ddp.launch_order.observe(log)
    for number in range(4):
        log.record_next_step()
        step(ddp, optimizer, number)
    times = log.take_sync()[-1]
    assert all(launched_before_next_was_ready(times))
    assert all(transfer.ready <= transfer.launched for transfer in times.transfers)
    assert 0 < times.transfers[-1].launched < 60


def test_the_event_log_has_the_times_of_the_stream():
    run_on_ranks(log_a_step, 1, backend=None)


def agree_from_the_host():
    join()
    groups = parallel_state.get_process_groups()
    assert dist.get_backend(groups.tp_dp_cp) == "nccl" and dist.get_backend(groups.tp_dp_cp_host) == "gloo"
    ddp, _ = wrap(BOTH)
    with torch.cuda.device(default_device()):
        torch.cuda.set_sync_debug_mode("error")
        try:
            ddp.zero_grad_buffer()
            ddp(torch.ones(1, WIDTH, device=default_device(), dtype=torch.bfloat16)).float().sum().backward()
            ddp.finish_grad_sync()
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_gradients_are_reduced_without_a_read_of_the_device():
    run_on_ranks(agree_from_the_host, 1, backend=None)


def wait_for_every_stream():
    device = join()
    late, main = torch.cuda.Stream(device), torch.cuda.current_stream(device)
    value, writers = torch.zeros(1 << 20, device=device), Writers(device)
    synchronize(device)
    with torch.cuda.stream(late):
        torch.cuda._sleep(100_000_000)
        value.fill_(1.0)
        writers.note()
    writers.join()
    copy = value.clone()
    main.synchronize()
    assert bool((copy == 1).all())


def test_b16_a_launch_waits_for_the_stream_that_made_a_gradient():
    run_on_ranks(wait_for_every_stream, 1, backend=None)


def send_to_itself(dtype):
    """Calls the collectives of a bucket, which a group of one rank would skip. Their results must equal the input."""
    device, group = join(), dist.group.WORLD
    given = torch.randn(1 << 16, device=device).to(dtype)
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
        flat = given.clone()
        reduce_scatter_single(shard_of(flat, group), flat, op=op, group=group, async_op=True).wait()
        all_gather_single(flat, shard_of(flat, group), group=group, async_op=True).wait()
        assert torch.equal(flat, given)
    # A collective after another, on a side stream that waits for the first.
    with SideStream(device).current() as is_beside:
        assert is_beside
        reduce_scatter_single(shard_of(flat, group), flat, group=group, async_op=True).wait()
        following = dist.all_reduce(flat, group=group, async_op=True)
    following.wait()
    assert torch.equal(flat, given)
    with patch.object(collectives, "_SLICE_ELEMENTS", 1 << 10):
        _OrderedReduceScatter(flat, group, average=True).wait()
    assert torch.equal(flat, given)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_every_type_is_reduced_and_gathered(dtype):
    run_on_ranks(send_to_itself, 1, dtype, backend=None)


def sum_over_gloo():
    device = torch.device("cuda", 0)
    prepare_device(device)
    results = []
    for average in (False, True):
        config = DistributedDataParallelConfig(average_in_collective=average, overlap_grad_reduce=True, bucket_size=1)
        model = nn.Sequential(*[nn.Linear(8, 8, bias=False) for _ in range(3)]).to(device)
        ddp = DistributedDataParallel(ModelParallelConfig(), config, model)
        ddp.broadcast_params()
        for _ in range(3):
            ddp.zero_grad_buffer()
            ddp(torch.full((1, 8), dist.get_rank() + 1.0, device=device)).sum().backward()
            ddp.finish_grad_sync()
        # These gradients depend on the layers' inputs, which differ between the ranks.
        results.append([grad.cpu() for _, grad in ddp.named_main_grads()])
    return results


def test_two_ranks_on_one_gpu_reduce_over_gloo():
    first, second = run_on_ranks(sum_over_gloo, 2, backend="gloo")
    for ours, theirs in zip([*first[0], *first[1]], [*second[0], *second[1]], strict=True):
        assert torch.equal(ours, theirs) and bool(ours.any())
