"""Random tensors split into random boxes over ranks, for tests of checkpoints. Contains no tests."""

import dataclasses
import itertools
from random import Random

import torch

from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.logical_tensors import Box, whole

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]


@dataclasses.dataclass
class CutTensors:
    """Global tensors by key, and random splits of them into boxes."""

    tensors: dict[str, torch.Tensor]

    def cut(self, random: Random, num_ranks: int) -> list[list[ShardedTensor]]:
        """Returns each rank's boxes. Together they cover every tensor, with replicas and overlaps."""
        ranks: list[list[ShardedTensor]] = [[] for _ in range(num_ranks)]
        for key, tensor in self.tensors.items():
            shape = tuple(tensor.shape)
            for box in _grid(random, shape) + _grid(random, shape)[: random.randint(0, 2)]:
                for rank in random.sample(range(num_ranks), random.randint(1, num_ranks)):
                    data = tensor[box.relative_to(whole(shape))].clone()
                    ranks[rank].append(ShardedTensor.at(key, data, shape, box.offset))
        return ranks


def random_tensors(random: Random) -> CutTensors:
    """Draws one to four tensors of 0 to 3 dimensions, some of them empty."""
    tensors = {}
    for index in range(random.randint(1, 4)):
        shape = tuple(random.choice([0, 1, 2, 3, 5, 7]) for _ in range(random.randint(0, 3)))
        generator = torch.Generator().manual_seed(random.getrandbits(30))
        dtype = random.choice(DTYPES)
        tensors[f"layer.{index}.weight"] = (torch.rand(shape, generator=generator) * 200).to(dtype)
    return CutTensors(tensors)


def strided_copy(random: Random, item: ShardedTensor) -> ShardedTensor:
    """Copies a box into new memory filled with ones: contiguous, transposed, or part of a larger tensor."""
    shape = item.data.shape
    form = random.choice(["contiguous", "transposed", "window"])
    if form == "transposed" and len(shape) > 1:
        data = torch.ones(tuple(reversed(shape)), dtype=item.data.dtype).permute(*reversed(range(len(shape))))
    elif form == "window" and shape:
        data = torch.ones([2 * n + 1 for n in shape], dtype=item.data.dtype)[tuple(slice(1, None, 2) for _ in shape)]
    else:
        data = torch.ones(shape, dtype=item.data.dtype)
    return dataclasses.replace(item, data=data)


def _grid(random: Random, shape: tuple[int, ...]) -> list[Box]:
    """Splits a shape into a grid of boxes at random positions, some of them empty."""
    intervals = []
    for n in shape:
        lines = sorted([0, n] + [random.randint(0, n) for _ in range(random.randint(0, 2))])
        intervals.append(list(itertools.pairwise(lines)))
    return [Box(tuple(a for a, _ in cell), tuple(b - a for a, b in cell)) for cell in itertools.product(*intervals)]
