"""What real engines sample under given weights, and how the samples of a step come together."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import torch

from tests import worlds
from tests.rollout.helpers import (
    EOS,
    EXACT,
    PROMPTS,
    START,
    check,
    generate,
    model,
    prompts,
    reference_logits,
    rollout_of,
    together,
    weights,
)  # fmt: skip
from tests.rollout.updates import computes_what_it_was_given


def test_engines_compute_what_they_were_given(run_dir: str) -> None:
    computes_what_it_was_given("replicas", run_dir)


def test_samples_come_with_the_log_probs_of_their_temperature(run_dir: str) -> None:
    got = together(worlds.run(2, generate, "replicas", run_dir, 1, n=4, temperature=0.7, seed=5, timeout=START))
    assert [(t.prompt_index, t.sample_index) for t in got] == [(p, i) for p in range(len(PROMPTS)) for i in range(4)]
    check(got, model("replicas", 1), temperature=0.7)
    assert len({tuple(t.response_ids) for t in got}) > len(PROMPTS)
    for t in got:
        assert t.prompt_ids == PROMPTS[t.prompt_index] and t.prompt_text == str(t.prompt_index)
        assert t.response_mask == [1] * len(t.response_ids)
        ended = t.response_ids[-1] == EOS
        assert EOS not in t.response_ids[:-1]
        assert t.finish_reason == ("stop" if ended else "length")
        assert ended or len(t.response_ids) == 16
    assert {t.finish_reason for t in got} == {"stop", "length"}


def test_truncated_sampling_reports_the_truncated_distribution(run_dir: str) -> None:
    got = together(worlds.run(2, generate, "replicas", run_dir, 1, n=2, top_k=3, seed=6, timeout=START))
    for t in got:
        top = reference_logits(model("replicas", 1), t).topk(3)
        place = (top.indices == torch.tensor(t.response_ids)[:, None]).int().argmax(-1)
        expected = top.values.log_softmax(-1).gather(1, place[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(t.rollout_logprobs), expected, atol=EXACT, rtol=0)


def one_engine_takes_all(run_dir: str, given: int | None, taker: int, **sampling: Any) -> list[Any]:
    """As `generate`, with the other leader so slow that nothing is left for it."""
    from rlscale.rollout.sampling import Claims, Sampling

    rollout = rollout_of("replicas", run_dir)
    if given is not None:
        rollout.sync(lambda: weights("replicas", given))
    serve = rollout._serve

    async def late(*args: Any) -> list[Any]:
        [claims] = (a for a in args if isinstance(a, Claims))
        while rollout.device.rank != taker and claims.counter.add(claims.key, 0) < len(claims.positions):
            await asyncio.sleep(0.02)
        return await serve(*args)

    rollout._serve = late
    try:
        return rollout.generate(prompts(PROMPTS), Sampling(**sampling))
    finally:
        rollout._serve = serve


def test_a_response_does_not_depend_on_the_engine_that_takes_it(run_dir: str) -> None:
    sampling = dict(n=3, seed=9, max_tokens=12)
    first, second = (
        worlds.run(2, one_engine_takes_all, run_dir, given, taker, timeout=START, **sampling)
        for given, taker in ((1, 0), (None, 1))
    )
    assert [len(share) for share in first] == [3 * len(PROMPTS), 0], "a slow engine holds nobody back"
    assert [len(share) for share in second] == [0, 3 * len(PROMPTS)]
    shares = worlds.run(2, generate, "replicas", run_dir, None, timeout=START, **sampling)
    assert {t.prompt_index for t in shares[0]}.isdisjoint({t.prompt_index for t in shares[1]})
    for got in (second, shares):
        assert [t.response_ids for t in together(got)] == [t.response_ids for t in together(first)]
    other = together(worlds.run(2, generate, "replicas", run_dir, None, timeout=START, **{**sampling, "seed": 10}))
    assert [t.response_ids for t in other] != [t.response_ids for t in together(shares)]


def generate_late(run_dir: str, deterministic: bool, late_s: dict[int, float]) -> Any:
    """With requests that come late, by prompt; also how many there were when the engine began."""
    from rlscale.rollout.sampling import Sampling

    rollout, waiting = rollout_of("replicas", run_dir), []
    engine, sample = rollout.backend, rollout.sample
    resume = engine.resume

    async def late(prompt: Any, *args: Any) -> Any:
        await asyncio.sleep(late_s.get(int(prompt.text), 0))
        return await sample(prompt, *args)

    async def resumed() -> None:
        waiting.append(engine.waiting())
        await resume()

    rollout.cfg.trainer.deterministic, rollout.sample, engine.resume = deterministic, late, resumed
    try:
        return rollout.generate(prompts(PROMPTS), Sampling(n=4, max_tokens=24, seed=5)), waiting
    finally:
        engine.resume = resume


def test_deterministic_engines_begin_with_their_whole_share(run_dir: str) -> None:
    """Whoever is late: the same prompts for each engine, the same company for each, and so the same bits."""
    results = [
        worlds.run(2, generate_late, run_dir, True, late_s, timeout=START)
        for late_s in ({}, {0: 0.2, 4: 0.4}, {1: 0.4, 2: 0.1})
    ]
    for of_run in results:
        for rank, (share, waiting) in enumerate(of_run):
            own = list(range(rank, len(PROMPTS), 2))
            assert sorted({t.prompt_index for t in share}) == own
            assert waiting == [4 * len(own)]
    keys = [[(t.response_ids, t.rollout_logprobs) for share, _ in of_run for t in share] for of_run in results]
    assert keys[0] == keys[1] == keys[2]


class Pool:
    """Scores a response by its length; fails for prompt 1."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()

    async def score(self, prompt: Any, text: str) -> Any:
        self.begun.set()
        await asyncio.sleep(0.01)
        failed = prompt.text == "1"
        error = "no number" if failed else ""
        value = 0.0 if failed else float(len(text))
        return SimpleNamespace(value=value, failed=failed, error=error, extra={"words": 1.0})


def generate_scored(run_dir: str) -> Any:
    """With a last sample of each prompt that is not asked for before another one's response is being scored."""
    from rlscale.rollout.sampling import Sampling, sample_seed
    from rlscale.rollout.trajectory import sample_trajectory

    rollout, pool = rollout_of("replicas", run_dir), Pool()
    rollout.tokenizer = SimpleNamespace(decode=lambda ids, skip_special_tokens: "x" * len(ids))
    rollout.cfg.rollout.request_timeout_s = 100.0  # if nothing is scored before all are complete

    async def last_waits(prompt: Any, sampling: Any, seed: int, *args: Any) -> Any:
        if seed == sample_seed(sampling.seed, int(prompt.text), 7):
            await pool.begun.wait()
        return await sample_trajectory(prompt, sampling, seed, *args)

    rollout.sample = last_waits
    return rollout.generate(prompts(PROMPTS), Sampling(n=8, max_tokens=32, seed=2), pool)


def test_responses_are_scored_while_others_are_generated(run_dir: str) -> None:
    got = together(worlds.run(2, generate_scored, run_dir, timeout=START))
    assert len(got) == 8 * len(PROMPTS)
    for t in got:
        assert t.reward == (0.0 if t.prompt_index == 1 else len(t.response_ids))
        assert t.reward_failed == (t.prompt_index == 1) and bool(t.reward_error) == t.reward_failed
        assert t.extra == {"words": 1.0}


def interrupt(run_dir: str) -> int:
    """The first sample of the step never comes to its end; its engine's leader breaks off when another one has."""
    from rlscale.rollout.sampling import Sampling, sample_seed
    from rlscale.rollout.trajectory import sample_trajectory

    rollout, done, stuck = rollout_of("replicas", run_dir), [0], []

    async def sample(prompt: Any, sampling: Any, seed: int, *args: Any) -> Any:
        trajectory = await sample_trajectory(prompt, sampling, seed, *args)
        if seed == sample_seed(sampling.seed, 0, 0):
            stuck.append(seed)
            await asyncio.Event().wait()
        done[0] += 1
        return trajectory

    rollout.sample, rollout.interrupted = sample, lambda: bool(stuck and done[0])
    return len(rollout.generate(prompts(PROMPTS), Sampling(n=4, max_tokens=60)))


def test_generation_can_be_broken_off(run_dir: str) -> None:
    assert sum(worlds.run(2, interrupt, run_dir, timeout=START)) < 4 * len(PROMPTS)
    check(together(worlds.run(2, generate, "replicas", run_dir, 1, timeout=START)), model("replicas", 1))


def generate_in_turns(run_dir: str) -> Any:
    """An agent that asks twice, with an observation in between."""
    from dataclasses import replace

    from rlscale.batch.types import Trajectory
    from rlscale.rollout.sampling import Sampling

    rollout = rollout_of("replicas", run_dir)
    rollout.sync(lambda: weights("replicas", 1))

    async def agent(prompt: Any, sampling: Any, seed: int, generate: Any) -> Any:
        first = await generate(prompt.token_ids, replace(sampling, seed=seed, stop_token_ids=(7,)))
        observed = [9, 10, 11]
        context = [*prompt.token_ids, *first.token_ids, *observed]
        second = await generate(context, replace(sampling, seed=seed + 1))
        return Trajectory(
            0, 0, prompt.token_ids, [*first.token_ids, *observed, *second.token_ids],
            [1] * len(first.token_ids) + [0] * 3 + [1] * len(second.token_ids),
            [*first.logprobs, 0.0, 0.0, 0.0, *second.logprobs],
        )  # fmt: skip

    rollout.sample = agent
    return rollout.generate(prompts(PROMPTS), Sampling(n=2, max_tokens=8, seed=4))


def test_an_agent_takes_the_place_of_the_single_request(run_dir: str) -> None:
    got = together(worlds.run(2, generate_in_turns, run_dir, timeout=START))
    assert [(t.prompt_index, t.sample_index) for t in got] == [(p, i) for p in range(len(PROMPTS)) for i in range(2)]
    for t in got:
        first = t.response_mask.index(0)
        assert t.response_mask[first : first + 4] == [0, 0, 0, 1] and t.response_ids[first : first + 3] == [9, 10, 11]
        assert first == 8 or t.response_ids[first - 1] == 7, "this request ends at a token of its own"
        logits, mask = reference_logits(model("replicas", 1), t), torch.tensor(t.response_mask)
        of_policy = logits.log_softmax(-1).gather(1, torch.tensor(t.response_ids)[:, None])[:, 0] * mask
        torch.testing.assert_close(torch.tensor(t.rollout_logprobs), of_policy, atol=EXACT, rtol=0)
