"""Right answers that strict scorers elsewhere refuse, because of how a number is written."""

from __future__ import annotations

import pytest

from rlscale.reward.verifiers import gsm8k, last_number

RIGHT = ["#### 1,234", "#### 1234.", "####1234", "#### $1,234", "#### 1234.0", "#### 12\n#### 1234"]
WRONG = ["#### 1235", "1234"]


def test_gsm8k_reads_the_number_after_the_last_mark() -> None:
    assert [gsm8k("", answer, "1234") for answer in RIGHT + WRONG] == [1] * 6 + [0] * 2
    assert gsm8k("", "#### 18\nthat is all", "She sells 9 + 9 eggs.\n#### 18") == 1
    assert gsm8k("", "#### 17 or 18", "18") == 0
    with pytest.raises(ValueError, match="one number"):
        gsm8k("", "#### 1", "one")


def test_last_number_takes_no_punctuation_for_a_part_of_it() -> None:
    answers = ["answer 18.", "18 eggs cost $18", "so -18", "It is 17"]
    assert [last_number("", answer, "18") for answer in answers] == [1, 1, 0, 0]


def test_math_reads_a_boxed_answer_of_any_length() -> None:
    math = pytest.importorskip("rlscale.reward.math_answer").math
    digits = "1" * 120
    assert math("", f"So the answer is \\boxed{{{digits}}}.", digits) == 1
    assert math("", f"So the answer is \\boxed{{{digits[:-1]}2}}.", digits) == 0
