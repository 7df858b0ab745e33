"""Lets torch's fully_shard run on parameters without memory, which it refuses, so that a plan sees its messages."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_collectives


@contextmanager
def fsdp_runs_without_memory(model: Sequence[nn.Module]) -> Iterator[None]:
    """Inside, what fully_shard allocates for the chunks has no memory either; there are streams of the CPU, which do
    nothing.

    The units themselves are changed in place and for good: their device is meta, and nothing checks for it any more.
    Reads private parts of torch 2.11 to 2.13: no public way tells fully_shard to run where its parameters are.
    """
    parts = [part for chunk in model for part in chunk.modules() if isinstance(part, FSDPModule)]
    units = [unit for part in parts for unit in part._get_fsdp_state()._fsdp_param_groups]
    for unit in units:
        unit.device = torch.device("meta")
        for param in unit.fsdp_params:
            param.device = torch.device("meta")
        # It would refuse them in the first forward.
        vars(unit)["_validate_no_meta_params"] = lambda: None
    handle = vars(_fsdp_collectives)["_get_device_handle"]
    vars(_fsdp_collectives)["_get_device_handle"] = lambda kind: torch.cpu
    try:
        yield
    finally:
        vars(_fsdp_collectives)["_get_device_handle"] = handle
