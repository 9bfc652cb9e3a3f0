"""How a program that a signal ends before its first step is told from one that has failed."""

from __future__ import annotations

import sys

import pytest

from rlscale.loop.launch import signalled


class Field:
    def __set_name__(self, owner: type, name: str) -> None:
        sys.exit(143)  # as the handler of a signal that arrives here


def test_a_signal_while_a_class_is_made_is_a_signal() -> None:
    with pytest.raises((RuntimeError, SystemExit)) as raised:
        type("Model", (), {"field": Field()})
    assert signalled(raised.value) == 143


def test_an_error_is_no_signal() -> None:
    assert signalled(RuntimeError("an error")) is None
    assert signalled(SystemExit("a text")) == 1
