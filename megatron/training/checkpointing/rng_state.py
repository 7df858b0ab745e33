"""Seeds, captures and restores the random-number generators of a rank, and stores them as rows in a checkpoint.

The generators are those of Python, NumPy and torch, and the streams of the tensor-parallel tracker.
"""

import math
import random

import numpy
import torch

from megatron.core.device import default_device, rng_state_bytes, seed_all, set_rng_state_bytes
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.process_groups_config import ProcessGroupCollection, group_rank, group_size
from megatron.core.tensor_parallel import get_cuda_rng_tracker, model_parallel_cuda_manual_seed

_PREFIX = "rng."
# In the order of rng_state_bytes. "cuda" exists only with a GPU.
_TORCH = ("torch", "cuda")
# All generators of this rank by name: each [N], int64, float64 or uint8, on the CPU.
RngState = dict[str, torch.Tensor]


def seed_generators(seed: int, groups: ProcessGroupCollection) -> None:
    """Seeds every generator identically on all data-parallel replicas and pipeline stages, for equal weights."""
    seed_all(seed)
    model_parallel_cuda_manual_seed(
        seed, tp_rank=group_rank(groups.tp), ep_rank=group_rank(groups.ep), etp_rank=group_rank(groups.expt_tp)
    )


def seed_ranks(seed: int, groups: ProcessGroupCollection) -> None:
    """Seeds each replica, context-parallel rank and pipeline stage differently, so that their dropout masks differ.

    Call it after weight initialization. Tensor-parallel ranks still share the default stream.
    """
    seed_generators(seed + 1_000_003 * group_rank(groups.dp_cp) + 100_003 * group_rank(groups.pp), groups)


def rng_sharded_state(groups: ProcessGroupCollection) -> list[ShardedTensor]:
    """Returns this rank's generators as rows of global tensors.

    The tensors are [data, pipeline, context, tensor parallel size, N], int64, float64 or uint8, on the CPU.
    """
    axes = (groups.dp, groups.pp, groups.cp, groups.tp)
    sizes, place = tuple(map(group_size, axes)), tuple(map(group_rank, axes))
    # Rows of one tensor instead of a key for each rank, so that a load detects a different layout from the shape.
    return [
        ShardedTensor.at(_PREFIX + name, row.view(1, 1, 1, 1, -1), (*sizes, row.numel()), (*place, 0))
        for name, row in capture_rng().items()
    ]


def load_rng(loaded: list[ShardedTensor]) -> None:
    """Restores this rank's generators from tensors of rng_sharded_state that a load has filled."""
    restore_rng({tensor.key.removeprefix(_PREFIX): tensor.data.view(-1) for tensor in loaded})


def restore_rng(rows: RngState) -> None:
    """Restores this rank's generators to a state from capture_rng, which can be reused any number of times."""
    python, numpy_state, gauss = rows["python"].tolist(), rows["numpy"].numpy(), rows["gauss"].tolist()
    # 3 is the version of the Mersenne Twister state since Python 3.2.
    random.setstate((3, tuple(python), None if math.isnan(gauss[0]) else gauss[0]))
    keys, (position, has_gauss) = numpy_state[:-2].astype(numpy.uint32), numpy_state[-2:].tolist()
    numpy.random.set_state(("MT19937", keys, position, has_gauss, gauss[1]))
    set_rng_state_bytes([rows[name] for name in _TORCH if name in rows], default_device())
    tracker = get_cuda_rng_tracker()
    streams = {name: [f"{name}.{kind}" for kind in _TORCH] for name in tracker.get_states()}
    tracker.set_states({name: [rows[key] for key in keys if key in rows] for name, keys in streams.items()})


def same_rng(one: RngState, other: RngState) -> bool:
    """Returns whether two captured states are equal, i.e. no random number was drawn between them."""
    # Compared as bytes, because "gauss" uses NaN for an absent value.
    return one.keys() == other.keys() and all(
        torch.equal(state.view(torch.uint8), other[name].view(torch.uint8)) for name, state in one.items()
    )


def capture_rng() -> RngState:
    """Captures this rank's generators: Python, NumPy, torch, the device, and the tracker's streams."""
    _, python, python_gauss = random.getstate()
    numpy_state = numpy.random.get_state(legacy=False)
    keys, position = numpy_state["state"]["key"], numpy_state["state"]["pos"]
    streams = {
        f"{name}.{kind}": state
        for name, states in get_cuda_rng_tracker().get_states().items()
        for kind, state in zip(_TORCH, states, strict=False)
    }
    return {
        # Converted with NumPy, which is much faster than torch.tensor for 625 numbers.
        "python": torch.from_numpy(numpy.array(python, dtype=numpy.int64)),
        "numpy": torch.from_numpy(numpy.append(keys.astype(numpy.int64), [position, numpy_state["has_gauss"]])),
        # Both generators cache the second of a pair of normal numbers; NaN encodes Python's empty cache.
        "gauss": torch.tensor(
            [math.nan if python_gauss is None else python_gauss, numpy_state["gauss"]], dtype=torch.float64
        ),
        **dict(zip(_TORCH, rng_state_bytes(default_device()), strict=False)),
        **streams,
    }
