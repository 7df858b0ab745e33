"""Process groups over NCCL, with and without additional gloo groups for host tensors. Skipped without a GPU."""

import pytest
import torch
import torch.distributed as dist

from megatron.core import parallel_state
from megatron.core.device import default_device
from megatron.core.group_collectives import all_ranks_agree
from megatron.training.config import DistributedConfig, LaunchConfig
from megatron.training.initialize import leave_process_group
from megatron.training.startup_handshake import join_process_group
from tests.harness import run_on_ranks

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("gloo", [True, False])
def test_groups_of_the_device_are_nccls_and_the_host_has_gloo_unless_disabled(gloo: bool) -> None:
    run_on_ranks(_groups_of_one, 1, gloo, backend=None)


def _groups_of_one(gloo: bool) -> None:
    device = default_device()
    for _ in range(2):
        config = DistributedConfig(use_gloo_process_groups=gloo)
        join_process_group(config, LaunchConfig(), device, settings=dict, broadcast=None)
        parallel_state.initialize_model_parallel()
        assert dist.get_backend_config() == ("cpu:gloo,cuda:nccl" if gloo else "cuda:nccl")
        group = parallel_state.get_tensor_model_parallel_group()
        assert dist.get_backend(group) == "nccl"
        value = torch.ones(3, device=device)
        dist.all_reduce(value, group=group)
        assert value.tolist() == [1.0, 1.0, 1.0]
        if gloo:
            dist.all_reduce(torch.ones(3))
        with all_ranks_agree():
            pass
        leave_process_group()
        assert not dist.is_initialized()
