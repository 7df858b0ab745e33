"""Records of chats: fields that exclude answers from the loss, system texts, tools, and what is rejected."""

from typing import Any

import pytest

from megatron.tools.chat_records import read_chat

QUESTION = {"role": "user", "content": "q"}
ANSWER = {"role": "assistant", "content": "a"}
CALL = {"function": {"name": "f", "arguments": '{"x": 1}'}}


@pytest.mark.parametrize(
    "fields, has_loss",
    [
        ({}, True),
        ({"weight": 0}, False),
        ({"weight": 0.0}, False),
        ({"weight": 1}, True),
        ({"weight": None}, True),
        ({"train": False}, False),
        ({"training": False}, False),
        ({"loss": False}, False),
        ({"loss": True, "weight": 1}, True),
        ({"loss_scale": 0, "trainable": False}, False),
        ({"masked": True}, False),
        ({"masked": False}, True),
        ({"masked": True, "weight": 0}, False),
        ({"loss_mask": 0}, False),
        ({"loss_mask": True, "mask": None}, True),
    ],
)
def test_each_field_excludes_its_answer_alone(fields: dict[str, Any], has_loss: bool) -> None:
    chat = read_chat({"m": [QUESTION, {**ANSWER, **fields}, QUESTION, ANSWER]}, "m")
    assert (1 not in chat.untrained, 3 not in chat.untrained) == (has_loss, True)
    shared = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a", **fields}]
    assert (1 not in read_chat({"m": shared}, "m").untrained) == has_loss


@pytest.mark.parametrize(
    "record, error",
    [
        (
            {"m": [ANSWER], "chat_template_kwargs": {"thinking": 0}},
            "key 'chat_template_kwargs' is {'thinking': 0}: must",
        ),
        ({"m": [{**ANSWER, "weight": 0.5}]}, "message 1 has weight 0.5: must be 0, 1, false or true"),
        ({"m": [QUESTION, {**ANSWER, "weight": -1}]}, "message 2 has weight -1: must be 0"),
        ({"m": [{**ANSWER, "train": "false"}]}, "message 1 has train 'false': must be 0"),
        ({"m": [{**ANSWER, "weight": 0, "train": True}]}, "message 1 has weight, train that contradict"),
        ({"m": [{**ANSWER, "masked": True, "loss": True}]}, "message 1 has loss, masked that contradict"),
        ({"m": [{**QUESTION, "train": True}]}, "role 'user' has train True: only messages of the assistant"),
        ({"m": [{**ANSWER, "train_detail": [{"train": False}]}]}, "has train_detail: parts of a message cannot"),
        ({"m": [{"from": "function_call", "value": "{}"}]}, "'function_call': must be an assistant's message"),
        ({"m": [ANSWER], "system": ["s"]}, "'system' is list: must be text"),
        ({"m": [{"role": "system", "content": "s"}], "system": "t"}, "'system' and a system message"),
        ({"m": [ANSWER], "tools": "f(x)"}, "'tools' is text that is not JSON"),
        ({"m": [ANSWER], "tools": '{"name": "f"}'}, "'tools' is dict: must be a list"),
        ({"m": [{**ANSWER, "mask": True}]}, "message 1 has mask, which is ambiguous: must be loss_mask"),
        ({"m": [{**ANSWER, "loss_mask": [0, 1]}]}, "message 1 has loss_mask [0, 1]: must be 0"),
        ({"m": [ANSWER], "weight": 0.5}, "key 'weight' is 0.5: must be 0, 1, false or true"),
        ({"m": "no"}, "'m' is str: must be a list of at least one message"),
        ({"m": []}, "'m' is empty: must be a list of at least one message"),
    ],
)
def test_a_record_that_does_not_fit_names_the_field(record: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError) as found:
        read_chat(record, "m")
    assert error in str(found.value)


def test_the_system_text_of_a_record_comes_first_and_marks_keep_their_messages() -> None:
    system = {"role": "system", "content": "s"}
    chat = read_chat({"m": [QUESTION, {**ANSWER, "weight": 0}, ANSWER], "system": "s", "tools": "[{}]"}, "m")
    assert chat.messages[0] == system and chat.untrained == {0, 1, 2} and chat.tools == [{}]
    assert read_chat({"m": [system, ANSWER], "system": "s", "tools": None}, "m").messages == [system, ANSWER]
    assert read_chat({"m": [ANSWER], "system": None, "tools": ""}, "m").messages == [ANSWER]


def test_arguments_that_are_json_text_can_become_objects() -> None:
    calls = [CALL, {"name": "g", "arguments": "none"}, {"function": {"name": "h", "arguments": {}}}]
    chat = read_chat({"m": [{**ANSWER, "tool_calls": calls}]}, "m")
    assert list(chat.quoted_arguments()) == ['"{\\"x\\": 1}"']
    parsed = chat.with_parsed_arguments().messages[0]["tool_calls"]
    assert parsed == [{"function": {"name": "f", "arguments": {"x": 1}}}, *calls[1:]]
    assert chat.messages[0]["tool_calls"] == calls


@pytest.mark.parametrize(
    "messages, is_excluded",
    [
        ([QUESTION], False),
        ([QUESTION, ANSWER], False),
        ([QUESTION, {**ANSWER, "loss": False}], True),
        ([{**ANSWER, "loss": False}, ANSWER], False),
    ],
)
def test_a_chat_is_excluded_if_all_its_answers_are(messages: list[dict[str, Any]], is_excluded: bool) -> None:
    assert read_chat({"m": messages}, "m").is_excluded == is_excluded


@pytest.mark.parametrize(
    "fields, is_excluded",
    [
        ({"weight": 0}, True),
        ({"weight": 1, "train": False}, True),
        ({"loss_weight": 0.0}, True),
        ({"trainable": True}, False),
        ({"weight": "heavy", "train": None}, False),
        ({"loss": 0.0}, False),  # a measurement
    ],
)
def test_fields_of_a_record_exclude_all_its_answers(fields: dict[str, Any], is_excluded: bool) -> None:
    assert read_chat({"m": [QUESTION, ANSWER, {**ANSWER, "weight": 1}], **fields}, "m").is_excluded == is_excluded
