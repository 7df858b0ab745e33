"""Renders chats as text with Jinja templates, and determines which characters the assistant wrote.

Templates use the dialect of transformers: {% generation %} marks the assistant's text, and raise_exception() rejects a
conversation. Templates run in a sandbox. This file does not tokenize.

[Note: Answers without marks]
The text of the whole conversation is what training reads, so spans are positions in it. An answer begins after the
prompt, which is the rendering of the messages before it with the generation prompt, and ends with the rendering of the
messages up to it. Often both are prefixes of the whole text. They are not if a template renders a message differently
when others follow: it drops the reasoning of earlier answers, adds an empty think block to the last one, or writes the
tools before the last question. Only the text around a message is then comparable. A probe character inside the message
finds the message in both renderings, and from there they agree up to the end of the turn (probe in the answer), or up
to the end of the generation prompt (probe in the message before the answer). A probe is used only if the rendering
without the probe is the original one.
"""

import copy
import json
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.core.tokenizers.tokenizer import PIP_EXTRA, BaseTokenizer, NullTokenizer

# Unicode reserves these noncharacters for programs, so no text contains them.
_BEGIN, _END, _PROBE = "\ufdd0", "\ufdd1", "\ufdd2"
_GENERATION = re.compile(r"\{%([-+]?)\s*generation\s*([-+]?)%\}")
_END_GENERATION = re.compile(r"\{%([-+]?)\s*endgeneration\s*([-+]?)%\}")
_NOT_FOUND = (
    "the template renders message {number} so differently when other messages follow that its tokens cannot be "
    "identified: mark the assistant's text in the template with {{% generation %}} and {{% endgeneration %}}"
)
# Errors that expressions of a template can raise, such as 1 / 0.
_ERRORS_OF_TEMPLATES = (TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError)
# Parts of a text that are written as a whole: tags such as <|im_end|> and [/INST], and words.
_TAG = re.compile(r"<[^<>\s]*>|\[[^\[\]\s]*\]")
_WORD = re.compile(r"\w+")
# Fields of a message on which templates base decisions instead of printing them.
_NEVER_PROBED = ("role", "type", "id", "tool_call_id")
_PROBED_WORDS = 4  # last words of a text after which a probe is tried


class ChatTemplateError(ValueError):
    """Raised for an invalid template, or for a conversation that the template cannot render."""


@dataclass(frozen=True)
class RenderedChat:
    """Conversation rendered as text. spans: (begin, end) of text in the loss, in characters and in order."""

    text: str
    spans: list[tuple[int, int]]


class ChatTemplate:
    """Compiled Jinja template that renders conversations.

    names: texts of special tokens that the template may use, such as bos_token and eos_token. Raises ChatTemplateError
    if the template is not valid Jinja or the package jinja2 is missing.
    """

    def __init__(self, source: str, names: Mapping[str, str]) -> None:
        self._names = dict(names)
        self._marks_spans = _GENERATION.search(source) is not None
        self._template = _compile(source)

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, untrained: Collection[int] = (), **variables: Any
    ) -> RenderedChat:
        """Renders a conversation with the spans of the assistant's text. Raises ChatTemplateError.

        untrained: positions of messages whose text is not in the spans. variables: other inputs of the template, such
        as tools.
        """
        given = json.dumps([messages, variables], ensure_ascii=False, default=str)
        if any(mark in given for mark in (_BEGIN, _END, _PROBE)):
            raise ChatTemplateError("a message contains U+FDD0, U+FDD1 or U+FDD2, which are not characters")
        marked = _without_marks(self._marked_text(messages, variables))
        # With marks, only the extents of answers without a loss are needed.
        numbers = [
            number
            for number, message in enumerate(messages)
            if message.get("role") == "assistant" and (number in untrained) == self._marks_spans
        ]
        extents = _Extents(self, messages, variables, marked.text)
        found = _increasing([extents.of(number) for number in numbers], numbers)
        return RenderedChat(marked.text, _apart(marked.spans, found) if self._marks_spans else found)

    def text(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """Renders a conversation without spans, which is faster. Raises ChatTemplateError."""
        return self._text(messages, variables)

    def prompt(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """Renders a conversation up to the start of the next answer, as for generation. Raises ChatTemplateError."""
        return self._text(messages, {**variables, "add_generation_prompt": True})

    def after_answer(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """Returns what follows an answer to a conversation, such as an end token. Raises ChatTemplateError."""
        return self._text([*messages, {"role": "assistant", "content": _PROBE}], variables).rpartition(_PROBE)[2]

    def _text(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
        return _without_marks(self._marked_text(messages, variables)).text

    def _marked_text(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
        given = {"add_generation_prompt": False, "tools": None, "documents": None, **self._names, **variables}
        import jinja2

        try:
            text: str = self._template.render(messages=messages, **given)
        except (jinja2.TemplateError, *_ERRORS_OF_TEMPLATES) as error:
            raise ChatTemplateError(f"the chat template does not support this conversation: {error}") from error
        return text


@dataclass(frozen=True)
class _Agreement:
    """A place within a message, and where two renderings cease to agree after it: in the text, and in the other one."""

    place: int
    end: int
    other_end: int


class _Extents:
    """Finds the text of single answers within the text of a conversation. See [Note: Answers without marks]."""

    def __init__(
        self,
        template: ChatTemplate,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        text: str,
    ) -> None:
        self._template = template
        self._messages = messages
        self._variables = variables
        self._prompt_variables = {**variables, "add_generation_prompt": True}
        self._text = text
        self._constant_prompt = self._find_constant_prompt()

    def of(self, number: int) -> tuple[int, int]:
        """Returns (begin, end) of answer `number`, from the end of its prompt to the end of its turn."""
        up_to_answer, history = self._messages[: number + 1], self._messages[:number]
        behind = self._rendered(up_to_answer, self._variables)
        if behind is not None:
            behind = behind.removesuffix(self._constant_prompt)
        before = self._rendered(history, self._prompt_variables)
        if before is not None and before == self._rendered(history, self._variables):
            # The template writes a generation prompt after messages, but not here, such as after none.
            begin = self._begin_without_prompt(number)
            before = before if begin is None else self._text[:begin]
        if behind is not None and self._text.startswith(behind):
            if before is not None and behind.startswith(before):
                return len(before), len(behind)
            answer: _Agreement | None = _Agreement(len(behind) - 1, len(behind), len(behind))
        elif behind is not None:
            answer = self._agreement(number, up_to_answer, self._variables, behind)
        else:
            answer = self._agreement_after_question(number)
        begin = self._begin_without_prompt(number) if before is None else self._begin(number, before)
        if begin is None or answer is None or begin > answer.place:
            raise ChatTemplateError(_NOT_FOUND.format(number=number + 1))
        return begin, answer.end

    def _find_constant_prompt(self) -> str:
        """Returns the generation prompt of a template that always ends with one, as Llama 3's first one, or ""."""
        answer = [{"role": "assistant", "content": _PROBE}]
        text = self._rendered(answer, self._variables)
        if text is None or _PROBE not in text or text != self._rendered(answer, self._prompt_variables):
            return ""
        header, _, end = text.rpartition(_PROBE)
        prompt = end[len(end) - _agreeing(header[::-1], end[::-1]) :]
        return prompt if prompt.strip() and self._text.endswith(prompt) else ""

    def _begin(self, number: int, before: str) -> int | None:
        if self._text.startswith(before):
            return len(before)
        history = self._messages[:number]
        found = None
        for anchor in range(number - 1, -1, -1):
            found = self._agreement(anchor, history, self._prompt_variables, before)
            if found is not None:
                break
        if found is None:
            common = _agreeing(self._text, before)
            found = _Agreement(0, common, common)
        # The end of the prompt may be missing in the text, such as a think tag, but not all of the generation prompt.
        question = self._rendered(history, self._variables)
        least = len(before) if question is None else min(len(before), _agreeing(before, question) + 1)
        return found.end if found.other_end >= least else None

    def _begin_without_prompt(self, number: int) -> int | None:
        """Returns where an answer begins if the template rejects its prompt alone, which may have no question."""
        whole = self._rendered(self._messages, self._prompt_variables)
        if whole is None or not whole.startswith(self._text) or whole == self._text:
            return None
        header = whole[len(self._text) :]
        for probed in _probed(self._messages[number]):
            place = self._place(self._messages, number, probed, self._variables, self._text)
            if place is not None:
                begin = self._text.rfind(header, 0, place)
                return None if begin < 0 else begin + len(header)
        return None

    def _agreement_after_question(self, number: int) -> _Agreement | None:
        """Compares the text with answer `number` for a template that requires a question before an answer."""
        question = next((message for message in self._messages if message.get("role") == "user"), None)
        messages = [question or {}, *self._messages[: number + 1]]
        other = None if question is None else self._rendered(messages, self._variables)
        return None if other is None else self._agreement(number, messages, self._variables, other, shift=1)

    def _agreement(
        self,
        anchor: int,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        other: str,
        *,
        shift: int = 0,
    ) -> _Agreement | None:
        """Compares the text with `other`, the rendering of other messages, from a place within message `anchor`.

        shift: number of messages that precede the same ones in `other`. Returns None if message `anchor` is not found
        in both.
        """
        for probed in _probed(self._messages[anchor]):
            there = self._place(messages, anchor + shift, probed, variables, other)
            here = self._place(self._messages, anchor, probed, self._variables, self._text)
            if here is not None and there is not None:
                common = _agreeing(self._text[here:], other[there:])
                return _Agreement(here, here + common, there + common)
        return None

    def _place(
        self,
        messages: Sequence[Mapping[str, Any]],
        number: int,
        probed: Mapping[str, Any],
        variables: Mapping[str, Any],
        text: str,
    ) -> int | None:
        """Returns the last position of the probe in `text`, the rendering of the messages, or None if it is not there.

        probed: message `number` with a probe.
        """
        found = self._rendered([*messages[:number], probed, *messages[number + 1 :]], variables)
        if found is None or _PROBE not in found or found.replace(_PROBE, "") != text:
            return None
        return found.rindex(_PROBE) - found.count(_PROBE) + 1

    def _rendered(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str | None:
        try:
            return self._template._text(messages, variables)
        except ChatTemplateError:
            return None


@dataclass(frozen=True)
class TemplateSources:
    """Jinja sources of a tokenizer's chat templates. with_tools: for conversations with tools, if different."""

    default: str
    with_tools: str | None = None

    def of(self, tools: object) -> str:
        return self.default if tools is None or self.with_tools is None else self.with_tools


def find_templates(tokenizer: BaseTokenizer, path: str | None) -> TemplateSources:
    """Returns the template in the file --chat-template, or else the tokenizer's own templates.

    Raises OSError, or ValueError if there is no template or the tokenizer does not read text.
    """
    if isinstance(tokenizer, NullTokenizer):
        raise ValueError("--tokenizer-type is NullTokenizer, which reads ids: chats require a tokenizer of text")
    if path is not None:
        if not Path(path).is_file():
            raise FileNotFoundError(f"--chat-template {path} does not exist: must be a Jinja file")
        return TemplateSources(read_template(Path(path)))
    own = tokenizer.chat_templates
    if "default" not in own:
        raise ValueError(f"{tokenizer.name} has no chat template: give a Jinja file with --chat-template")
    return TemplateSources(own["default"], own.get("tool_use"))


def read_template(path: Path) -> str:
    """Reads a Jinja file. Raises OSError or ChatTemplateError."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ChatTemplateError(f"{path} is not a Jinja template: must be UTF-8 text ({error})") from error


def _compile(source: str) -> Any:
    try:
        from jinja2 import TemplateSyntaxError
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as error:
        raise ChatTemplateError(f"chat templates require the package jinja2: {PIP_EXTRA}") from error
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    # strftime_now, which some templates use if available, is omitted, because the text must not depend on the date.
    environment.globals |= {"raise_exception": _raise_exception, "assistant_text": _between_marks}
    environment.filters["tojson"] = _to_json
    marked = _GENERATION.sub(r"{%\1 call assistant_text() \2%}", source)
    try:
        return environment.from_string(_END_GENERATION.sub(r"{%\1 endcall \2%}", marked))
    except TemplateSyntaxError as error:
        raise ChatTemplateError(
            f"the chat template is not valid Jinja: {error.message} in line {error.lineno}"
        ) from error


def _raise_exception(message: str) -> str:
    raise ChatTemplateError(message)


def _between_marks(caller: Any) -> str:
    return f"{_BEGIN}{caller()}{_END}"


def _to_json(value: Any, **settings: Any) -> str:
    # Jinja's own filter escapes < and > for HTML.
    return json.dumps(value, **{"ensure_ascii": False, **settings})


def _without_marks(text: str) -> RenderedChat:
    pieces = re.split(f"({_BEGIN}|{_END})", text)
    if pieces[1::2] != [_BEGIN, _END] * (len(pieces) // 4):
        raise ChatTemplateError(
            "the template contains U+FDD0 or U+FDD1, which are not characters, or nests {% generation %} blocks"
        )
    spans = []
    begin = 0
    for number, piece in enumerate(pieces[::2]):
        if number % 2 == 1 and piece:
            spans.append((begin, begin + len(piece)))
        begin += len(piece)
    return RenderedChat("".join(pieces[::2]), spans)


def _increasing(spans: list[tuple[int, int]], numbers: Sequence[int]) -> list[tuple[int, int]]:
    for (_, end), (begin, _), number in zip(spans, spans[1:], numbers[1:]):
        if begin < end:
            raise ChatTemplateError(_NOT_FOUND.format(number=number + 1))
    return spans


def _apart(spans: list[tuple[int, int]], others: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Returns the spans that overlap none of the others. Whole spans, because a marked one may include its prompt."""
    return [
        (begin, end)
        for begin, end in spans
        if all(end <= other_begin or other_end <= begin for other_begin, other_end in others)
    ]


def _probed(message: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yields copies of a message with a probe after one of the last words of one of its texts.

    The text that a template probably writes last comes first.
    """
    order = sorted(message, key=lambda key: (key != "tool_calls", key != "content"))
    for path in [path for key in order for path in reversed(_paths_of_texts(message[key], (key,)))]:
        text = _value_at(message, path)
        ends = [found.end() for found in _WORD.finditer(text)][-_PROBED_WORDS:]
        for place in dict.fromkeys([len(text.rstrip()), *reversed(ends)]):
            yield _with_probe(message, path, place)


def _paths_of_texts(value: Any, path: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """Returns the paths of all texts in a JSON value, in order."""
    if path[-1] in _NEVER_PROBED:
        return []
    if isinstance(value, str):
        return [path]
    parts = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    return [found for key, part in parts for found in _paths_of_texts(part, (*path, key))]


def _value_at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def _with_probe(message: Mapping[str, Any], path: tuple[Any, ...], place: int) -> Mapping[str, Any]:
    probed = copy.deepcopy(dict(message))
    holder = _value_at(probed, path[:-1])
    text = holder[path[-1]]
    holder[path[-1]] = text[:place] + _PROBE + text[place:]
    return probed


def _agreeing(one: str, other: str) -> int:
    """Returns the length of the common start of two texts that ends within no tag, and not within a word of both."""
    common = len(os.path.commonprefix([one, other]))
    in_tags = min(_start_of_unit(_TAG, text, common) for text in (one, other))
    in_words = max(_start_of_unit(_WORD, text, common) for text in (one, other))
    return min(in_tags, in_words)


def _start_of_unit(unit: re.Pattern[str], text: str, place: int) -> int:
    """Returns the start of the unit that contains the characters on both sides of `place`, or `place` without one."""
    line = re.search(r"\S*\Z", text[:place])
    assert line is not None, "the pattern matches an empty text"
    for found in unit.finditer(text, line.start()):
        if found.end() > place:
            return min(found.start(), place)
    return place
