"""What the device model changes in the project, so that it takes the path of a GPU on the modelled one."""

from megatron.core.distributed import collectives
from megatron.core.transformer.moe.paged_stash import saved_tensors
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
    return device
