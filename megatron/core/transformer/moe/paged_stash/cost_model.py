"""What stashing saves and costs, in bytes and seconds, from sizes alone. Pages are counted in arithmetic.py.

Letters: H hidden, F ffn of one expert, N rows of a group, S pairs of (layer, micro-batch) that wait for backward at
once, b bytes that a row leaves for backward, c capacity factor. Without a stash a layer keeps c x N rows whatever the
router decided: static buffers are made for the worst case. These are estimates for choosing sizes; what a run really
holds, its pool counts.
"""

from dataclasses import dataclass

_PASSES = 4  # stash reads and writes each byte, and restore does so again


@dataclass(frozen=True)
class ExpertShape:
    """Sizes of one expert, in elements, and of one element, in bytes. is_gated: gate_up has 2F columns, else F."""

    hidden_size: int
    ffn_hidden_size: int
    itemsize: int = 2
    is_gated: bool = True

    @property
    def input_bytes(self) -> int:
        """Bytes of x per row, without the row's routing weight (4 bytes)."""
        return self.hidden_size * self.itemsize

    @property
    def gate_up_bytes(self) -> int:
        """Bytes of gate_up per row."""
        return self._fc1_width * self.itemsize

    @property
    def act_bytes(self) -> int:
        """Bytes of act per row."""
        return self.ffn_hidden_size * self.itemsize

    @property
    def row_bytes(self) -> int:
        """b: bytes that one row saves for backward."""
        return self.input_bytes + self.gate_up_bytes + self.act_bytes

    @property
    def flops(self) -> int:
        """Operations of forward and backward per row: three H x F matrices, three products each, 18 H F.

        Each multiply-add counts as 2. Without a gate there are two matrices.
        """
        return 6 * self.hidden_size * (self._fc1_width + self.ffn_hidden_size)

    @property
    def gate_up_flops(self) -> int:
        """Operations to compute gate_up once, per row: 4 H F, or 2 H F without a gate."""
        return 2 * self.hidden_size * self._fc1_width

    @property
    def _fc1_width(self) -> int:
        return (2 if self.is_gated else 1) * self.ffn_hidden_size


@dataclass(frozen=True)
class Machine:
    """Rates of one device, as measured on it, per second."""

    flops: float  # of the grouped products
    copied_bytes: float  # read plus written, device memory
    host_bytes: float  # one way between device and host


@dataclass(frozen=True)
class StepShape:
    """A step, at whose peak S = live_groups groups of N = num_rows rows each wait for their backward."""

    expert: ExpertShape
    num_rows: int
    live_groups: int
    capacity_factor: float

    @property
    def group_bytes(self) -> int:
        """N b: what one group leaves for backward in its live rows."""
        return self.num_rows * self.expert.row_bytes

    @property
    def dropless_bytes(self) -> int:
        """S N b: buffers as large as the live rows, which the host must know: no static shapes, no graph."""
        return self.live_groups * self.group_bytes

    @property
    def static_bytes(self) -> float:
        """c S N b: every group keeps its worst case."""
        return self.capacity_factor * self.dropless_bytes

    def stashed_bytes(self, *, arena_factor: float = 1.1, prefetch_groups: int = 1, tail_bytes: float = 0.0) -> float:
        """arena_factor S N b + (1 + prefetch_groups) c N b + tail_bytes: the arena and the static working sets.

        Working sets are the group that computes and those whose restore runs ahead of it.
        """
        working_set = self.capacity_factor * self.group_bytes
        return arena_factor * self.dropless_bytes + (1 + prefetch_groups) * working_set + tail_bytes

    def saving(self, *, arena_factor: float = 1.1, prefetch_groups: int = 1) -> float:
        """Share of the static bytes that stashing saves, tails left out: 1 - (arena_factor + w c / S) / c.

        w is 1 + prefetch_groups. Negative where stashing costs memory: c near 1, or few live groups.
        """
        stashed = self.stashed_bytes(arena_factor=arena_factor, prefetch_groups=prefetch_groups)
        return 1 - stashed / self.static_bytes

    def tail_bytes(self, num_tensors: int, *, page_bytes: int) -> float:
        """Expected unused bytes in last pages at the peak, for num_tensors tensors a group: half a page each."""
        return self.live_groups * num_tensors * page_bytes / 2


@dataclass(frozen=True)
class GroupCosts:
    """Seconds that work on one group of num_rows rows takes. Beside other work it may cost less time than that."""

    expert: ExpertShape
    num_rows: int
    machine: Machine

    @property
    def compute_seconds(self) -> float:
        """Forward and backward of the experts; a third of it is the forward."""
        return self.num_rows * self.expert.flops / self.machine.flops

    def copy_seconds(self, row_bytes: int) -> float:
        """Stash and restore of row_bytes bytes a row."""
        return _PASSES * self.num_rows * row_bytes / self.machine.copied_bytes

    @property
    def rho(self) -> float:
        """Stash and restore of everything over the compute they may hide behind."""
        return self.copy_seconds(self.expert.row_bytes) / self.compute_seconds

    def spill_seconds(self, share: float) -> float:
        """One way between device and host, for that share of the group's bytes."""
        return share * self.num_rows * self.expert.row_bytes / self.machine.host_bytes

    @property
    def hidden_share(self) -> float:
        """Largest share of a group's bytes whose spill takes no longer than the group's own forward."""
        return self.compute_seconds / 3 / self.spill_seconds(1.0)

    @property
    def act_rung_seconds(self) -> float:
        """Act computed again. It costs just memory traffic: gate_up is read and act written."""
        return self.num_rows * (self.expert.gate_up_bytes + self.expert.act_bytes) / self.machine.copied_bytes

    @property
    def gate_up_rung_seconds(self) -> float:
        """Gate_up computed again from x: a product with 2 F columns, 4 of the 18 H F flops of a row."""
        return self.num_rows * self.expert.gate_up_flops / self.machine.flops
