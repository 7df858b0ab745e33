"""Reads chats from the records of data sets: roles, the system text, tools, and which answers have a loss.

Does not render or tokenize them.
"""

import copy
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

# Alternative names of roles in data sets.
ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "observation": "tool",
}
# Fields of a message that say whether it has a loss, as OpenAI, axolotl, ms-swift, XTuner and others write them.
LOSS_FIELDS = ("weight", "train", "training", "trainable", "loss", "loss_weight", "loss_scale", "loss_mask")
# Those that also apply to a whole record. Others, such as a loss, are measurements there.
RECORD_LOSS_FIELDS = ("weight", "train", "trainable", "loss_weight")
NO_LOSS_FIELDS = ("masked",)
# A field whose values mean a loss in some data sets, and none in others.
AMBIGUOUS_LOSS_FIELD = "mask"
# Fields that select parts of a message, which are not supported.
PARTIAL_LOSS_FIELDS = ("train_detail", "training_detail")
# Fields of a message that contain calls; the second one is OpenAI's older form.
CALL_FIELDS = ("tool_calls", "function_call")
# Field of a record with inputs of the template, which are not supported. Others, such as a source, change no text.
TEMPLATE_INPUTS = "chat_template_kwargs"
# Fields that are no content: a message with only these is empty.
_NO_TEXT = ("role", *LOSS_FIELDS, *NO_LOSS_FIELDS, *PARTIAL_LOSS_FIELDS)


@dataclass(frozen=True)
class ChatRecord:
    """A conversation. untrained: positions of the answers without a loss. tools: for the template, or None."""

    messages: list[dict[str, Any]]
    untrained: frozenset[int] = frozenset()
    tools: list[Any] | None = None

    @property
    def is_excluded(self) -> bool:
        """Whether the chat has answers, but none with a loss."""
        answers = {number for number, message in enumerate(self.messages) if message["role"] == "assistant"}
        return bool(answers) and answers <= self.untrained

    @property
    def is_plain(self) -> bool:
        """Whether all contents are texts, and there are no calls."""
        return not self.has_tool_calls and all(isinstance(message["content"], str) for message in self.messages)

    @property
    def has_tool_calls(self) -> bool:
        return any(message.get(name) for message in self.messages for name in CALL_FIELDS)

    @property
    def has_null_content(self) -> bool:
        return any(message.get("content") is None for message in self.messages)

    def parts(self) -> Iterator[Any]:
        """Yields contents that are lists or objects instead of a text."""
        for message in self.messages:
            if isinstance(message.get("content"), list | dict) and message["content"]:
                yield message["content"]

    def with_joined_parts(self) -> "ChatRecord":
        """Returns the conversation with a text in place of a content that consists of a single part of text."""
        messages = [{**message} for message in self.messages]
        for message in messages:
            match message.get("content"):
                case [{"text": str(text), **others}] if others.keys() <= {"type"}:
                    message["content"] = text
        return replace(self, messages=messages)

    def quoted_arguments(self) -> Iterator[str]:
        """Yields the arguments of tool calls that are JSON text, as a template writes them that encodes them again."""
        for function in _functions_of(self.messages):
            if _parsed_arguments(function) is not None:
                yield json.dumps(function["arguments"], ensure_ascii=False)

    def with_parsed_arguments(self) -> "ChatRecord":
        """Returns the conversation with objects in place of JSON text as arguments of tool calls."""
        messages = copy.deepcopy(self.messages)
        for function in _functions_of(messages):
            arguments = _parsed_arguments(function)
            if arguments is not None:
                function["arguments"] = arguments
        return replace(self, messages=messages)

    def with_empty_content(self) -> "ChatRecord":
        """Returns the conversation with an empty text in place of a null or missing content."""
        empty = {"content": ""}
        return replace(self, messages=[one | empty if one.get("content") is None else one for one in self.messages])

    def without_tool_calls(self) -> "ChatRecord":
        kept = [{name: value for name, value in one.items() if name not in CALL_FIELDS} for one in self.messages]
        return replace(self, messages=kept)


def read_chat(record: dict[str, Any], key: str) -> ChatRecord:
    """Returns the conversation under a key of a record, with the record's `system` and `tools`.

    Raises ValueError for other contents.
    """
    if record.get(TEMPLATE_INPUTS):
        raise ValueError(
            f"key {TEMPLATE_INPUTS!r} is {str(record[TEMPLATE_INPUTS])[:80]}: must be absent, because the template "
            "would not receive it; pass a --chat-template that contains the choice"
        )
    messages = record[key]
    if not isinstance(messages, list) or not messages:
        kind = "empty" if messages == [] else type(messages).__name__
        raise ValueError(f"key {key!r} is {kind}: must be a list of at least one message")
    messages = [_message(message, key) for message in messages]
    has_loss = [_has_loss(message, number) for number, message in enumerate(messages, 1)]
    system = record.get("system")
    if not isinstance(system, str | None):
        raise ValueError(f"key 'system' is {type(system).__name__}: must be text")
    if system and messages[0] != {"role": "system", "content": system}:
        if messages[0]["role"] == "system":
            raise ValueError("key 'system' and a system message are both given: give only one of them")
        messages.insert(0, {"role": "system", "content": system})
        has_loss.insert(0, False)
    excludes_all = not _record_has_loss(record)
    untrained = frozenset(number for number, one in enumerate(has_loss) if not one or excludes_all)
    return ChatRecord(messages, untrained, _tools(record.get("tools")))


def _message(message: Any, key: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise ValueError(f"key {key!r} contains a {type(message).__name__}: must be objects with role and content")
    if "from" in message and "value" in message:
        role = message["from"]
        others = {name: value for name, value in message.items() if name not in ("from", "value")}
        role = ROLES.get(role, role) if isinstance(role, str) else role
        message = {**others, "role": role, "content": message["value"]}
    has_content = "content" in message or any(message.get(name) for name in CALL_FIELDS)
    if not isinstance(message.get("role"), str) or not has_content:
        raise ValueError(f"a message of {key!r} has the keys {sorted(message)}: must have role and content")
    if message["role"] == "function_call":
        raise ValueError("a message has the role 'function_call': must be an assistant's message with tool_calls")
    if message.get("content") is None and not any(value for name, value in message.items() if name not in _NO_TEXT):
        raise ValueError(f"a message of {key!r} with the role {message['role']!r} has no content: must be text")
    return message


def _has_loss(message: dict[str, Any], number: int) -> bool:
    """Returns whether a message has a loss. Raises ValueError if its fields contradict each other or its role."""
    for name in PARTIAL_LOSS_FIELDS:
        if message.get(name) is not None:
            raise ValueError(f"message {number} has {name}: parts of a message cannot be selected for the loss")
    if message.get(AMBIGUOUS_LOSS_FIELD) is not None:
        raise ValueError(
            f"message {number} has {AMBIGUOUS_LOSS_FIELD}, which is ambiguous: must be loss_mask (1: a loss) or masked "
            "(true: no loss)"
        )
    is_answer = message["role"] == "assistant"
    said: dict[str, bool] = {}
    for name in (*LOSS_FIELDS, *NO_LOSS_FIELDS):
        value = message.get(name)
        if value is None:
            continue
        if value not in (0, 1):  # equal to False and True, and to 0.0 and 1.0
            raise ValueError(f"message {number} has {name} {value!r}: must be 0, 1, false or true")
        said[name] = bool(value) == (name in LOSS_FIELDS)
    if len(set(said.values())) > 1:
        raise ValueError(f"message {number} has {', '.join(said)} that contradict each other: must all say the same")
    if not is_answer and True in said.values():
        raise ValueError(
            f"message {number} with the role {message['role']!r} has {next(iter(said))} {message[next(iter(said))]!r}: "
            "only messages of the assistant can have a loss"
        )
    return next(iter(said.values()), is_answer)


def _record_has_loss(record: dict[str, Any]) -> bool:
    """Whether the fields of a record leave its answers in the loss. Raises ValueError for a weight between 0 and 1."""
    values = {name: record.get(name) for name in RECORD_LOSS_FIELDS if isinstance(record.get(name), int | float)}
    for name, value in values.items():
        if value not in (0, 1):
            raise ValueError(f"key {name!r} is {value}: must be 0, 1, false or true")
    return all(values.values())


def _tools(tools: Any) -> list[Any] | None:
    """Returns the tools of a record, which may be a list or its JSON text. Raises ValueError for other values."""
    parsed = tools
    if isinstance(tools, str):
        try:
            parsed = json.loads(tools) if tools.strip() else None
        except ValueError as error:
            raise ValueError(f"key 'tools' is text that is not JSON: {error}") from error
    if not isinstance(parsed, list | None):
        raise ValueError(f"key 'tools' is {type(parsed).__name__}: must be a list of tools, or its JSON text")
    return parsed


def _functions_of(messages: list[dict[str, Any]]) -> Iterator[Any]:
    """Yields the function of each tool call, as OpenAI writes them or without the level `function`."""
    for message in messages:
        calls = message.get("tool_calls")
        for call in calls if isinstance(calls, list) else ():
            yield call.get("function", call) if isinstance(call, dict) else None


def _parsed_arguments(function: Any) -> dict[str, Any] | None:
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return None
    try:
        parsed = json.loads(function["arguments"])
    except ValueError:
        return None
    return parsed if isinstance(parsed, dict) else None
