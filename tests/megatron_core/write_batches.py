"""Writes the batches of mock data that a run with the flags of settings.py reads, for write_fixtures.py.

Run `python -m tests.megatron_core.write_batches` when the mock data or its order changes.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy
import torch

import pretrain_gpt
from tests.megatron_core.settings import FLAGS, STEPS_IN_ALL, case_flags

DataIterator = Iterator[dict[str, torch.Tensor]] | None
BATCHES = Path(__file__).parent / "fixtures" / "batches.npz"


def main() -> None:
    """Trains all steps in one process and writes the tokens that it reads: [steps, samples, S + 1]."""
    seen: list[torch.Tensor] = []
    get_batch = pretrain_gpt.get_batch

    def recorded(data_iterator: DataIterator, device: torch.device) -> dict[str, torch.Tensor]:
        batch = get_batch(data_iterator, device)
        seen.append(torch.cat([batch["tokens"], batch["labels"][:, -1:]], dim=1))
        return batch

    pretrain_gpt.get_batch = recorded
    pretrain_gpt.main([*FLAGS, *case_flags("dense"), "--train-iters", str(STEPS_IN_ALL), "--eval-iters", "0"])
    samples = torch.cat(seen)
    numpy.savez_compressed(BATCHES, tokens=samples.view(STEPS_IN_ALL, -1, samples.shape[1]).to(torch.int16).numpy())
    print(BATCHES, samples.shape)


if __name__ == "__main__":
    main()
