"""Patches the project so that it follows its GPU code paths on the modelled device."""

import builtins
import copy
import math
import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor

from megatron.core.distributed import collectives
from megatron.core.optimizer import adam, triton_adam
from megatron.core.transformer import activation_offload
from megatron.core.transformer.moe.paged_stash import PagePool, saved_tensors
from megatron.training import startup_handshake
from tests.device_model.alarms import Kind, site
from tests.device_model.collectives import install_collectives
from tests.device_model.cuda_api import GRAPHS, install
from tests.device_model.device import Device
from tests.device_model.memory import Block
from tests.device_model.operators import DeviceTensor

# Device pages of this run's stash.
PAGES: list[weakref.ref[Block]] = []


def begin_run(device: Device) -> None:
    """Clears the alarms, waits, pages and graphs of an earlier run."""
    device.timeline.host_waits_for_all()
    device.alarms.found.clear()
    device.host_wait_sites.clear()
    PAGES.clear()
    GRAPHS.clear()


def install_model() -> Device:
    """Installs one modelled GPU with collectives in this process, and patches the project to use them."""
    device = install()
    install_collectives(device)
    # The groups use gloo, but the program follows the code path of NCCL.
    collectives._is_over_nccl = lambda flat, group: flat.is_cuda
    startup_handshake.distributed_backend = lambda _: "cpu:gloo,cuda:gloo"
    # These modules test for plain torch.Tensor. On a real GPU, the device's tensors are plain.
    for module in (saved_tensors, activation_offload):
        vars(module)["type"] = _type_on_a_gpu
    _note_pools(device)
    _model_adam_kernel(device)
    return device


def _type_on_a_gpu(value: Any) -> Any:
    found = builtins.type(value)
    return Tensor if found is DeviceTensor else found


def _note_pools(device: Device) -> None:
    init = PagePool.__init__

    def noting(pool: PagePool, *args: Any, **kwargs: Any) -> None:
        # A run has one pool, so a second pool replaces the first.
        old = [block for block in (reference() for reference in PAGES) if block is not None and block.is_alive]
        if old:
            device.alarms.add(Kind.GROWTH, "pages of the stash", site(), old[0].place)
        if any(graph.is_captured for graph in GRAPHS):
            device.alarms.add(Kind.GROWTH, "pages of the stash, while graphs are alive", site())
        init(pool, *args, **kwargs)
        if pool.device.type == "cuda":
            device.page_pools[device.block_of(pool.ring)] = weakref.ref(pool)
            PAGES[:] = [weakref.ref(device.block_of(pool.device_pages))]

    PagePool.__init__ = noting  # type: ignore[method-assign]


def _model_adam_kernel(device: Device) -> None:
    """Models Adam's Triton kernel, which is launched without a torch operator, with the results of the CPU code."""

    def step_run(
        stored: Any,
        grad: Tensor,
        *,
        out: Tensor | None,
        step: Tensor,
        divisor: Tensor | None,
        skip: Tensor | None,
        bias_correction: bool,
        **rates: Any,
    ) -> None:
        memory = [tensor for one in stored for tensor in triton_adam._tensors(one)]

        def run(plain: Callable[[Any], Any]) -> None:
            state = adam.FlatAdam(*(_plain_form(one, plain) for one in stored), plain(step))
            settings = {name: plain(value) for name, value in rates.items()}
            adam._step_in_pieces(
                adam.AdamUpdate(state, plain(grad), plain(out)),
                adam.AdamRates(**settings, bias_correction=bias_correction),
                count=plain(step) + (1.0 if bias_correction else math.inf),
                scaled=adam._Scaled(plain(divisor), plain(skip)),
                grads=adam.GradUse.READ,
            )

        reads = [one for one in (grad, step, rates["lr"], divisor, skip) if one is not None]
        writes = [one for one in (*memory, out) if one is not None]
        device.run_kernel("adam_kernel", reads=reads, writes=writes, run=run)

    triton_adam.step_run = step_run


def _plain_form(stored: Any, plain: Callable[[Any], Any]) -> Any:
    made = copy.copy(stored)
    for name, value in vars(stored).items():
        if isinstance(value, Tensor):
            setattr(made, name, plain(value))
    return made
