"""The repository in a real tritonserver: every way in, streaming, options, cancelling, many requests at once."""

from __future__ import annotations

import asyncio
import json
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from pairs import Pair
from triton_client import MODELS, Answer, ask, metrics, one, run, until
from tritonclient.grpc import InferenceServerClient as PlainClient
from tritonclient.grpc.aio import InferenceServerClient

from dflow_trt.api import LLM
from dflow_trt.method.sampling import SamplingParams
from dflow_trt.serving import tensors as t
from dflow_trt.serving.package import PackageOptions, package_bundle
from dflow_trt.serving.server import TritonServer
from dflow_trt.text import Tokenizer

FRONTS = ("ensemble", "dflow_bls")
LONG = 500  # tokens: many rounds, so that there is time to interfere


@pytest.fixture(scope="module")
def server(serve_python: Path, example: Pair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    folder = tmp_path_factory.mktemp("triton")
    package_bundle(example.bundle.path, folder / "repository", PackageOptions(threads=1, max_queue=200))
    with TritonServer(folder / "repository", python=serve_python, log=folder / "log", drain=3) as running:
        yield running


@pytest.fixture(scope="module")
def tokenizer(example: Pair) -> Tokenizer:
    assert example.bundle.tokenizer_path is not None
    return Tokenizer.from_folder(example.bundle.tokenizer_path)


@pytest.fixture(scope="module")
def texts(tokenizer: Tokenizer, example_prompts: list[dict[str, Any]]) -> list[str]:
    """Prompts with the chat template applied, as a client of the ensemble sends them."""
    return [tokenizer.render_chat(prompt["messages"]) for prompt in example_prompts]


@pytest.fixture(scope="module")
def llm(example: Pair) -> Iterator[LLM]:
    with LLM(example.bundle, threads=1) as opened:
        yield opened


def is_idle(server: TritonServer) -> bool:
    """No slot in use, nothing queued: as the metrics say, which a second thread publishes."""
    found = metrics(server)
    return found["dflow_slots_in_use"] == 0 == found["dflow_queue_length"]


# -- what is there -----------------------------------------------------------------------------------------------------


def test_models_are_ready_and_what_the_table_says(server: TritonServer) -> None:
    client = PlainClient(server.grpc_address)
    for model in t.MODELS:
        assert server.is_ready(model.name)
        reported = client.get_model_metadata(model.name)
        for tensors, found in ((model.inputs, reported.inputs), (model.outputs, reported.outputs)):
            kinds = {"STRING": "BYTES"}
            assert {tensor.name: (tensor.datatype, list(tensor.shape)) for tensor in found} == {
                tensor.name: (kinds.get(tensor.type, tensor.type), [-1, *tensor.dims]) for tensor in tensors
            }
        config = client.get_model_config(model.name).config
        assert {tensor.name for tensor in config.input if tensor.optional} == {
            tensor.name for tensor in model.inputs if tensor.optional
        }
        assert config.model_transaction_policy.decoupled == model.decoupled
    client.close()


@pytest.mark.parametrize("model", FRONTS)
def test_unary_and_stream_give_the_text_of_the_python_api(
    server: TritonServer, llm: LLM, texts: list[str], model: str
) -> None:
    [expected] = llm.generate(texts[0], SamplingParams(max_tokens=60))
    options = {"text_input": texts[0], "max_tokens": 60}
    whole = one(server, model, options)
    assert (len(whole.responses), whole.finals, whole.message) == (1, 1, None)
    streamed = one(server, model, {**options, "stream": True})
    assert len(streamed.responses) > 3
    assert streamed.finals == 1
    for answer in (whole, streamed):
        assert answer.text == expected.text
        assert answer.ids() == {0: list(expected.token_ids)}
        assert answer.last("finish_reason") == expected.finish_reason.encode()
        assert answer.last("num_input_tokens") == len(expected.prompt_token_ids)
        assert answer.last("num_output_tokens") == len(expected.token_ids)
        assert answer.last("total_accepted_draft_tokens") == expected.stats.accepted
        assert answer.last("total_draft_tokens") == expected.stats.drafted
        assert answer.last("acceptance_rate") == pytest.approx(expected.stats.accepted / expected.stats.drafted)
    assert all(response["finish_reason"] == [b""] for response in streamed.responses[:-1])
    assert whole.shapes[0]["text_output"] == [1]  # NVIDIA's clients take element 0 for the text
    assert whole.shapes[0]["sequence_index"] == [1, 1]


@pytest.mark.parametrize("model", FRONTS)
def test_the_http_endpoints(server: TritonServer, llm: LLM, texts: list[str], model: str) -> None:
    [expected] = llm.generate(texts[1], SamplingParams(max_tokens=40))
    url = f"http://{server.http_address}/v2/models/{model}/generate"
    body = {"text_input": texts[1], "max_tokens": 40, "id": "mine", "parameters": {"task": "http"}}
    answer = httpx.post(url, json=body, timeout=60)
    assert answer.status_code == 200
    assert answer.json()["text_output"] == expected.text
    assert answer.json()["id"] == "mine"
    pieces = []
    with httpx.stream("POST", f"{url}_stream", json={**body, "stream": True}, timeout=60) as stream:
        pieces = [json.loads(line.removeprefix("data: ")) for line in stream.iter_lines() if line]
    assert len(pieces) > 2
    assert "".join(piece["text_output"] for piece in pieces) == expected.text
    assert [piece["finish_reason"] for piece in pieces if piece["finish_reason"]] == ["length"]
    misspelt = httpx.post(url, json={**body, "temperatur": 1.0}, timeout=60)
    assert misspelt.status_code == 400
    assert "temperatur" in misspelt.json()["error"]


def test_samples_of_one_prompt(server: TritonServer, llm: LLM, texts: list[str]) -> None:
    params = SamplingParams(max_tokens=24, temperature=1.5, seed=5, n=3)
    [expected] = llm.generate(texts[2], params)
    options = {"text_input": texts[2], "max_tokens": 24, "temperature": 1.5, "seed": 5, "num_return_sequences": 3}
    assert len({output.token_ids for output in expected.outputs}) > 1
    for model in FRONTS:
        for stream in (False, True):
            answer = one(server, model, {**options, "stream": stream})
            assert answer.finals == 1
            assert answer.ids() == {output.index: list(output.token_ids) for output in expected.outputs}
            assert answer.texts() == {output.index: output.text for output in expected.outputs}


def test_log_probabilities(server: TritonServer, llm: LLM, texts: list[str]) -> None:
    [expected] = llm.generate(texts[3], SamplingParams(max_tokens=5, logprobs=2))
    picks = expected.logprobs
    assert picks is not None
    answer = one(server, "ensemble", {"text_input": texts[3], "max_tokens": 5, "logprobs": 2, "stream": True})
    flat = {name: [item for response in answer.responses for item in response[name]] for name in answer.responses[0]}
    assert flat["output_log_probs"] == pytest.approx([pick.logprob for pick in picks], rel=1e-5)
    assert flat["top_ids"] == [token for pick in picks for token, _ in pick.top_logprobs or ()]
    assert answer.last("cum_log_probs") == pytest.approx(sum(pick.logprob or 0 for pick in picks), rel=1e-5)
    plain = one(server, "ensemble", {"text_input": texts[3], "max_tokens": 5, "return_log_probs": True})
    assert len(plain.responses[0]["output_log_probs"]) == 5
    assert plain.responses[0]["top_ids"] == []


@pytest.mark.parametrize("model", FRONTS)
def test_the_prompt_comes_first_where_it_is_asked_for(server: TritonServer, texts: list[str], model: str) -> None:
    options = {"text_input": texts[0], "max_tokens": 12}
    plain = one(server, model, {**options, "exclude_input_in_output": True}).text
    for stream in (False, True):
        given = one(server, model, {**options, "exclude_input_in_output": False, "stream": stream})
        assert given.text == texts[0] + plain


def test_words_that_stop_and_words_that_are_banned(server: TritonServer, texts: list[str]) -> None:
    options = {"text_input": texts[0], "max_tokens": 60}
    plain = one(server, "ensemble", options).text
    stop = plain[10:14]
    stopped = one(server, "ensemble", {**options, "stop_words": [stop], "stream": True})
    assert stopped.text == plain[: plain.index(stop)]
    assert stopped.last("finish_reason") == b"stop"
    first = plain.split("\n")[0].split()[0]
    assert first not in one(server, "ensemble", {**options, "bad_words": [first]}).text


@pytest.mark.parametrize("model", FRONTS)
def test_the_smallest_temperatures_give_the_greedy_text(
    server: TritonServer, llm: LLM, texts: list[str], model: str
) -> None:
    """1e-50 is 0 as a float32; 1e-40 is none of the normal ones, and the most probable token still wins every draw."""
    [expected] = llm.generate(texts[0], SamplingParams(max_tokens=40))
    for temperature in (1e-50, 1e-40):
        url = f"http://{server.http_address}/v2/models/{model}/generate"
        body = {"text_input": texts[0], "max_tokens": 40, "temperature": temperature, "seed": 4}
        answers = [httpx.post(url, json=body, timeout=60).json()["text_output"]]
        answers.append(one(server, model, body).text)
        assert answers == [expected.text] * 2, temperature


@pytest.mark.parametrize("word", ["你好,世界", "👩‍👩‍👧‍👦 🇩🇪 e\u0301 \u202eabc", "naïve Ωμέγα"])
def test_text_beyond_ascii(server: TritonServer, llm: LLM, tokenizer: Tokenizer, word: str) -> None:
    """The prompt comes back whole, and an output of its bytes streams as it is decoded at once."""
    ids = sorted(set(tokenizer.encode(word)))
    forced = {"logit_bias_ids": ids, "logit_bias_values": [60.0] * len(ids)}
    params = SamplingParams(max_tokens=40, logit_bias=dict.fromkeys(ids, 60.0), temperature=1.0, seed=3)
    [expected] = llm.generate(word, params)
    options = {"text_input": word, "max_tokens": 40, "temperature": 1.0, "seed": 3, **forced}
    streamed = one(server, "ensemble", {**options, "stream": True})
    assert streamed.text == expected.text == one(server, "dflow_bls", options).text
    echoed = one(server, "ensemble", {**options, "exclude_input_in_output": False})
    assert echoed.text == word + expected.text


# -- what is refused ---------------------------------------------------------------------------------------------------

BAD: dict[str, dict[str, Any]] = {
    "max_tokens": {"max_tokens": 0},
    "temperature": {"temperature": -0.5},
    "top_k": {"top_k": -2},
    "top_p": {"top_p": 1.5},
    "min_p": {"min_p": -0.1},
    "min_tokens": {"min_tokens": 99},
    "repetition_penalty": {"repetition_penalty": 0.0},
    "presence_penalty": {"presence_penalty": 2.5},
    "frequency_penalty": {"frequency_penalty": -2.5},
    "num_return_sequences": {"num_return_sequences": 0},
    "stop_token_ids": {"stop_token_ids": [-1]},
    "logprobs": {"logprobs": -1},
    "logit_bias": {"logit_bias_ids": [10**6], "logit_bias_values": [1.0]},
    "logit_bias_ids": {"logit_bias_ids": [1, 2], "logit_bias_values": [1.0]},
    "embedding_bias_words": {"embedding_bias_words": ["a"]},
    "end_id": {"end_id": -2},
    "draft_tokens": {"draft_tokens": -1},
    "strategy": {"strategy": "medusa"},
    "timeout_ms": {"timeout_ms": 0},
    "beam_width": {"beam_width": 2},
    "length_penalty": {"length_penalty": 2.0},
    "return_context_logits": {"return_context_logits": True},
    "return_generation_logits": {"return_generation_logits": True},
    "return_perf_metrics": {"return_perf_metrics": True},
    "empty": {"text_input": ""},
    "tokens, this bundle takes": {"text_input": "1 + 1 = 2\n" * 300},
    "UTF-8": {"stop_words": [b"\xff"]},
}


@pytest.mark.parametrize("model", FRONTS)
def test_bad_requests_are_refused_by_name_alone(server: TritonServer, texts: list[str], model: str) -> None:
    """All of them at once, beside one good request that they must not touch."""
    good = {"text_input": texts[0], "max_tokens": 40, "stream": True}

    async def work(client: InferenceServerClient) -> tuple[Answer, list[Answer]]:
        answers = await asyncio.gather(
            ask(client, model, good),
            *(ask(client, model, {"text_input": texts[0], "max_tokens": 8, **bad}, codes=True) for bad in BAD.values()),
        )
        return answers[0], list(answers[1:])

    fine, refused = run(server, work)
    assert fine.last("finish_reason") == b"length"
    assert fine.message is None
    for name, answer in zip(BAD, refused, strict=True):
        assert answer.code == "INVALID_ARGUMENT", (name, answer.message)
        assert name in (answer.message or ""), answer.message
        assert "\n" not in (answer.message or "")
        assert answer.responses == []


def test_what_nvidias_clients_send_of_it_is_taken(server: TritonServer, texts: list[str]) -> None:
    neutral = {tensor.name: tensor.neutral for tensor in t.NOT_OFFERED}
    given = dict.fromkeys((tensor.name for tensor in t.ALWAYS_GIVEN), True)
    options = {"text_input": texts[0], "max_tokens": 8, "pad_id": 0, "stop_words": [""], **neutral, **given}
    assert one(server, "ensemble", options).message is None


def test_batches_and_unknown_tensors_are_refused(server: TritonServer, texts: list[str]) -> None:
    url = f"http://{server.http_address}/v2/models/preprocessing/infer"
    inputs = [{"name": "text_input", "shape": [2, 1], "datatype": "BYTES", "data": ["a", "b"]}]
    assert "batch-size" in httpx.post(url, json={"inputs": inputs}).json()["error"]
    inputs = [{"name": "lora_task_id", "shape": [1, 1], "datatype": "UINT64", "data": [1]}]
    assert "lora_task_id" in httpx.post(url, json={"inputs": inputs}).json()["error"]
    wide = one(server, "ensemble", {"text_input": texts[0], "max_tokens": 4, "top_k": [1, 2]})
    assert "top_k" in (wide.message or "")


# -- ending early ------------------------------------------------------------------------------------------------------


def long_request(texts: list[str], **more: Any) -> dict[str, Any]:
    return {"text_input": texts[4], "max_tokens": LONG, "ignore_eos": True, "stream": True, "strategy": "ar", **more}


@pytest.mark.parametrize("model", FRONTS)
def test_stop_ends_the_requests_of_that_id_alone(server: TritonServer, texts: list[str], model: str) -> None:
    async def work(client: InferenceServerClient) -> list[Answer]:
        running = asyncio.Event()

        async def begun(answer: Answer) -> bool:
            running.set()
            return True

        tasks = [
            asyncio.create_task(ask(client, model, long_request(texts), request_id=name, on_response=begun))
            for name in ("a", "a", "b")
        ]
        await running.wait()
        stop = await ask(client, model, {"text_input": "", "max_tokens": 1, "stop": True}, request_id="a")
        return [stop, *await asyncio.gather(*tasks)]

    stop, first, second, other = run(server, work)
    assert (stop.message, stop.finals) == (None, 1)
    for answer in (first, second):
        assert answer.last("finish_reason") == b"cancelled"
        assert answer.last("num_output_tokens") < LONG
        assert answer.finals == 1
    assert other.last("finish_reason") == b"length"
    assert other.last("num_output_tokens") == LONG


def test_a_handle_names_one_request_and_brings_errors_with_their_code(
    server: TritonServer, tokenizer: Tokenizer, texts: list[str]
) -> None:
    ids = tokenizer.encode(texts[4])
    long = {"input_ids": ids, "max_tokens": LONG, "ignore_eos": True, "stream": True, "strategy": "ar"}
    stop = {"input_ids": [0], "max_tokens": 1, "stop": True}

    async def work(client: InferenceServerClient) -> list[Answer]:
        running = asyncio.Event()

        async def begun(answer: Answer) -> bool:
            running.set()
            return True

        mine, other = (
            asyncio.create_task(
                ask(client, "dflow", long, request_id="a", parameters={"handle": handle}, on_response=begun)
            )
            for handle in ("mine", "other")
        )
        await running.wait()
        await ask(client, "dflow", stop, parameters={"handle": "mine"})
        bad = await ask(client, "dflow", {**long, "temperature": -1.0}, parameters={"handle": "bad"})
        return [await mine, await other, bad]

    mine, other, bad = run(server, work)
    assert mine.last("finish_reason") == b"cancelled"
    assert other.last("num_output_tokens") == LONG
    assert (bad.message, bad.finals, bad.last("finish_reason")) == (None, 1, b"error")
    assert bad.last("text_output") == b"INVALID_ARG: temperature is -1.0; allowed: a number >= 0"


def test_a_handle_in_use_is_refused_and_its_request_stays_watched(
    server: TritonServer, tokenizer: Tokenizer, texts: list[str]
) -> None:
    long = {"input_ids": tokenizer.encode(texts[4]), "max_tokens": LONG, "ignore_eos": True, "stream": True}
    handle = {"handle": "twice"}

    async def work(client: InferenceServerClient) -> Answer:
        begun, refused = asyncio.Event(), asyncio.Event()

        async def leave(answer: Answer) -> bool:
            begun.set()
            return not refused.is_set()

        options = {**long, "strategy": "ar"}
        first = asyncio.create_task(
            ask(client, "dflow", options, parameters={**handle, "task": "twice"}, on_response=leave)
        )
        await begun.wait()
        second = await ask(client, "dflow", options, parameters=handle)
        refused.set()
        await first
        return second

    second = run(server, work)
    assert (
        second.last("text_output") == b"INVALID_ARG: handle 'twice' is in use; allowed: one that no other request has"
    )
    assert until(lambda: counted(server, "dflow_requests_total", "twice", outcome="cancelled") == 1)


@pytest.mark.parametrize("model", ["ensemble", "dflow_bls"])
def test_a_text_that_must_be_too_long_is_refused_unread(server: TritonServer, model: str) -> None:
    answer = one(server, model, {"text_input": "1 + 2\n" * 10**6, "max_tokens": 4})
    assert answer.message is not None
    assert re.search("the prompt has [0-9]+ tokens or more, this server takes 512", answer.message)


@pytest.mark.parametrize("model", ["dflow", "dflow_bls"])
def test_a_client_that_leaves_frees_its_slot(
    server: TritonServer, tokenizer: Tokenizer, texts: list[str], model: str
) -> None:
    ids = tokenizer.encode(texts[4])
    options = long_request(texts) if model != "dflow" else {**long_request(texts), "input_ids": ids}
    if model == "dflow":
        del options["text_input"]

    async def leave(answer: Answer) -> bool:
        return len(answer.responses) < 2

    task = f"leave {model}"
    answer = one(server, model, options, on_response=leave, parameters={"task": task})
    assert len(answer.responses) == 2
    assert until(lambda: counted(server, "dflow_requests_total", task, outcome="cancelled") == 1)
    assert 0 < counted(server, "dflow_output_tokens_total", task) < LONG
    assert until(lambda: is_idle(server))


def counted(server: TritonServer, name: str, task: str, **labels: str) -> float:
    """The sum of a metric's series of one task."""
    wanted = [f'{label}="{value}"' for label, value in {"task": task, **labels}.items()]
    found = metrics(server).items()
    return sum(value for series, value in found if series.startswith(name + "{") and all(w in series for w in wanted))


KILLED_CLIENT = """
import asyncio, sys
sys.path.insert(0, sys.argv[1])
from tritonclient.grpc.aio import InferenceServerClient
from triton_client import ask

async def main():
    async def tell(answer):
        print("got", flush=True)
        return True
    async with InferenceServerClient(sys.argv[2]) as client:
        options = {"text_input": sys.argv[3], "max_tokens": 500, "ignore_eos": True, "stream": True, "strategy": "ar"}
        await asyncio.gather(*(ask(client, "dflow_bls", options, on_response=tell, parameters={"task": "killed"})
                               for _ in range(4)))

asyncio.run(main())
"""


def test_kill_9_of_a_client_frees_its_slots(server: TritonServer, texts: list[str]) -> None:
    tests = str(Path(__file__).resolve().parent.parent)
    arguments = [sys.executable, "-c", KILLED_CLIENT, tests, server.grpc_address, texts[4]]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE) as client:
        assert client.stdout is not None
        assert client.stdout.readline() == b"got\n"
        client.kill()
    assert until(lambda: counted(server, "dflow_requests_total", "killed", outcome="cancelled") == 4)
    assert until(lambda: is_idle(server))
    assert one(server, "dflow_bls", {"text_input": texts[0], "max_tokens": 8}).message is None


def test_a_request_that_takes_too_long_ends_with_what_it_has(server: TritonServer, texts: list[str]) -> None:
    answer = one(server, "ensemble", long_request(texts, timeout_ms=60))
    assert answer.last("finish_reason") == b"timeout"
    assert answer.last("num_output_tokens") < LONG
    assert answer.finals == 1


# -- many at once ------------------------------------------------------------------------------------------------------


def mixed(texts: list[str], strategies: list[str], count: int) -> list[dict[str, Any]]:
    """Ragged requests of all kinds."""
    rng = random.Random(7)
    found = []
    for i in range(count):
        options: dict[str, Any] = {"text_input": texts[i], "max_tokens": rng.randrange(4, 48)}
        options["strategy"] = strategies[i % len(strategies)]
        if i % 3 == 1:
            options |= {"temperature": 0.8, "seed": i, "top_p": 0.9}
        if i % 3 == 2:
            options |= {"temperature": 1.2, "seed": i, "top_k": 40, "repetition_penalty": 1.1}
        if i % 5 == 0:
            options["draft_tokens"] = i % 4
        found.append(options)
    return found


def test_64_streams_at_once_equal_the_python_api(
    server: TritonServer, example: Pair, llm: LLM, texts: list[str]
) -> None:
    requests = mixed(texts, list(example.bundle.strategies), 64)
    names = {"text_input", "strategy", "draft_tokens"}
    expected = [
        llm.generate(
            options["text_input"],
            SamplingParams(**{name: value for name, value in options.items() if name not in names}),
            strategy=options["strategy"],
            draft_tokens=options.get("draft_tokens"),
        )[0]
        for options in requests
    ]

    async def work(client: InferenceServerClient) -> list[Answer]:
        fronts = [FRONTS[i % 2] for i in range(len(requests))]
        pairs = zip(fronts, requests, strict=True)
        return await asyncio.gather(*(ask(client, front, {**options, "stream": True}) for front, options in pairs))

    answers = run(server, work)
    for options, answer, wanted in zip(requests, answers, expected, strict=True):
        assert answer.message is None
        assert answer.finals == 1
        assert answer.ids() == {0: list(wanted.token_ids)}, options
        assert answer.text == wanted.text


def test_500_requests_with_cancels_leave_no_slot(server: TritonServer, texts: list[str]) -> None:
    rng = random.Random(11)

    async def some(client: InferenceServerClient, number: int, gate: asyncio.Semaphore) -> Answer:
        after = rng.randrange(1, 4)

        async def leave(answer: Answer) -> bool:
            return len(answer.responses) < after

        options = {"text_input": texts[number % 200], "max_tokens": rng.randrange(1, 24), "stream": True}
        async with gate:
            if number % 4 == 0:
                return await ask(client, "dflow_bls", options, on_response=leave)
            if number % 4 == 1:
                task = asyncio.create_task(ask(client, "dflow_bls", options))
                await asyncio.sleep(rng.random() / 20)
                task.cancel()
                return await task
            return await ask(client, "dflow_bls", options)

    async def work(client: InferenceServerClient) -> list[Answer]:
        gate = asyncio.Semaphore(48)
        return await asyncio.gather(*(some(client, number, gate) for number in range(500)))

    answers = run(server, work)
    for number, answer in enumerate(answers):
        if number % 4 > 1:
            assert (answer.message, answer.finals) == (None, 1)
    assert until(lambda: is_idle(server))
    assert one(server, "ensemble", {"text_input": texts[0], "max_tokens": 8}).message is None


def test_the_log_has_no_prompt(server: TritonServer, texts: list[str]) -> None:
    one(server, "ensemble", {"text_input": "a secret of mine", "max_tokens": 4, "temperature": -1.0})
    assert server.log is not None
    log = server.log.read_text(encoding="utf-8", errors="replace")
    assert "secret" not in log
    assert texts[0].split("\n")[1] not in log
    assert "Traceback" not in log


def test_every_input_of_the_front_models_is_known_here() -> None:
    """So that an option which is added is tested as well."""
    tested = {name for bad in BAD.values() for name in bad} | {"seed", "stream", "stop", "bad_words", "pad_id"}
    tested |= {"ignore_eos", "exclude_input_in_output", "return_log_probs", "embedding_bias_weights"}
    tested |= {tensor.name for tensor in t.ALWAYS_GIVEN}
    assert {tensor.name for tensor in MODELS["ensemble"].inputs} == tested
