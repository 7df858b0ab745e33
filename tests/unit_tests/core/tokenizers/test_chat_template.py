"""Chats have the same text, tokens and assistant masks as in transformers, even if templates mark no assistant text."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from megatron.core.tokenizers.chat_template import ChatTemplate, ChatTemplateError, find_templates
from megatron.core.tokenizers.library_tokenizers import HuggingFaceTokenizer
from megatron.core.tokenizers.optional_tokenizers import Llama2Tokenizer, SentencePieceTokenizer, TikTokenizer
from megatron.core.tokenizers.tokenizer import BaseTokenizer, ByteLevelTokenizer
from tests.unit_tests.core.tokenizers.vocabularies import TEXT, write_sentencepiece, write_tiktoken

CHATML = """{{ bos_token }}{% for message in messages %}
{{ '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' %}{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}
{% else %}{{ message.content }}<|im_end|>{% endif %}
{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>"]
# Templates without marks: the assistant's text is the part after the prompt.
UNMARKED = {
    "chatml": CHATML.replace("{% generation %}", "").replace("{% endgeneration %}", ""),
    "llama": "{% for m in messages %}{% if m.role == 'assistant' %} {{ m.content }} {{ eos_token }}"
    "{% else %}{{ bos_token }}[INST] {{ m.content }} [/INST]{% endif %}{% endfor %}",
}
CONTENTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\ufdd0\ufdd1"), min_size=1, max_size=20)
CHATS = st.lists(st.tuples(CONTENTS, CONTENTS), min_size=1, max_size=3)


def messages(turns: list[tuple[str, str]]) -> list[dict[str, str]]:
    roles = [{"role": role, "content": text} for turn in turns for role, text in zip(("user", "assistant"), turn)]
    return [{"role": "system", "content": "be <brief> & \u00fc"}, *roles]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False)
    library.train_from_iterator(TEXT, trainer)
    path = tmp_path_factory.mktemp("chat")
    (path / "trimmed").mkdir()
    library.post_processor = processors.ByteLevel(trim_offsets=True)
    library.save(str(path / "trimmed/tokenizer.json"))
    library.post_processor = processors.ByteLevel(trim_offsets=False)
    reference = PreTrainedTokenizerFast(tokenizer_object=library, eos_token="<|endoftext|>", bos_token="<s>")
    reference.chat_template = CHATML
    reference.save_pretrained(path)
    return path


@given(turns=CHATS)
def test_tokens_and_marks_are_those_of_transformers(folder: Path, turns: list[tuple[str, str]]) -> None:
    reference = PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer = HuggingFaceTokenizer(str(folder))
    assert tokenizer.chat_templates == {"default": CHATML}
    chat = ChatTemplate(CHATML, tokenizer.special_names).render(messages(turns))
    found = tokenizer.tokenize_marked(chat.text, chat.spans)
    wanted = reference.apply_chat_template(
        messages(turns), return_dict=True, return_assistant_tokens_mask=True, tokenize=True
    )
    assert chat.text == reference.apply_chat_template(messages(turns), tokenize=False)
    assert found.ids == wanted["input_ids"] and [int(mark) for mark in found.marks] == wanted["assistant_masks"]
    # Also if the vocabulary has no characters for blanks.
    assert HuggingFaceTokenizer(str(folder / "trimmed")).tokenize_marked(chat.text, chat.spans) == found


@given(turns=CHATS, name=st.sampled_from(sorted(UNMARKED)))
def test_without_marks_an_answer_is_what_follows_its_prompt(turns: list[tuple[str, str]], name: str) -> None:
    chat = ChatTemplate(UNMARKED[name], {"bos_token": "<s>", "eos_token": "</s>"}).render(messages(turns))
    answers = [chat.text[begin:end] for begin, end in chat.spans]
    form = "{}<|im_end|>" if name == "chatml" else " {} </s>"
    assert [answer.rstrip("\n") for answer in answers] == [form.format(answer).rstrip("\n") for _, answer in turns]


def tokenizers(folder: Path) -> list[BaseTokenizer]:
    pieces, ranks = write_sentencepiece(folder / "s.model"), write_tiktoken(folder / "t.json")
    return [Llama2Tokenizer(str(pieces)), TikTokenizer(str(ranks)), ByteLevelTokenizer()]


def test_special_tokens_in_a_template_become_their_ids(tmp_path: Path) -> None:
    for tokenizer in tokenizers(tmp_path):
        chat = ChatTemplate(UNMARKED["llama"], tokenizer.special_names).render(messages([("hello", "the fox")]))
        found = tokenizer.tokenize_marked(chat.text, chat.spans)
        learned = [token for token, mark in zip(found.ids, found.marks) if mark]
        assert learned == [*tokenizer.tokenize_piece(" the fox "), tokenizer.eod]
        assert found.ids.count(tokenizer.eod) == 1
        assert tokenizer.bos is None or found.ids[0] == tokenizer.bos


def test_of_two_special_tokens_that_begin_alike_the_longer_one_is_read(tmp_path: Path) -> None:
    path = write_sentencepiece(tmp_path / "s.model", control_symbols=["<|im|>", "<|im|>start", "<|im|>st"])
    tokenizer = SentencePieceTokenizer(str(path))
    assert tokenizer.tokenize_marked("<|im|>start<|im|><|im|>st", []).ids == [
        tokenizer.vocab[text] for text in ("<|im|>start", "<|im|>", "<|im|>st")
    ]


@pytest.mark.parametrize(
    "source, error",
    [
        ("{% for %}", "is not valid Jinja: .* in line 1"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages.nothing.more }}", "does not support this conversation: .*nothing"),
        ("{{ messages.append(1) }}", "does not support this conversation"),
        ("{% for m in messages|reverse %}{{ m.content }}{% endfor %}", "message 3 so differently .*mark the assistant"),
        ("{{ strftime_now('%d') }}", "'strftime_now' is undefined"),
        ("{% generation %}{{ '\ufdd0' }}{% endgeneration %}", "which are not characters"),
        ("{{ 1 / 0 }}", "does not support this conversation: division by zero"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "does not support this conversation: maximum recursion"),
    ],
)
def test_templates_and_chats_that_do_not_fit_say_why(source: str, error: str) -> None:
    with pytest.raises(ChatTemplateError, match=error):
        ChatTemplate(source, {}).render(messages([("a", "b")]))


@pytest.mark.parametrize("source", [CHATML, *UNMARKED.values()])
def test_no_message_can_move_the_marks(source: str) -> None:
    with pytest.raises(ChatTemplateError, match="which are not characters"):
        ChatTemplate(source, {}).render(messages([("a", "b\ufdd1c\ufdd0d")]))


def test_a_template_is_found_in_each_place_that_transformers_knows(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text((folder / "tokenizer.json").read_text())
    config = tmp_path / "tokenizer_config.json"
    named = [{"name": "default", "template": "b"}, {"name": "tool_use", "template": "d"}]
    for value, expected in (("a", {"default": "a"}), (named, {"default": "b", "tool_use": "d"}), (None, {})):
        config.write_text(json.dumps({"chat_template": value}))
        assert HuggingFaceTokenizer(str(tmp_path)).chat_templates == expected
    config.write_text(json.dumps({"chat_template": named}))
    (tmp_path / "chat_template.jinja").write_text("c")
    assert HuggingFaceTokenizer(str(tmp_path)).chat_templates == {"default": "c", "tool_use": "d"}
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("e")
    tokenizer = HuggingFaceTokenizer(str(tmp_path))
    assert tokenizer.chat_templates == {"default": "c", "tool_use": "e"}
    own = find_templates(tokenizer, None)
    assert (own.of(None), own.of([]), own.of([{}])) == ("c", "e", "e")
    given = find_templates(tokenizer, str(tmp_path / "chat_template.jinja"))
    assert (given.of(None), given.of([{}])) == ("c", "c")
