"""What the device model changes in the project, so that it takes the path of a GPU on the modelled one."""

import weakref
from typing import Any

from megatron.core.distributed import collectives
from megatron.core.transformer.moe.paged_stash import PagePool, saved_tensors
from megatron.training import joining
from tests.device_model.collectives import install_collectives
from tests.device_model.cuda_api import install
from tests.device_model.device import Device
from tests.device_model.operators import DeviceTensor


def install_model() -> Device:
    """Makes this process see one modelled GPU, with collectives, and the project use them as on a real one."""
    device = install()
    install_collectives(device)
    # The groups are gloo's; the program takes the path of NCCL.
    collectives._is_over_nccl = lambda flat, group: flat.is_cuda
    joining.distributed_backend = lambda _: "cpu:gloo,cuda:gloo"
    # Only tensors without a subclass are rows of a stash; here those of the device are a subclass.
    saved_tensors.Tensor = DeviceTensor
    _note_pools(device)
    return device


def _note_pools(device: Device) -> None:
    init = PagePool.__init__

    def noting(pool: PagePool, *args: Any, **kwargs: Any) -> None:
        init(pool, *args, **kwargs)
        if pool.device.type == "cuda":
            device.page_pools[device.block_of(pool.ring)] = weakref.ref(pool)

    PagePool.__init__ = noting
