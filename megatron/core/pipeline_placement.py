"""Placement: which part of the model each chunk of a pipeline stage holds.

Parts are numbered in the order of their layers. Part 0 begins with the embedding, and the last part ends with the
output layer and the loss. Model building, schedules and data iterators use the same numbers.
"""

from typing import NamedTuple, Protocol

# Values of --pipeline-schedule whose stages have two chunks, placed in a V.
V_SCHEDULES = ("zbv", "dualpipev")


class Place(NamedTuple):
    """A chunk of a stage, both from 0."""

    stage: int
    chunk: int


class Placement(NamedTuple):
    """Model chunks over stages.

    is_v: whether the parts pass through the stages forward and back, so that stage 0 of two chunks holds the first and
    the last part of the model. Otherwise chunk c of stage s is part c * num_stages + s.
    """

    num_stages: int
    num_chunks: int = 1
    is_v: bool = False

    @property
    def num_parts(self) -> int:
        """Number of parts of the model."""
        return self.num_stages * self.num_chunks

    def part_of(self, stage: int, chunk: int) -> int:
        """Returns the part of the model that a chunk holds."""
        return chunk * self.num_stages + self._turned(stage, chunk)

    def place_of(self, part: int) -> Place:
        """Returns the chunk that holds a part of the model."""
        chunk, position = divmod(part, self.num_stages)
        return Place(self._turned(position, chunk), chunk)

    def parts_of(self, stage: int) -> list[int]:
        """Lists the parts of the model that a stage holds, in the order of its chunks."""
        return [self.part_of(stage, chunk) for chunk in range(self.num_chunks)]

    @property
    def loss_stage(self) -> int:
        """The stage that holds the last part of the model, and computes the loss."""
        return self.place_of(self.num_parts - 1).stage

    def has_embedding(self, stage: int, chunk: int) -> bool:
        """Returns whether a chunk holds the first part of the model."""
        return self.part_of(stage, chunk) == 0

    def has_loss(self, stage: int, chunk: int) -> bool:
        """Returns whether a chunk holds the last part of the model."""
        return self.part_of(stage, chunk) == self.num_parts - 1

    def _turned(self, stage: int, chunk: int) -> int:
        """Returns a stage's position in the pass of a chunk over the stages, or the stage at a position."""
        return self.num_stages - 1 - stage if self.is_v and chunk % 2 else stage


class PlacementConfig(Protocol):
    """The fields of ModelParallelConfig that choose a placement."""

    pipeline_model_parallel_size: int
    virtual_pipeline_model_parallel_size: int | None
    pipeline_schedule: str


def configured_placement(config: PlacementConfig) -> Placement:
    """Returns the placement that a configuration chooses."""
    return placement_of(
        config.pipeline_schedule,
        config.pipeline_model_parallel_size,
        config.virtual_pipeline_model_parallel_size or 1,
    )


def check_chunks(schedule: str, num_stages: int, virtual_size: int | None) -> None:
    """Raises ValueError if a schedule places chunks in a V, and stages have another number of chunks than two."""
    if schedule in V_SCHEDULES and num_stages > 1 and virtual_size != 2:
        raise ValueError(
            f"virtual_pipeline_model_parallel_size is {virtual_size} and pipeline_schedule is {schedule}: must be 2, "
            "because stages have two chunks each"
        )


def placement_of(schedule: str, num_stages: int, num_chunks: int) -> Placement:
    """Returns the placement of a value of --pipeline-schedule. One stage with one chunk has no V."""
    return Placement(num_stages, num_chunks, schedule in V_SCHEDULES and num_stages > 1)
