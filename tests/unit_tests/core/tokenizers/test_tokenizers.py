"""Round trips and special ids of the tokenizers, and errors for invalid configurations."""

import json
import pickle
import warnings
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, pre_tokenizers, trainers

from megatron.core.tokenizers import (
    MegatronTokenizer,
    Tokenizer,
    TokenizerConfig,
    build_tokenizer,
    vocab_size_with_padding,
)
from megatron.core.tokenizers.library_tokenizers import HuggingFaceTokenizer
from megatron.core.tokenizers.tokenizer import END_OF_TEXT, ByteLevelTokenizer


def write_tokenizer(folder: Path, special: list[str], config: object = None) -> Path:
    """Writes a byte-level BPE tokenizer with these special tokens, and its tokenizer_config.json if one is passed."""
    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    library.train_from_iterator(["hello world, hello hello"], trainer)
    folder.mkdir(exist_ok=True)
    library.save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def hugging_face(path: Path) -> Tokenizer:
    return build_tokenizer(TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(path)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("bpe") / "t", ["<|endoftext|>"])


@given(text=st.text())
def test_any_text_comes_back(folder: Path, text: str) -> None:
    assume(END_OF_TEXT not in text)  # like transformers, the library recognizes special tokens in text
    for tokenizer in (ByteLevelTokenizer(), hugging_face(folder)):
        tokens = tokenizer.tokenize(text)
        assert tokenizer.detokenize(tokens) == text
        assert all(0 <= token < tokenizer.vocab_size and token != tokenizer.eod for token in tokens)


def test_a_file_that_cuts_and_fills_texts_gives_all_tokens_and_no_others(folder: Path, tmp_path: Path) -> None:
    library = Library.from_file(str(folder / "tokenizer.json"))
    library.enable_truncation(2)
    library.enable_padding()
    library.save(str(tmp_path / "tokenizer.json"))
    texts = ["hello", "hello world, hello"]
    assert HuggingFaceTokenizer(str(tmp_path)).tokenize_batch(texts) == [
        hugging_face(folder).tokenize(t) for t in texts
    ]


def test_the_byte_level_tokenizer_has_257_ids_and_shows_its_eod() -> None:
    tokenizer = build_tokenizer(TokenizerConfig(tokenizer_type="ByteLevelTokenizer"))
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.bos, tokenizer.pad) == (257, 256, None, None)
    assert tokenizer.detokenize([72, 105, 256]) == "Hi<|endoftext|>"
    assert tokenizer.detokenize([0xC3]) == "\ufffd"
    with pytest.raises(ValueError, match="token 257 is outside the 257 ids"):
        tokenizer.detokenize([257])


@pytest.mark.parametrize("eod_id, eod", [(None, 99), (5, 5)])
def test_the_null_tokenizer_reads_ids(eod_id: int | None, eod: int) -> None:
    config = TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=100, null_tokenizer_eod_id=eod_id)
    tokenizer = build_tokenizer(config)
    assert (tokenizer.vocab_size, tokenizer.eod) == (100, eod)
    assert tokenizer.tokenize(" 1 99\n0") == [1, 99, 0] and tokenizer.detokenize([1, 99]) == "1 99"
    for wrong in ("100", "-1", "a", "\u00b2"):
        with pytest.raises(ValueError, match="is not a token of the NullTokenizer of 100 ids: must be 0 to 99"):
            tokenizer.tokenize(f"1 {wrong}")


def test_a_tokenizer_is_found_by_file_and_by_folder_and_pickles(folder: Path) -> None:
    for path in (folder, folder / "tokenizer.json"):
        tokenizer = pickle.loads(pickle.dumps(hugging_face(path)))
        assert tokenizer.tokenize("hello") == hugging_face(folder).tokenize("hello")
        assert tokenizer.detokenize([tokenizer.eod]) == "<|endoftext|>"


@pytest.mark.parametrize(
    "special, config, expected",
    [
        (["<|endoftext|>"], None, ("<|endoftext|>", None, None)),
        (["<s>", "</s>", "<pad>"], None, ("</s>", "<s>", "<pad>")),
        (["<bos>", "<eos>"], None, ("<eos>", "<bos>", None)),
        (["</s>", "<|stop|>"], {"eos_token": "<|stop|>", "pad_token": None}, ("<|stop|>", None, None)),
        (["<a>", "<b>"], {"eos_token": {"content": "<a>"}, "bos_token": "<b>"}, ("<a>", "<b>", None)),
    ],
)
def test_special_ids_are_those_of_the_config_file_or_the_usual_names(tmp_path, special, config, expected) -> None:
    tokenizer = hugging_face(write_tokenizer(tmp_path, special, config))
    found = [None if token is None else special[token] for token in (tokenizer.eod, tokenizer.bos, tokenizer.pad)]
    assert tuple(found) == expected


def test_vocab_size_covers_the_highest_id(folder: Path) -> None:
    facts = json.loads((folder / "tokenizer.json").read_text())
    facts["added_tokens"].append({**facts["added_tokens"][0], "id": 5000, "content": "<far>"})
    file = folder.parent / "far.json"
    file.write_text(json.dumps(facts))
    tokenizer = HuggingFaceTokenizer(str(file))
    assert max(tokenizer.tokenize("<far>")) == tokenizer.vocab_size - 1


@pytest.mark.parametrize(
    "content, error, message",
    [
        (None, FileNotFoundError, "tokenizer.json does not exist: --tokenizer-model must be"),
        ("{", ValueError, "tokenizer.json is not a tokenizer.json"),
        ("no eod", ValueError, "tokenizer.json has no end-of-document token: must contain one of"),
        ("bad config", ValueError, "tokenizer_config.json is not a JSON object"),
    ],
)
def test_unusable_files_are_named(tmp_path: Path, content: str | None, error: type, message: str) -> None:
    if content in ("no eod", "bad config"):
        write_tokenizer(tmp_path, ["<other>"], config=[1] if content == "bad config" else None)
    elif content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(error, match=message):
        hugging_face(tmp_path)


@pytest.mark.parametrize(
    "declared, absent",
    [
        ({"eos_token": "<|end|>", "pad_token": "<|pad|>"}, "<|pad|>"),
        ({"eos_token": {"content": "<|end|>"}, "additional_special_tokens": ["<|start|>", "<|end|>"]}, "<|start|>"),
        ({"added_tokens_decoder": {"400": {"content": "<tool>", "special": True}}}, "<tool>"),
        ({"extra_special_tokens": {"image_token": "<image>"}}, "<image>"),
        ({"eos_token": "<|end|>", "added_tokens_decoder": {"0": {"content": "<|end|>"}}}, None),
    ],
)
def test_declared_tokens_that_would_be_text_are_named(tmp_path: Path, declared: dict, absent: str | None) -> None:
    write_tokenizer(tmp_path, ["<|end|>", "<|endoftext|>"], config=declared)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        hugging_face(tmp_path)
    said = [str(one.message) for one in found if "transformers would add" in str(one.message)]
    assert [f"lacks {absent} of tokenizer_config.json" in one for one in said] == ([] if absent is None else [True])


def test_an_end_of_document_that_is_not_in_the_vocabulary_is_named(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, ["<|endoftext|>"], config={"eos_token": "<|im_end|>"})
    with pytest.raises(ValueError, match=r"eos_token of tokenizer_config.json is '<\|im_end\|>': must be a token of"):
        hugging_face(tmp_path)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"tokenizer_type": "SentencePieceTokenizer"}, "requires --tokenizer-model: a SentencePiece .model"),
        ({"tokenizer_type": "GPT2BPETokenizer", "vocab_file": "v"}, "requires --merge-file: a merges.txt"),
        (
            {"tokenizer_type": "TikTokenizer", "tokenizer_model": "t", "vocab_file": "v"},
            "which reads --tokenizer-model",
        ),
        ({"tokenizer_type": "Unheard"}, "tokenizer_type is 'Unheard': must be one of ByteLevelTokenizer"),
        ({"tokenizer_type": "NullTokenizer"}, "NullTokenizer requires --vocab-size"),
        ({"tokenizer_type": "HuggingFaceTokenizer"}, "requires --tokenizer-model"),
        ({"tokenizer_type": "ByteLevelTokenizer", "tokenizer_model": "a"}, "--tokenizer-model a conflicts with"),
        (
            {"tokenizer_type": "ByteLevelTokenizer", "null_tokenizer_eod_id": 1},
            "--null-tokenizer-eod-id conflicts with",
        ),
        ({"tokenizer_type": "ByteLevelTokenizer", "vocab_size": 200}, "--vocab-size is 200: ByteLevel.* has 257 ids"),
        (
            {"tokenizer_type": "NullTokenizer", "vocab_size": 9, "null_tokenizer_eod_id": 9},
            "null_tokenizer_eod_id is 9: must be 0 to",
        ),
        ({}, "--tokenizer-type is None: must be one of"),
    ],
)
def test_wrong_fields_say_what_would_be_right(fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_tokenizer(TokenizerConfig(**fields))


def test_the_type_follows_from_a_vocabulary_with_merges() -> None:
    assert TokenizerConfig(vocab_file="v.json", merge_file="m.txt").tokenizer_type == "GPT2BPETokenizer"
    assert TokenizerConfig(vocab_file="v.json").tokenizer_type is None


def test_a_model_may_know_more_ids_than_its_tokenizer_gives() -> None:
    tokenizer = build_tokenizer(TokenizerConfig(tokenizer_type="ByteLevelTokenizer", vocab_size=300))
    assert tokenizer.vocab_size == 257


@given(vocab_size=st.integers(1, 10**6), divisor=st.integers(1, 512), ranks=st.integers(1, 16))
def test_a_padded_vocabulary_is_the_next_multiple_for_every_rank(vocab_size: int, divisor: int, ranks: int) -> None:
    padded = vocab_size_with_padding(vocab_size, divisible_by=divisor, tensor_parallel_size=ranks)
    assert padded % (divisor * ranks) == 0 and 0 <= padded - vocab_size < divisor * ranks


def test_tokenizers_are_built_from_their_metadata(tmp_path: Path) -> None:
    build = MegatronTokenizer.from_pretrained
    null = build(metadata_path={"library": "null-text"}, vocab_size=9)
    assert (null.vocab_size, null.eod) == (10, 9)
    (tmp_path / "tokenizer_metadata.json").write_text('{"library": "byte-level"}')
    for path in (str(tmp_path), str(tmp_path / "any.json")):
        with pytest.raises(ValueError, match="conflicts with --tokenizer-type ByteLevelTokenizer"):
            build(path)
    assert build(metadata_path=tmp_path / "tokenizer_metadata.json").tokenize("a") == [97]
    for metadata, message in (
        ({"library": "other"}, "library is 'other' in the tokenizer's metadata: must be one of byte-level, "),
        ({}, "must have a key 'library'"),
        ({"library": "null"}, "vocab_size is None"),
        (None, "tokenizer_path and metadata_path are both None"),
    ):
        with pytest.raises(ValueError, match=message):
            build(metadata_path=metadata)
