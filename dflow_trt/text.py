"""Text around the token loop: tokenizer and chat template, incremental detokenising, stop strings.

Ids in, text out, on the host. The files that come with a checkpoint (``tokenizer.json``, ``tokenizer_config.json``,
``chat_template.jinja``) are read without transformers, and give the same ids and the same text as its AutoTokenizer.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import tokenizers
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from dflow_trt.errors import UserError

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_TEMPLATE_ERRORS = (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError)
_REPLACEMENT = "\ufffd"  # what decoders put for bytes that are not, or not yet, UTF-8
_LONGEST_CHARACTER = 4  # in bytes, hence in tokens of one byte each

LONG_TEXT = 2**14  # characters
SHORTENED = 4  # so many characters may become one before a text is cut into tokens (Unicode's composition)


class Tokenizer:
    """A checkpoint's tokenizer and chat template. Made by :meth:`from_folder`; immutable, shared by all requests.

    size: the largest token id + 1. special_ids: what ``skip_special_tokens`` leaves out.
    byte_level: decoding is joining the tokens' bytes (GPT-2, Llama 3, Qwen), with no context across tokens.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, special_tokens: Mapping[str, str], templates: Mapping[str, str]
    ) -> None:
        """special_tokens: texts by name (``eos_token``). templates: jinja sources by name, usually one, ``default``."""
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._special_tokens = dict(special_tokens)
        self._templates = dict(templates)
        self._compiled: dict[str, jinja2.Template] = {}
        self._bytes: dict[int, bytes] = {}  # of tokens seen
        vocabulary = backend.get_vocab(with_added_tokens=True)
        self.size = max(vocabulary.values(), default=-1) + 1
        self._longest_token = max(map(len, vocabulary), default=1)
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token for token, entry in added.items() if entry.special)
        self.byte_level = backend.decoder is not None and b'"ByteLevel"' in backend.decoder.__getstate__()

    @classmethod
    def from_folder(cls, path: str | Path) -> Tokenizer:
        """Reads a checkpoint or bundle folder. Raises UserError for a missing or malformed file."""
        folder = Path(path)
        config = _read_json(folder / "tokenizer_config.json")
        special_tokens = _special_tokens({**_read_json(folder / "special_tokens_map.json"), **config})
        return cls(_read_backend(folder / "tokenizer.json"), special_tokens, _read_templates(folder, config))

    def encode(self, text: str) -> list[int]:
        """Token ids of a plain prompt, with the special tokens that the tokenizer itself adds (often none)."""
        return self._encode(text, add_special_tokens=True)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        add_generation_prompt: bool = True,
        **template_kwargs: Any,
    ) -> list[int]:
        """Token ids of a conversation, laid out by the checkpoint's chat template.

        messages: [{"role": ..., "content": ...}, ...]. add_generation_prompt: end with the opening of the assistant's
        turn. template_kwargs: what else this template knows (``tools``, ``enable_thinking``, ...).
        Raises UserError for malformed messages, a missing template, or one that refuses the messages.
        """
        return self.encode_rendered(self.render_chat(messages, add_generation_prompt, **template_kwargs))

    def encode_rendered(self, text: str) -> list[int]:
        """Token ids of what :meth:`render_chat` gave, which has all special tokens spelled out."""
        return self._encode(text, add_special_tokens=False)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        add_generation_prompt: bool = True,
        **template_kwargs: Any,
    ) -> str:
        """The text that :meth:`encode_chat` encodes."""
        values = {"tools": None, "documents": None, **self._special_tokens, **template_kwargs}
        values |= {"messages": _checked_messages(messages), "add_generation_prompt": add_generation_prompt}
        template = self._template("tool_use" if values["tools"] is not None else "default")
        try:
            return template.render(values)
        except _TEMPLATE_ERRORS as error:
            raise UserError(f"the chat template does not take these messages: {_line(error)}") from error

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of a whole sequence. Bytes that are not UTF-8 become U+FFFD, ids beyond the vocabulary nothing."""
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def token_text(self, token: int) -> str:
        """One token by itself, for display: special tokens by name, part of a character as U+FFFD."""
        return self.decode([token], skip_special_tokens=False)

    def bad_words_ids(self, words: Sequence[str | Sequence[int]]) -> tuple[tuple[int, ...], ...]:
        """Token id sequences that spell ``words``, for ``SamplingParams.bad_words_ids``; id sequences pass through.

        A text gives two: at the start of a line, and after a space. (vLLM drops the second where its length differs.)
        """
        sequences: list[tuple[int, ...]] = []
        for word in words:
            spellings = [word.lstrip(), " " + word.lstrip()] if isinstance(word, str) else []
            sequences += [tuple(self._encode(text, add_special_tokens=False)) for text in spellings]
            sequences += [] if isinstance(word, str) else [tuple(word)]
        return tuple(dict.fromkeys(ids for ids in sequences if ids))

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token of a byte-level vocabulary stands for; none for an id that does not exist."""
        if token not in self._bytes:
            self._bytes[token] = self._spelled(token)
        return self._bytes[token]

    def _spelled(self, token: int) -> bytes:
        text = self._backend.id_to_token(token) or ""
        mapped = [_BYTE_OF_CHAR.get(char) for char in text]
        return text.encode() if None in mapped else bytes(byte for byte in mapped if byte is not None)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        if not isinstance(text, str) or not _is_unicode(text):
            raise UserError(f"the text is {_show(text)}; allowed: a string without lone surrogates")
        if len(text) < LONG_TEXT:
            return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)
        # A batch is encoded without Python's lock, so that a long text holds up nobody else.
        return list(self._backend.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids)

    def least_tokens(self, text: str) -> int:
        """A number of tokens that a text has at least; from its length alone, so much quicker than encoding it."""
        return len(text) // (SHORTENED * self._longest_token)

    def _template(self, name: str) -> jinja2.Template:
        source = self._templates.get(name, self._templates.get("default"))
        if source is None:
            raise UserError("this tokenizer has no chat template; give the prompt as text, or add chat_template.jinja")
        if source not in self._compiled:
            self._compiled[source] = _compile(source)
        return self._compiled[source]


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _read_text(path: Path) -> str | None:
    """A UTF-8 file's text; None where there is no such file."""
    try:
        return path.read_text(encoding="utf-8") if path.is_file() else None
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8: {_line(error)}") from error


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON object; {} where there is no such file."""
    text = _read_text(path)
    try:
        data = json.loads("{}" if text is None else text)
    except ValueError as error:
        raise UserError(f"{path} is not JSON: {_line(error)}") from error
    if not isinstance(data, dict):
        raise UserError(f"{path} holds {_show(data)}; allowed: a JSON object")
    return data


def _read_backend(path: Path) -> tokenizers.Tokenizer:
    if not path.is_file():
        raise UserError(f"{path} does not exist; save the tokenizer in the fast format (tokenizer.json)")
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise UserError(
            f"{path} is not a tokenizer that tokenizers {tokenizers.__version__} reads: {_line(error)}"
        ) from error


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Texts of the named special tokens, given plainly or as an added-token object with its ``content``."""
    values = {name: config.get(name) for name in SPECIAL_TOKENS}
    texts = {name: v.get("content") if isinstance(v, dict) else v for name, v in values.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _read_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """chat_template.jinja if there is one, else tokenizer_config.json's: a text, or a list of named ones."""
    value = _read_text(folder / "chat_template.jinja")
    value = config.get("chat_template") if value is None else value
    entries = (
        value if isinstance(value, list) else [{"name": "default", "template": value}] if value is not None else []
    )
    for entry in entries:
        if not isinstance(entry, dict) or not isinstance(entry.get("template"), str):
            raise UserError(
                f"{folder}: a chat_template is {_show(entry)}; allowed: text, or a list of {{name, template}}"
            )
    return {str(entry.get("name")): entry["template"] for entry in entries}


class _GenerationBlock(Extension):
    """``{% generation %}`` marks the assistant's text for training; for a prompt it is its content."""

    tags = {"generation"}  # noqa: RUF012 (jinja declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _compile(source: str) -> jinja2.Template:
    """A chat template in the sandbox that transformers gives it (utils/chat_template_utils.py)."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise UserError(f"the chat template is not valid jinja: {_line(error)}") from error


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """JSON without jinja's own HTML escapes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _checked_messages(messages: Any) -> list[dict[str, Any]]:
    """The messages as plain dicts without their null entries, as transformers passes them to a template."""
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence) or not messages:
        raise UserError(f"messages are {_show(messages)}; allowed: a non-empty list of {{role, content}}")
    return [_checked_message(index, message) for index, message in enumerate(messages)]


def _checked_message(index: int, message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise UserError(f"message {index} is {_show(message)}; allowed: an object with role and content")
    present = {key: value for key, value in message.items() if value is not None}
    if not isinstance(present.get("role"), str) or not present["role"]:
        raise UserError(f"message {index} has the role {_show(message.get('role'))}; allowed: a non-empty string")
    content = present.get("content")
    parts = isinstance(content, list) and all(isinstance(part, Mapping) for part in content)
    if not isinstance(content, str) and not parts and not (content is None and "tool_calls" in present):
        raise UserError(
            f"message {index} has the content {_show(content)}; allowed: a string or a list of content parts"
        )
    return present


def _byte_of_char() -> dict[str, int]:
    """The inverse of GPT-2's bytes_to_unicode: printable Latin-1 stands for itself, the others for 256, 257, ..."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHAR = _byte_of_char()


class Detokenizer:
    """Text of a growing id sequence, piece by piece: the pieces joined are ``tokenizer.decode`` of all ids.

    Half a character is held back until it is complete, or until :meth:`finish`. The cost of a push does not grow with
    the text.

    Byte-level vocabularies: exact for any ids, by an incremental UTF-8 decoder. Others (SentencePiece style), where a
    token's text depends on its neighbours: the tokens since the last character border are decoded with and without the
    new ones (the prefix and read offsets of vLLM and TGI). That is exact for text; an id sequence that spells no UTF-8
    may give other U+FFFD than a one-shot decode, whose look-ahead has no bound.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace") if tokenizer.byte_level else None
        self._before: list[int] = []  # decoded and emitted; context for what follows
        self._pending: list[int] = []

    def push(self, ids: Sequence[int]) -> str:
        """The text that became certain with these ids."""
        kept = [token for token in ids if token not in self._skipped and token < self._tokenizer.size]
        if self._utf8 is not None:
            return self._utf8.decode(b"".join(map(self._tokenizer.token_bytes, kept)))
        return "".join(map(self._push_in_context, kept))

    def finish(self) -> str:
        """What was held back; the end of the stream."""
        return self._utf8.decode(b"", final=True) if self._utf8 is not None else self._advance(self._pending_text())

    def _push_in_context(self, token: int) -> str:
        """Holds tokens that are bytes of an unfinished character: each of them still decodes to one U+FFFD."""
        self._pending.append(token)
        text = self._pending_text()
        unfinished = text.endswith(_REPLACEMENT) and len(text) >= len(self._pending)
        return "" if unfinished and len(self._pending) < _LONGEST_CHARACTER else self._advance(text)

    def _pending_text(self) -> str:
        before = self._tokenizer.decode(self._before, skip_special_tokens=False)
        return self._tokenizer.decode(self._before + self._pending, skip_special_tokens=False)[len(before) :]

    def _advance(self, text: str) -> str:
        self._before, self._pending = self._pending, []
        return text


class StopMatcher:
    """Finds stop strings in text that arrives in pieces, and lets through what is certainly before one.

    The stop string that is complete first wins, and among those complete at the same character the longest: the result
    of looking after every character, so it does not depend on how the text was cut into pieces. (With "bc" and "abcd",
    "xabcd" ends at "xa".) The stop string is not part of the output.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = (stops,) if isinstance(stops, str) else tuple(stops)
        self._longest_part = max(map(len, self._stops), default=1) - 1
        self._held = ""
        self._stopped = False

    def push(self, delta: str, search: bool = True) -> tuple[str, bool]:
        """(text that is safe to emit, whether a stop string has completed); nothing comes after a stop.

        search: False lets stop strings that complete within this piece pass.
        """
        if self._stopped:
            return "", True
        if not self._stops:
            return delta, False
        text = self._held + delta
        found = self._completed(text, len(self._held)) if search else []
        self._stopped = bool(found)
        safe = min(found)[1] if found else len(text) - self._held_length(text)
        self._held = "" if found else text[safe:]
        return text[:safe], self._stopped

    def _completed(self, text: str, after: int) -> list[tuple[int, int]]:
        """(end, start) of the first occurrence of each stop string that ends after the first ``after`` characters."""
        starts = [(stop, text.find(stop, max(0, after - len(stop) + 1))) for stop in self._stops]
        return [(start + len(stop), start) for stop, start in starts if start >= 0]

    def finish(self) -> str:
        """The text held back for a stop string that did not come."""
        text, self._held = self._held, ""
        return text

    def _held_length(self, text: str) -> int:
        """Length of the longest end of the text with which some stop string begins."""
        for length in range(min(self._longest_part, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0


class TextStream:
    """One request's output text: detokenising and stop strings together.

    The decoder pushes every emitted token and stops where push says so. Where a stop string completes inside a token,
    the text is cut exactly before the stop string and the token stays among the request's token ids.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[str] = (),
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
    ) -> None:
        """min_tokens: a stop string that completes within that many tokens is text like any other, as in vLLM."""
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens)
        self._matcher = StopMatcher(stops)
        self._tokens_before_stop = min_tokens
        self._parts: list[str] = []
        self._taken = 0

    def push(self, token: int) -> bool:
        """Adds one token; True when a stop string has completed with it, or did before."""
        search = self._tokens_before_stop == 0
        self._tokens_before_stop -= not search
        text, stopped = self._matcher.push(self._detokenizer.push([token]), search)
        self._parts.append(text)
        return stopped

    def take(self) -> str:
        """The safe text since the last take."""
        parts, self._taken = self._parts[self._taken :], len(self._parts)
        return "".join(parts)

    def finish(self) -> str:
        """Ends the stream; what was held back joins the text unless a stop string came. Text since the last take."""
        text, _ = self._matcher.push(self._detokenizer.finish(), search=self._tokens_before_stop == 0)
        self._parts += [text, self._matcher.finish()]
        return self.take()

    @property
    def text(self) -> str:
        """All safe text so far."""
        return "".join(self._parts)
