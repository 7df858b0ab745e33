"""Phase: where an iteration of gradients is, as one field of LaunchOrder, which alone moves it."""

from enum import Enum


class Phase(Enum):
    """Where an iteration is; it begins with zero_grad_buffer and ends with finish_grad_sync.

    REPLAYED: a CUDA graph has run it, sums included, and ranks have told each other nothing of it yet. STEPPED: all
    ranks know that no rank has broken it off, and update. CLOSED: the wrappers were taken off.
    """

    COLLECTING = "collecting"
    REPLAYED = "replayed"
    FINISHED = "finished"
    STEPPED = "stepped"
    ABORTED = "aborted"
    CLOSED = "closed"
