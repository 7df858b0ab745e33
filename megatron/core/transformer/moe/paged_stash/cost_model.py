"""Estimated savings and costs of stashing, in bytes and seconds, from sizes alone. arithmetic.py counts pages.

Letters: H hidden, F ffn of one expert, N rows of a group, S pairs of (layer, micro-batch) saved for backward at the
same time, b bytes that a row saves for backward, c capacity factor. Without a stash a layer saves c x N rows, because
static buffers are sized for the worst case. These estimates help to choose sizes. The pool of a run counts real use.
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
    """Shape of a step at whose peak S = live_groups groups of N = num_rows rows each are saved for backward."""

    expert: ExpertShape
    num_rows: int
    live_groups: int
    capacity_factor: float

    @property
    def group_bytes(self) -> int:
        """N b: bytes that one group saves for backward in its live rows."""
        return self.num_rows * self.expert.row_bytes

    @property
    def dropless_bytes(self) -> int:
        """S N b: bytes of buffers that hold exactly the live rows. Shapes are then not static."""
        return self.live_groups * self.group_bytes

    @property
    def static_bytes(self) -> float:
        """c S N b: bytes if every group keeps its worst case."""
        return self.capacity_factor * self.dropless_bytes

    def stashed_bytes(self, *, arena_factor: float = 1.1, prefetch_groups: int = 1, tail_bytes: float = 0.0) -> float:
        """Returns the bytes of arena and working sets: arena_factor S N b + (1 + prefetch_groups) c N b + tail_bytes.

        Working sets are the group that computes and the prefetched groups.
        """
        working_set = self.capacity_factor * self.group_bytes
        return arena_factor * self.dropless_bytes + (1 + prefetch_groups) * working_set + tail_bytes

    def saving(self, *, arena_factor: float = 1.1, prefetch_groups: int = 1) -> float:
        """Returns the share of static bytes that stashing saves without tails: 1 - (arena_factor + w c / S) / c.

        w is 1 + prefetch_groups. It is negative if stashing costs memory, with c near 1 or few live groups.
        """
        stashed = self.stashed_bytes(arena_factor=arena_factor, prefetch_groups=prefetch_groups)
        return 1 - stashed / self.static_bytes

    def tail_bytes(self, num_tensors: int, *, page_bytes: int) -> float:
        """Returns the expected unused bytes in last pages at the peak: half a page for each tensor of a group."""
        return self.live_groups * num_tensors * page_bytes / 2


@dataclass(frozen=True)
class GroupCosts:
    """Seconds of work on one group of num_rows rows, without any overlap with other work."""

    expert: ExpertShape
    num_rows: int
    machine: Machine

    @property
    def compute_seconds(self) -> float:
        """Seconds of the experts' forward and backward. A third of it is the forward."""
        return self.num_rows * self.expert.flops / self.machine.flops

    def copy_seconds(self, row_bytes: int) -> float:
        """Returns the seconds to stash and restore row_bytes bytes per row."""
        return _PASSES * self.num_rows * row_bytes / self.machine.copied_bytes

    @property
    def rho(self) -> float:
        """Ratio of the time to stash and restore everything to the compute that may hide it."""
        return self.copy_seconds(self.expert.row_bytes) / self.compute_seconds

    def spill_seconds(self, share: float) -> float:
        """Returns the seconds of one way between device and host, for that share of the group's bytes."""
        return share * self.num_rows * self.expert.row_bytes / self.machine.host_bytes

    @property
    def hidden_share(self) -> float:
        """Largest share of a group's bytes whose spill takes no longer than the group's own forward."""
        return self.compute_seconds / 3 / self.spill_seconds(1.0)

    @property
    def act_rung_seconds(self) -> float:
        """Seconds to recompute act. It only costs memory traffic: gate_up is read and act written."""
        return self.num_rows * (self.expert.gate_up_bytes + self.expert.act_bytes) / self.machine.copied_bytes

    @property
    def gate_up_rung_seconds(self) -> float:
        """Seconds to recompute gate_up from x: a product with 2 F columns, 4 of the 18 H F flops of a row."""
        return self.num_rows * self.expert.gate_up_flops / self.machine.flops
