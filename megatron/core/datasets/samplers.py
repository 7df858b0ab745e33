"""Which samples of a dataset form a rank's micro-batches; the samples themselves are read elsewhere."""

from collections.abc import Iterator


class MegatronPretrainingSampler:
    """Endless lists of sample numbers, one list per micro-batch of this data-parallel rank.

    Samples are taken in dataset order. Of each run of micro_batch_size * data_parallel_size samples, rank r takes
    rows r * micro_batch_size to (r + 1) * micro_batch_size. A global batch is thus the samples from consumed_samples
    to consumed_samples + global batch size whatever the number of ranks and the micro-batch size: a run may resume
    on another layout and every global batch keeps its samples. Behind the last sample the first follows.
    """

    def __init__(
        self,
        total_samples: int,
        consumed_samples: int,
        *,
        micro_batch_size: int,
        data_parallel_rank: int,
        data_parallel_size: int,
    ) -> None:
        if total_samples <= 0:
            raise ValueError(f"total_samples is {total_samples}: must be at least 1")
        if consumed_samples < 0:
            raise ValueError(f"consumed_samples is {consumed_samples}: must be at least 0")
        if micro_batch_size <= 0:
            raise ValueError(f"micro_batch_size is {micro_batch_size}: must be at least 1")
        if not 0 <= data_parallel_rank < data_parallel_size:
            raise ValueError(
                f"data_parallel_rank is {data_parallel_rank}: must be 0 to data_parallel_size - 1 = "
                f"{data_parallel_size - 1}"
            )
        self.total_samples = total_samples
        self._begin = consumed_samples + data_parallel_rank * micro_batch_size
        self._micro_batch_size = micro_batch_size
        self._stride = micro_batch_size * data_parallel_size

    def __iter__(self) -> Iterator[list[int]]:
        begin = self._begin
        while True:
            yield [number % self.total_samples for number in range(begin, begin + self._micro_batch_size)]
            begin += self._stride
