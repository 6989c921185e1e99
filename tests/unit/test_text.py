"""Tokenizer against transformers, streams against one-shot decoding, stop strings against a plain search."""

from __future__ import annotations

import itertools
import json
import time
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

from dflow_trt.errors import UserError
from dflow_trt.text import Detokenizer, StopMatcher, TextStream, Tokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog. " * 3,
    "def add(a, b):\n    return a + b\n\nprint(add(12, 30))  # 42\n",
    "Größe, naïve café, Ελληνικά, русский, 日本語のテキスト, 中文, 한국어, 🙂🚀👩‍👩‍👧",
    "User: hello there\nAssistant: hello to you\n",
]
TEMPLATE = """
{%- for message in messages %}
    {%- if message.role not in ["system", "user", "assistant", "tool"] %}
        {{- raise_exception("unknown role " + message.role) }}
    {%- endif %}
    {%- if message.tool_calls is defined %}
        {{- "<|im_start|>assistant\n" + (message.tool_calls | tojson) }}
    {%- elif message.role == "assistant" %}
        {{- "<|im_start|>assistant\n" }}{% generation %}{{ message.content }}{% endgeneration %}
    {%- else %}
        {{- "<|im_start|>" + message.role + "\n" + message.content }}
    {%- endif %}
    {{- eos_token + "\n" }}
    {%- if loop.last %}{% break %}{% endif %}
{%- endfor %}
{%- if tools %}{{ tools | tojson(indent=2) }}{% endif %}
{%- if add_generation_prompt %}
    {{- "<|im_start|>assistant\n" }}
    {%- if enable_thinking is defined and not enable_thinking %}{{ "<think></think>" }}{% endif %}
{%- endif %}
"""
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief, < & > stay."},
    {"role": "user", "content": "Größe? 🙂 <|im_end|>"},
    {"role": "assistant", "content": "  yes\n"},
    {"role": "assistant", "content": None, "tool_calls": [{"name": "f", "arguments": {"ü": "<1>"}}]},
    {"role": "user", "content": "and then", "name": None},
]


def byte_level_backend() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=480,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=SPECIAL,
    )
    backend.train_from_iterator(CORPUS * 4, trainer)
    backend.add_tokens([AddedToken("<think>", special=False), AddedToken("[a tool ☃]", special=False)])
    return backend


def save(folder: Path, backend: tokenizers.Tokenizer, template: Any = None, **config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", **config}
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pad = {"content": "<|endoftext|>", "special": True, "__type": "AddedToken"}
    return save(tmp_path_factory.mktemp("tokenizer"), byte_level_backend(), TEMPLATE, pad_token=pad)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(folder)


BYTE_LEVEL = Tokenizer(byte_level_backend(), {}, {})


def sentencepiece_style() -> Tokenizer:
    """Llama 2's arrangement: words joined by U+2581, byte fallback, the first space stripped on decoding."""
    backend = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    special = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=340, show_progress=False, special_tokens=special[:2])
    backend.train_from_iterator([text.replace(" ", "▁") for text in CORPUS[:2]], trainer)
    data = json.loads(backend.to_str())
    vocab = data["model"]["vocab"]
    vocab.update({piece: len(vocab) + i for i, piece in enumerate(special[2:])})
    return Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(data)), {}, {})


SENTENCEPIECE = sentencepiece_style()

# -- the tokenizer --


def auto_tokenizer(folder: Path) -> Any:
    transformers = pytest.importorskip("transformers", reason="compares with transformers, which is not installed")
    return transformers.AutoTokenizer.from_pretrained(str(folder))


@pytest.mark.parametrize("text", ["", " ", *CORPUS, "<|im_start|>user\nhi<|im_end|>", "a\r\n\tb  c e\u0301 \x00"])
def test_encode_and_decode_equal_transformers(folder: Path, tokenizer: Tokenizer, text: str) -> None:
    theirs = auto_tokenizer(folder)
    ids = tokenizer.encode(text)
    assert ids == theirs.encode(text)
    for skip in (True, False):
        assert tokenizer.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("options", [{}, {"enable_thinking": False}, {"tools": [{"name": "f"}], "eos_token": "!"}])
def test_chat_equals_transformers(
    folder: Path, tokenizer: Tokenizer, add_generation_prompt: bool, options: dict[str, Any]
) -> None:
    ours = tokenizer.encode_chat(MESSAGES, add_generation_prompt, **options)
    theirs = auto_tokenizer(folder).apply_chat_template(
        MESSAGES, add_generation_prompt=add_generation_prompt, return_dict=False, **options
    )
    assert ours == theirs


def test_special_tokens_that_the_tokenizer_adds_are_added_to_prompts_and_not_to_chats(tmp_path: Path) -> None:
    backend = byte_level_backend()
    backend.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    backend.enable_truncation(4)
    backend.enable_padding(length=9)
    folder = save(tmp_path, backend, "{{ messages[0].content }}", pad_token="<|endoftext|>")
    ours, theirs = Tokenizer.from_folder(folder), auto_tokenizer(folder)
    message = [{"role": "user", "content": CORPUS[0]}]
    assert ours.encode(CORPUS[0]) == theirs.encode(CORPUS[0])
    assert ours.encode_chat(message) == theirs.apply_chat_template(message, return_dict=False)
    assert ours.encode(CORPUS[0]) == [0, *ours.encode_chat(message)]


def test_a_jinja_file_comes_before_the_config(tmp_path: Path) -> None:
    folder = save(tmp_path, byte_level_backend(), "from the config")
    (folder / "chat_template.jinja").write_text("from the file {{ eos_token }}")
    assert Tokenizer.from_folder(folder).render_chat(MESSAGES) == "from the file <|im_end|>"


def test_a_list_of_templates_is_chosen_from_by_tools(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    ours = Tokenizer.from_folder(save(tmp_path, byte_level_backend(), named))
    assert ours.render_chat(MESSAGES) == "plain"
    assert ours.render_chat(MESSAGES, tools=[]) == "tools"


def test_strftime_now_is_there_and_the_sandbox_holds(tmp_path: Path) -> None:
    dated = Tokenizer.from_folder(save(tmp_path / "a", byte_level_backend(), "{{ strftime_now('%Y') }}"))
    assert dated.render_chat(MESSAGES) == time.strftime("%Y")
    escape = "{{ messages.__class__.__mro__ }}"
    with pytest.raises(UserError, match="does not take these messages: access to attribute '__class__'"):
        Tokenizer.from_folder(save(tmp_path / "b", byte_level_backend(), escape)).render_chat(MESSAGES)


def test_a_tokenizer_without_a_template_refuses_chats(tmp_path: Path) -> None:
    ours = Tokenizer.from_folder(save(tmp_path, byte_level_backend()))
    assert ours.encode("fox")
    with pytest.raises(UserError, match=r"no chat template; .* add chat_template\.jinja"):
        ours.encode_chat(MESSAGES)


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ("hello", "messages are 'hello'; allowed"),
        ([], "messages are []"),
        (None, "messages are None"),
        (["hello"], "message 0 is 'hello'; allowed: an object"),
        ([{"content": "x"}], "message 0 has the role None"),
        ([{"role": "", "content": "x"}], "message 0 has the role ''"),
        ([{"role": "user", "content": "x"}, {"role": "user"}], "message 1 has the content None"),
        ([{"role": "user", "content": 5}], "message 0 has the content 5; allowed: a string"),
        ([{"role": "user", "content": ["x"]}], "message 0 has the content ['x']"),
        ([{"role": "wizard", "content": "x"}], "does not take these messages: unknown role wizard"),
        (
            [{"role": "user", "content": [{"type": "text"}]}],
            "does not take these messages: can only concatenate",
        ),
        ([{"role": "user", "content": "\ud800"}], "a string without lone surrogates"),
    ],
)
def test_bad_messages_are_refused_in_one_line(tokenizer: Tokenizer, messages: Any, says: str) -> None:
    with pytest.raises(UserError) as caught:
        tokenizer.encode_chat(messages)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("tokenizer.json", None, "does not exist; save the tokenizer in the fast format"),
        ("tokenizer.json", b"{}", "is not a tokenizer that tokenizers"),
        ("tokenizer_config.json", b"{", "is not JSON"),
        ("tokenizer_config.json", b"[1]", r"holds \[1\]; allowed: a JSON object"),
        ("tokenizer_config.json", b'{"chat_template": [3]}', "a chat_template is 3; allowed"),
        ("chat_template.jinja", b"\xff", "is not UTF-8"),
        ("chat_template.jinja", b"{% for %}", "not valid jinja"),
    ],
)
def test_bad_files_are_refused_in_one_line(tmp_path: Path, name: str, content: bytes | None, says: str) -> None:
    folder = save(tmp_path, byte_level_backend())
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(content)
    with pytest.raises(UserError, match=says) as caught:
        Tokenizer.from_folder(folder).encode_chat(MESSAGES)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", [None, 5, ["a"], "lone \udfff"])
def test_a_prompt_that_is_not_text_is_refused(tokenizer: Tokenizer, text: Any) -> None:
    with pytest.raises(UserError, match="allowed: a string"):
        tokenizer.encode(text)


def test_byte_level_is_seen_within_a_sequence_of_decoders() -> None:
    backend = byte_level_backend()
    backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])
    ours = Tokenizer(backend, {}, {})
    assert ours.byte_level
    assert "".join(streamed(ours, ours.encode(CORPUS[2]), [1])) == CORPUS[2]


def test_size_and_token_text(tokenizer: Tokenizer) -> None:
    assert tokenizer.size == len(byte_level_backend().get_vocab()) > 400
    assert tokenizer.token_text(2) == "<|im_end|>"
    assert tokenizer.token_text(tokenizer.encode(" the")[0]) == " the"
    assert tokenizer.decode([2]) == ""
    assert tokenizer.decode([tokenizer.size + 5]) == ""


def test_bad_words_become_ids_at_line_start_and_after_a_space(tokenizer: Tokenizer) -> None:
    start, spaced = tokenizer.encode("fox"), tokenizer.encode(" fox")
    expected = (tuple(start), tuple(spaced), (1, 2))
    assert tokenizer.bad_words_ids(["fox", " fox", [1, 2]]) == expected


# -- detokenising --


def streamed(tokenizer: Tokenizer, ids: list[int], sizes: list[int], skip: bool = True) -> list[str]:
    """The deltas of ids pushed in chunks of the given sizes, over and over."""
    stream, deltas, start = Detokenizer(tokenizer, skip), [], 0
    for size in sizes * (len(ids) + 1):
        deltas.append(stream.push(ids[start : start + size]))
        start += size
        if start >= len(ids):
            break
    return [*deltas, stream.finish()]


SIZES = st.lists(st.integers(1, 5), min_size=1, max_size=4)
TEXT = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"])),
    st.sampled_from([*CORPUS, " a  b ", "\ufffd", "\ufffdx", "\ufffd" * 9]),
)


@settings(max_examples=400, deadline=None)
@given(text=TEXT, sizes=SIZES, skip=st.booleans())
def test_deltas_of_any_text_join_to_its_one_shot_decoding(text: str, sizes: list[int], skip: bool) -> None:
    ids = BYTE_LEVEL.encode(text)
    assert "".join(streamed(BYTE_LEVEL, ids, sizes, skip)) == BYTE_LEVEL.decode(ids, skip)


@settings(max_examples=400, deadline=None)
@given(ids=st.lists(st.integers(0, 490), max_size=40), sizes=SIZES, skip=st.booleans())
def test_deltas_of_any_ids_join_to_their_one_shot_decoding(ids: list[int], sizes: list[int], skip: bool) -> None:
    """Broken UTF-8, special and added tokens, ids that do not exist."""
    assert "".join(streamed(BYTE_LEVEL, ids, sizes, skip)) == BYTE_LEVEL.decode(ids, skip)


@settings(max_examples=300, deadline=None)
@given(text=TEXT, sizes=SIZES)
def test_deltas_join_where_a_tokens_text_depends_on_its_neighbours(text: str, sizes: list[int]) -> None:
    ids = SENTENCEPIECE.encode(text)
    assert not SENTENCEPIECE.byte_level
    assert "".join(streamed(SENTENCEPIECE, ids, sizes)) == SENTENCEPIECE.decode(ids)


@pytest.mark.parametrize("ours", [BYTE_LEVEL, SENTENCEPIECE], ids=["byte-level", "sentencepiece"])
def test_half_a_character_is_held_and_spaces_are_kept(ours: Tokenizer) -> None:
    text = "a 🙂 語 b"
    deltas = streamed(ours, ours.encode(text), [1])
    assert "".join(deltas) == text
    assert not any("\ufffd" in delta for delta in deltas)
    assert "🙂" in "".join(deltas[:-2])


@pytest.mark.parametrize("ours", [BYTE_LEVEL, SENTENCEPIECE], ids=["byte-level", "sentencepiece"])
def test_half_a_character_at_the_end_comes_with_finish(ours: Tokenizer) -> None:
    ids = ours.encode("x 🚀")[:-1]
    *deltas, last = streamed(ours, ids, [1])
    assert "\ufffd" not in "".join(deltas)
    assert "\ufffd" in last
    assert "".join([*deltas, last]) == ours.decode(ids)


@pytest.mark.parametrize("ours", [BYTE_LEVEL, SENTENCEPIECE], ids=["byte-level", "sentencepiece"])
@pytest.mark.parametrize("text", ["fox jumps ", "\ufffd"], ids=["words", "replacements"])
def test_the_cost_of_a_push_does_not_grow_with_the_text(ours: Tokenizer, text: str) -> None:
    decoded = 0

    class Counting(Tokenizer):
        def decode(self, ids: Any, skip_special_tokens: bool = True) -> str:
            nonlocal decoded
            decoded += len(ids)
            return ours.decode(ids, skip_special_tokens)

    ids = ours.encode(text * 500)
    stream = Detokenizer(Counting(ours._backend, {}, {}))
    assert "".join([*(stream.push([token]) for token in ids), stream.finish()]) == text * 500
    assert decoded <= 12 * len(ids)


# -- stop strings --

LETTERS = st.text("ab", max_size=30)
STOPS = st.lists(st.text("ab", min_size=1, max_size=5), max_size=3)


def pieces(text: str, cuts: list[int]) -> list[str]:
    borders = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[a:b] for a, b in itertools.pairwise(borders)]


def matched(stops: list[str], parts: list[str]) -> tuple[str, bool, str]:
    """(text emitted by pushes, stopped, text emitted by finish)."""
    matcher, emitted, stopped = StopMatcher(stops), "", False
    for part in parts:
        text, stopped = matcher.push(part)
        emitted += text
    return emitted, stopped, matcher.finish()


@settings(max_examples=500, deadline=None)
@given(text=LETTERS, stop=st.text("ab", min_size=1, max_size=5), cuts=st.lists(st.integers(0, 100), max_size=8))
def test_one_stop_string_cuts_where_find_finds_it(text: str, stop: str, cuts: list[int]) -> None:
    emitted, stopped, rest = matched([stop], pieces(text, cuts))
    at = text.find(stop)
    assert stopped == (at >= 0)
    assert emitted + rest == (text if at < 0 else text[:at])


@settings(max_examples=500, deadline=None)
@given(text=LETTERS, stops=STOPS, cuts=st.lists(st.integers(0, 100), max_size=8))
def test_of_several_the_first_to_complete_wins_whatever_the_pieces(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    emitted, stopped, rest = matched(stops, pieces(text, cuts))
    ends = [end for end in range(len(text) + 1) if text[:end].endswith(tuple(stops))]
    assert stopped == bool(ends)
    if ends:
        longest = max(len(stop) for stop in stops if text[: ends[0]].endswith(stop))
        assert (emitted, rest) == (text[: ends[0] - longest], "")
    else:
        assert emitted + rest == text


@settings(max_examples=300, deadline=None)
@given(text=LETTERS, stops=STOPS)
def test_no_more_is_held_back_than_could_become_a_stop_string(text: str, stops: list[str]) -> None:
    _, stopped, rest = matched(stops, [text])
    assert stopped or not rest or any(stop.startswith(rest) for stop in stops)


@pytest.mark.parametrize(
    ("stops", "text", "emitted"),
    [
        (["bc", "abcd"], "xabcd", "xa"),  # complete first
        (["bc", "abc"], "xabc", "x"),  # complete together: the longest
        (["ab", "abc"], "xabc", "x"),
        (["aab"], "aaaab", "aa"),
        ([], "xabc", "xabc"),
    ],
)
def test_which_stop_string_wins(stops: list[str], text: str, emitted: str) -> None:
    assert matched(stops, [text])[0] == emitted
    assert matched(stops, list(text))[0] == emitted


def test_nothing_comes_after_a_stop() -> None:
    matcher = StopMatcher("END")
    assert matcher.push("a EN") == ("a ", False)
    assert matcher.push("D b") == ("", True)
    assert matcher.push("c") == ("", True)
    assert matcher.finish() == ""


# -- both together --


@settings(max_examples=300, deadline=None)
@given(
    ids=st.lists(st.integers(0, 490), max_size=30),
    stops=st.lists(st.sampled_from(["e", " t", "ox j", "\n", "🙂", "\ufffd", "<think>"]), max_size=3),
    takes=st.lists(st.booleans(), min_size=30, max_size=30),
)
def test_a_stream_is_the_decoded_text_up_to_the_stop(ids: list[int], stops: list[str], takes: list[bool]) -> None:
    stream, taken, stopped = TextStream(BYTE_LEVEL, stops), [], False
    for token, take in zip(ids, takes, strict=False):
        stopped = stream.push(token)
        taken += [stream.take()] if take else []
        if stopped:
            break
    taken.append(stream.finish())
    emitted, found, rest = matched(stops, [BYTE_LEVEL.decode(ids)])
    assert stream.text == "".join(taken) == emitted + rest
    assert found or not stopped


def test_a_stop_string_inside_a_token_cuts_the_text_before_it(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("The quick")
    assert tokenizer.token_text(ids[-1]) == " quick"
    stream = TextStream(tokenizer, "ui")
    assert [stream.push(token) for token in ids] == [False] * (len(ids) - 1) + [True]
    assert stream.text == stream.take() == "The q"
    assert stream.finish() == stream.take() == ""


def test_a_stream_gives_back_held_text_at_the_end(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, ["dog!"])
    for token in tokenizer.encode("lazy dog"):
        assert not stream.push(token)
    assert stream.take() == "lazy "
    assert stream.finish() == "dog"
    assert stream.text == "lazy dog"


def test_a_stop_string_within_the_first_min_tokens_is_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("aXaXaXbc")
    assert len(ids) == 8
    stream = TextStream(tokenizer, ["aX", "Xaa", "c"], min_tokens=2)
    assert [stream.push(token) for token in ids[:4]] == [False, False, False, True]
    assert stream.text == "aX"


def test_a_stop_string_may_begin_within_the_first_min_tokens(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, ["aX", "XYZ"], min_tokens=2)
    assert [stream.push(token) for token in tokenizer.encode("aXYZ")] == [False, False, False, True]
    assert stream.text == "a"
    assert stream.finish() == "a"


def test_a_template_may_be_given_values_of_any_name() -> None:
    tokenizer = Tokenizer.from_folder(str(files("dflow_trt") / "example_data" / "target"))
    messages = [{"role": "user", "content": "1"}]
    assert tokenizer.encode_chat(messages, self=1, messages=2) == tokenizer.encode_chat(messages)


@pytest.mark.parametrize("text", ["1 + 2\n" * 9000, "a\u0301\u1100\u1161\u11a8" * 5000])
def test_long_texts_are_encoded_the_same_and_have_no_fewer_tokens_than_was_said(text: str) -> None:
    tokenizer = Tokenizer.from_folder(str(files("dflow_trt") / "example_data" / "target"))
    ids = tokenizer.encode(text)
    assert ids == list(tokenizer._backend.encode(text).ids)
    assert 0 < tokenizer.least_tokens(text) <= len(ids)
