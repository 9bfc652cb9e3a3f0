"""What a verifier pays for, and what it must not: a policy finds every hole."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlscale.config import functions
from rlscale.reward import scorers
from rlscale.reward.gym_answer import score as gym_score
from rlscale.reward.math_answer import math
from rlscale.reward.verifiers import exact_match, last_number, numbers

QUESTION = "What is 3 + 4? Answer with a number."


def pays(answer: str, truth: object = "7", question: str = QUESTION) -> float:
    return last_number("addition", answer, truth, {"question": question})


@pytest.mark.parametrize(
    "answer",
    ["7", "7.", " 7\n", "**7**", "7.0", "+7", "= 7", "(7)", "$7$", "\\boxed{7}", "Answer: 7", "The answer is 7.",
     "3 + 4 = 7", "3+4=7", "3 + 4 = 7.", "The sum of 3 and 4 is 7", "If you add 3 to 4, you get 7!", "It is 7, yes 7.",
     "3 + 4 = 7\n\nSo the answer is 7", "4 + 3 = 7", "Three plus four is seven: 7", "Not six or eight, but 7"],
)  # fmt: skip
def test_an_answer_is_paid(answer: str) -> None:
    assert pays(answer) == 1.0


@pytest.mark.parametrize(
    "answer",
    ["", "seven", "8", "-7", "17", "70", "7.5", "0.7", "7 8", "8 7", "7 or 8", "6 or 7", "6, 7", "1, 2, 3, 4, 5, 6, 7",
     "1 2 3 4 5 6 7", "1,2,3,4,5,6,7", "1\n2\n3\n4\n5\n6\n7", "1234567", "5/6/7", "between 6 and 7", "6-7",
     "0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18", "It is 6. No, 7", "3 + 4 = 6. 3 + 4 = 7", "6 < x <= 7",
     "3 + 3 = 6, 3 + 4 = 7", "1 + 6 = 7, 2 + 5 = 7, 3 + 4 = 7", "3, 4, 7", "3 4 7", "3 or 4 or 7", "4\n7", "3 and 7",
     "3 + 7", "3 + 4", "3 + 4 + 7", "Not 6 or 8, but 7", "x7 y8", "\\boxed{6} \\boxed{7}", "6|7", "7th of 9",
     "٧", "７", "9" * 10_000],
)  # fmt: skip
def test_anything_else_is_not(answer: str) -> None:
    assert pays(answer) == 0.0


@pytest.mark.parametrize(
    ("question", "truth", "paid", "unpaid"),
    [
        (
            "What is 0 + 7?",
            "7",
            ["7", "0 + 7 = 7", "It is 7", "0 and 7 is 7"],
            ["0, 7, 7", "0 + 7 7", "0 + 7", "0 and 7", "0 7", "0, 7", "0 + 7 0 + 7", "0"],
        ),
        ("What is 7 + 0?", "7", ["7", "7 + 0 = 7"], ["7 + 0", "7 0", "7, 0"]),
        ("What is 0 + 0?", "0", ["0", "0 + 0 = 0", "0 + 0 is 0."], ["0 + 0", "0 0", "0 and 0", "0 + 0 + 0"]),
        ("What is 1 + 2?", "3", ["3", "1 + 2 = 3"], ["1, 2, 3", "1 2 3", "1. 2. 3.", "0 1 2 3", "1 or 2 or 3"]),
        ("What is 5 - 8?", "-3", ["-3", "5 - 8 = -3", "\u22123"], ["3", "- 3", "5 - 8", "5 - 3", "8 -3"]),
        ("What is 8 - 3?", "5", ["5", "8 - 3 = 5", "8-3=5"], ["-5", "8 - 5", "8 -5", "8-5"]),
        ("What is 700 + 534?", "1234", ["1234", "1,234", "1,234.00"], ["1 234", "1,23,4", "12,34"]),
        ("Double 0", "0", ["0"], ["0, 1"]),
    ],
)
def test_numbers_of_the_question_are_no_answer(question: str, truth: str, paid: list[str], unpaid: list[str]) -> None:
    assert {answer: pays(answer, truth, question) for answer in paid} == dict.fromkeys(paid, 1.0)
    assert {answer: pays(answer, truth, question) for answer in unpaid} == dict.fromkeys(unpaid, 0.0)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.integers(0, 18), min_size=2, max_size=19, unique=True),
    st.sampled_from([" ", ", ", ",", "\n", " or ", "; ", " / ", " and ", " | ", ". "]),
    st.integers(0, 9),
    st.integers(0, 9),
)
def test_no_enumeration_is_ever_paid(candidates: list[int], separator: str, a: int, b: int) -> None:
    """Several different candidates in any order and notation are worth nothing, whatever the sum is."""
    text = separator.join(map(str, candidates))
    assert pays(text, str(a + b), f"What is {a} + {b}?") == 0.0


@settings(max_examples=200, deadline=None)
@given(
    st.integers(0, 999),
    st.integers(0, 999),
    st.sampled_from(["{s}", "{a} + {b} = {s}", "The sum of {a} and {b} is {s}."]),
)
def test_plain_answers_are_always_paid(a: int, b: int, form: str) -> None:
    text = form.format(a=a, b=b, s=a + b)
    assert pays(text, str(a + b), f"What is {a} + {b}?") == 1.0
    assert pays(text, str(a + b + 1), f"What is {a} + {b}?") == 0.0


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("1,234.50 and 1,2,3", ["1234.50", "1", "2", "3"]),
        ("-7, = -7, 9-2, 9 -2, - 7", ["-7", "-7", "9", "2", "9", "2", "7"]),
        ("(3)-4 and .5 and 1.2.3", ["3", "4", "0.5", "1.2", "0.3"]),
        ("12,3456 1,234,56", ["12", "3456", "1", "234", "56"]),
        ("no digits", []),
    ],
)
def test_numbers(text: str, found: list[str]) -> None:
    assert numbers(text) == [Decimal(number) for number in found]


def test_plain_answers_to_all_single_digit_sums_are_paid() -> None:
    forms = ["{s}", "{a} + {b} = {s}", "{a}+{b}={s}.", "The sum of {a} and {b} is {s}.", "{a} plus {b} equals {s}"]
    unpaid = [
        text
        for a in range(10)
        for b in range(10)
        for text in (form.format(a=a, b=b, s=a + b) for form in forms)
        if pays(text, str(a + b), f"What is {a} + {b}?") != 1.0
    ]
    assert unpaid == []


def test_last_number_needs_a_number_as_truth() -> None:
    for truth in ("seven", "", None, "7 or 8"):
        with pytest.raises(ValueError, match="one number as ground truth"):
            pays("7", truth)
    assert last_number("addition", "7", 7) == last_number("addition", "7", "7", None) == 1.0


def test_exact_match() -> None:
    assert exact_match("", "  Paris. ", "paris") == 1.0
    assert exact_match("", "Paris or Rome", "Paris") == exact_match("", "", "Paris") == 0.0


@pytest.mark.parametrize(
    ("truth", "answer", "value"),
    [
        ("7", "3 and 4 make 7", 1.0),
        ("\\frac{1}{2}", "so $x = 0.5$", 1.0),
        ("\\frac{1}{2}", "\\boxed{\\frac{2}{4}}", 1.0),
        ("x^2+2x+1", "$(x+1)^2$", 1.0),
        ("some reasoning\n#### 42", "It is \\boxed{42}.", 1.0),
        ("42", "It is \\boxed{41}.", 0.0),
        ("7", "\\boxed{6} or \\boxed{7}", 0.0),
        ("7", "".join(f"\\boxed{{{i}}} " for i in range(10)), 0.0),
        ("7", "1, 2, 3, 4, 5, 6, 7, 8", 0.0),
        ("7", "I don't know", 0.0),
    ],
)
def test_math(truth: str, answer: str, value: float) -> None:
    assert math("", answer, truth) == value


def test_reasoning_gym_scores_with_the_task() -> None:
    from rlscale.data import reasoning_gym

    for name in ("chain_sum", "rearc", "countdown", "basic_arithmetic"):
        (prompt,) = reasoning_gym.make(name, 1, 3, {})
        right = str(prompt.ground_truth)
        if name == "countdown":  # any expression that reaches the target, so the truth is one of many
            right = prompt.extra_info["entry"]["metadata"]["expression"]
        for text in (right, f"Let me think. <answer>17x</answer> No: <answer> {right} </answer>"):
            assert gym_score("", text, prompt.ground_truth, prompt.extra_info) == 1.0, (name, text)
        assert gym_score("", "<answer>wrong</answer>", prompt.ground_truth, prompt.extra_info) < 0.2
    with pytest.raises(ValueError, match="needs prompts of a reasoning-gym source"):
        gym_score("mine", "7", "7", {})


def test_every_built_in_scorer_loads() -> None:
    for name in [*scorers.SCORERS, *(f"source:{source}" for source in scorers.SOURCES)]:
        assert callable(functions.load_function("reward.scorer", scorers.expand(name))), name
