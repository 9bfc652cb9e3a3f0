"""How weights reach real engines of one rank each."""

from __future__ import annotations

from tests.rollout.updates import finds_a_flipped_bit, refuses_an_incomplete_update


def test_an_incomplete_update_is_an_error(run_dir: str) -> None:
    refuses_an_incomplete_update("replicas", run_dir)


def test_a_flipped_bit_is_found_and_the_tensor_named(run_dir: str) -> None:
    finds_a_flipped_bit("replicas", run_dir)
