"""A small mixture of experts, trained from a raw text, reaches a validation loss far below a unigram model's."""

import math
from pathlib import Path

import numpy as np
import pytest

from megatron.core.datasets.data_config import DataConfig
from megatron.core.datasets.data_iterators import build_train_valid_test_datasets
from megatron.core.datasets.gpt_dataset import GPTDataset
from megatron.core.tokenizers import TokenizerConfig, build_tokenizer
from megatron.tools import preprocess_data, python_corpus, train_tokenizer
from tests.functional_tests.case import Flags, command_line, read_bases
from tests.functional_tests.launch import run_program

VOCAB_SIZE, SEQ_LENGTH, STEPS = 512, 64, 80
SPLIT = "95,5,0"
FLAGS: Flags = {
    "mock-data": None,
    "vocab-size": None,
    "deterministic-mode": None,
    "tokenizer-type": "HuggingFaceTokenizer",
    "hidden-size": 64,
    "moe-ffn-hidden-size": 128,
    "seq-length": SEQ_LENGTH,
    "max-position-embeddings": SEQ_LENGTH,
    "micro-batch-size": 8,
    "global-batch-size": 16,
    "train-iters": STEPS,
    "eval-interval": STEPS // 2,
    "eval-iters": 10,
    "lr": 5e-3,
    "min-lr": 5e-4,
    "lr-warmup-iters": 10,
    "split": SPLIT,
}


@pytest.mark.slow
def test_a_mixture_of_experts_beats_a_unigram_model_on_real_text(tmp_path: Path) -> None:
    text, tokenizer, tokens = tmp_path / "text.jsonl", tmp_path / "tokenizer.json", tmp_path / "tokens"
    model = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(tokenizer)]
    files = ["--input", str(text), "--output-prefix", str(tokens), "--append-eod", "--workers", "1"]
    assert python_corpus.main(["--output", str(text), "--max-bytes", "1000000"]) == 0
    sizes = ["--vocab-size", str(VOCAB_SIZE)]
    assert train_tokenizer.main(["--input", str(text), "--output", str(tokenizer), *sizes]) == 0
    assert preprocess_data.main([*files, *model]) == 0
    data = f"{tokens}_text_document"

    flags = {**read_bases()["moe"], **FLAGS, "data-path": data, "tokenizer-model": tokenizer}
    run = run_program(command_line(flags), 2, folder=tmp_path / "run")
    assert run.exit_codes == [0, 0], run.written()
    losses = [losses[-1] for _, losses in sorted(run.validation_losses.items())]
    unigram = _unigram_loss(data, tokenizer)
    print(f"validation losses {losses}, unigram model {unigram:.3f}, uniform {math.log(VOCAB_SIZE):.3f}")
    assert unigram < math.log(VOCAB_SIZE) - 0.3, "the unigram model is hardly better than a uniform one"
    assert losses[-1] < losses[0]
    assert losses[-1] < unigram - 0.4  # measured: 0.65


def _unigram_loss(data: str, tokenizer_model: Path) -> float:
    """Returns the loss of a unigram model with add-one smoothing, in nats per token of the validation split."""
    tokenizer = build_tokenizer(
        TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(tokenizer_model))
    )
    config = DataConfig(data_path=[data], split=SPLIT, seq_length=SEQ_LENGTH)
    train, valid, _ = build_train_valid_test_datasets(config, tokenizer, sizes=[None, None, 0], seed=0)
    assert isinstance(train, GPTDataset) and isinstance(valid, GPTDataset)
    train_counts, valid_counts = _counts(train), _counts(valid)
    frequencies = (train_counts + 1) / (train_counts + 1).sum()
    return float(-(valid_counts / valid_counts.sum()) @ np.log(frequencies))


def _counts(dataset: GPTDataset) -> np.ndarray:
    """Counts the occurrences of each token. Result: [V], float64."""
    documents = [dataset.dataset.get(int(number)) for number in dataset.indices]
    return np.bincount(np.concatenate(documents), minlength=VOCAB_SIZE).astype(np.float64)
