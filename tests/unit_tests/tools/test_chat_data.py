"""Chats in JSON lines become tokens, loss masks and packed documents; the training loss covers only the answers."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.tools import preprocess_data
from megatron.tools.generate import load_model
from megatron.tools.preprocess_data import Chat, packed
from tests.functional_tests.case import command_line, read_bases
from tests.functional_tests.launch import run_program

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
BYTES = ("--tokenizer-type", "ByteLevelTokenizer", "--workers", "1", "--chat-key", "messages")


def chat(question: str, answer: str) -> dict:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def run(folder: Path, records: list, *words: str) -> list[tuple[str, str]]:
    """Returns each document's text, with $ for its end, and its loss mask as a string of 0 and 1."""
    (folder / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "t.jinja").write_text(TEMPLATE)
    files = ["--input", str(folder / "a.jsonl"), "--output-prefix", str(folder / "out")]
    assert preprocess_data.main([*files, "--chat-template", str(folder / "t.jinja"), *BYTES, *words]) == 0
    tokens, masks = (IndexedDataset(str(folder / f"out_messages_document{end}")) for end in ("", "_loss_mask"))
    text = ["".join("$" if token == 256 else chr(token) for token in one) for one in tokens[:]]
    return [(one, "".join(map(str, mask))) for one, mask in zip(text, masks[:])]


def test_the_answers_alone_are_learned_and_what_cannot_be_read_is_named(tmp_path: Path, capsys) -> None:
    shared = {"messages": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "rs"}]}
    bad = [{"messages": "no"}, {"messages": [{"text": 1}]}, {"body": []}, {"messages": ["a"]}, {"messages": []}]
    silent = {"messages": [{"role": "user", "content": "q"}]}
    found = run(tmp_path, [chat("ab", "cd"), silent, shared, *bad], "--append-eod", "--max-dropped-share", "0.75")
    # The answer has no end token, so the end of the document belongs to it.
    assert found == [("u:aba:cd$", "000000111"), ("u:qa:rs$", "00000111")]
    out, err = capsys.readouterr()
    assert "chats: 2 kept, 6 dropped (75.0%): 5 not readable, 1 without an answer\n" in out
    assert "2 documents, 17 tokens, 6 with a loss (35.3%), " in out
    assert "skipped 6 chats in total" in err
    for line, reason in (
        (2, "the assistant has no text"),
        (4, "must be a list of at least one message"),
        (5, "must have role and content"),
        (6, "no key 'messages'"),
    ):
        assert any(f"a.jsonl:{line}: " in word and reason in word for word in err.splitlines())


def test_packed_documents_hold_whole_chats_each_with_its_end(tmp_path: Path, capsys) -> None:
    records = [chat("a", "1" * 9), chat("b", "2"), chat("c", "3" * 30), chat("d", "4" * 2), chat("e" * 30, "5")]
    found = run(tmp_path, records, "--pack-length", "16", "--max-dropped-share", "0.2")
    assert [text for text, _ in found] == ["u:aa:" + "1" * 9 + "$$", "u:ba:2$u:da:44$$", "u:ca:" + "3" * 11]
    assert found[1][1] == "0000011000001110"
    assert (
        "chats: 4 kept, 1 dropped (20.0%): 1 without an answer within --pack-length\n3 documents, 1 longer chats "
        "truncated, 20 truncated tokens with a loss, 2 padding tokens, 46 tokens, 26 with a loss (56.5%)"
    ) in capsys.readouterr().out


@given(lengths=st.lists(st.integers(1, 12), max_size=40), capacity=st.integers(12, 30))
def test_packing_keeps_every_chat_once_and_fills_half_at_least(lengths: list[int], capacity: int) -> None:
    chats = [Chat(np.full(length, number + 1), np.ones(length)) for number, length in enumerate(lengths)]
    documents = list(packed(chats, length=capacity, fill=0, counts=Counter()))
    assert all(len(one.tokens) == len(one.mask) == capacity for one in documents)
    assert all(((one.tokens == 0) == (one.mask == 0)).all() for one in documents)
    runs = Counter(int(token) for one in documents for token in one.tokens if token)
    assert runs == Counter({number + 1: length for number, length in enumerate(lengths)})
    assert all(sum((chat.tokens[0] == one.tokens).any() for one in documents) == 1 for chat in chats)
    # No two documents fit into one, except for the last document.
    assert len(documents) <= 1 or sum(lengths) > capacity * len(documents) / 2


@pytest.mark.parametrize("borders", [[], ["--no-create-attention-mask-in-dataloader"]])
def test_the_loss_of_a_run_is_the_mean_over_the_answers_of_the_chats_alone(tmp_path: Path, borders: list[str]) -> None:
    long, short = chat("what?", "yes, of co"), chat("who", "me")
    documents = run(tmp_path, [long, short] * 5, "--pack-length", "32")
    assert len(documents) == 5 and len(set(documents)) == 1
    flags = {
        **read_bases()["llama"],
        "mock-data": None,
        "vocab-size": None,
        "tokenizer-type": "ByteLevelTokenizer",
        "data-path": tmp_path / "out_messages_document",
        "split": "100,0,0",
        "train-iters": 1,
        "lr": 1e-30,
        "min-lr": 0,
        "lr-warmup-iters": 0,
        "eval-iters": 0,
        "save": tmp_path / "saved",
    }
    finished = run_program(
        [*command_line(flags), "--reset-position-ids", "--reset-attention-mask", *borders], 1, folder=tmp_path / "run"
    )
    assert finished.exit_codes == [0], finished.written()
    model, _ = load_model(str(tmp_path / "saved"), step=None, moved={})
    losses = []
    for record in (long, short):
        question, answer = (message["content"] for message in record["messages"])
        tokens = torch.tensor([[*f"u:{question}a:{answer}".encode(), 256]])
        with torch.no_grad():
            logits = model(tokens[:, :-1], torch.arange(tokens.shape[1] - 1)[None], None)
        every = torch.nn.functional.cross_entropy(logits[0, :, :257], tokens[0, 1:], reduction="none")
        losses += every[-len(answer) - 1 :].tolist()
    assert finished.steps[1]["lm_loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-5)


@pytest.mark.parametrize(
    "num_good, words, status",
    [(9, (), 0), (8, (), 1), (8, ("--max-dropped-share", "0.2"), 0), (99, ("--max-dropped-share", "0"), 1)],
)
def test_too_many_dropped_chats_are_an_error(
    tmp_path: Path, num_good: int, words: tuple[str, ...], status: int, capsys
) -> None:
    excluded = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "weight": 0}]}
    records = [chat("a", "b")] * num_good + [excluded]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (tmp_path / "t.jinja").write_text(TEMPLATE)
    files = ["--input", str(tmp_path / "a.jsonl"), "--chat-template", str(tmp_path / "t.jinja")]
    (tmp_path / "out_messages_document.bin").write_bytes(b"old")
    assert preprocess_data.main([*files, "--output-prefix", str(tmp_path / "out"), *BYTES, *words]) == status
    out, err = capsys.readouterr()
    share = f"{1 / (num_good + 1):.1%}"
    counted = f"{num_good} kept, 1 dropped ({share}): 1 without a loss because of their marks"
    assert f"a.jsonl:{num_good + 1}: the fields of its messages exclude all answers" in err
    if status == 0:
        assert f"chats: {counted}\n" in out
    else:
        limit = words[-1] if words else "0.1"
        assert f"are dropped: {counted}; nothing was written" in err and f"share of {limit} with --max-dropped" in err
        assert (tmp_path / "out_messages_document.bin").read_bytes() == b"old"


def test_samples_are_shown_as_they_are_trained_on(tmp_path: Path, capsys) -> None:
    run(tmp_path, [chat("a", "b"), chat("c", "d")], "--pack-length", "16", "--show", "5")
    shown = capsys.readouterr().out.splitlines()[:5]
    assert shown == [
        "sample 1 of 1: 14 tokens, 4 with a loss, and padding of 2",
        "       | u:aa:",
        "  loss | b<|endoftext|>",
        "       | u:ca:",
        "  loss | d<|endoftext|>",
    ]


@pytest.mark.parametrize("value", ["1.5", "-0.1", "nan"])
def test_a_share_is_0_to_1(tmp_path: Path, value: str, capsys) -> None:
    with pytest.raises(SystemExit):
        preprocess_data.main(["--input", "a", "--output-prefix", "o", *BYTES, "--max-dropped-share", value])
    assert f"--max-dropped-share is {value}: must be 0 to 1" in capsys.readouterr().err
