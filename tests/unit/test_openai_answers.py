"""Jobs, tensors and answers: what goes to the model and what becomes of its responses."""

from __future__ import annotations

import dataclasses
import json
import re
from importlib.resources import files
from typing import Any

import fake
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflow_trt.bundle import Bundle
from dflow_trt.errors import UserError
from dflow_trt.method.sampling import Pick, SamplingParams
from dflow_trt.request import RequestStats
from dflow_trt.serving import tensors as t
from dflow_trt.serving.openai import translate
from dflow_trt.serving.openai.answers import Answer, ChatForm, CompletionForm, TokenTexts, Wanted
from dflow_trt.serving.openai.protocol import ChatRequest, CompletionRequest, parse
from dflow_trt.serving.openai.translate import Job, Update, feeds, fetches, updates
from dflow_trt.serving.options import StrategyChooser
from dflow_trt.text import TextStream, Tokenizer

TOKENIZER = Tokenizer.from_folder(str(files("dflow_trt") / "example_data" / "target"))


def bundle() -> Bundle:
    made = fake.make_bundle([fake.drafter_spec("dflow", 8, "after_rejection")])
    return dataclasses.replace(made, target=dataclasses.replace(made.target, vocab_size=TOKENIZER.size))


def completion(**fields: Any) -> CompletionRequest:
    return parse(CompletionRequest, json.dumps({"prompt": "13 + 17"} | fields).encode())


def jobs(asked: CompletionRequest | ChatRequest, tokenizer: Tokenizer | None = TOKENIZER) -> list[Job]:
    return translate.jobs(asked, bundle(), tokenizer, StrategyChooser(bundle(), None, {}))


def sent(job: Job) -> dict[str, list[Any]]:
    made = {tensor.name: array for tensor, array in feeds(job)}
    assert all(array.shape[0] == 1 and array.ndim == 2 for array in made.values())
    return {name: array[0].tolist() for name, array in made.items()}


def test_a_plain_request_sends_little() -> None:
    [job] = jobs(completion(temperature=0))
    ids = TOKENIZER.encode("13 + 17")
    kept = {name: values for name, values in sent(job).items() if name in ("input_ids", "max_tokens", "strategy")}
    assert kept == {"input_ids": ids, "max_tokens": [16], "strategy": [b"dflow"]}
    assert not {"seed", "stop_words", "logprobs", "draft_tokens", "logit_bias_ids"} & sent(job).keys()


def test_every_option_has_its_tensor() -> None:
    asked = completion(
        temperature=0.5, top_k=7, top_p=0.75, min_p=0.125, seed=2**64 - 1, n=3, stop=["\n\n", "漢"], stop_token_ids=[5],
        ignore_eos=True, min_tokens=2, max_tokens=9, repetition_penalty=1.5, presence_penalty=0.5, logprobs=0,
        frequency_penalty=-0.5, bad_words=["x"], logit_bias={"4": -1.5, "9": 2}, strategy="dflow-norelay",
        draft_tokens=0, stream=True, metadata={"task": "math"},
    )  # fmt: skip
    [job] = jobs(asked)
    assert job.task == "math"
    assert sent(job) | {"input_ids": []} == {
        "input_ids": [],
        "max_tokens": [9],
        "stream": [True],
        "temperature": [0.5],
        "top_k": [7],
        "top_p": [0.75],
        "min_p": [0.125],
        "seed": [2**64 - 1],
        "min_tokens": [2],
        "repetition_penalty": [1.5],
        "presence_penalty": [0.5],
        "frequency_penalty": [-0.5],
        "ignore_eos": [True],
        "stop_token_ids": [5],
        "stop_words": [b"\n\n", "漢".encode()],
        "bad_words": [b"x"],
        "logprobs": [0],
        "logit_bias_ids": [4, 9],
        "logit_bias_values": [-1.5, 2.0],
        "num_return_sequences": [3],
        "strategy": [b"dflow-norelay"],
        "draft_tokens": [0],
    }


def test_types_are_those_of_the_model() -> None:
    [job] = jobs(completion(seed=1, stop="a", logit_bias={"1": 1}))
    expected = {"BOOL": np.bool_, "INT32": np.int32, "UINT64": np.uint64, "FP32": np.float32, "STRING": np.object_}
    for tensor, array in feeds(job):
        assert array.dtype == expected[tensor.type], tensor.name


def test_a_chat_goes_through_the_template() -> None:
    asked = parse(ChatRequest, b'{"messages": [{"role": "user", "content": "13 + 17"}]}')
    [job] = jobs(asked)
    assert job.prompt_ids == TOKENIZER.encode_chat([{"role": "user", "content": "13 + 17"}])
    assert job.params.max_tokens == bundle().build.max_seq_len - len(job.prompt_ids)


def test_a_job_a_prompt() -> None:
    made = jobs(completion(prompt=[[5, 6], [7]], n=2))
    assert [list(job.prompt_ids) for job in made] == [[5, 6], [7]]
    assert [job.params.n for job in made] == [2, 2]


REFUSED = {
    "an id too large": ({"prompt": [[1], [760]]}, "prompt: token id 760; allowed: 0 to 759"),
    "a negative id": ({"prompt": [-1]}, "prompt: token id -1"),
    "an unknown strategy": ({"strategy": "magic"}, "strategy: this bundle has no 'magic'"),
    "an option out of range": ({"temperature": -1}, "temperature is -1"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_bundle_cannot_do_is_refused(case: str) -> None:
    fields, message = REFUSED[case]
    with pytest.raises(UserError, match=message.replace(".", r"\.")):
        jobs(completion(**fields))


@pytest.mark.parametrize("fields", [{"max_tokens": 2**31}, {"stop_token_ids": [1, 2**31]}, {"top_k": 2**40}])
def test_an_integer_that_the_tensor_cannot_hold_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=f"^{next(iter(fields))} is .*allowed: up to 2147483647"):
        jobs(completion(**fields))


@pytest.mark.parametrize("fields", [{"temperature": 1e-50}, {"temperature": 1e39}, {"top_p": 1e-60}, {"min_p": 1e-46}])
def test_a_number_that_would_become_another_one_in_the_tensor_is_refused(fields: dict[str, Any]) -> None:
    """0 is greedy, and inf no number at all: neither is what was asked for."""
    [(name, value)] = fields.items()
    line = f"{name} is {value}; allowed: 0, or in size 1.4e-45 to 3.4e+38, which a float32 holds"
    with pytest.raises(UserError, match=f"^{re.escape(line)}$"):
        jobs(completion(**fields))


def test_small_numbers_that_a_float32_holds_are_taken() -> None:
    [job] = jobs(completion(temperature=1e-44, logit_bias={"1": 1e-60}))
    fed = {tensor.name: float(str(array[0, 0])) for tensor, array in feeds(job) if tensor.type == "FP32"}
    assert (fed["temperature"], fed["logit_bias_values"]) == (1e-44, 0.0)


def test_a_long_prompt_is_refused_before_it_is_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tokenizer, "_encode", lambda *arguments, **options: pytest.fail("it was encoded"))
    chat = parse(ChatRequest, json.dumps({"messages": [{"role": "user", "content": "1 " * 10**6}]}).encode())
    for asked in (completion(prompt="1 " * 10**6), chat):
        with pytest.raises(UserError, match=r"^the prompt has [0-9]+ tokens or more, this server takes [0-9]+"):
            jobs(asked)


@pytest.mark.parametrize("fields", [{"stop": ["x"] * 257}, {"stop": ["x" * 1025]}, {"bad_words": ["x y"] * 300}])
def test_words_that_would_hold_up_others_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=f"^{next(iter(fields))}: .*allowed: 256 texts of up to 1024"):
        jobs(completion(**fields))


def test_without_a_tokenizer_token_ids_still_work() -> None:
    assert len(jobs(completion(prompt=[1, 2]), None)) == 1
    for asked in (completion(), completion(prompt=[1], logprobs=1), parse(ChatRequest, CHAT)):
        with pytest.raises(UserError, match="no tokenizer"):
            jobs(asked, None)


CHAT = b'{"messages": [{"role": "user", "content": "a"}]}'


# -- updates -----------------------------------------------------------------------------------------------------------


def outputs(**changed: Any) -> dict[str, np.ndarray[Any, Any]]:
    """Two sequences of 2 and 1 tokens, with two alternatives each, in one response."""
    values: dict[str, Any] = {
        "text_output": np.array([b"ab", "漢".encode()], np.object_),
        "output_ids": [5, 6, 7],
        "sequence_index": [0, 1],
        "finish_reason": np.array([b"stop", b"length"], np.object_),
        "num_accepted": [1, 0],
        "num_input_tokens": [4, 4],
        "num_output_tokens": [2, 1],
        "num_rounds": [1, 0],
        "total_draft_tokens": [7, 0],
        "total_accepted_draft_tokens": [1, 0],
        "acceptance_rate": [0.1, 0.0],
        "seed_used": np.array([9, 2**64 - 1], np.uint64),
        "cum_log_probs": [0.0, 0.0],
        "output_log_probs": [-1.0, -2.0, -3.0],
        "top_ids": [50, 51, 60, 61, 70, 71],
        "top_log_probs": [-0.5, -0.6, -0.7, -0.8, -0.9, -1.0],
    }
    return {name: np.asarray(value).reshape(1, -1) for name, value in (values | changed).items()}


def test_one_response_with_several_sequences_is_taken_apart() -> None:
    first, second = updates(outputs())
    assert first.picks == (Pick(5, -1.0, ((50, -0.5), (51, -0.6))), Pick(6, -2.0, ((60, -0.7), (61, -0.8))))
    assert second.picks == (Pick(7, -3.0, ((70, -0.9), (71, -1.0))),)
    assert (first.text, second.text) == ("ab", "漢")
    assert (first.finish_reason, second.finish_reason) == ("stop", "length")
    assert (first.index, second.index, second.seed) == (0, 1, 2**64 - 1)
    assert first.stats == RequestStats(4, 2, rounds=1, drafted=7, accepted=1, emitted=1)


def test_a_round_of_one_sequence_keeps_its_tokens() -> None:
    """There num_output_tokens counts the whole sequence so far."""
    one = {name: array[:, :1] for name, array in outputs(num_output_tokens=[30, 0]).items()}
    one |= {"output_ids": np.array([[5, 6]]), "finish_reason": np.array([[b""]], np.object_)}
    for name in ("output_log_probs", "top_ids", "top_log_probs"):
        del one[name]  # not asked for
    [update] = updates(one)
    assert update.picks == (Pick(5), Pick(6))
    assert update.finish_reason is None
    assert update.stats.emitted == 29


def test_log_probabilities_without_alternatives() -> None:
    first, second = updates(outputs(top_ids=np.empty(0, np.int32), top_log_probs=np.empty(0, np.float32)))
    assert first.picks == (Pick(5, -1.0, ()), Pick(6, -2.0, ()))
    assert second.picks == (Pick(7, -3.0, ()),)


# -- answers -----------------------------------------------------------------------------------------------------------


def update(ids: list[int], text: str, kept: int = 0, reason: str | None = None, **counts: int) -> Update:
    picks = tuple(Pick(token, -0.25, ((token, -0.25), (token + 1, -2.0))) for token in ids)
    return Update(0, text, picks, kept, reason, RequestStats(**counts), 77)


def answer(form: Any, wanted: Wanted, n: int = 1, prompts: int = 1) -> Answer:
    job = Job([1, 2, 3], SamplingParams(n=n), "dflow")
    return Answer(form, "m", "f", [job] * prompts, TOKENIZER, wanted)


CHARACTER = TOKENIZER.encode("漢")  # three tokens of a byte each


def test_chat_logprobs_have_texts_and_bytes() -> None:
    made = answer(ChatForm(), Wanted(logprobs=True))
    chunk = made.add(0, update(CHARACTER, "漢", reason="stop"))
    content = chunk["choices"][0]["logprobs"]["content"]
    assert [entry["bytes"] for entry in content] == [[byte] for byte in "漢".encode()]
    assert {entry["token"] for entry in content} == {"\ufffd"}
    assert [len(entry["top_logprobs"]) for entry in content] == [2, 2, 2]
    assert content[0]["logprob"] == -0.25
    whole = made.body()["choices"][0]
    assert whole["logprobs"]["content"] == content
    assert whole["message"]["content"] == "漢"


def test_completion_logprobs_have_offsets() -> None:
    ids = [*TOKENIZER.encode(" 13"), *CHARACTER, *TOKENIZER.encode("a)")]
    made = answer(CompletionForm(), Wanted(logprobs=True))
    logprobs = made.add(0, update(ids, " 13漢a)", reason="stop"))["choices"][0]["logprobs"]
    assert logprobs["text_offset"] == [0, 3, 3, 3, 4]
    assert logprobs["tokens"] == [" 13", "bytes:\\xe6", "bytes:\\xbc", "bytes:\\xa2", "a)"]
    assert logprobs["token_logprobs"] == [-0.25] * 5
    assert all(logprobs["top_logprobs"][i][name] == -0.25 for i, name in enumerate(logprobs["tokens"]))


def test_offsets_go_on_from_chunk_to_chunk() -> None:
    made = answer(CompletionForm(), Wanted(logprobs=True))
    offsets = []
    for token in TOKENIZER.encode("13 + 17 = 30"):
        offsets += made.add(0, update([token], ""))["choices"][0]["logprobs"]["text_offset"]
    assert offsets == sorted(offsets)
    assert offsets == made.body()["choices"][0]["logprobs"]["text_offset"]


def test_usage_sums_all_samples_and_counts_a_prompt_once() -> None:
    made = answer(CompletionForm(), Wanted(), n=2, prompts=2)
    for job in (0, 1):
        for index in (0, 1):
            counts = {"output_tokens": 10, "rounds": 3, "drafted": 21, "accepted": 6, "emitted": 9}
            made.add(job, dataclasses.replace(update([5], "x", reason="stop", **counts), index=index))
    usage = made.usage()
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (6, 40, 46)
    details = usage["completion_tokens_details"]
    assert (details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]) == (24, 60)
    assert usage["dflow"] == {
        "strategy": "dflow",
        "rounds": 12,
        "tau_emitted": 3.0,
        "tau_accepted": 2.0,
        "seeds": [77, 77],
    }
    assert [choice["index"] for choice in made.body()["choices"]] == [0, 1, 2, 3]


def test_usage_without_rounds_divides_by_nothing() -> None:
    made = answer(CompletionForm(), Wanted())
    made.add(0, update([5], "x", reason="length", output_tokens=1))
    assert made.usage()["dflow"]["tau_emitted"] == 0


def test_chunks_of_a_chat_begin_with_the_role() -> None:
    made = answer(ChatForm(), Wanted(usage=True), n=2)
    first = made.add(0, update([5], "a"))
    other = made.add(0, dataclasses.replace(update([5], "b"), index=1))
    second = made.add(0, update([6], "c", reason="stop"))
    assert first["choices"][0]["delta"] == other["choices"][0]["delta"] | {"content": "a"}
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": "a"}
    assert second["choices"][0] == {"index": 0, "delta": {"content": "c"}, "logprobs": None, "finish_reason": "stop"}
    assert first["usage"] is None
    assert first["object"] == "chat.completion.chunk"
    assert made.usage_chunk()["choices"] == []


def pieces(ids: list[int], rounds: list[int], stops: list[str]) -> tuple[list[dict[str, Any]], str]:
    """The pieces of a whole stream, made as the model makes its text; and that text."""
    stream, texts = TextStream(TOKENIZER, stops), TokenTexts(TOKENIZER)
    found, start, whole = [], 0, ""
    for number, accepted in enumerate(rounds):
        part = ids[start : start + accepted + 1]
        start += len(part)
        stopped = False
        for token in part:
            stopped = stopped or stream.push(token)
        text = stream.finish() if stopped or number == len(rounds) - 1 else stream.take()
        whole += text
        texts.push(update(part, text, accepted))
        found.append(texts.pieces(text))
        if stopped:
            break
    return [piece for pieces in found for piece in pieces], whole


@given(
    ids=st.lists(st.integers(0, TOKENIZER.size - 1), min_size=1, max_size=40),
    rounds=st.lists(st.integers(0, 6), min_size=1, max_size=12),
    stops=st.lists(st.text("0123 \n=", min_size=1, max_size=3), max_size=2),
)
def test_pieces_joined_are_the_text(ids: list[int], rounds: list[int], stops: list[str]) -> None:
    """Whatever the tokens are: half characters, specials, text held back for a stop string."""
    found, whole = pieces(ids, rounds, stops)
    assert "".join(piece["text"] for piece in found) == whole
    assert all(piece["text"] for piece in found)


def test_pieces_tell_drafted_from_own() -> None:
    ids = TOKENIZER.encode("13 + 17 = 30")
    assert len(ids) == 5
    found, _ = pieces(ids, [0, 2, 0], [])
    names = [TOKENIZER.token_text(token) for token in ids]
    assert found == [
        {"text": names[0], "drafted": False},
        {"text": names[1] + names[2], "drafted": True},
        {"text": names[3], "drafted": False},
        {"text": names[4], "drafted": False},
    ]


def test_held_back_text_keeps_its_origin() -> None:
    """A drafted token that may begin a stop string comes a round later, and is still drafted."""
    ids = TOKENIZER.encode("13 + 17")
    found, whole = pieces(ids, [0, 1, 0], [" + 18"])
    assert whole == "13 + 17"
    assert [piece["text"] for piece in found if piece["drafted"]] == [" +"]


def test_what_is_asked_for_is_what_is_read() -> None:
    names = {tensor.name for tensor in t.DFLOW.outputs}
    plain, detailed = (set(fetches(jobs(completion(**fields))[0])) for fields in ({}, {"logprobs": 1}))
    assert detailed - plain == {"output_log_probs", "top_ids", "top_log_probs"}
    assert names - detailed == {"acceptance_rate", "cum_log_probs"}
    whole = outputs()
    assert next(updates({name: whole[name] for name in detailed})).picks[0].logprob == -1.0
    assert next(updates({name: whole[name] for name in plain})).picks[0].logprob is None


def test_a_share_of_requests_goes_to_another_strategy() -> None:
    chooser = StrategyChooser(bundle(), None, {"ar": 0.5})
    chosen = [translate.jobs(completion(prompt=["a", "b"]), bundle(), TOKENIZER, chooser) for _ in range(40)]
    assert {job.strategy for made in chosen for job in made} == {"ar", "dflow"}
    assert all(made[0].strategy == made[1].strategy for made in chosen), "one answer names one strategy"
    [named] = translate.jobs(completion(strategy="dflow-norelay"), bundle(), TOKENIZER, chooser)
    assert named.strategy == "dflow-norelay"
