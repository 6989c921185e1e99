"""Seeded worksheet texts: the small domain of the example pair.

Every task asks for independent lines that repeat operands of the prompt and add a result. Such text lets a
relay gain: a deeper target computes each result, a one-layer drafter often cannot, and a wrong result leaves
the lines after it valid, so what the target computed for the rejected lines is worth handing back to the
drafter.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from string import ascii_lowercase

# fmt: off
ITEMS = (
    "tea", "milk", "rice", "bread", "eggs", "salt", "sugar", "flour",
    "beans", "corn", "soap", "paper", "pens", "books", "cups", "plates",
    "forks", "knives", "lamps", "chairs", "nails", "ropes", "bags", "boxes",
    "apples", "pears", "plums", "grapes", "lemons", "onions", "carrots", "peas",
)
# fmt: on

# Numbers, words and labels such as "a)" stay whole; a space belongs to what follows it.
SPLIT_PATTERN = r"\p{L}\)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)


LineWriter = Callable[[random.Random], tuple[str, str]]


@dataclass(frozen=True)
class Example:
    """One worksheet: the task's name, what the user asks, and the answer a perfect target would give."""

    task: str
    prompt: str
    answer: str


def _sum_operands(rng: random.Random) -> tuple[int, int, int]:
    a, b = rng.randint(2, 20), rng.randint(2, 20)
    return a, b, a + b


def _difference_operands(rng: random.Random) -> tuple[int, int, int]:
    a, b, total = _sum_operands(rng)
    return total, b, a


def _product_operands(rng: random.Random) -> tuple[int, int, int]:
    a, b = rng.randint(2, 9), rng.randint(2, 9)
    return a, b, a * b


_OPERATIONS: dict[str, Callable[[random.Random], tuple[int, int, int]]] = {
    "+": _sum_operands,
    "-": _difference_operands,
    "*": _product_operands,
}
_FUNCTIONS = {"add": "+", "sub": "-", "mul": "*"}


def _arithmetic(operators: str) -> LineWriter:
    def write(rng: random.Random) -> tuple[str, str]:
        operator = rng.choice(operators)
        a, b, result = _OPERATIONS[operator](rng)
        return f"{a} {operator} {b}", f"{a} {operator} {b} = {result}"

    return write


def _result_only(rng: random.Random) -> tuple[str, str]:
    operator = rng.choice("+-*")
    a, b, result = _OPERATIONS[operator](rng)
    return f"{a} {operator} {b}", f"{result}"


def _test(rng: random.Random) -> tuple[str, str]:
    function = rng.choice(list(_FUNCTIONS))
    a, b, result = _OPERATIONS[_FUNCTIONS[function]](rng)
    return f"{function}({a}, {b})", f"{function}({a}, {b}) == {result}"


def _receipt(rng: random.Random) -> tuple[str, str]:
    count, price, total = _product_operands(rng)
    item = rng.choice(ITEMS)
    return f"{count} {item} at {price}", f"{count} {item} at {price} = {total}"


def _stock(rng: random.Random) -> tuple[str, str]:
    had, sold, left = _difference_operands(rng)
    item = rng.choice(ITEMS)
    return f"{item} {had} - {sold}", f"{item} {had} - {sold} = {left}"


def _comparison(rng: random.Random) -> tuple[str, str]:
    a, b = rng.sample(range(2, 41), 2)
    return f"{a} or {b}", f"{a} {'<' if a < b else '>'} {b}"


def _letters(rng: random.Random) -> tuple[str, str]:
    item = rng.choice(ITEMS)
    return item, f"{item} {len(item)}"


@dataclass(frozen=True)
class _Task:
    """How one line is written, the headings a user may give, and how many lines a worksheet has."""

    line: LineWriter
    headings: tuple[str, ...]
    fewest: int
    most: int


_TASKS = {
    "sums": _Task(_arithmetic("+"), ("Add up each line.", "Work out these sums."), 6, 16),
    "differences": _Task(_arithmetic("-"), ("Subtract on each line.", "Work out these differences."), 6, 16),
    "products": _Task(_arithmetic("*"), ("Multiply on each line.", "Work out these products."), 6, 16),
    "mixed": _Task(_arithmetic("+-*"), ("Solve this worksheet.", "Fill in the results, please."), 6, 16),
    "results": _Task(_result_only, ("Give the results only.", "Just the answers, please."), 12, 26),
    "tests": _Task(_test, ("Write a check for each call.", "Turn these calls into tests."), 4, 11),
    "receipt": _Task(_receipt, ("Write a receipt.", "What does each item cost?"), 5, 13),
    "stock": _Task(_stock, ("Update the stock.", "How many are left of each?"), 5, 13),
    "compare": _Task(_comparison, ("Which is larger?", "Compare the numbers."), 8, 20),
    "letters": _Task(_letters, ("Count the letters.", "How long is each word?"), 10, 24),
}
TASK_NAMES = tuple(_TASKS)


def make_example(rng: random.Random, task: str | None = None, most_lines: int | None = None) -> Example:
    """Draw one worksheet, of a given task or of one chosen at random; its lines are labelled a), b), c)...

    With `most_lines` it has 1 to `most_lines` lines (at most the task's own limit), else as many as the task
    asks for.
    """
    name = task or rng.choice(TASK_NAMES)
    chosen = _TASKS[name]
    fewest, most = (chosen.fewest, chosen.most) if most_lines is None else (1, min(most_lines, chosen.most))
    lines = [chosen.line(rng) for _ in range(rng.randint(fewest, most))]
    asked = [f"{label}) {question}" for label, (question, _) in zip(ascii_lowercase, lines, strict=False)]
    answered = [f"{label}) {answer}" for label, (_, answer) in zip(ascii_lowercase, lines, strict=False)]
    return Example(name, "\n".join([rng.choice(chosen.headings), *asked]), "\n".join(answered))


def stream_examples(
    seed: int, excluded: frozenset[str] = frozenset(), most_lines: int | None = None
) -> Iterator[Example]:
    """Endless worksheets from one seed, none with a prompt in `excluded` (the held-out ones)."""
    rng = random.Random(seed)
    while True:
        example = make_example(rng, most_lines=most_lines)
        if example.prompt not in excluded:
            yield example


def stream_copies(seed: int, most_lines: int) -> Iterator[list[tuple[str, str]]]:
    """Endless lists to copy out: 2 to `most_lines` pairs of label and value, such as ("a)", " tea") or ("b)", "7").

    Numbers come with and without a space before them, as those are different tokens.
    """
    rng = random.Random(seed)
    values = [f" {item}" for item in ITEMS] + [f"{space}{number}" for space in ("", " ") for number in range(2, 99)]
    while True:
        labels = ascii_lowercase[: rng.randint(2, most_lines)]
        yield [(f"{label})", rng.choice(values)) for label in labels]


def held_out_examples(seed: int, per_task: int) -> list[Example]:
    """`per_task` distinct worksheets of every task, in task order."""
    rng = random.Random(seed)
    examples: dict[str, Example] = {}
    for task in TASK_NAMES:
        wanted = len(examples) + per_task
        while len(examples) < wanted:
            example = make_example(rng, task)
            examples.setdefault(example.prompt, example)
    return list(examples.values())
