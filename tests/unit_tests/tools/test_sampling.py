"""Sampling of tools/generate.py: temperature, top-k, top-p and seed."""

import argparse

import pytest
import torch

from megatron.tools.generate import check_options, continue_tokens, parse_options, sample

LOGITS = torch.log(torch.tensor([0.05, 0.5, 0.15, 0.3]))


def options(*words: str) -> argparse.Namespace:
    return parse_options(["--load", "x", *words])


def drawn(*words: str) -> list[int]:
    generator = torch.Generator().manual_seed(0)
    return [sample(LOGITS.clone(), options=options(*words), generator=generator) for _ in range(2000)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "shares"),
    [
        (("--temperature", "1"), [0.05, 0.5, 0.15, 0.3]),
        (("--temperature", "0"), [0, 1, 0, 0]),
        (("--temperature", "0.5"), [0.0025 / 0.365, 0.25 / 0.365, 0.0225 / 0.365, 0.09 / 0.365]),
        (("--temperature", "1", "--top-k", "2"), [0, 0.625, 0, 0.375]),
        (("--temperature", "1", "--top-k", "99"), [0.05, 0.5, 0.15, 0.3]),
        (("--temperature", "1", "--top-p", "0.5"), [0, 1, 0, 0]),
        (("--temperature", "1", "--top-p", "0.81"), [0, 0.5 / 0.95, 0.15 / 0.95, 0.3 / 0.95]),
        (("--temperature", "1", "--top-k", "3", "--top-p", "0.6"), [0, 0.625, 0, 0.375]),
        (("--temperature", "1", "--top-p", "1e-9"), [0, 1, 0, 0]),
    ],
)
def test_tokens_are_drawn_with_the_right_shares(words: tuple[str, ...], shares: list[float]) -> None:
    counts = torch.bincount(torch.tensor(drawn(*words)), minlength=4) / 2000
    torch.testing.assert_close(counts, torch.tensor(shares, dtype=torch.float32), atol=0.04, rtol=0)
    assert all(share > 0 for count, share in zip(counts.tolist(), shares) if count > 0)


@pytest.mark.slow
def test_the_same_seed_draws_the_same_tokens() -> None:
    assert drawn("--temperature", "1") == drawn("--temperature", "1")


@pytest.mark.parametrize(
    "words",
    [("--temperature", "-1"), ("--top-k", "0"), ("--top-p", "0"), ("--top-p", "1.5"), ("--max-new-tokens", "0")],
)
def test_impossible_options_are_refused_by_name(words: tuple[str, str]) -> None:
    with pytest.raises(ValueError, match=f"{words[0]} is"):
        check_options(options(*words))


class FavoursPadding(torch.nn.Module):
    """A model of 8 ids that prefers the last id, which a tokenizer of 5 ids does not have, and then id 3."""

    max_sequence_length, unpadded_vocab_size = 4, 8

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor([0.0, 0, 0, 5, 0, 0, 0, 9]))

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, mask: None) -> torch.Tensor:
        """tokens: [1, S], int64. Returns [1, S, 8], fp32."""
        return self.weight.expand(1, tokens.shape[1], 8)


def test_ids_that_the_tokenizer_lacks_are_never_drawn() -> None:
    settings = options("--temperature", "0", "--max-new-tokens", "6")
    generator = torch.Generator().manual_seed(0)
    model = FavoursPadding()
    drawn = continue_tokens(model, [1], num_ids=5, options=settings, eod=0, generator=generator)  # type: ignore[arg-type]
    assert list(drawn) == [3] * 6
    drawn = continue_tokens(model, [1], num_ids=5, options=settings, eod=0, ends={3}, generator=generator)  # type: ignore[arg-type]
    assert list(drawn) == []


def test_a_chat_template_requires_a_chat() -> None:
    with pytest.raises(ValueError, match="--chat-template applies only to chats"):
        check_options(options("--chat-template", "t.jinja"))
