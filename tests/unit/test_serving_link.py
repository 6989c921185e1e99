"""The socket between two models: many answers a question, ends of either side, a new listener beside an old one."""

from __future__ import annotations

import os
import queue
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from dflow_trt.errors import UserError
from dflow_trt.serving.link import CONNECT_SECONDS, Answer, LinkClient, LinkServer, Question, meeting_place

PATIENCE = 20.0
Answering = Callable[[Answer], None]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


class Asked:
    """An answering end that keeps what it was asked."""

    def __init__(self) -> None:
        self.questions: queue.Queue[tuple[Question, Answering]] = queue.Queue()
        self.server = LinkServer(1, lambda question, answer: self.questions.put((question, answer)))

    def next(self) -> tuple[Question, Answering]:
        return self.questions.get(timeout=PATIENCE)


def client() -> tuple[LinkClient, queue.Queue[Answer]]:
    answers: queue.Queue[Answer] = queue.Queue()
    return LinkClient(1, answers.put), answers


def ask(link: LinkClient, handle: str) -> None:
    link.ask(Question(handle, "id", {"input_ids": np.array([[1, 2]])}, {"task": "t"}, frozenset({"text_output"})))


def test_questions_get_their_answers_in_order() -> None:
    asked, (link, answers) = Asked(), client()
    ask(link, "a")
    ask(link, "b")
    (first, answer), (second, _) = asked.next(), asked.next()
    assert (first.handle, second.handle, first.parameters) == ("a", "b", {"task": "t"})
    assert first.values is not None
    assert first.values["input_ids"].tolist() == [[1, 2]]
    for number in range(3):
        answer(Answer("b", {"x": np.array([number])}, final=number == 2))
    answer(Answer("a", None, True, "INVALID_ARG", "no"))
    got = [answers.get(timeout=PATIENCE) for _ in range(4)]
    assert [(each.handle, each.final) for each in got] == [("b", False), ("b", False), ("b", True), ("a", True)]
    assert (got[3].code, got[3].message) == ("INVALID_ARG", "no")
    link.close()


def test_answers_of_many_threads_arrive_whole() -> None:
    asked, (link, answers) = Asked(), client()
    for number in range(8):
        ask(link, str(number))
    pairs = [asked.next() for _ in range(8)]

    def send(question: Question, answer: Answering) -> None:
        for number in range(50):
            answer(Answer(question.handle, {"x": np.full(1000, number)}, number == 49))

    threads = [threading.Thread(target=send, args=pair) for pair in pairs]
    for thread in threads:
        thread.start()
    found: dict[str, list[int]] = {}
    for _ in range(400):
        given = answers.get(timeout=PATIENCE)
        assert given.tensors is not None
        assert len(set(given.tensors["x"].tolist())) == 1
        found.setdefault(given.handle, []).append(int(given.tensors["x"][0]))
    assert all(numbers == list(range(50)) for numbers in found.values())
    link.close()


def test_whoever_asks_and_goes_away_has_its_requests_ended() -> None:
    asked, (link, _) = Asked(), client()
    ask(link, "a")
    ask(link, "b")
    (_, answer), _ = asked.next(), asked.next()
    answer(Answer("a", {}, True))
    link.close()
    ended, _ = asked.next()
    assert (ended.handle, ended.values) == ("b", None)
    assert asked.questions.empty()


def test_requests_of_a_listener_that_ends_fail_and_the_next_ones_find_another() -> None:
    first, (link, answers) = Asked(), client()
    ask(link, "a")
    first.next()
    first.server.close()
    first.server.hang_up()
    lost = answers.get(timeout=PATIENCE)
    assert (lost.handle, lost.code, lost.final) == ("a", "UNAVAILABLE", True)
    with pytest.raises(OSError):
        ask(link, "b")
    second = Asked()
    ask(link, "c")
    assert second.next()[0].handle == "c"
    link.close()


def test_one_that_says_goodbye_answers_what_it_has() -> None:
    old, (link, answers) = Asked(), client()
    ask(link, "a")
    _, answer = old.next()
    new = Asked()
    ask(link, "b")
    assert old.next()[0].handle == "b", "the line that is there is kept"
    old.server.close()
    answer(Answer("a", {}, False))
    assert answers.get(timeout=PATIENCE).handle == "a"  # and so the goodbye before it was read
    ask(link, "c")
    assert new.next()[0].handle == "c"
    answer(Answer("a", {}, True))
    assert answers.get(timeout=PATIENCE).final
    link.close()


LISTENS = """
import sys, tempfile
tempfile.tempdir = sys.argv[1]
from dflow_trt.serving.link import LinkServer
server = LinkServer(1, lambda question, answer: print("asked", flush=True))
print("listens", flush=True)
if sys.stdin.readline() == "close\\n":
    server.close()
    server.hang_up()
"""


@pytest.mark.parametrize("dies", [True, False])
def test_a_process_that_dies_is_noticed_and_one_that_says_goodbye_is_not_missed(folder: Path, dies: bool) -> None:
    """Without a question: whoever may ask is connected before."""
    died, answers = threading.Event(), queue.Queue[Answer]()
    arguments = [sys.executable, "-c", LISTENS, str(folder)]
    link = LinkClient(1, answers.put, died.set)
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        assert other.stdout.readline() == "listens\n"
        time.sleep(3 * CONNECT_SECONDS)
        if dies:
            other.kill()
            assert died.wait(PATIENCE)
        else:
            ask(link, "a")
            assert other.stdout.readline() == "asked\n"
            other.stdin.write("close\n")
            other.wait(PATIENCE)
            assert answers.get(timeout=PATIENCE).code == "UNAVAILABLE"
            assert not died.wait(CONNECT_SECONDS)
    link.close()


def test_whoever_closes_its_own_end_mourns_nobody() -> None:
    died, asked = threading.Event(), Asked()
    link = LinkClient(1, lambda answer: None, died.set)
    ask(link, "a")
    asked.next()
    link.close()
    assert not died.wait(CONNECT_SECONDS)


def test_sockets_of_servers_that_are_gone_are_removed() -> None:
    with subprocess.Popen(["true"]) as gone:
        pass
    left, kept = (meeting_place() / f"{pid}-1-0.sock" for pid in (gone.pid, os.getpid()))
    for path in (left, kept):
        path.touch()
    Asked().server.close()
    assert not left.exists()
    assert kept.exists()


def test_the_folder_is_of_this_user_alone(folder: Path) -> None:
    assert stat.S_IMODE(meeting_place().stat().st_mode) == 0o700
    os.chmod(meeting_place_path := folder / f"dflow-{os.getuid()}", 0o777)
    with pytest.raises(UserError, match="others may write there"):
        meeting_place()
    os.chmod(meeting_place_path, 0o700)
