"""Placement: which part of the model each chunk of a pipeline stage holds.

Parts are numbered in the order of their layers. Part 0 begins with the embedding, and the last part ends with the
output layer and the loss. Model building, schedules and data iterators use the same numbers.
"""

from typing import NamedTuple, Protocol


class Place(NamedTuple):
    """A chunk of a stage, both from 0."""

    stage: int
    chunk: int


class Placement(NamedTuple):
    """Model chunks over stages: chunk c of stage s is part c * num_stages + s of the model."""

    num_stages: int
    num_chunks: int = 1

    @property
    def num_parts(self) -> int:
        """Number of parts of the model."""
        return self.num_stages * self.num_chunks

    def part_of(self, stage: int, chunk: int) -> int:
        """Returns the part of the model that a chunk holds."""
        return chunk * self.num_stages + stage

    def place_of(self, part: int) -> Place:
        """Returns the chunk that holds a part of the model."""
        chunk, stage = divmod(part, self.num_stages)
        return Place(stage, chunk)

    def has_embedding(self, stage: int, chunk: int) -> bool:
        """Returns whether a chunk holds the first part of the model."""
        return self.part_of(stage, chunk) == 0

    def has_loss(self, stage: int, chunk: int) -> bool:
        """Returns whether a chunk holds the last part of the model."""
        return self.part_of(stage, chunk) == self.num_parts - 1


class PlacementConfig(Protocol):
    """The fields of ModelParallelConfig that choose a placement."""

    pipeline_model_parallel_size: int
    virtual_pipeline_model_parallel_size: int | None


def configured_placement(config: PlacementConfig) -> Placement:
    """Returns the placement that a configuration chooses."""
    return Placement(config.pipeline_model_parallel_size, config.virtual_pipeline_model_parallel_size or 1)
