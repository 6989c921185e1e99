"""Workloads: the data sets' own fields, task labels, random prompts, and what is wrong named by its line."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from dflow_trt.errors import UserError
from dflow_trt.profiling.workload import (
    Choice,
    Vocabulary,
    example_workload,
    random_workload,
    read_workload,
    takes_chats,
    token_ids,
)
from dflow_trt.text import Tokenizer

TOKENIZER = Tokenizer.from_folder(str(files("dflow_trt") / "example_data" / "target"))
VOCABULARY = Vocabulary(50, (3, 7))

# One line of each, with the fields that its release has.
GSM8K = {"question": "How many?", "answer": "6 #### 6"}
MATH = {"problem": "Find x.", "solution": "x = 1", "answer": "1", "subject": "Algebra", "level": 2, "unique_id": "t/1"}
HUMANEVAL = {
    "task_id": "HumanEval/0",
    "prompt": "def f():\n",
    "canonical_solution": "    return 1\n",
    "test": "def check(): ...",
    "entry_point": "f",
}
MBPP = {"task_id": 2, "text": "Write a function.", "code": "def f(): ...", "test_list": ["assert f()"]}
SANITISED = {"task_id": 2, "prompt": "Write one.", "code": "def f(): ...", "test_list": ["assert f()"]}
MT_BENCH = {"question_id": 81, "category": "writing", "turns": ["Compose a post.", "Now shorter."]}
ALPACA = {"instruction": "Translate.", "input": "Hello", "output": "Hallo", "text": "Below is ... Hallo"}


def workload(folder: Path, *lines: Any) -> Any:
    path = folder / "p.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), encoding="utf-8")
    return read_workload(path)


@pytest.mark.parametrize(
    ("line", "task", "text"),
    [
        (GSM8K, "gsm8k", "How many?"),
        (MATH, "math-500", "Find x."),
        (HUMANEVAL, "humaneval", "def f():\n"),
        (MBPP, "mbpp", "Write a function."),
        (SANITISED, "mbpp", "Write one."),
        (MT_BENCH, "mt-bench", "Compose a post."),
        (ALPACA, "alpaca", "Translate.\n\nHello"),
        (ALPACA | {"input": ""}, "alpaca", "Translate."),
        (GSM8K | {"task": "maths"}, "maths", "How many?"),
        ({"prompt": "Say.", "task": "own"}, "own", "Say."),
        ({"text": "Say."}, "none", "Say."),
    ],
)
def test_fields_of_the_data_sets(tmp_path: Path, line: dict[str, Any], task: str, text: str) -> None:
    [item] = workload(tmp_path, line).items
    assert (item.task, item.prompt) == (task, {"prompt": text})
    [chat] = workload(tmp_path, line).as_chats().items
    assert chat.prompt == {"messages": [{"role": "user", "content": text}]}


def test_messages_and_ids_are_taken_as_they_are(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    made = workload(tmp_path, {"messages": messages}, {"prompt_token_ids": [5, 6], "task": "t"})
    assert [item.prompt for item in made.as_chats().items] == [{"messages": messages}, {"prompt_token_ids": [5, 6]}]
    assert [token_ids(item, TOKENIZER) for item in made.items] == [TOKENIZER.encode_chat(messages), [5, 6]]


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("", "empty"),
        ("{", "no JSON"),
        ('"text"', '"text"; allowed: a JSON object'),
        ({"task": "t"}, "no prompt among task"),
        ({}, "no prompt among no fields"),
        ({"prompt": 5}, "prompt is 5; allowed: a text"),
        ({"prompt": "  "}, "prompt is"),
        ({"turns": []}, "turns is []; allowed: a list of texts"),
        ({"messages": [{"content": "x"}]}, "messages is"),
        ({"prompt_token_ids": [1, True]}, "prompt_token_ids is"),
        ({"instruction": "a", "input": 5}, "instruction is"),
        ({"prompt": "a", "task": 5}, "task is 5"),
        ({"prompt": "a", "task": "all"}, 'task is "all"'),
        ({"prompt": "a", "task": "x" * 65}, "task is"),
    ],
)
def test_a_line_that_cannot_be_read_is_named(tmp_path: Path, line: Any, fault: str) -> None:
    with pytest.raises(UserError) as error:
        workload(tmp_path, GSM8K, line, GSM8K)
    assert str(error.value).startswith(f"--prompts: {tmp_path / 'p.jsonl'} line 2: ")
    assert fault in str(error.value)
    assert "\n" not in str(error.value)


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"p\.jsonl: No such file"):
        read_workload(tmp_path / "p.jsonl")
    with pytest.raises(UserError, match="holds no prompt"):
        workload(tmp_path, " ", "")
    (tmp_path / "p.jsonl").write_bytes(b'{"prompt": "\xff"}')
    with pytest.raises(UserError, match="not UTF-8 text"):
        read_workload(tmp_path / "p.jsonl")


def test_the_example_ships_with_its_tasks() -> None:
    made = example_workload()
    assert made.info(8).prompts == len(made.items) >= 50
    assert len(made.info(8).tasks) > 3
    assert len({item.task for item in made.items[:24]}) == len(made.info(8).tasks), "the first ones have every task"


def test_a_digest_tells_workloads_apart(tmp_path: Path) -> None:
    digests = {
        workload(tmp_path, GSM8K).info(8).digest,
        workload(tmp_path, GSM8K).info(9).digest,
        workload(tmp_path, GSM8K | {"task": "t"}).info(8).digest,
        workload(tmp_path, GSM8K, GSM8K).info(8).digest,
        workload(tmp_path, GSM8K).as_chats().info(8).digest,
    }
    assert len(digests) == 5
    assert workload(tmp_path, GSM8K).info(8).digest == workload(tmp_path, GSM8K).info(8).digest


def test_random_prompts_repeat_with_their_seed() -> None:
    made = random_workload(12, 5, VOCABULARY, seed=1)
    ids = [item.prompt["prompt_token_ids"] for item in made.items]
    assert [len(each) for each in ids] == [12] * 5
    assert {token for each in ids for token in each} <= set(range(50)) - {3, 7}
    assert len(set(map(tuple, ids))) == 5
    assert random_workload(12, 5, VOCABULARY, seed=1) == made
    assert random_workload(12, 5, VOCABULARY, seed=2) != made


def test_choices(tmp_path: Path) -> None:
    by_length = Choice(input_lens=(4, 9, 4)).workloads(VOCABULARY, True, 3, 0)
    assert list(by_length) == [4, 9]
    assert all(len(each.items) == 3 for each in by_length.values())
    assert Choice().workloads(VOCABULARY, True, 3, 0)[None].items[0].kind == "messages"
    assert Choice().workloads(VOCABULARY, False, 3, 0)[None].items[0].kind == "prompt"
    assert Choice(chat=False).workloads(VOCABULARY, True, 3, 0)[None].items[0].kind == "prompt"
    assert Choice(example=True, chat=True).workloads(None, False, 3, 0)[None].items[0].kind == "messages"


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"file": Path("x"), "example": True}, "--prompts and --example"),
        ({"example": True, "input_lens": (4,)}, "--example and --input-len"),
        ({"input_lens": (4, 0)}, "--input-len: 0"),
    ],
)
def test_choices_that_do_not_fit(options: dict[str, Any], fault: str) -> None:
    with pytest.raises(UserError, match=fault):
        Choice(**options)


def test_random_prompts_need_a_vocabulary() -> None:
    with pytest.raises(UserError, match="--input-len: random tokens need a vocabulary"):
        Choice(input_lens=(4,)).workloads(None, True, 3, 0)


def test_texts_need_a_tokenizer(tmp_path: Path) -> None:
    [item] = workload(tmp_path, GSM8K).items
    with pytest.raises(UserError, match=r"p.jsonl line 1: this bundle has no tokenizer"):
        token_ids(item, None)
    [broken] = workload(tmp_path, {"messages": [{"role": "user"}]}).items
    with pytest.raises(UserError, match=r"p.jsonl line 1: "):
        token_ids(broken, TOKENIZER)
    assert takes_chats(TOKENIZER)
    assert not takes_chats(None)
