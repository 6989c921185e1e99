"""What the endpoint takes and refuses, and how it says so."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dflow_trt.errors import UserError
from dflow_trt.serving.openai.errors import ApiError
from dflow_trt.serving.openai.protocol import (
    MAX_PROMPTS,
    NOT_OFFERED,
    ChatRequest,
    CompletionRequest,
    invalid,
    parse,
)

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
TEXT: dict[str, Any] = {"prompt": "hi"}


def chat(**fields: Any) -> ChatRequest:
    return parse(ChatRequest, json.dumps(CHAT | fields).encode())


def completion(**fields: Any) -> CompletionRequest:
    return parse(CompletionRequest, json.dumps(TEXT | fields).encode())


def refusal(kind: Any, body: bytes) -> dict[str, Any]:
    with pytest.raises(ApiError) as caught:
        parse(kind, body)
    assert caught.value.status == 400
    error = caught.value.body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert "\n" not in error["message"]
    return dict(error)


def test_defaults_are_those_of_openai() -> None:
    params = completion().sampling(room=100)
    assert (params.temperature, params.max_tokens, params.n, params.top_p) == (1.0, 16, 1, 1.0)
    assert chat().sampling(room=100).max_tokens == 100, "a chat goes on to the end of the context"
    assert chat(temperature=0).sampling(room=100).greedy
    assert completion().streams is None


def test_every_option_reaches_sampling() -> None:
    options = {
        "temperature": 0.5, "top_k": 7, "top_p": 0.75, "min_p": 0.125, "seed": 2**64 - 1, "n": 3, "stop": ["a", "b"],
        "stop_token_ids": [5], "ignore_eos": True, "min_tokens": 2, "max_tokens": 9, "repetition_penalty": 1.5,
        "presence_penalty": 0.5, "frequency_penalty": -0.5, "bad_words": ["x"],
    }  # fmt: skip
    params = completion(**options, logit_bias={"4": -1.5}, logprobs=3).sampling(room=100)
    for name, value in options.items():
        assert getattr(params, name) == (tuple(value) if isinstance(value, list) else value), name
    assert params.logit_bias == {4: -1.5}
    assert params.logprobs == 3


def test_chat_spells_some_options_its_own_way() -> None:
    assert chat(logprobs=True).num_logprobs() == 0
    assert chat(logprobs=True, top_logprobs=4).num_logprobs() == 4
    assert chat(logprobs=False).num_logprobs() is None
    assert chat(max_completion_tokens=5).sampling(room=100).max_tokens == 5
    assert chat(max_tokens=6).sampling(room=100).max_tokens == 6
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert chat(messages=[{"role": "user", "content": parts}]).messages[0].content == "one\ntwo"


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]]), ("", [""])],
)
def test_the_four_forms_of_a_prompt(prompt: Any, expected: Any) -> None:
    assert completion(prompt=prompt).prompt == expected


def test_what_the_official_client_sends_back_is_taken() -> None:
    """An answer's message, dumped by its object, is full of nulls."""
    from openai.types.chat import ChatCompletionMessage

    message = ChatCompletionMessage(role="assistant", content="hello").model_dump()
    assert chat(messages=[*CHAT["messages"], message]).messages[1].content == "hello"


@pytest.mark.parametrize("name", sorted(NOT_OFFERED))
def test_what_is_not_offered_is_refused_by_name_unless_it_asks_for_nothing(name: str) -> None:
    error = refusal(ChatRequest, json.dumps(CHAT | {name: {"type": "json_object"}}).encode())
    assert (error["param"], error["code"]) == (name, "unsupported_parameter")
    assert error["message"].startswith(f"{name}: this server does not offer it; ")
    for neutral in NOT_OFFERED[name]:
        chat(**{name: neutral})


USER = {"role": "user"}
REFUSED: dict[str, tuple[Any, dict[str, Any], str, str]] = {
    "unknown": (CompletionRequest, {"temprature": 1}, "temprature", "unknown_parameter"),
    "of the other endpoint": (CompletionRequest, {"messages": []}, "messages", "unknown_parameter"),
    "inside": (ChatRequest, {"stream": True, "stream_options": {"x": 1}}, "stream_options.x", "unknown_parameter"),
    "a message's": (ChatRequest, {"messages": [USER | {"content": "a", "x": 1}]}, "messages[0].x", "unknown_parameter"),
    "tool calls": (
        ChatRequest,
        {"messages": [{"role": "assistant", "content": "a", "tool_calls": [{}]}]},
        "messages[0].tool_calls",
        "unsupported_parameter",
    ),
    "no content": (ChatRequest, {"messages": [USER]}, "messages[0].content", "missing_required_parameter"),
    "null content": (ChatRequest, {"messages": [USER | {"content": None}]}, "messages[0].content", "invalid_value"),
    "an image": (
        ChatRequest,
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content",
        "invalid_value",
    ),
    "no messages": (ChatRequest, {"messages": []}, "messages", "invalid_value"),
    "no list of messages": (ChatRequest, {"messages": "hi"}, "messages", "invalid_value"),
    "a text for a number": (CompletionRequest, {"temperature": "1"}, "temperature", "invalid_value"),
    "a fraction for an integer": (CompletionRequest, {"max_tokens": 1.5}, "max_tokens", "invalid_value"),
    "true for an integer": (CompletionRequest, {"n": True}, "n", "invalid_value"),
    "stop of numbers": (CompletionRequest, {"stop": [1]}, "stop", "invalid_value"),
    "stop a number": (CompletionRequest, {"stop": 1}, "stop", "invalid_value"),
    "mixed prompts": (CompletionRequest, {"prompt": ["a", 1]}, "prompt", "invalid_value"),
    "no prompt": (CompletionRequest, {"prompt": []}, "prompt", "invalid_value"),
    "an empty id list": (CompletionRequest, {"prompt": [[]]}, "prompt", "invalid_value"),
    "true as an id": (CompletionRequest, {"prompt": [True]}, "prompt", "invalid_value"),
    "too many prompts": (CompletionRequest, {"prompt": ["a"] * (MAX_PROMPTS + 1)}, "prompt", "invalid_value"),
    "many logprobs": (CompletionRequest, {"logprobs": 21}, "logprobs", "invalid_value"),
    "many top_logprobs": (ChatRequest, {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value"),
    "top_logprobs alone": (ChatRequest, {"top_logprobs": 2}, "top_logprobs", "invalid_value"),
    "two lengths": (ChatRequest, {"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens", "invalid_value"),
    "stream_options alone": (ChatRequest, {"stream_options": {}}, "stream_options", "invalid_value"),
    "a task in prose": (ChatRequest, {"metadata": {"task": "two words"}}, "metadata", "invalid_value"),
    "metadata of numbers": (ChatRequest, {"metadata": {"task": 1}}, "metadata.task", "invalid_value"),
    "negative drafts": (ChatRequest, {"draft_tokens": -1}, "draft_tokens", "invalid_value"),
    "the template's own": (
        ChatRequest,
        {"chat_template_kwargs": {"messages": []}},
        "chat_template_kwargs",
        "invalid_value",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_wrong_is_named(case: str) -> None:
    kind, fields, param, code = REFUSED[case]
    error = refusal(kind, json.dumps((CHAT if kind is ChatRequest else TEXT) | fields).encode())
    assert (error["param"], error["code"]) == (param, code)
    assert error["message"].startswith(param)


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b'{"prompt": "\\ud800"}', b"[" * 10_000, b'{"prompt": "a",}'])
def test_what_is_no_json_is_said(body: bytes) -> None:
    error = refusal(CompletionRequest, body)
    assert error["code"] == "invalid_json"
    assert error["message"].startswith("the body is not JSON: ")


@pytest.mark.parametrize("body", [b"[]", b"1", b'"a"', b"null"])
def test_what_is_no_object_is_said(body: bytes) -> None:
    assert refusal(ChatRequest, body)["message"].startswith("the body: ")


def test_a_missing_prompt_is_named() -> None:
    assert refusal(CompletionRequest, b"{}")["message"] == "prompt: missing; give it"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1),
        ("top_p", 0),
        ("n", 0),
        ("seed", -1),
        ("max_tokens", 0),
        ("presence_penalty", 2.5),
        ("stop", ""),
    ],
)
def test_ranges_are_those_of_the_package(field: str, value: Any) -> None:
    with pytest.raises(UserError) as caught:
        completion(**{field: value}).sampling(room=10)
    error = invalid(caught.value).body["error"]
    assert error["param"] == field
    assert error["message"].startswith(f"{field} ")


def test_a_long_value_is_cut_in_the_message() -> None:
    error = refusal(CompletionRequest, json.dumps({"prompt": "a", "temperature": "x" * 10_000}).encode())
    assert len(error["message"]) < 200
