"""Rule verifiers: from the text of an answer to a score, without a model.

A scorer has veRL's signature `compute_score(data_source, solution_str, ground_truth, extra_info)` and returns a number,
or a dict with the number under `score` (its other numbers are logged). `extra_info["question"]` is the last user turn.
The scorers here run in worker processes (`rlscale.reward.pool`), so nothing heavy is imported at the top.

A verifier is what the policy is optimised against, so each one's docstring says what it pays for, and above all what
not.
"""

from __future__ import annotations

import re
from collections import Counter
from decimal import Decimal
from typing import Any, NamedTuple

_NUMBER = re.compile(
    r"(?P<sign>(?<![\w)\]}])[-+−])?(?P<digits>(?:\d{1,3}(?:,\d{3})+(?![,\d])|\d+)(?:\.\d+)?|\.\d+)", re.ASCII
)
_AFTER_OPERAND = re.compile(r"[\d)\]}]\s+$", re.ASCII)  # before a sign: `9 -2` is a difference
_AFTER_OPERATOR = re.compile(r"[\d)\]}]\s*[-+−*/×÷·]\s*$", re.ASCII)  # before a number: `9 - 2`

_SEPARATORS = re.compile(r"(?:[\s.,;/|&-]|\band\b|\bor\b)*", re.IGNORECASE)  # between the members of a list


def numbers(text: str) -> list[Decimal]:
    """The decimal numbers of a text, in order; `1,234.50` is one number, `1,2,3` are three.

    A minus is a sign where it touches its number and follows no operand: `-7` and `= -7` are negative, in `9-2`, `9 -2`
    and in the list item `- 7` the minus is none.
    """
    return [number.value for number in _find(text)]


class _Number(NamedTuple):
    value: Decimal
    is_operand: bool  # the right operand of an operator
    listed: bool  # nothing but list separators between it and the number before


def _find(text: str) -> list[_Number]:
    found: list[_Number] = []
    end = 0
    for match in _NUMBER.finditer(text):
        before = text[max(0, match.start() - 16) : match.start()]
        value = Decimal(match["digits"].replace(",", ""))
        difference = bool(match["sign"] and _AFTER_OPERAND.search(before))
        if match["sign"] in ("-", "−") and not difference:
            value = value.copy_negate()
        is_operand = difference or (not match["sign"] and bool(_AFTER_OPERATOR.search(before)))
        listed = bool(found and _SEPARATORS.fullmatch(text, end, match.start()))
        found.append(_Number(value, is_operand, listed))
        end = match.end()
    return found


def last_number(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
) -> float:
    """1.0 where the answer commits itself to the right number, else 0.0. For short answers to arithmetic questions.

    The rule: (1) the last number of the answer is the truth; (2) every other number of the answer is the truth again or
    a number of the question, so that a list of candidates, a corrected guess or a chain of other sums is worth nothing;
    (3) after the last other number, the truth is stated in a sentence or an equation, not as one more member of a list
    (`1, 2, 3` to `1 + 2`); (4) repeating the question is no answer: the last number isn't the right operand of an
    operator (`0 + 7`), and the numbers of the answer aren't just those of the question (`0 and 7`). Hence `7`, `7.`,
    `3 + 4 = 7` and `The sum of 3 and 4 is 7` are paid, `7 or 8` and `1, 2, 3, ..., 7` are not. Numbers written as words
    don't count at all. `extra_info["question"]` is the question; without it rule (2) allows the truth only.

    Raises:
        ValueError: the ground truth isn't one number.
    """
    truths = numbers(str(ground_truth))
    if len(truths) != 1:
        raise ValueError(f"last_number needs one number as ground truth, got {ground_truth!r}")
    truth = truths[0]
    answer = _find(solution_str)
    question = Counter(numbers(str((extra_info or {}).get("question", ""))))
    if not answer or answer[-1].value != truth:
        return 0.0
    given = Counter(number.value for number in answer)
    if set(given) - set(question) - {truth}:
        return 0.0
    final = max((i + 1 for i, number in enumerate(answer) if number.value != truth), default=0)
    stated = any(not number.listed and not number.is_operand for number in answer[final:])
    if not stated or answer[-1].is_operand or _only_quotes(given, question, truth):
        return 0.0
    return 1.0


def _only_quotes(given: Counter[Decimal], question: Counter[Decimal], truth: Decimal) -> bool:
    """Whether the numbers given are those of the question, once or several times over, and nothing else."""
    if question.total() < 2:  # a single number can't be told from an answer
        return False
    times = 1 if set(question) == {truth} else max(1, given[truth] // max(1, question[truth]))
    return given == Counter({number: times * count for number, count in question.items()})


def gsm8k(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None) -> float:
    """1.0 where the line after the last ``####`` is the right number, however it is written, else 0.0.

    ``#### 1,234``, ``#### $1,234.`` and ``####1234.0`` are one number; an answer without the mark is worth nothing.

    Raises:
        ValueError: the ground truth (after its own mark, if it is a worked solution) isn't one number.
    """
    truths = numbers(str(ground_truth).rpartition("####")[2])
    if len(truths) != 1:
        raise ValueError(f"gsm8k needs one number as ground truth, got {ground_truth!r}")
    _, mark, answer = solution_str.rpartition("####")
    return float(bool(mark) and numbers(answer.strip().partition("\n")[0]) == truths)


def exact_match(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
) -> float:
    """1.0 where the answer is the truth, up to outer white space, case and one final full stop; else 0.0."""
    return float(_plain(solution_str) == _plain(str(ground_truth)))


def _plain(text: str) -> str:
    return " ".join(text.split()).removesuffix(".").casefold()
