"""The web page in a real Chromium, over the real endpoint and a scripted model that answers when the test says so."""

from __future__ import annotations

import asyncio
import dataclasses
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.resources import files
from typing import Any

import browser
import fake
import httpx
import pytest
import uvicorn
from fake_triton import Asked, Failure, FakeTriton, Sample
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement

from dflow_trt.serving.openai.app import Endpoint, Settings, build_app
from dflow_trt.serving.openai.backend import Backend
from dflow_trt.text import Tokenizer

PATIENCE = 60.0
TOKENIZER = Tokenizer.from_folder(str(files("dflow_trt") / "example_data" / "target"))
TEXT = "a) 13 + 17 = 30\nb) 2 + 17 = <img src=x onerror=alert(1)> 漢\n"
REPLY = TOKENIZER.encode(TEXT)
ROUNDS = (3, 0, 6, 2)
SAMPLE = Sample(REPLY, (*ROUNDS, *[0] * (len(REPLY) - 1 - sum(ROUNDS) - len(ROUNDS))), "stop")
ALL = 10_000  # responses: more than any answer has


class Server:
    """The endpoint on a port of its own, in a thread. ``let`` so many responses of the model through."""

    def __init__(self, api_key: str | None = None) -> None:
        self.triton = FakeTriton(TOKENIZER, self._script)
        self.failure: Failure | None = None
        self._api_key = api_key
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}/"
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))

    def _script(self, asked: Asked) -> Sequence[Sample]:
        if self.failure is not None:
            raise self.failure
        return [SAMPLE]

    async def _run(self) -> None:
        bundle = fake.make_bundle([fake.drafter_spec("dflow", 8, "after_rejection")])
        bundle = dataclasses.replace(
            bundle,
            target=dataclasses.replace(bundle.target, vocab_size=TOKENIZER.size),
            build=dataclasses.replace(bundle.build, max_seq_len=704),
        )
        self.triton.gate = asyncio.Semaphore(0)
        self._loop = asyncio.get_running_loop()
        async with httpx.AsyncClient() as http:
            settings = Settings("demo", "127.0.0.1:1", 10_000, api_key=self._api_key)
            app = build_app(Endpoint(bundle, TOKENIZER, Backend(self.triton, PATIENCE), http, settings))
            self._server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off"))
            self._ready.set()
            await self._server.serve([self._socket])

    def let(self, count: int) -> None:
        gate = asyncio.Semaphore(count)

        def open_gate() -> None:
            old, self.triton.gate = self.triton.gate, gate
            assert old is not None
            old.release()  # who waits there already

        self._loop.call_soon_threadsafe(open_gate)

    def __enter__(self) -> Server:
        self._thread.start()
        self._ready.wait(PATIENCE)
        return self

    def __exit__(self, *error: object) -> None:
        self._server.should_exit = True
        self._thread.join(PATIENCE)


@pytest.fixture(scope="module")
def chromium() -> Iterator[webdriver.Chrome]:
    with browser.chromium() as opened:
        yield opened


class Page:
    """The page as someone sees it."""

    def __init__(self, chromium: webdriver.Chrome, url: str, width: int = 1280, dark: bool = False) -> None:
        self._browser = chromium
        browser.show(chromium, url, width, dark)

    def __getitem__(self, name: str) -> WebElement:
        return self._browser.find_element(By.ID, name)

    def all(self, selector: str) -> list[WebElement]:
        return self._browser.find_elements(By.CSS_SELECTOR, selector)

    def texts(self, selector: str) -> list[str]:
        return [str(element.get_attribute("textContent")) for element in self.all(selector)]

    def until(self, reached: Callable[[], Any], what: str) -> None:
        end = time.monotonic() + PATIENCE
        while not reached():
            assert time.monotonic() < end, f"{what}; the page says: {self['layout'].text}"
            time.sleep(0.02)

    def script(self, code: str) -> Any:
        return self._browser.execute_script(code)  # type: ignore[no-untyped-call]

    def ready(self) -> Page:
        self.until(lambda: self["status"].text == "ready", "the model is not shown")
        return self

    def ask(self, text: str) -> None:
        self["prompt"].send_keys(text, Keys.ENTER)

    def answered(self, count: int = 1) -> None:
        self.until(lambda: len(self.texts(".assistant .figures")) == count, "the answer does not end")

    def complaints(self) -> list[str]:
        return [str(entry["message"]) for entry in self._browser.get_log("browser")]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server() as running:
        yield running


@pytest.fixture
def page(chromium: webdriver.Chrome, server: Server) -> Page:
    server.failure = None
    server.triton.asked.clear()
    server.triton.stopped.clear()
    return Page(chromium, server.url).ready()


def test_an_answer_shows_what_was_drafted(page: Page, server: Server) -> None:
    server.let(ALL)
    page.ask("13 + 17")
    page.answered()
    assert "".join(page.texts(".assistant .text span")) == TEXT, "as text, whatever it looks like"
    names = [TOKENIZER.token_text(token) for token in REPLY]
    assert page.texts(".assistant .own")[:2] == [names[0], names[4]]
    assert page.texts(".assistant .drafted")[0] == "".join(names[1:4])
    drafted, own = page.all(".assistant .drafted")[0], page.all(".assistant .own")[0]
    assert drafted.value_of_css_property("background-color") != own.value_of_css_property("background-color")
    rounds = len(SAMPLE.rounds)
    assert page["tau"].text == f"{(len(REPLY) - 1) / rounds:.2f}"
    assert page["accepted"].text == f"{round(100 * sum(ROUNDS) / (7 * rounds))}%"
    assert float(page["speed"].text) > 0
    assert len(page.all("#rounds i")) == min(rounds, 60)
    assert page.texts(".figures")[0].startswith(f"{len(REPLY)} tokens in {rounds} rounds")
    assert page.complaints() == []


def test_figures_live_and_the_stop_button(page: Page, server: Server) -> None:
    server.let(4)
    page.ask("13 + 17")
    page.until(lambda: len(page.all("#rounds i")) == 3, "three rounds came")
    shown = 1 + sum(ROUNDS[:3]) + 3
    assert "".join(page.texts(".assistant .text span")) == TOKENIZER.decode(REPLY[:shown])
    assert page["tau"].text == f"{(shown - 1) / 3:.2f}"
    assert page["stop"].is_displayed()
    assert not page["send"].is_displayed()
    page["stop"].click()
    page.answered()
    assert "stopped" in page.texts(".figures")[0]
    page.until(lambda: len(server.triton.stopped) == 1, "the model was told")
    assert page["send"].is_displayed()


def test_settings_go_along_and_so_does_the_conversation(page: Page, server: Server) -> None:
    server.let(ALL)
    assert page.texts("#strategy option") == ["ar", "dflow", "dflow-norelay"]
    assert page["strategy"].get_attribute("value") == "dflow"
    for name, value in (("drafts", 3), ("temperature", 0.5)):
        page.script(
            f"const e = document.getElementById('{name}'); e.value = {value}; e.dispatchEvent(new Event('input'))"
        )
    assert (page["drafts-value"].text, page["temperature-value"].text) == ("3", "0.50")
    page["max-tokens"].clear()
    page["max-tokens"].send_keys("99")
    page.ask("13")
    page.answered()
    page["strategy"].send_keys("ar")
    assert not page["drafts"].is_enabled()
    page.ask("17")
    page.answered(2)
    first, second = server.triton.asked
    asked = {name: first.value(name) for name in ("strategy", "draft_tokens", "temperature", "max_tokens")}
    assert asked == {"strategy": "dflow", "draft_tokens": 3, "temperature": 0.5, "max_tokens": 99}
    assert second.value("strategy") == "ar"
    said = [("user", "13"), ("assistant", TEXT), ("user", "17")]
    messages = [{"role": role, "content": content} for role, content in said]
    assert second.inputs["input_ids"] == TOKENIZER.encode_chat(messages)
    page["new"].click()
    assert page.texts("#log li") == []
    assert page["empty"].is_displayed()


def test_an_error_is_shown_and_the_question_can_be_asked_again(page: Page, server: Server) -> None:
    server.let(ALL)
    server.failure = Failure("INVALID_ARG", "the prompt has 900 tokens, this bundle takes 512")
    page.ask("13")
    page.until(lambda: page.texts("[role=alert]"), "the error is shown")
    assert page.texts("[role=alert]") == ["the prompt has 900 tokens, this bundle takes 512"]
    server.failure = None
    page.ask("17")
    page.answered()
    messages = [{"role": "user", "content": "17"}]
    assert server.triton.asked[-1].inputs["input_ids"] == TOKENIZER.encode_chat(messages)


def test_a_suggestion_is_a_question(page: Page, server: Server) -> None:
    server.let(ALL)
    page.all("#suggestions button")[0].click()
    page.answered()
    assert page.texts(".user .text")[0].startswith("Work out these sums.\na) ")


def test_every_control_has_a_name_and_the_page_a_language(page: Page) -> None:
    controls = [each for each in page.all("button, input, select, textarea, summary") if each.is_displayed()]
    assert len(controls) >= 9
    assert all(each.accessible_name for each in controls), [each.get_attribute("id") for each in controls]
    assert page.script("return document.documentElement.lang") == "en"


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [360, 1280])
def test_it_fits_and_follows_the_colour_scheme(
    chromium: webdriver.Chrome, server: Server, width: int, dark: bool
) -> None:
    page = Page(chromium, server.url, width, dark).ready()
    server.let(ALL)
    page.ask("13" if width == 1280 else "13 " + "x" * 200)
    page.answered()
    assert page.script("return document.documentElement.scrollWidth <= innerWidth")
    assert page.script("return document.documentElement.scrollHeight <= innerHeight"), "the page itself never scrolls"
    assert page["prompt"].is_displayed()
    background = page.script("return getComputedStyle(document.body).backgroundColor").removeprefix("rgb(")
    assert (int(background.split(",")[0]) < 128) == dark
    assert page["strategy"].is_displayed() == (width == 1280), "settings are folded away on a phone"


def test_the_key_is_asked_for(chromium: webdriver.Chrome) -> None:
    with Server(api_key="s3cret") as guarded:
        page = Page(chromium, guarded.url)
        page.until(lambda: page["key"].is_displayed(), "the key is asked for")
        assert "API key" in page["status"].text
        page["key"].send_keys("s3cret", Keys.TAB)
        page.ready()
        guarded.let(ALL)
        page.ask("13")
        page.answered()
