"""What a request may say: OpenAI's fields and this server's own, read strictly; anything else is refused by name.

Types are checked here. What the numbers may be is :class:`SamplingParams`' to say, as everywhere.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from dflow_trt.errors import UserError
from dflow_trt.method.sampling import NOT_OFFERED as SAMPLING_NOT_OFFERED
from dflow_trt.method.sampling import SamplingParams
from dflow_trt.serving.openai.errors import ApiError

DEFAULT_TEMPERATURE = 1.0  # OpenAI's; 0 is greedy
DEFAULT_MAX_TOKENS = 16  # OpenAI's for /v1/completions; a chat goes on to the end of the context
MAX_PROMPTS = 128  # of one request
MAX_LOGPROBS = 20  # alternatives a token, OpenAI's limit
TASK = re.compile(r"[A-Za-z0-9_.:/-]{1,64}")  # a Prometheus label: no free text

_NOTHING: tuple[Any, ...] = (None,)
# Fields of OpenAI that this server does not honour, with the values that ask for nothing.
NOT_OFFERED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(sorted(SAMPLING_NOT_OFFERED), _NOTHING),
    "audio": _NOTHING,
    "best_of": (None, 1),
    "echo": (None, False),
    "function_call": (None, "none"),
    "functions": (None, []),
    "include_obfuscation": (None, False),
    "modalities": (None, ["text"]),
    "moderation": _NOTHING,
    "parallel_tool_calls": (None, True, False),
    "prediction": _NOTHING,
    "prompt_cache_key": _NOTHING,
    "prompt_cache_options": _NOTHING,
    "prompt_cache_retention": _NOTHING,
    "reasoning_effort": _NOTHING,
    "response_format": (None, {"type": "text"}),
    "service_tier": (None, "auto", "default"),
    "store": (None, False),
    "suffix": (None, ""),
    "tool_choice": (None, "none", "auto"),
    "tools": (None, []),
    "verbosity": _NOTHING,
    "web_search_options": _NOTHING,
    # of a message, as the official client's own objects carry them
    "annotations": (None, []),
    "refusal": _NOTHING,
    "tool_calls": (None, []),
    "tool_call_id": _NOTHING,
}


class Refused(UserError):
    """A field at fault inside one object; ``rest`` says what was found and what is allowed."""

    def __init__(self, field: str, rest: str, code: str = "invalid_value") -> None:
        super().__init__(f"{field}: {rest}")
        self.field, self.rest, self.code = field, rest, code


class _Body(BaseModel):
    """A JSON object, read strictly. Fields of NOT_OFFERED may be there with a value that asks for nothing."""

    model_config = ConfigDict(extra="allow", strict=True)

    @model_validator(mode="after")
    def _refuse_the_rest(self) -> Self:
        for name, value in (self.model_extra or {}).items():
            if name not in NOT_OFFERED:
                offered = ", ".join(sorted(type(self).model_fields))
                raise Refused(name, f"unknown field; allowed here: {offered}", "unknown_parameter")
            if value not in NOT_OFFERED[name]:
                neutral = " or ".join(_shown(value) for value in NOT_OFFERED[name] if value is not None)
                allowed = f"{neutral}, or leave it out" if neutral else "leave it out"
                raise Refused(name, f"this server does not offer it; {allowed}", "unsupported_parameter")
        return self


class StreamOptions(_Body):
    """include_usage: a last chunk with the usage. continuous_usage_stats, vLLM's name: every chunk has that so far.
    include_drafts: each chunk says which text was drafted.
    """

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_drafts: bool = False


def _text_of(content: Any) -> str:
    """A message's text: a string, or text parts, joined by line ends as vLLM joins them."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise UserError(f"{_shown(content)}; allowed: a string, or a list of text parts")
    return "\n".join(map(_part_text, content))


def _part_text(part: Any) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    raise UserError(f'a part is {_shown(part)}; allowed: {{"type": "text", "text": "..."}}')


class Message(_Body):
    """One message of a conversation. Which roles there are is the chat template's to say."""

    role: Annotated[str, Field(min_length=1)]
    content: Annotated[str, BeforeValidator(_text_of)]
    name: str | None = None


def _prompts_of(value: Any) -> list[str | list[int]]:
    """The four forms of ``prompt`` as a list of texts or token id lists."""
    if isinstance(value, str) or _is_ids(value):
        return [value]
    if not isinstance(value, list) or not value or not all(isinstance(each, str) or _is_ids(each) for each in value):
        allowed = "a text, token ids, or a non-empty list of texts or of token id lists"
        raise UserError(f"{_shown(value)}; allowed: {allowed}")
    if len(value) > MAX_PROMPTS:
        raise UserError(f"a list of {len(value)}; allowed: up to {MAX_PROMPTS}, send several requests")
    return value


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(token) is int for token in value)


class GenerationRequest(_Body):
    """What both endpoints take. None is "not given", as in OpenAI's protocol."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    safety_identifier: str | None = None
    metadata: dict[str, str] | None = None
    # this server's own; vLLM's names where it has them
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    strategy: str | None = None
    draft_tokens: Annotated[int, Field(ge=0)] | None = None
    return_token_ids: bool | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise Refused("stream_options", "given without stream; allowed: only with stream true")
        if self.task is not None and not TASK.fullmatch(self.task):
            raise Refused("metadata", f"task is {_shown(self.task)}; allowed: 1 to 64 letters, digits and _.:/-")
        return self

    @property
    def task(self) -> str | None:
        """The label of this request in the metrics."""
        return (self.metadata or {}).get("task")

    @property
    def streams(self) -> StreamOptions | None:
        """How to stream, or None: one answer."""
        return (self.stream_options or StreamOptions()) if self.stream else None

    def num_logprobs(self) -> int | None:
        """Alternatives a token, or None: no log-probabilities at all."""
        raise NotImplementedError

    def sampling(self, room: int) -> SamplingParams:
        """The sampling options, all of them checked. room: tokens that the context has left behind the prompt."""
        options = {name: getattr(self, name) for name in _SAMPLING}
        options["logprobs"] = self.num_logprobs()
        options["max_tokens"] = self._max_tokens(room)
        if self.temperature is None:
            options["temperature"] = DEFAULT_TEMPERATURE
        return SamplingParams.from_dict(options)

    def _max_tokens(self, room: int) -> int:
        return DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens


_SAMPLING = (
    "temperature", "top_k", "top_p", "min_p", "seed", "n", "stop", "stop_token_ids", "ignore_eos", "min_tokens",
    "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "bad_words",
)  # fmt: skip


class CompletionRequest(GenerationRequest):
    """``POST /v1/completions``."""

    prompt: Annotated[list[str | list[int]], BeforeValidator(_prompts_of)]
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    def num_logprobs(self) -> int | None:
        return self.logprobs


class ChatRequest(GenerationRequest):
    """``POST /v1/chat/completions``."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check_chat(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise Refused("top_logprobs", "given without logprobs; allowed: only with logprobs true")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise Refused("max_tokens", "differs from max_completion_tokens; allowed: one of them")
        taken = {"messages", "add_generation_prompt", "tools", "documents"} & set(self.chat_template_kwargs or {})
        if taken:
            raise Refused("chat_template_kwargs", f"{sorted(taken)[0]} is set by this server; leave it out")
        return self

    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def _max_tokens(self, room: int) -> int:
        given = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return room if given is None else given


AnyRequest = TypeVar("AnyRequest", CompletionRequest, ChatRequest)


def parse(kind: type[AnyRequest], body: bytes) -> AnyRequest:
    """The request in a body; ApiError 400 that names the first field at fault."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise _refusal(error) from None


def _refusal(error: ValidationError) -> ApiError:
    first = error.errors(include_url=False)[0]
    place, kind = _place(first["loc"]), first["type"]
    if kind == "json_invalid":
        return ApiError(400, f"the body is not JSON: {first['ctx']['error']}", code="invalid_json")
    if kind == "missing":
        return ApiError(400, f"{place}: missing; give it", param=place, code="missing_required_parameter")
    if kind == "value_error":
        return _value_refusal(place, first["ctx"]["error"])
    where, fault = place or "the body", first["msg"][:1].lower() + first["msg"][1:]
    return ApiError(400, f"{where}: {_shown(first['input'])}; {fault}", param=place or None, code="invalid_value")


def _value_refusal(place: str, error: UserError) -> ApiError:
    """What one of our own validators refused: of a field of the object at ``place``, or the value there itself."""
    if not isinstance(error, Refused):
        return ApiError(400, f"{place}: {error}", param=place, code="invalid_value")
    name = f"{place}.{error.field}" if place else error.field
    return ApiError(400, f"{name}: {error.rest}", param=name, code=error.code)


def _place(path: Sequence[str | int]) -> str:
    """``messages[0].content`` for where pydantic found something; its notes on which form of a union it tried go."""
    steps = [step for step in path if isinstance(step, int) or re.fullmatch(r"[a-z_0-9]+", step)]
    steps = steps[:1] if steps[:1] == ["stop"] else steps
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps).removeprefix(".")


TOO_LONG = "the prompt has "  # how the package begins to say so


def invalid(error: UserError) -> ApiError:
    """What the package itself refused; its first word is the field at fault, where it is one."""
    field = re.match(r"\w+", str(error))
    param = field[0] if field is not None and field[0] in _FIELDS else None
    return ApiError(400, str(error), param=param, code="invalid_value")


def refused(error: UserError) -> ApiError:
    """The same for a whole request: a prompt that is too long has a code of its own."""
    refusal = invalid(error)
    if str(error).startswith(TOO_LONG):
        refusal.code = "context_length_exceeded"
    return refusal


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


_FIELDS = {*CompletionRequest.model_fields, *ChatRequest.model_fields}
