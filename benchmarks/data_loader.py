"""Measures the tokens per second that one core reads through DataIterator from a memory-mapped corpus, by option.

    python benchmarks/data_loader.py [--json FILE]

Trains nothing. Times are the CPU time of this process, which reads without workers and with one thread. Results
therefore depend little on other programs on the machine and describe a single core.
"""

import argparse
import json
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # a clone works without installation

from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder  # noqa: E402
from megatron.core.datasets.data_iterators import BatchPlan, DataIterator  # noqa: E402
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig  # noqa: E402
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder, loss_mask_prefix  # noqa: E402
from megatron.core.device import keep_cpu_heap  # noqa: E402
from megatron.core.tokenizers.tokenizer import NullTokenizer  # noqa: E402

VOCABULARY = NullTokenizer(50_000)
MEAN_DOCUMENT = 600
MICRO_BATCH = 4
BATCHES = {1024: 200, 4096: 50}
NO_MASK = {"create_attention_mask": False}
BORDERS = {"reset_attention_mask": True, **NO_MASK}
EVERY = {"eod_mask_loss": True, "reset_position_ids": True, **BORDERS}
MASKS = "eod_mask_loss, reset_position_ids, masks of S x S"
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": NO_MASK,
    "eod_mask_loss": {"eod_mask_loss": True, **NO_MASK},
    "reset_position_ids": {"reset_position_ids": True, **NO_MASK},
    "borders": BORDERS,
    "eod_mask_loss, reset_position_ids, document boundaries": EVERY,
    MASKS: EVERY,
}


def main(argv: list[str] | None = None) -> None:
    """Measures every option, with and without loss masks in the corpus. Prints one line for each and writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--tokens", type=int, default=20_000_000, help="size of the corpus (default: 20 million)")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    keep_cpu_heap()  # as in a training run
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for masks in ("", "loss masks"):
            prefix = write_corpus(Path(folder) / f"corpus{len(masks)}", num_tokens=args.tokens, with_masks=bool(masks))
            for seq_length in BATCHES:
                for name in OPTIONS:
                    speed = measure(prefix, seq_length=seq_length, name=name, repeats=args.repeats)
                    what = ", ".join(filter(None, (name, masks)))
                    rows.append({"options": what, "seq_length": seq_length, "tokens_per_second": speed})
                    print(f"{what:70} {seq_length:5} {speed / 1e6:6.2f} M tokens/s")
    report = {
        "machine": {"processor": platform.processor() or platform.machine(), "torch": torch.__version__},
        "corpus": {"tokens": args.tokens, "bytes_per_token": 2, "mean_document": MEAN_DOCUMENT},
        "micro_batch_size": MICRO_BATCH,
        "rows": rows,
    }
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=1) + "\n")


def write_corpus(prefix: Path, *, num_tokens: int, with_masks: bool) -> str:
    """Writes a corpus of documents of random lengths, each ending with eod, and returns its prefix."""
    rng = np.random.default_rng(0)
    lengths = 1 + rng.exponential(MEAN_DOCUMENT, num_tokens // MEAN_DOCUMENT).astype(np.int64)
    tokens = rng.integers(0, VOCABULARY.eod, lengths.sum()).astype(np.uint16)
    tokens[np.cumsum(lengths) - 1] = VOCABULARY.eod
    _write(str(prefix), tokens, lengths=lengths)
    if with_masks:
        _write(loss_mask_prefix(str(prefix)), (tokens % 2).astype(np.uint8), lengths=lengths)
    return str(prefix)


def _write(prefix: str, values: np.ndarray, *, lengths: np.ndarray) -> None:
    with IndexedDatasetBuilder(f"{prefix}.bin", dtype=values.dtype.type) as builder:
        builder.add_concatenated(values, lengths.tolist())
        builder.finalize(f"{prefix}.idx")


def measure(prefix: str, *, seq_length: int, name: str, repeats: int) -> int:
    """Returns the median tokens per second of `repeats` runs over the same batches."""
    config = GPTDatasetConfig(
        sequence_length=seq_length, blend=([prefix], None), split="1,0,0", tokenizer=VOCABULARY, **OPTIONS[name]
    )
    dataset = BlendedMegatronDatasetBuilder(GPTDataset, [None, 0, 0], lambda: True, config).build()[0]
    assert isinstance(dataset, GPTDataset)
    plan = BatchPlan(micro_batch_size=MICRO_BATCH, create_attention_mask=name == MASKS)
    speeds = []
    for _ in range(repeats):
        iterator = DataIterator(dataset, plan)
        next(iterator)
        start = time.process_time()
        for _ in range(BATCHES[seq_length]):
            next(iterator)
        speeds.append(BATCHES[seq_length] * MICRO_BATCH * seq_length / (time.process_time() - start))
        iterator.close()
    return round(statistics.median(speeds))


if __name__ == "__main__":
    main()
