"""Tokenizes raw documents in chunks, on several processes. Reads and writes no files.

EncodeSettings selects the output: texts of one or several keys, or chats with their loss masks.
"""

import functools
import multiprocessing
import os
import signal
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megatron.core.datasets.indexed_dataset import DType, loss_mask_prefix
from megatron.core.datasets.table_files import Columns
from megatron.core.datasets.text_files import BadLine, RawDocument, decode_record, decode_texts
from megatron.core.tokenizers import TokenizerConfig, build_tokenizer
from megatron.core.tokenizers.chat_template import (
    ChatTemplate,
    ChatTemplateError,
    RenderedChat,
    TemplateSources,
)
from megatron.core.tokenizers.library_tokenizers import LibraryTokenizer
from megatron.core.tokenizers.tokenizer import BaseTokenizer, MarkedTokens
from megatron.tools.chat_records import ChatRecord, read_chat

CHUNK_BYTES = 256 << 10  # size of the text that a worker encodes at a time
CHUNKS_IN_FLIGHT = 4  # per worker: bounds memory, and keeps workers busy during a slow chunk
# Reasons why a chat is dropped.
UNREADABLE = "not readable"
REJECTED = "rejected by the template"
UNANSWERED = "without an answer"
UNWEIGHTED = "without a loss because of their marks"


@dataclass(frozen=True)
class EncodeSettings:
    """Settings of a worker. They are small, because they are sent with every chunk."""

    tokenizer: tuple[tuple[str, Any], ...]  # fields of the tokenizer's TokenizerConfig
    append_eod: bool
    json_keys: tuple[str, ...]
    chat_templates: TemplateSources | None = None  # if given, the only key contains chats

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the outputs, which follow the prefix: tokens of each key, or tokens and loss masks of chats."""
        documents = tuple(f"{key}_document" for key in self.json_keys)
        return documents if self.chat_templates is None else (*documents, loss_mask_prefix(documents[0]))

    @property
    def columns(self) -> Columns:
        """Table columns to read."""
        is_chat = self.chat_templates is not None
        return Columns(self.json_keys, hold_chats=is_chat, flag="--chat-key" if is_chat else "--json-keys")

    @property
    def dtypes(self) -> tuple[type[np.number], ...]:
        """Element types of the outputs in `names`."""
        tokens = DType.optimal_dtype(tokenizer_for(self.tokenizer).vocab_size)
        return tuple(np.uint8 if name.endswith("_loss_mask") else tokens for name in self.names)


@dataclass
class EncodedChunk:
    """Consecutive encoded documents: for each of the settings' names, the concatenated values and their lengths.

    dropped: number of dropped chats by reason; bad_lines contains each of them.
    """

    arrays: list[np.ndarray] = field(default_factory=list)
    lengths: list[list[int]] = field(default_factory=list)
    bad_lines: list[BadLine] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    num_bytes: int = 0
    num_tokens: int = 0


def chunks(documents: Iterable[RawDocument]) -> Iterator[list[RawDocument]]:
    """Groups the documents, in order, into lists of about 256 KiB."""
    chunk: list[RawDocument] = []
    size = 0
    for document in documents:
        chunk.append(document)
        size += len(document.data)
        if size >= CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def map_in_order(
    encode: Callable[[list[RawDocument]], EncodedChunk], items: Iterable[list[RawDocument]], *, workers: int
) -> Iterator[EncodedChunk]:
    """Applies `encode` to the items in worker processes and yields the results in the order of the items.

    Reads only a few items ahead.
    """
    if workers == 1:
        yield from map(encode, items)
        return
    fork = multiprocessing.get_context("fork")
    waiting: deque[Future[EncodedChunk]] = deque()
    with ProcessPoolExecutor(workers, mp_context=fork, initializer=follow_parent) as pool:
        for item in items:
            waiting.append(pool.submit(encode, item))
            if len(waiting) >= CHUNKS_IN_FLIGHT * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def follow_parent() -> None:
    """Makes a worker ignore signals sent to the whole job, and exit when its parent exits for any reason."""
    # Ctrl-C reaches every process of the terminal. Only the parent reacts and shuts down the pool.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=end_with_parent, daemon=True).start()


def end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "runs in a worker"
    parent.join()
    # The pool's queue never ends, because its write end is open in every worker.
    os._exit(1)


def encode_chunk(settings: EncodeSettings, documents: list[RawDocument]) -> EncodedChunk:
    """Encodes documents and drops documents without tokens. Runs in a worker."""
    chunk = EncodedChunk(num_bytes=sum(len(raw.data) for raw in documents))
    encode = encode_texts if settings.chat_templates is None else encode_chats
    for column, dtype in zip(encode(settings, documents, chunk=chunk), settings.dtypes):
        chunk.lengths.append([len(piece) for piece in column])
        chunk.arrays.append(np.concatenate(column).astype(dtype, copy=False) if column else np.empty(0, dtype))
        chunk.num_tokens += 0 if dtype is np.uint8 else len(chunk.arrays[-1])
    return chunk


def encode_texts(
    settings: EncodeSettings, documents: list[RawDocument], *, chunk: EncodedChunk
) -> list[list[np.ndarray]]:
    """Returns the tokens of each document, [L] integers, by key. Records bad and empty documents in `chunk`."""
    tokenizer = tokenizer_for(settings.tokenizer)
    rows, sources = [], []
    for raw in documents:
        texts, bad_lines = decode_texts(raw, settings.json_keys)
        chunk.bad_lines += bad_lines
        # A document without one of the texts is omitted for all keys: document i of every key is from the same line.
        if all(text.strip() for text in texts):
            rows.append(texts)
            sources.append(raw)
        elif not bad_lines:
            chunk.counts["empty"] += 1
    found = _tokenize(tokenizer, rows, sources=sources, chunk=chunk)
    end = [tokenizer.eod] if settings.append_eod else []
    dtype = DType.optimal_dtype(tokenizer.vocab_size)
    return [[np.asarray(row[i] + end, dtype=dtype) for row in found] for i in range(len(settings.json_keys))]


def _tokenize(
    tokenizer: BaseTokenizer, rows: list[list[str]], *, sources: list[RawDocument], chunk: EncodedChunk
) -> list[list[list[int]]]:
    if isinstance(tokenizer, LibraryTokenizer):
        columns = [tokenizer.tokenize_batch(texts) for texts in zip(*rows)]
        return [list(row) for row in zip(*columns)]
    found = []
    for row, raw in zip(rows, sources):
        try:
            found.append([tokenizer.tokenize(text) for text in row])
        except ValueError as error:
            chunk.bad_lines.append(BadLine(raw.path, raw.line, str(error), raw.begin))
    return found


def encode_chats(
    settings: EncodeSettings, documents: list[RawDocument], *, chunk: EncodedChunk
) -> list[list[np.ndarray]]:
    """Returns the tokens and loss masks of each chat, [L] integers. A mask is 1 for tokens of the assistant's answers.

    Chats without such a token are dropped and recorded in `chunk`, as are bad lines.
    """
    tokens, masks = [], []
    for raw in documents:
        try:
            found = _encode_chat(settings, decode_record(raw, settings.json_keys))
        except (DroppedChat, ValueError, TypeError) as error:
            chunk.dropped[_reason_of(error)] += 1
            chunk.bad_lines.append(BadLine(raw.path, raw.line, str(error), raw.begin))
            continue
        if settings.append_eod:
            found = _ended(found, tokenizer_for(settings.tokenizer))
        chunk.counts["eod inside"] += _is_split(found.ids, tokenizer_for(settings.tokenizer))
        chunk.counts["with a loss"] += sum(found.marks)
        tokens.append(np.asarray(found.ids))
        masks.append(np.asarray(found.marks))
    return [tokens, masks]


class DroppedChat(Exception):
    """Raised for a chat without a token in the loss. reason: one of the reasons above."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def _encode_chat(settings: EncodeSettings, record: dict[str, Any]) -> MarkedTokens:
    """Returns the tokens of a record's chat. Raises DroppedChat, ValueError or TypeError."""
    chat = read_chat(record, settings.json_keys[0])
    rendered = _render(template_for(settings, chat.tools), chat)
    rendered.text.encode()  # JSON may contain lone surrogates, which are not valid text
    found = tokenizer_for(settings.tokenizer).tokenize_marked(rendered.text, rendered.spans)
    # The first token has no context from which it could be predicted.
    found.marks[:1] = [False] * len(found.marks[:1])
    if not any(found.marks):
        if chat.is_excluded:
            raise DroppedChat(UNWEIGHTED, "the fields of its messages exclude all answers from the loss")
        raise DroppedChat(UNANSWERED, "the assistant has no text")
    return found


def _render(template: ChatTemplate, chat: ChatRecord) -> RenderedChat:
    """Renders a chat. Raises ChatTemplateError also for a template that does not write tool calls or parts as text."""
    chat = chat if chat.is_plain else _adapted(chat, template)
    return template.render(chat.messages, untrained=chat.untrained, tools=chat.tools)


def _adapted(chat: ChatRecord, template: ChatTemplate) -> ChatRecord:
    """Replaces values that the template would write in the notation of Python, or as JSON within JSON."""
    text = template.text(chat.messages, tools=chat.tools)
    if any(quoted in text for quoted in chat.quoted_arguments()):
        chat = chat.with_parsed_arguments()
        text = template.text(chat.messages, tools=chat.tools)
    if any(str(part) in text for part in chat.parts()):
        chat = chat.with_joined_parts()
        text = template.text(chat.messages, tools=chat.tools)
        if any(str(part) in text for part in chat.parts()):
            raise ChatTemplateError("the chat template does not support a list as content: must be text")
    if chat.has_null_content and "None" in text:
        filled = chat.with_empty_content()
        text_of_filled = template.text(filled.messages, tools=chat.tools)
        if text_of_filled.count("None") < text.count("None"):
            chat, text = filled, text_of_filled
    if chat.has_tool_calls and text == _text_without_calls(template, chat):
        raise ChatTemplateError("the chat template does not write the tool calls of this conversation")
    return chat


def _text_without_calls(template: ChatTemplate, chat: ChatRecord) -> str | None:
    try:
        return template.text(chat.without_tool_calls().messages, tools=chat.tools)
    except ChatTemplateError:
        return None


def _ended(chat: MarkedTokens, tokenizer: BaseTokenizer) -> MarkedTokens:
    """Appends the end of the document to a chat that does not end with it."""
    last = chat.ids[_length_without_blanks(chat.ids, tokenizer) - 1]
    if last == tokenizer.eod:
        return chat
    # Ends an answer that does not end with an end token itself.
    has_loss = chat.marks[-1] and last not in tokenizer.special_ids
    return MarkedTokens([*chat.ids, tokenizer.eod], [*chat.marks, has_loss])


def _is_split(ids: Sequence[int], tokenizer: BaseTokenizer) -> bool:
    """Whether a chat contains the end of a document before its end."""
    return tokenizer.eod in ids[: _length_without_blanks(ids, tokenizer) - 1]


def _length_without_blanks(ids: Sequence[int], tokenizer: BaseTokenizer) -> int:
    """Returns the number of tokens up to the last one that is not blank text. Returns 1 if all text is blank."""
    for length in range(len(ids), 1, -1):
        if ids[length - 1] in tokenizer.special_ids or tokenizer.detokenize(ids[length - 1 : length]).strip():
            return length
    return 1


def _reason_of(error: Exception) -> str:
    if isinstance(error, DroppedChat):
        return error.reason
    return REJECTED if isinstance(error, ChatTemplateError) else UNREADABLE


@functools.cache
def tokenizer_for(fields: Sequence[tuple[str, Any]]) -> BaseTokenizer:
    """Builds the tokenizer, once per process."""
    return build_tokenizer(TokenizerConfig(**dict(fields)))


def template_for(settings: EncodeSettings, tools: object = None) -> ChatTemplate:
    """Returns the template of conversations with these tools, compiled once per process."""
    assert settings.chat_templates is not None
    return _compiled(settings.chat_templates.of(tools), settings.tokenizer)


@functools.cache
def _compiled(source: str, tokenizer_fields: Sequence[tuple[str, Any]]) -> ChatTemplate:
    return ChatTemplate(source, tokenizer_for(tokenizer_fields).special_names)
