"""An engine of two workers."""

from __future__ import annotations

from tests.rollout.updates import computes_what_it_was_given, finds_a_flipped_bit, refuses_an_incomplete_update


def test_an_engine_split_over_two_ranks(run_dir: str) -> None:
    """One kv head, so that both workers hold it; untied; each worker reads the bucket of its own rank."""
    computes_what_it_was_given("split", run_dir)
    refuses_an_incomplete_update("split", run_dir)
    finds_a_flipped_bit("split", run_dir)
