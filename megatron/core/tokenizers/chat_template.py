"""Renders chats as text with Jinja templates, and determines which characters the assistant wrote.

Templates use the dialect of transformers: {% generation %} marks the assistant's text, and raise_exception() rejects a
conversation. Templates run in a sandbox. This file does not tokenize.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.core.tokenizers.tokenizer import PIP_EXTRA

# Unicode reserves these two noncharacters for programs, so no text contains them.
_BEGIN, _END = "\ufdd0", "\ufdd1"
_GENERATION = re.compile(r"\{%([-+]?)\s*generation\s*([-+]?)%\}")
_END_GENERATION = re.compile(r"\{%([-+]?)\s*endgeneration\s*([-+]?)%\}")
_NO_PREFIX = (
    "the template renders earlier messages differently when later ones follow, so the assistant's tokens cannot be "
    "identified: mark them in the template with {% generation %} and {% endgeneration %}"
)
# Errors that expressions of a template can raise, such as 1 / 0.
_ERRORS_OF_TEMPLATES = (TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError)


class ChatTemplateError(ValueError):
    """Raised for an invalid template, or for a conversation that the template cannot render."""


@dataclass(frozen=True)
class RenderedChat:
    """Conversation rendered as text. spans: (begin, end) of the assistant's text, in characters and in order."""

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

    def render(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> RenderedChat:
        """Renders a conversation. variables: other inputs of the template, such as tools. Raises ChatTemplateError."""
        if any(mark in json.dumps([messages, variables], ensure_ascii=False, default=str) for mark in (_BEGIN, _END)):
            raise ChatTemplateError("a message contains U+FDD0 or U+FDD1, which are not characters")
        if self._marks_spans:
            return _without_marks(self._text(messages, variables))
        text = self._text(messages, variables)
        spans = []
        for number, message in enumerate(messages):
            if message.get("role") != "assistant":
                continue
            # The text before an answer is the prompt.
            before = self._text(messages[:number], {**variables, "add_generation_prompt": True})
            behind = self._text(messages[: number + 1], variables)
            if not (text.startswith(behind) and behind.startswith(before)):
                raise ChatTemplateError(_NO_PREFIX)
            spans.append((len(before), len(behind)))
        return RenderedChat(text, spans)

    def _text(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
        given = {"add_generation_prompt": False, "tools": None, "documents": None, **self._names, **variables}
        import jinja2

        try:
            text: str = self._template.render(messages=messages, **given)
        except (jinja2.TemplateError, *_ERRORS_OF_TEMPLATES) as error:
            raise ChatTemplateError(f"the chat template does not support this conversation: {error}") from error
        return text


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
