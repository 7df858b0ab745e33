"""KeptBatches: what a step reads, kept until the step counts, so that it can run again on the same.

Where batches come from is megatron.core.datasets'.
"""

from collections.abc import Iterator
from typing import Any

from torch.utils._pytree import tree_map

from megatron.training.checkpointing.rng_state import RngState, capture_rng, restore_rng, same_rng


class KeptBatches(Iterator[Any]):
    """Reads on in `source`, and after `rewind` from the first batch that it has read.

    Who reads gets dicts, lists and tuples of his own, which he may take apart, with the source's tensors in them, which
    he must not change. Where reading from the source drew random numbers, reading a second time leaves the generators
    as it did; elsewhere it leaves them alone, and may be done ahead of passes that it came between the first time.
    Nothing is copied, but all microbatches of a step stay on the host until it counts: with
    --create-attention-mask-in-dataloader masks of B x S x S bytes each, which borders of documents do without.
    """

    def __init__(self, source: Iterator[Any]) -> None:
        self._source = source
        # With the generators' states behind the read, where it drew.
        self._kept: list[tuple[Any, RngState | None]] = []
        self._num_read = 0

    def __next__(self) -> Any:
        if self._num_read == len(self._kept):
            before = capture_rng()
            batch = next(self._source)
            # A source may draw its batches, of which nothing is drawn a second time.
            after = capture_rng()
            self._kept.append((batch, None if same_rng(before, after) else after))
        elif (drawn := self._kept[self._num_read][1]) is not None:
            restore_rng(drawn)
        self._num_read += 1
        return with_own_containers(self._kept[self._num_read - 1][0])

    def rewind(self) -> None:
        """Goes back to the first batch."""
        self._num_read = 0


def with_own_containers(batch: Any) -> Any:
    """The same tensors in dicts, lists and tuples of its own."""
    return tree_map(_same, batch)


def _same(leaf: Any) -> Any:
    return leaf
