"""Future tokens of each token, compared with plain indexing. tests/distributed covers context parallelism."""

import pytest
import torch
from torch import Tensor

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.future_tokens import FutureTokens

BATCH, SEQ = 2, 7


def rows(start: int) -> Tensor:
    return torch.arange(start, start + BATCH * SEQ).view(BATCH, SEQ)


def future_tokens(*, num_ahead: int = 2, **options: object) -> FutureTokens:
    arguments = {"loss_mask": None, **options}
    return FutureTokens(rows(100), rows(200), rows(300), num_ahead=num_ahead, **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("distance", [1, 2])
def test_each_place_sees_what_lies_so_far_ahead_and_nothing_past_the_end(distance: int) -> None:
    token = future_tokens().ahead(distance)
    for found, given in ((token.tokens, rows(100)), (token.positions, rows(200)), (token.labels, rows(300))):
        assert torch.equal(found[:, :-distance], given[:, distance:])
    assert torch.equal(token.weights[:, :-distance], torch.ones(BATCH, SEQ - distance))
    assert not token.weights[:, -distance:].any()


def test_more_places_ahead_than_tokens_have_no_weight() -> None:
    assert not future_tokens(num_ahead=9).ahead(8).weights.any()


def test_masked_and_negative_labels_have_no_weight() -> None:
    labels, mask = rows(300), torch.ones(BATCH, SEQ, dtype=torch.bfloat16)
    labels[0, 3], mask[1, 5] = -100, 0.5
    token = FutureTokens(rows(100), rows(200), labels, mask, num_ahead=1).ahead(1)
    assert token.weights[0].tolist() == [1, 1, 0, 1, 1, 1, 0] and token.labels.min() == 0
    assert token.weights[1].tolist() == [1, 1, 1, 1, 0.5, 1, 0] and token.weights.dtype is torch.float32


def test_weights_of_half_precision_count_far() -> None:
    ones = torch.ones(1, 1000, dtype=torch.bfloat16)
    tokens = torch.zeros(1, 1000, dtype=torch.int64)
    assert FutureTokens(tokens, tokens, tokens, ones, num_ahead=1).ahead(1).weights.sum() == 999


@pytest.mark.parametrize("as_mask", [True, False])
def test_what_belongs_to_another_document_has_no_weight(as_mask: bool) -> None:
    # Documents of 3, 4 and 7 tokens.
    segments = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [2] * 7])
    if as_mask:
        causal = torch.ones(SEQ, SEQ, dtype=torch.bool).tril()
        borders = {"attention_mask": ~(causal & (segments[:, :, None] == segments[:, None, :])).unsqueeze(1)}
    else:
        borders = {"packed_seq_params": PackedSeqParams(cu_seqlens_q=torch.tensor([0, 3, 7, 14], dtype=torch.int32))}
    ahead = future_tokens(**borders)
    assert ahead.ahead(1).weights.tolist() == [[1, 1, 0, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1, 0]]
    assert ahead.ahead(2).weights.tolist() == [[1, 0, 0, 1, 1, 0, 0], [1, 1, 1, 1, 1, 0, 0]]
