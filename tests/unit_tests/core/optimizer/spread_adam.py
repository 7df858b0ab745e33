"""Adam state sharded according to a layout, without an optimizer or communication. Contains no tests."""

from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from megatron.core.distributed.layout import ParamRange, Span, lay_out
from megatron.core.optimizer.adam import EXP_AVG, EXP_AVG_SQ, FlatAdam, Masters, StateForm
from megatron.core.optimizer.state_dict import (
    MASTERS,
    STEP,
    AdamShard,
    StateRange,
    adam_state_dict,
    load_adam_state_dict,
    range_values,
)

KINDS = (EXP_AVG, EXP_AVG_SQ, MASTERS)
# Sizes that are not divisible, a scalar, an empty tensor, and memory that is not in logical order.
SHAPES = [(7, 5), (64,), (), (0, 3), (2, 3, 5, 4), (6, 9), (2, 3, 4, 3, 2), (41, 33), (3, 1)]


def make_params(*dtypes: torch.dtype) -> list[nn.Parameter]:
    """Creates a parameter of each shape, cycling through the dtypes. Some are channels_last and one is transposed."""
    dtypes = dtypes or (torch.float32,)
    params = []
    for number, shape in enumerate(SHAPES):
        values = torch.randn(shape, generator=torch.Generator().manual_seed(number))
        values = values.to(dtypes[number % len(dtypes)])
        if len(shape) == 4:
            values = values.to(memory_format=torch.channels_last)
        if len(shape) == 5:
            values = values.to(memory_format=torch.channels_last_3d)
        if shape == (6, 9):
            values = values.t().contiguous().t()
        params.append(nn.Parameter(values))
    assert not all(param.is_contiguous() for param in params)
    return params


def any_state(params: list[nn.Parameter], seed: int = 0) -> dict[int, dict[str, Tensor]]:
    """Returns random unsharded state in fp32 or fp64, contiguous, with masters that round to the parameters."""
    chance = torch.Generator().manual_seed(seed)
    state: dict[int, dict[str, Tensor]] = {}
    for index, param in enumerate(params):
        wide = torch.promote_types(param.dtype, torch.float32)
        noise = [torch.randn(param.shape, generator=chance, dtype=wide) for _ in range(3)]
        master = param.detach().contiguous().to(wide) * (1 + 1e-4 * noise[2])
        state[index] = {EXP_AVG: noise[0], EXP_AVG_SQ: noise[1].square() * 1e-6, MASTERS: master}
        state[index][STEP] = torch.tensor(7.0)
    return state


@dataclass
class SpreadAdam:
    """State of one rank, with one buffer for each group and dtype, split into small buckets."""

    groups: list[list[nn.Parameter]]
    rank: int = 0
    num_ranks: int = 1
    form: StateForm = field(default_factory=StateForm)
    bucket_size: int = 256
    adam_w_mode: bool = True
    process_group: dist.ProcessGroup | None = None

    def __post_init__(self) -> None:
        rates = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1, "bias_correction": True}
        self.param_groups = [{**rates, "params": params} for params in self.groups]
        self.ranges: list[StateRange] = []
        first = 0
        for params in self.groups:
            for dtype in dict.fromkeys(param.dtype for param in params if param.requires_grad):
                own = {i: p for i, p in enumerate(params, first) if p.dtype == dtype and p.requires_grad}
                self._spread(own)
            first += len(params)

    def _spread(self, params: dict[int, nn.Parameter]) -> None:
        layout = lay_out(
            [param.numel() for param in params.values()],
            num_shards=self.num_ranks,
            bucket_size=self.bucket_size,
            split=True,
        )
        some = next(iter(params.values()))
        flat = torch.zeros(layout.numel, dtype=some.dtype)
        for param, span in zip(params.values(), layout.spans, strict=True):
            flat[span.start : span.end].copy_(in_memory_order(param.detach(), param))
        masters = self.form.masters
        if masters is Masters.REMAINDERS and some.dtype != torch.bfloat16:
            masters = Masters.COPY
        form = StateForm(self.form.dtype, masters, self.form.is_scaled)
        for owned in layout.owned(self.rank):
            adam = FlatAdam.of_form(flat[owned.start : owned.end], form)
            for (index, param), span in zip(params.items(), layout.spans, strict=True):
                part = span.intersection(owned)
                if part.numel:
                    here = Span(part.start - owned.start, part.numel)
                    held = ParamRange(f"parameter {index}", param, here, part.start - span.start)
                    self.ranges.append(StateRange(index, held, adam))

    @property
    def shard(self) -> AdamShard:
        params = [param for params in self.groups for param in params]
        frozen = frozenset(index for index, param in enumerate(params) if not param.requires_grad)
        return AdamShard(self.ranges, self.param_groups, self.adam_w_mode, self.process_group, frozen)

    def state_dict(self) -> dict:
        return adam_state_dict(self.shard)

    def load_state_dict(self, state_dict: dict) -> None:
        load_adam_state_dict(self.shard, state_dict)

    def save(self, folder: Path, **settings) -> None:
        dcp.save({"optim": self.state_dict()}, checkpoint_id=folder, **settings)

    def load(self, folder: Path, **settings) -> None:
        state_dict = self.state_dict()
        dcp.load({"optim": state_dict}, checkpoint_id=folder, **settings)
        self.load_state_dict(state_dict)

    def fill(self, state: dict[int, dict[str, Tensor]]) -> "SpreadAdam":
        """Loads unsharded values as returned by any_state."""
        self.load_state_dict({**self.state_dict(), "state": state})
        return self

    def values(self) -> dict[int, dict[str, Tensor]]:
        """Returns this rank's values in the form of any_state, with NaN for elements of other ranks."""
        params = [param for params in self.groups for param in params]
        wides = {part.index: part.adam.wide for part in self.ranges}
        found = {}
        for index, param in enumerate(params):
            nothing = torch.empty_strided(param.shape, param.stride(), dtype=wides.get(index, torch.float32))
            found[index] = {kind: nothing.clone().fill_(torch.nan) for kind in KINDS}
            found[index][STEP] = torch.tensor(torch.nan)
        for part in self.ranges:
            adam = part.adam
            for kind, stored in zip(KINDS, (adam.exp_avg, adam.exp_avg_sq, adam.main), strict=True):
                held = part.range
                memory = found[part.index][kind].as_strided((held.param.numel(),), (1,))
                memory[held.start : held.start + held.span.numel] = range_values(part, stored)
            found[part.index][STEP] = adam.step.clone()
        return found

    def lacks(self, state: dict[int, dict[str, Tensor]]) -> list[str]:
        """Names the local values that differ from `state`."""
        wrong = []
        for index, entry in self.values().items():
            for kind, held in entry.items():
                is_here = ~held.isnan()
                if not torch.equal(held[is_here], state[index][kind].to(held.dtype)[is_here]):
                    wrong.append(f"{kind} of {index}")
        return wrong


def in_memory_order(values: Tensor, param: nn.Parameter) -> Tensor:
    """Returns the values in the order of the parameter's memory: [numel]."""
    memory = torch.empty_strided(param.shape, param.stride(), dtype=values.dtype)
    return memory.copy_(values).as_strided((param.numel(),), (1,))
