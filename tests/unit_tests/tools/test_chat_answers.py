"""The tokens and loss masks of chats are those of a plain Python rendering, for templates and marks of many kinds."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.text_files import RawDocument
from megatron.core.datasets.utils import Split
from megatron.core.tokenizers import TokenizerConfig, build_tokenizer
from megatron.core.tokenizers.chat_template import TemplateSources
from megatron.core.tokenizers.library_tokenizers import HuggingFaceTokenizer
from megatron.tools import preprocess_data
from megatron.tools.generate import parse_options, read_prompt
from megatron.tools.token_chunks import EncodedChunk, EncodeSettings, encode_chats
from tests.unit_tests.core.tokenizers.vocabularies import write_sentencepiece, write_tiktoken

SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|pad|>",
    "<s>",
    "</s>",
    "<|Assistant|>",
    "<|User|>",
    "<|eot_id|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
)


def user(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **more}


def answer(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def call(arguments: Any) -> dict[str, Any]:
    return {"id": "x", "type": "function", "function": {"name": "f", "arguments": arguments}}


@pytest.fixture(scope="module")
def library() -> Tokenizer:
    """Builds a tokenizer with one token per byte, besides the special tokens."""
    found = Tokenizer(models.BPE())
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    found.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    found.train_from_iterator(["ab"], trainers.BpeTrainer(vocab_size=256, initial_alphabet=alphabet))
    found.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    return found


@pytest.fixture(scope="module")
def folders(library: Tokenizer, tmp_path_factory) -> dict[str, Path]:
    """Returns a folder with the tokenizer for each token that can end documents."""
    found = {}
    for number, eos in enumerate(SPECIAL):
        found[eos] = tmp_path_factory.mktemp(f"eos{number}")
        library.save(str(found[eos] / "tokenizer.json"))
        config = {"eos_token": eos, "bos_token": "<s>", "pad_token": "<|pad|>"}
        (found[eos] / "tokenizer_config.json").write_text(json.dumps(config))
    return found


def tokens_of(library: Tokenizer, pieces: list[tuple[str, bool]]) -> tuple[list[int], list[int]]:
    """Returns the ids and the mask of (text, has a loss) pairs."""
    ids, mask = [], []
    for text, has_loss in pieces:
        found = library.encode(text, add_special_tokens=False).ids
        ids += found
        mask += [int(has_loss)] * len(found)
    return ids, mask


# Templates of known models, reduced to what renders messages.
LLAMA3_FIRST = (
    "{% for m in messages %}{% if loop.first %}{{ bos_token }}{% endif %}<|start_header_id|>{{ m.role }}"
    "<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
)
ZEPHYR = """{% for m in messages %}
{{ '<|' + m.role + '|>\n' + m.content + '</s>' }}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}"""
EOT = "<|eot_id|>"


def head(role: str) -> str:
    return f"<|start_header_id|>{role}<|end_header_id|>\n\n"


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# An empty think block only in the last answer; the reasoning is kept only after the last question.
QWEN3 = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- '# Tools' }}
    {%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and not(message.content.startswith('<tool_response>')
        and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index and (loop.last or reasoning) %}
            {{- '<|im_start|>assistant\\n<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' + content }}
        {%- else %}
            {{- '<|im_start|>assistant\\n' + content }}
        {%- endif %}
        {%- for tool_call in message.tool_calls or [] %}
            {%- if not loop.first or content %}{{- '\\n' }}{%- endif %}
            {{- '<tool_call>\\n' + tool_call.function.name + ' ' }}
            {{- tool_call.function.arguments | tojson }}
            {{- '\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if messages[loop.index0 - 1].role != "tool" %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != "tool" %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
# The reasoning is never kept, but the generation prompt opens a think block.
DEEPSEEK = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}<|User|>{{ m.content }}{% else %}"
    "<|Assistant|>{{ m.content.split('</think>')[-1] }}<|endoftext|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|Assistant|><think>\n{% endif %}"
)
# Tools come before the last question, and there is no generation prompt.
MISTRAL = (
    "{{ bos_token }}{% set asked = messages | selectattr('role', 'equalto', 'user') | list %}{% for m in messages %}"
    "{% if m.role == 'user' %}{% if tools and m == asked[-1] %}[TOOLS] {{ tools | tojson }}[/TOOLS]{% endif %}"
    "[INST] {{ m.content }}[/INST]{% elif m.tool_calls %}[CALLS] {{ m.tool_calls[0].function | tojson }}</s>"
    "{% elif m.role == 'assistant' %} {{ m.content | trim }}</s>{% else %}[RESULT] {{ m.content }}[/RESULT]{% endif %}"
    "{% endfor %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}"
    "<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
TAGGED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}"
    "{% if loop.last %}<think></think>{% endif %}{{ m.content }}<|im_end|>{% endgeneration %}{% else %}"
    "{{ m.content }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PLAIN = (
    "{% for m in messages %}{% if m.role == 'assistant' %}Answer: {{ m.content }}\n{% else %}"
    "Question: {{ m.content }}\n{% endif %}{% endfor %}{% if add_generation_prompt %}Answer: {% endif %}"
)
# The document's end follows only the last answer.
CLOSED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% elif messages[-1].role == 'assistant' %}"
    "<|endoftext|>{% endif %}"
)
# The system text is part of the first question, and the assistant has another name.
GEMMA = (
    "{% set before = messages[0].content + '\n' if messages[0].role == 'system' else '' %}"
    "{% for m in messages if m.role != 'system' %}<|im_start|>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ before if loop.first else '' }}{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>model\n{% endif %}"
)


@dataclass(frozen=True)
class Case:
    """A chat and its text. Every second part of the text, between ~, has a loss."""

    template: str
    record: dict[str, Any]
    text: str
    eos: str = "<|endoftext|>"
    words: tuple[str, ...] = ()


def of(*messages: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"messages": list(messages), **more}


U, A, END = "<|im_start|>user\n", "<|im_start|>assistant\n", "<|im_end|>\n"
CASES = {
    "the end of ChatML is the end of documents, several turns": Case(
        CHATML,
        of(user("a"), answer("b"), user("c"), answer("d")),
        f"{U}a{END}{A}~b{END}~{U}c{END}{A}~d{END}",
        eos="<|im_end|>",
        words=("--append-eod",),
    ),
    "another token ends documents, and follows an end token without a loss": Case(
        CHATML,
        of(user("a"), answer("b")),
        f"{U}a{END}{A}~b{END}~<|endoftext|>",
        words=("--append-eod",),
    ),
    "packed: what follows the end of documents is cut, and the rest is padding": Case(
        CHATML,
        of(user("a"), answer("b")),
        f"{U}a{END}{A}~b<|im_end|>~" + "<|pad|>" * 10,
        eos="<|im_end|>",
        words=("--pack-length", "32"),
    ),
    "an empty think block in the last answer": Case(
        QWEN3,
        of(user("a"), answer("b"), user("c"), answer("<d"), user("e"), answer("f")),
        f"{U}a{END}{A}~b{END}~{U}c{END}{A}~<d{END}~{U}e{END}{A}~<think>\n\n</think>\n\nf{END}",
    ),
    "steps of tools, of which the reasoning of earlier turns is dropped": Case(
        QWEN3,
        of(
            user("a"),
            answer("<think>\nr\n</think>\n\nb", tool_calls=[call({"x": 1}), call({})]),
            {"role": "tool", "content": "1"},
            {"role": "tool", "content": "2"},
            answer("c", reasoning_content="s"),
            user("d"),
            answer(None, tool_calls=[call({"y": "z"})], reasoning_content="t"),
            {"role": "tool", "content": "3"},
            answer("e", reasoning_content="u"),
            tools=[{"name": "f"}],
        ),
        '<|im_start|>system\n# Tools\n{"name": "f"}' + END + f"{U}a{END}{A}~b\n<tool_call>\nf "
        '{"x": 1}\n</tool_call>\n<tool_call>\nf {}\n</tool_call>' + END + "~<|im_start|>user\n<tool_response>\n1\n"
        f"</tool_response>\n<tool_response>\n2\n</tool_response>{END}{A}~c{END}~{U}d{END}{A}~<think>\nt\n</think>\n\n"
        '<tool_call>\nf {"y": "z"}\n</tool_call>' + END + "~<|im_start|>user\n<tool_response>\n3\n</tool_response>"
        f"{END}{A}~<think>\nu\n</think>\n\ne{END}",
    ),
    "reasoning is never kept, and the prompt opens a think block": Case(
        DEEPSEEK,
        of(user("a"), answer("<think>\nr\n</think><b>"), user("c"), answer("<think>s</think>d")),
        "<s><|User|>a<|Assistant|>~<b><|endoftext|>~<|User|>c<|Assistant|>~d<|endoftext|>",
        words=("--append-eod",),
    ),
    "tools before the last question, an answer without a weight": Case(
        MISTRAL,
        of(
            user("a"),
            answer(" b ", weight=0),
            user("c"),
            answer("", tool_calls=[call({"x": 1})]),
            {"role": "tool", "content": "1"},
            answer("d", weight=1),
            user("e"),
            answer("f"),
            tools='[{"name": "g"}]',
        ),
        '<s>[INST] a[/INST] b</s>[INST] c[/INST]~[CALLS] {"name": "f", "arguments": {"x": 1}}</s>~[RESULT] 1[/RESULT]'
        '~ d</s>~[TOOLS] [{"name": "g"}][/TOOLS][INST] e[/INST]~ f</s>',
        eos="</s>",
        words=("--append-eod",),
    ),
    "fields of axolotl, with the roles of ShareGPT and a system text beside the messages": Case(
        LLAMA3,
        {
            "messages": [
                {"from": "human", "value": "a", "train": False},
                {"from": "gpt", "value": "b ", "train": False},
                {"from": "human", "value": "c"},
                {"from": "gpt", "value": "d", "train": True},
            ],
            "system": "be kind",
        },
        "<s><|start_header_id|>system<|end_header_id|>\n\nbe kind<|eot_id|><|start_header_id|>user<|end_header_id|>"
        "\n\na<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nb<|eot_id|><|start_header_id|>user"
        "<|end_header_id|>\n\nc<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n~d<|eot_id|>",
        eos="<|eot_id|>",
        words=("--append-eod",),
    ),
    "marks in the template, and answers that are excluded": Case(
        TAGGED,
        of(user("a"), answer("b", loss=False), user("c"), answer("d"), answer("e"), user("f"), answer("g", loss=False)),
        f"{U}a{END}{A}b{END}{U}c{END}{A}~d<|im_end|>~\n{A}~e<|im_end|>~\n{U}f{END}{A}<think></think>g{END}",
        eos="<|im_end|>",
        words=("--append-eod",),
    ),
    "no end token, so that the end of the document has a loss": Case(
        PLAIN,
        of(user("a"), answer("b", masked=True), user("c"), answer("d")),
        "Question: a\nAnswer: b\nQuestion: c\nAnswer: ~d\n<|endoftext|>",
        words=("--append-eod",),
    ),
    "no end token, and the last answer is excluded": Case(
        PLAIN,
        of(user("a"), answer("b"), user("c"), answer("d", weight=0.0)),
        "Question: a\nAnswer: ~b\n~Question: c\nAnswer: d\n<|endoftext|>",
        words=("--append-eod",),
    ),
    "the end of the document only at the end": Case(
        CLOSED,
        of(user("a"), answer("b"), user("c"), answer("d")),
        f"{U}a{END}{A}~b{END}~{U}c{END}{A}~d{END}<|endoftext|>",
        words=("--append-eod",),
    ),
    "a question last": Case(
        CHATML,
        of(user("a"), answer("b"), user("c")),
        f"{U}a{END}{A}~b{END}~{U}c{END}",
        eos="<|im_end|>",
        words=("--append-eod",),
    ),
    "a greeting, whose prompt cannot be rendered alone": Case(
        "{{ '' if messages[0].role else '' }}" + CHATML,
        of(answer("hi"), user("a"), answer("b")),
        f"{A}~hi{END}~{U}a{END}{A}~b{END}",
    ),
    "a greeting, which the template rejects without a question": Case(
        "{% if 'user' not in messages | map(attribute='role') %}{{ raise_exception('no user') }}{% endif %}" + QWEN3,
        of(answer("hi"), user("a"), answer("b"), user("c"), answer("d")),
        f"{A}~hi{END}~{U}a{END}{A}~b{END}~{U}c{END}{A}~<think>\n\n</think>\n\nd{END}",
    ),
    "the system text within the first question": Case(
        GEMMA,
        of({"role": "system", "content": "s"}, user("a"), answer(" b"), user("c"), answer("d", trainable=0)),
        f"{U}s\na{END}<|im_start|>model\n~b{END}~{U}c{END}<|im_start|>model\nd{END}",
    ),
    "arguments as JSON text, which the template writes as an object": Case(
        MISTRAL,
        of(user("a"), answer("", tool_calls=[call('{"x": "\u00fc"}')]), {"role": "tool", "content": "1"}, answer("b")),
        '<s>[INST] a[/INST]~[CALLS] {"name": "f", "arguments": {"x": "\u00fc"}}</s>~[RESULT] 1[/RESULT]~ b</s>',
    ),
    "a template that always ends with a generation prompt (Llama 3's first one)": Case(
        LLAMA3_FIRST,
        of(user("a"), answer("b"), user("c"), answer("d")),
        f"<s>{head('user')}a{EOT}{head('assistant')}~b{EOT}~{head('user')}c{EOT}{head('assistant')}~d{EOT}~"
        f"{head('assistant')}",
    ),
    "two answers in a row, and always a generation prompt": Case(
        LLAMA3_FIRST,
        of(user("assistant"), answer("assistant"), answer("d", weight=0)),
        f"<s>{head('user')}assistant{EOT}{head('assistant')}~assistant{EOT}~{head('assistant')}d{EOT}"
        f"{head('assistant')}",
    ),
    "an answer first, of a template that writes no generation prompt without messages (Zephyr)": Case(
        ZEPHYR,
        of(answer("assistant"), user("a"), answer("b")),
        "<|assistant|>\n~assistant</s>\n~<|user|>\na</s>\n<|assistant|>\n~b</s>\n",
    ),
    "a null instead of a content, which the template would print": Case(
        CHATML.replace("<|im_end|>", "{{ m.tool_calls[0].function.name if m.tool_calls else '' }}<|im_end|>"),
        of(user("None?"), answer(None, tool_calls=[call({})]), {"role": "tool", "content": "1"}, answer("b")),
        f"{U}None?{END}{A}~f{END}~<|im_start|>tool\n1{END}{A}~b{END}",
    ),
    "parts of text, which the template would print as a list": Case(
        CHATML,
        of(user([{"type": "text", "text": "a"}]), answer([{"type": "text", "text": "b"}])),
        f"{U}a{END}{A}~b{END}",
    ),
    "parts of contents": Case(
        CHATML.replace("{{ m.content }}", "{% for part in m.content %}{{ part.text }}{% endfor %}"),
        of(
            user([{"type": "text", "text": "a"}]),
            answer([{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]),
        ),
        f"{U}a{END}{A}~bc{END}",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_tokens_and_masks_are_those_written_by_hand(
    library: Tokenizer, folders: dict[str, Path], tmp_path: Path, name: str, capsys
) -> None:
    case = CASES[name]
    (tmp_path / "a.jsonl").write_text(json.dumps(case.record) + "\n")
    (tmp_path / "t.jinja").write_text(case.template)
    words = ["--input", tmp_path / "a.jsonl", "--output-prefix", tmp_path / "out", "--chat-key", "messages"]
    words += ["--chat-template", tmp_path / "t.jinja", "--tokenizer-type", "HuggingFaceTokenizer", "--workers", 1]
    words += ["--tokenizer-model", folders[case.eos], *case.words]
    assert preprocess_data.main(list(map(str, words))) == 0, capsys.readouterr().err
    tokens, masks = (IndexedDataset(str(tmp_path / f"out_messages_document{end}")) for end in ("", "_loss_mask"))
    expected = tokens_of(library, [(part, number % 2 == 1) for number, part in enumerate(case.text.split("~"))])
    assert len(tokens) == 1
    assert library.decode(tokens[0].tolist(), skip_special_tokens=False) == case.text.replace("~", "")
    assert (tokens[0].tolist(), masks[0].tolist()) == expected


@pytest.mark.parametrize(
    "template, eos, prompt, ends",
    [
        (CHATML, "<|endoftext|>", f"{U}a{END}{A}", ["<|im_end|>"]),
        (CHATML, "<|im_end|>", f"{U}a{END}{A}", ["<|im_end|>"]),
        (QWEN3, "<|endoftext|>", f"{U}a{END}{A}", ["<|im_end|>"]),
        (DEEPSEEK, "<|endoftext|>", "<s><|User|>a<|Assistant|><think>\n", ["<|endoftext|>"]),
        (MISTRAL, "</s>", "<s>[INST] a[/INST]", ["</s>"]),
        (TAGGED, "<|endoftext|>", f"{U}a{END}{A}", ["<|im_end|>"]),
        (PLAIN, "</s>", "Question: a\nAnswer: ", []),
    ],
)
def test_generation_continues_the_prompt_of_training_up_to_the_end_of_a_turn(
    library: Tokenizer, folders: dict[str, Path], tmp_path: Path, template: str, eos: str, prompt: str, ends: list[str]
) -> None:
    (tmp_path / "t.jinja").write_text(template)
    words = ["--load", "x", "--chat", "--chat-template", str(tmp_path / "t.jinja"), "--prompt", "a"]
    ids, found = read_prompt(parse_options(words), HuggingFaceTokenizer(str(folders[eos])))
    assert ids == tokens_of(library, [(prompt, False)])[0]
    assert found == set(map(library.token_to_id, ends))


@pytest.mark.parametrize(
    "record, reason, problem",
    [
        (
            of(user("a"), answer(None, tool_calls=[call({})])),
            "rejected by the template",
            "does not write the tool calls",
        ),
        (of(user("a"), answer("", tool_calls=[call({})])), "rejected by the template", "does not write the tool"),
        (
            of(user("a"), answer(None, function_call={"name": "f"})),
            "rejected by the template",
            "not write the tool calls",
        ),
        (of(user("a"), answer([{"text": "b"}, {"text": "c"}])), "rejected by the template", "a list as content"),
        (of(user("a"), {"role": "assistant", "text": "b"}), "not readable", "['role', 'text']: must have role and"),
        (of(user("a"), answer(None)), "not readable", "'assistant' has no content: must be text"),
        (of(user("a"), answer("b", weight=0.3)), "not readable", "message 2 has weight 0.3: must be 0, 1"),
        (of(user("a"), answer("b", weight=0)), "without a loss because of their marks", "exclude all answers"),
        (of(user("a"), {"role": "gpt", "content": "b"}), "without an answer", "the assistant has no text"),
        (of({"role": "tool", "content": "a"}, answer("b")), "rejected by the template", "division by zero"),
    ],
)
def test_a_dropped_chat_has_a_reason(folders: dict[str, Path], record: dict, reason: str, problem: str) -> None:
    tokenizer = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(folders["</s>"])}
    template = TemplateSources(CHATML.replace("m.content", "(messages[0].role == 'tool') and 1 / 0 or m.content or ''"))
    chunk = EncodedChunk()
    line = RawDocument(Path("a.jsonl"), 7, json.dumps(record).encode())
    settings = EncodeSettings(tuple(tokenizer.items()), False, ("messages",), template)
    assert encode_chats(settings, [line], chunk=chunk) == [[], []]
    assert chunk.dropped == {reason: 1} and problem in str(chunk.bad_lines[0]) and chunk.bad_lines[0].line == 7


def test_each_turn_has_one_end_with_tokenizers_of_other_libraries(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    pieces, ranks = write_sentencepiece(tmp_path / "s.model"), write_tiktoken(tmp_path / "t.json")
    kinds = {"Llama2Tokenizer": pieces, "SentencePieceTokenizer": pieces, "TikTokenizer": ranks}
    record = of(user("the fox"), answer("the dog", weight=0), user("hello"), answer("the cat"))
    for kind, path in kinds.items():
        tokenizer = build_tokenizer(TokenizerConfig(tokenizer_type=kind, tokenizer_model=str(path)))
        fields = (("tokenizer_type", kind), ("tokenizer_model", str(path)))
        settings = EncodeSettings(fields, True, ("messages",), TemplateSources(template))
        line = RawDocument(Path("a.jsonl"), 1, json.dumps(record).encode())
        (ids,), (mask,) = encode_chats(settings, [line], chunk=EncodedChunk())
        assert mask[ids == tokenizer.eod].tolist() == [0, 0, 0, 1]
        learned = ids[mask == 1]
        expected = [*tokenizer.tokenize_piece("the cat"), tokenizer.eod, *tokenizer.tokenize_piece("\n")]
        assert learned.tolist() == expected


def test_conversations_with_tools_have_a_template_of_their_own(library: Tokenizer, folders: dict[str, Path]) -> None:
    tokenizer = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(folders["</s>"])}
    templates = TemplateSources(CHATML, "{{ tools | tojson }}" + CHATML)
    settings = EncodeSettings(tuple(tokenizer.items()), False, ("messages",), templates)
    records = [of(user("a"), answer("b")), of(user("a"), answer("b"), tools=[{"name": "f"}])]
    lines = [RawDocument(Path("a.jsonl"), 1, json.dumps(record).encode()) for record in records]
    tokens, _ = encode_chats(settings, lines, chunk=EncodedChunk())
    texts = [library.decode(one.tolist(), skip_special_tokens=False) for one in tokens]
    assert texts == [f"{U}a{END}{A}b{END}", '[{"name": "f"}]' + f"{U}a{END}{A}b{END}"]


@dataclass(frozen=True)
class Kind:
    """A template by its decisions. Each is written twice: in `jinja`, and in plain Python in `rendered`."""

    end: str  # of a turn
    newline: str  # after the end
    keeps: str  # the answers whose reasoning is kept: "all", "last" or "none"
    adds_think: bool  # an empty think block begins the last answer without reasoning
    opens_think: bool  # the generation prompt opens a think block
    trims: bool
    closes: bool  # <|endoftext|> follows the last answer, at the end
    greets: bool  # a system text is added if there is none
    has_tools: bool  # a line precedes the last question
    has_marks: bool  # {% generation %}

    def jinja(self) -> str:
        kept = {"all": "true", "last": "loop.last", "none": "false"}[self.keeps]
        content = "| trim }}" if self.trims else "}}"
        begin, end = ("{% generation %}", "{% endgeneration %}") if self.has_marks else ("", "")
        parts = [
            "{% if messages[0].role != 'system' %}<|im_start|>system-" + self.end + "{% endif %}"
            if self.greets
            else "",
            "{% set ns = namespace(asked=-1) %}{% for m in messages %}{% if m.role == 'user' %}",
            "{% set ns.asked = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}",
            "{% if loop.index0 == ns.asked %}[TOOLS]{% endif %}" if self.has_tools else "",
            "<|im_start|>{{ m.role }}{{ ':' }}{% if m.role == 'assistant' %}" + begin,
            "{% if '</think>' in m.content and " + kept + " %}",
            "<think>{{ ' ' }}{{ m.content.split('</think>')[0].split('<think>')[-1] | trim }}</think>",
            "{% elif loop.last %}<think>{{ ' ' }}</think>" if self.adds_think else "",
            "{% endif %}{{ m.content.split('</think>')[-1] " + content + self.end + end,
            "{% else %}{{ m.content "
            + content
            + self.end
            + "{% endif %}{{ "
            + json.dumps(self.newline)
            + " }}{% endfor %}",
            "{% if add_generation_prompt %}<|im_start|>assistant:" + ("<think>{{ ' ' }}" if self.opens_think else ""),
            "{% elif messages[-1].role == 'assistant' %}<|endoftext|>" if self.closes else "",
            "{% endif %}",
        ]
        return "".join(parts)

    def rendered(self, messages: list[dict[str, Any]]) -> list[tuple[str, bool]]:
        """Returns the text in pieces, each with whether it has a loss."""
        pieces = []
        if self.greets and messages[0]["role"] != "system":
            pieces.append(("<|im_start|>system-" + self.end, False))
        questions = [number for number, message in enumerate(messages) if message["role"] == "user"]
        for number, message in enumerate(messages):
            content, is_last = message["content"], number == len(messages) - 1
            if self.has_tools and questions and number == questions[-1]:
                pieces.append(("[TOOLS]", False))
            pieces.append((f"<|im_start|>{message['role']}:", False))
            if message["role"] != "assistant":
                pieces.append(((content.strip() if self.trims else content) + self.end + self.newline, False))
                continue
            reasoning, _, said = content.rpartition("</think>")
            think = ""
            if reasoning and (self.keeps == "all" or (self.keeps == "last" and is_last)):
                think = "<think> " + reasoning.removeprefix("<think>").strip() + "</think>"
            elif self.adds_think and is_last:
                think = "<think> </think>"
            has_loss = message.get("weight", 1) == 1
            if self.opens_think and not self.has_marks and think.startswith("<think> "):
                pieces.append(("<think> ", False))  # belongs to the prompt
                think = think.removeprefix("<think> ")
            pieces.append((think + (said.strip() if self.trims else said) + self.end, has_loss))
            pieces.append((self.newline, has_loss and not self.has_marks))
            if self.closes and is_last:
                pieces.append(("<|endoftext|>", has_loss and not self.has_marks))
        return pieces


# Texts of characters with which templates also write: parts of tags, blanks and line ends.
TEXTS = st.text("ab<>/[]:| \n\u00e9", min_size=1, max_size=8).filter(lambda text: text.strip())
REASONED = st.builds("<think>{}</think>{}".format, st.text("ab <\n", min_size=1, max_size=4), TEXTS)
ANSWERS = st.builds(
    lambda content, more: answer(content, **more),
    st.one_of(TEXTS, REASONED),
    st.sampled_from([{}, {}, {"weight": 1}, {"weight": 0}]),
)
TURNS = st.lists(st.tuples(st.builds(user, TEXTS), st.lists(ANSWERS, min_size=1, max_size=2)), min_size=1, max_size=3)
SYSTEM = st.lists(st.builds(lambda text: {"role": "system", "content": text}, TEXTS), max_size=1)
KINDS = st.builds(
    Kind,
    end=st.sampled_from(["<|im_end|>", "</s>", "<|eot_id|>"]),
    newline=st.sampled_from(["", "\n"]),
    keeps=st.sampled_from(["all", "last", "none"]),
    **{name: st.booleans() for name in ("adds_think", "opens_think", "trims", "closes", "greets")},
    **{name: st.booleans() for name in ("has_tools", "has_marks")},
)


@settings(max_examples=200)
@given(
    kind=KINDS,
    system=SYSTEM,
    turns=TURNS,
    last=st.lists(st.builds(user, TEXTS), max_size=1),
    ends_documents=st.booleans(),
    append_eod=st.booleans(),
)
def test_the_loss_covers_exactly_the_answers_with_each_end_once(
    library: Tokenizer,
    folders: dict[str, Path],
    kind: Kind,
    system: list[dict[str, Any]],
    turns: list[tuple[dict[str, Any], list[dict[str, Any]]]],
    last: list[dict[str, Any]],
    ends_documents: bool,
    append_eod: bool,
) -> None:
    messages = [*system, *(message for asked, answers in turns for message in (asked, *answers)), *last]
    eos = kind.end if ends_documents else "<|endoftext|>"
    pieces = kind.rendered(messages)
    text = "".join(piece for piece, _ in pieces).rstrip()
    if append_eod and not text.endswith(eos):
        assert text.endswith(SPECIAL), "every turn has an end token, so that the end of the document has no loss"
        pieces.append((eos, False))
    ids, mask = tokens_of(library, pieces)
    tokenizer = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(folders[eos])}
    encoding = EncodeSettings(tuple(tokenizer.items()), append_eod, ("messages",), TemplateSources(kind.jinja()))
    chunk = EncodedChunk()
    line = RawDocument(Path("a.jsonl"), 1, json.dumps({"messages": messages}).encode())
    tokens, masks = encode_chats(encoding, [line], chunk=chunk)
    if not any(mask):
        assert tokens == [] and chunk.dropped.total() == 1
        return
    assert not chunk.bad_lines
    assert library.decode(tokens[0].tolist(), skip_special_tokens=False) == "".join(piece for piece, _ in pieces)
    assert (tokens[0].tolist(), masks[0].tolist()) == (ids, mask)


@pytest.mark.parametrize("eos", ["<|im_end|>", "<|endoftext|>"])
@pytest.mark.parametrize("partitions", ["1", "2"])
def test_packed_chats_are_separate_also_if_the_end_of_document_ends_each_turn(
    library: Tokenizer, folders: dict[str, Path], tmp_path: Path, eos: str, partitions: str
) -> None:
    length = 128
    chats = [
        [user("a"), answer("b"), user("cc"), answer("d")],
        [user("e" * 9), answer("f")],
        [user("g"), answer("h"), user("i"), answer("j"), user("k"), answer("l")],
        [user("m" * 70), answer("n"), user("o"), answer("p" * 40)],
        [user("q"), answer("r")],
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    (tmp_path / "t.jinja").write_text(CHATML)
    words = ["--input", tmp_path / "a.jsonl", "--output-prefix", tmp_path / "out", "--chat-key", "messages"]
    words += ["--chat-template", tmp_path / "t.jinja", "--tokenizer-type", "HuggingFaceTokenizer", "--workers", 1]
    words += ["--tokenizer-model", folders[eos], "--pack-length", length, "--partitions", partitions]
    prefix = tmp_path / "out_messages_document"
    # Files of earlier data under the same name are removed if they are not written again.
    for end in (".bin", ".idx"):
        Path(f"{prefix}_document_starts{end}").touch()
    assert preprocess_data.main(list(map(str, words))) == 0
    assert Path(f"{prefix}_document_starts.bin").exists() == (eos == "<|im_end|>")

    texts = []
    for chat in chats:
        text = "".join(f"<|im_start|>{one['role']}\n{one['content']}<|im_end|>\n" for one in chat)
        text = text.removesuffix("\n") if eos == "<|im_end|>" else text + eos
        texts.append(library.encode(text, add_special_tokens=False).ids[:length])
    tokenizer = build_tokenizer(
        TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(folders[eos]))
    )
    config = GPTDatasetConfig(
        random_seed=1,
        sequence_length=length,
        blend=([str(prefix)], None),
        split="1,0,0",
        tokenizer=tokenizer,
        reset_position_ids=True,
        reset_attention_mask=True,
        eod_mask_loss=False,
        create_attention_mask=False,
        path_to_cache=str(tmp_path / "cache"),
    )
    tokens = IndexedDataset(str(prefix))
    data = GPTDataset(tokens, str(prefix), np.arange(len(tokens)), None, Split.train, config)
    seen = 0
    for number in range(len(data)):
        sample = data[number]
        borders = sample["cu_seqlens"].tolist()
        for begin, end in zip(borders, borders[1:]):
            piece = sample["tokens"][begin:end].tolist()
            assert sample["position_ids"][begin:end].tolist() == list(range(end - begin))
            is_padding = set(piece) == {library.token_to_id("<|pad|>")}
            assert is_padding or piece in texts
            seen += not is_padding
    assert len(data) == len(tokens) - 1 and seen >= 2
