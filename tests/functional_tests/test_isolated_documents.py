"""A document inside a packed sample has the same losses as alone, from the token file to the model's output."""

from pathlib import Path

import pytest
import torch

import pretrain_gpt
from megatron.core.datasets.data_config import DataConfig
from megatron.core.datasets.data_iterators import BatchPlan, build_data_iterators, build_train_valid_test_datasets
from megatron.core.timers import Timers
from megatron.core.tokenizers.tokenizer import NullTokenizer
from tests.functional_tests.corpora import EOD, write_corpora
from tests.unit_tests.core.models.small_models import SEQ, small_config, small_model


@pytest.mark.parametrize("create_masks", [True, False], ids=["masks", "borders"])
@pytest.mark.parametrize("positions", ["rope", "learned_absolute"])
def test_a_document_in_a_sample_has_the_losses_of_the_document_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, positions: str, create_masks: bool
) -> None:
    monkeypatch.setattr(pretrain_gpt, "get_timers", lambda: Timers(0))  # pretrain() creates the timers in a run
    write_corpora(tmp_path, {"a": {"longest": 9, "learned": "half"}})
    config = DataConfig(
        seq_length=SEQ,
        data_path=[str(tmp_path / "a")],
        split="1,0,0",
        reset_position_ids=positions == "learned_absolute",
        reset_attention_mask=True,
    )
    datasets = build_train_valid_test_datasets(config, NullTokenizer(EOD + 1), sizes=[40, 0, 0], seed=7)
    plan = BatchPlan(micro_batch_size=3, create_attention_mask=create_masks)
    train = build_data_iterators(datasets, plan)[0]
    model = small_model(small_config(), vocab_size=EOD + 1, position_embedding_type=positions)
    for _ in range(6):
        batch = next(train)
        assert ("attention_mask" in batch) == create_masks != ("cu_seqlens" in batch)
        losses, _ = pretrain_gpt.forward_step(iter([batch]), model)
        for row in range(3):
            documents = batch["tokens"][row].eq(EOD).roll(1).index_fill(0, torch.tensor([0]), 0).cumsum(0)
            for document in documents.unique():
                inside = documents == document
                tokens, labels = batch["tokens"][row, inside], batch["labels"][row, inside]
                alone = model(tokens[None], torch.arange(len(tokens))[None], None, labels=labels[None])
                torch.testing.assert_close(losses[row, inside], alone[0], rtol=1e-5, atol=1e-5)
