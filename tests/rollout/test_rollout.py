"""Real engines on tiny models: what they sample under given weights, how weights reach them, how they end.

The engines of a layout are started once, on the ranks of a pooled world, and used by all tests of the layout.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlscale.rollout.host import last_error
from rlscale.testing.models import tiny_model
from tests import worlds

START = 240.0  # seconds for a call that starts engines, on a busy machine
EXACT = 2e-5
SHAPES: dict[str, dict[str, Any]] = {
    "replicas": dict(arch="qwen2", tied=True, heads=4, kv_heads=2, head_dim=32),
    "split": dict(arch="qwen3", tied=False, heads=4, kv_heads=1, head_dim=32, hidden=96),
}
PROMPTS = [[4 + (7 * p + 3 * i) % 300 for i in range(20 + 9 * p)] for p in range(5)]  # shorter and longer than a block
EOS = 3


def model(layout: str, seed: int) -> str:
    return tiny_model(**SHAPES[layout], seed=seed)


@pytest.fixture(scope="module", autouse=True)
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    yield str(tmp_path_factory.mktemp("run"))
    worlds.run(2, close_all)


# Functions that run on the ranks; the rollout of a layout stays in the rank's process from call to call.

_rollouts: dict[str, Any] = {}


def configuration(layout: str, path: str, **rollout: Any) -> Any:
    from rlscale.config.schema import Config

    cfg = Config()
    cfg.model.path, cfg.model.dtype = path, "float32"
    cfg.data.max_prompt_length, cfg.data.max_response_length = 64, 64
    cfg.rollout.tensor_model_parallel_size = 2 if layout == "split" else 1
    cfg.rollout.kv_cache_memory_gb, cfg.rollout.max_num_seqs, cfg.rollout.sync_bucket_mb = 1 / 32, 16, 1
    cfg.rollout.engine_restarts = 0
    for key, value in rollout.items():
        setattr(cfg.rollout, key, value)
    return cfg


def close_all() -> None:
    while _rollouts:
        _rollouts.popitem()[1].close()


def rollout_of(layout: str, run_dir: str) -> Any:
    from rlscale.cluster.device import Device
    from rlscale.rollout.engine import Rollout

    if layout not in _rollouts:
        close_all()
        rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
        device = Device("cpu", rank, rank, world, world)
        rollout = Rollout(configuration(layout, model(layout, 0)), device, run_dir, [EOS])
        rollout.start()
        _rollouts[layout] = rollout
    return _rollouts[layout]


def weights(layout: str, seed: int, without: str | None = None) -> Any:
    """A source layout in which every tensor is cut over the ranks, and this rank's parts."""
    from safetensors.torch import load_file

    from rlscale.reshard.layout import Layout, Piece, whole

    world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    full = {k: v for k, v in load_file(f"{model(layout, seed)}/model.safetensors").items() if k != without}
    pieces, mine = [], {}
    for name, tensor in full.items():
        for r in range(world):
            rows = tensor.shape[0] * r // world, tensor.shape[0] * (r + 1) // world
            part = tensor[rows[0] : rows[1]]
            pieces.append(Piece(name, r, (rows, *whole(tuple(tensor.shape[1:]))), name, whole(tuple(part.shape))))
            if r == rank:
                mine[name] = part.clone()
    return Layout({name: tuple(t.shape) for name, t in full.items()}, pieces), mine


def prompts(ids: list[list[int]]) -> list[Any]:
    return [SimpleNamespace(token_ids=p, text=str(i), data_source="tiny") for i, p in enumerate(ids)]


def generate(layout: str, run_dir: str, given: int | None, **sampling: Any) -> list[Any]:
    """Sync the weights of model ``given`` (None: as they are) and generate; this rank's trajectories."""
    from rlscale.rollout.sampling import Sampling

    rollout = rollout_of(layout, run_dir)
    if given is not None:
        metrics = rollout.sync(*weights(layout, given))
        assert metrics["rollout/sync_bytes"] > 0
    return rollout.generate(prompts(PROMPTS), Sampling(**{"n": 1, "max_tokens": 16, **sampling}))


def together(shares: list[list[Any]]) -> list[Any]:
    return sorted((t for share in shares for t in share), key=lambda t: (t.prompt_index, t.sample_index))


# What the weights say: transformers in fp32.

_references: dict[str, Any] = {}


def reference_logits(path: str, trajectory: Any) -> torch.Tensor:
    """[t, vocabulary] logits that each response token was drawn from."""
    from transformers import AutoModelForCausalLM

    if path not in _references:
        _references[path] = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    ids = torch.tensor([trajectory.prompt_ids + trajectory.response_ids])
    with torch.no_grad():
        return _references[path](ids).logits[0, len(trajectory.prompt_ids) - 1 : -1]


def check(trajectories: list[Any], path: str, temperature: float = 1.0, greedy: bool = False) -> None:
    for t in trajectories:
        logits = reference_logits(path, t)
        ids = torch.tensor(t.response_ids)
        if greedy:
            assert logits.argmax(-1).tolist() == t.response_ids
        expected = (logits / temperature).log_softmax(-1).gather(1, ids[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(t.rollout_logprobs), expected, atol=EXACT, rtol=0)


def computes_what_it_was_given(layout: str, run_dir: str) -> None:
    """The model's own weights, others, the first again; each time prompts are cached under the old weights."""
    for seed in (None, 1, 0):
        got = together(worlds.run(2, generate, layout, run_dir, seed, temperature=0.0, timeout=START))
        assert [t.prompt_index for t in got] == list(range(len(PROMPTS)))
        check(got, model(layout, seed or 0), greedy=True)


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
        rollout.sync(*weights("replicas", given))
    serve = rollout._serve

    async def late(*args: Any) -> list[Any]:
        [claims] = (a for a in args if isinstance(a, Claims))
        while rollout.device.rank != taker and claims.counter.add(claims.key, 0) < claims.total:
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
    engine, sample = rollout.host.engine, rollout._sample
    resume = engine.resume_generation

    async def late(prompt: Any, index: int, *args: Any) -> Any:
        await asyncio.sleep(late_s.get(index, 0))
        return await sample(prompt, index, *args)

    async def resumed() -> None:
        waiting.append(engine.get_num_unfinished_requests())
        await resume()

    rollout.cfg.trainer.deterministic, rollout._sample, engine.resume_generation = deterministic, late, resumed
    try:
        return rollout.generate(prompts(PROMPTS), Sampling(n=4, max_tokens=24, seed=5)), waiting
    finally:
        rollout.cfg.trainer.deterministic, rollout._sample, engine.resume_generation = False, sample, resume


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
    """Scores a response by its length; fails for prompt 1, and keeps the order of events."""

    def __init__(self) -> None:
        self.scored: list[float] = []

    async def score(self, prompt: Any, text: str) -> Any:
        self.scored.append(time.monotonic())
        await asyncio.sleep(0.01)
        failed = prompt.text == "1"
        error = "no number" if failed else ""
        value = 0.0 if failed else float(len(text))
        return SimpleNamespace(value=value, failed=failed, error=error, extra={"words": 1.0})


def generate_scored(run_dir: str) -> Any:
    from rlscale.rollout.sampling import Sampling

    rollout, pool = rollout_of("replicas", run_dir), Pool()
    rollout.tokenizer = SimpleNamespace(decode=lambda ids, skip_special_tokens: "x" * len(ids))
    got = rollout.generate(prompts(PROMPTS), Sampling(n=8, max_tokens=32, seed=2), pool)
    done = time.monotonic()
    return got, [done - t for t in pool.scored]


def test_responses_are_scored_while_others_are_generated(run_dir: str) -> None:
    results = worlds.run(2, generate_scored, run_dir, timeout=START)
    got = together([share for share, _ in results])
    assert len(got) == 8 * len(PROMPTS)
    for t in got:
        assert t.reward == (0.0 if t.prompt_index == 1 else len(t.response_ids))
        assert t.reward_failed == (t.prompt_index == 1) and bool(t.reward_error) == t.reward_failed
        assert t.extra == {"words": 1.0}
    for share, before_end in results:  # of the earliest and the latest response of a leader
        assert not share or max(before_end) - min(before_end) > 0.05, "all responses were scored at the end"


def sync_incomplete(layout: str, run_dir: str, how: str) -> str:
    """An update that lacks something, in the source or (a fault) in what is handed over; returns the error."""
    from rlscale import reshard
    from rlscale.rollout.sampling import Sampling

    rollout = rollout_of(layout, run_dir)
    name = "model.layers.1.mlp.up_proj.weight"
    if how == "source":
        with pytest.raises(ValueError) as caught:
            rollout.sync(*weights(layout, 1, without=name))
        return str(caught.value)
    source, tensors = weights(layout, 1)
    rollout.sync(source, tensors)
    source, tensors = weights(layout, 1)  # another object with the same content: the plan stays
    rollout.source = None
    destination = rollout.destination
    plan = destination.plan

    def faulty(source: Any, bucket_bytes: int, **_: Any) -> Any:
        rest = destination.layout.only(set(destination.layout.shapes) - {name})
        return reshard.plan(source, rest, dtype=destination.dtypes, bucket_bytes=bucket_bytes)

    rollout.destination.plan = faulty
    try:
        with pytest.raises(RuntimeError) as caught:
            rollout.sync(source, tensors)
        with pytest.raises(RuntimeError, match="no valid weights"):
            rollout.generate(prompts(PROMPTS), Sampling(n=1))
    finally:
        rollout.destination.plan, rollout.source = plan, None
    return str(caught.value)


def refuses_an_incomplete_update(layout: str, run_dir: str) -> None:
    for how in ("source", "transfer"):
        for message in worlds.run(2, sync_incomplete, layout, run_dir, how, timeout=START):
            assert "model.layers.1.mlp.up_proj.weight" in message
    check(together(worlds.run(2, generate, layout, run_dir, 1, timeout=START)), model(layout, 1))


def test_an_incomplete_update_is_an_error(run_dir: str) -> None:
    refuses_an_incomplete_update("replicas", run_dir)


def sync_with_a_flipped_bit(layout: str, run_dir: str, verify: str) -> str:
    """One bit of what rank 1 hands to its worker is wrong; returns the error and the tensor that was hit."""
    from rlscale.rollout.sampling import Sampling

    rollout = rollout_of(layout, run_dir)
    rollout.sync(*weights(layout, 1))
    before, rollout.cfg.rollout.sync_verify = rollout.cfg.rollout.sync_verify, verify
    fill = rollout.buckets.fill

    def faulty(tensors: Any) -> Any:
        for bucket in fill(tensors):
            if rollout.device.rank == 1 and bucket.number == 0:
                _, values = list(bucket.tensors())[-1]
                values.view(torch.uint8).view(-1)[-1] ^= 1
            yield bucket

    rollout.buckets.fill = faulty
    hit = rollout.buckets.plan.bucket(1, 0)[-1].destination.name
    try:
        if verify == "off":
            rollout.sync(*weights(layout, 1))
            return ""
        with pytest.raises(RuntimeError) as caught:
            rollout.sync(*weights(layout, 1))
        with pytest.raises(RuntimeError, match="no valid weights"):
            rollout.generate(prompts(PROMPTS), Sampling(n=1))
    finally:
        rollout.buckets.fill, rollout.cfg.rollout.sync_verify = fill, before
    assert str(caught.value).endswith(f"1 tensor(s) differ: {hit}"), hit
    return str(caught.value)


def finds_a_flipped_bit(layout: str, run_dir: str) -> None:
    messages = worlds.run(2, sync_with_a_flipped_bit, layout, run_dir, "always", timeout=START)
    assert messages[0] == messages[1] and messages[0].startswith("rank 1: after the weight update the engine holds")
    assert worlds.run(2, sync_with_a_flipped_bit, layout, run_dir, "off", timeout=START) == ["", ""]
    check(together(worlds.run(2, generate, layout, run_dir, 1, timeout=START)), model(layout, 1))


def test_a_flipped_bit_is_found_and_the_tensor_named(run_dir: str) -> None:
    finds_a_flipped_bit("replicas", run_dir)


def generate_too_slowly(run_dir: str) -> str:
    from rlscale.rollout.sampling import Sampling

    rollout = rollout_of("replicas", run_dir)
    patience, rollout.cfg.rollout.request_timeout_s = rollout.cfg.rollout.request_timeout_s, 0.01
    try:
        with pytest.raises(RuntimeError) as caught:
            rollout.generate(prompts(PROMPTS), Sampling(n=4, max_tokens=60))
    finally:
        rollout.cfg.rollout.request_timeout_s = patience
    return str(caught.value)


def test_generation_that_takes_too_long_is_an_error_and_the_engines_go_on(run_dir: str) -> None:
    for message in worlds.run(2, generate_too_slowly, run_dir, timeout=START):
        assert re.fullmatch(r"rank \d: generation took more than 0.01 s", message)
    check(together(worlds.run(2, generate, "replicas", run_dir, 1, timeout=START)), model("replicas", 1))


def lose_engines(run_dir: str) -> Any:
    """Rank 1 loses its engine while it generates: the samples without and with that, and how many it cost."""
    from rlscale.rollout.sampling import Sampling

    rollout = rollout_of("replicas", run_dir)
    rollout.cfg.rollout.engine_restarts = rollout.restarts + 1
    looks = 0

    def kill_once() -> bool:
        nonlocal looks
        looks += 1
        if looks == 3 and rollout.device.rank == 1:
            os.kill(rollout.host.processes[0].pid, signal.SIGKILL)
        return False

    sampling = Sampling(n=4, max_tokens=16, seed=11)
    expected = rollout.generate(prompts(PROMPTS), sampling)
    rollout.interrupted = kill_once
    got = rollout.generate(prompts(PROMPTS), sampling)
    rollout.cfg.rollout.engine_restarts, rollout.interrupted = 0, lambda: False
    return expected, got, rollout.resampled


def test_a_lost_engine_is_replaced_and_only_what_was_unfinished_is_sampled_again(run_dir: str) -> None:
    worlds.run(2, generate, "replicas", run_dir, 1, timeout=START)
    answers = worlds.run(2, lose_engines, run_dir, timeout=START)
    expected, got = (together([a[k] for a in answers]) for k in (0, 1))
    assert len(expected) == len(got) == 4 * len(PROMPTS)
    for one, other in zip(expected, got, strict=True):
        assert one.response_ids == other.response_ids
        assert one.rollout_logprobs == pytest.approx(other.rollout_logprobs, abs=EXACT)
    assert answers[0][2] == answers[1][2] and 0 < answers[0][2] < len(expected)


def interrupt(run_dir: str) -> int:
    from rlscale.rollout.sampling import Sampling

    rollout, looks = rollout_of("replicas", run_dir), iter(range(100))
    rollout.interrupted = lambda: next(looks) > 3
    try:
        return len(rollout.generate(prompts(PROMPTS), Sampling(n=4, max_tokens=60)))
    finally:
        rollout.interrupted = lambda: False


def test_generation_can_be_broken_off(run_dir: str) -> None:
    assert sum(worlds.run(2, interrupt, run_dir, timeout=START)) < 4 * len(PROMPTS)
    check(together(worlds.run(2, generate, "replicas", run_dir, 1, timeout=START)), model("replicas", 1))


def family(run_dir: str, layout: str) -> tuple[list[int], set[str]]:
    rollout = rollout_of(layout, run_dir)
    return engine_processes(rollout), {path.name for path in rollout.host.shared}


def engine_processes(rollout: Any) -> list[int]:
    import psutil

    roots = [process.pid for process in rollout.host.processes]
    return roots + [child.pid for root in roots for child in psutil.Process(root).children(recursive=True)]


def sync_while_dying(run_dir: str) -> tuple[str, float]:
    """The engine of rank 1 is killed between two buckets; the next update finds it dead and starts a new one."""
    rollout = rollout_of("replicas", run_dir)
    rollout.sync(*weights("replicas", 0))
    fill = rollout.buckets.fill

    def faulty(tensors: Any) -> Any:
        for bucket in fill(tensors):
            if rollout.device.rank == 1 and bucket.number == 1:
                os.kill(rollout.host.processes[0].pid, signal.SIGKILL)
            yield bucket

    rollout.buckets.fill = faulty
    started = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        rollout.sync(*weights("replicas", 1))
    took = time.monotonic() - started
    rollout.buckets.fill = fill
    before, rollout.cfg.rollout.engine_restarts = rollout.restarts, rollout.restarts + 1
    rollout.sync(*weights("replicas", 1))
    assert rollout.restarts == before + 1
    rollout.cfg.rollout.engine_restarts = 0
    return str(caught.value), took


def test_an_engine_that_dies_during_an_update_is_replaced(run_dir: str) -> None:
    before = [pids for pids, _ in worlds.run(2, family, run_dir, "replicas", timeout=START)]
    for message, took in worlds.run(2, sync_while_dying, run_dir, timeout=START):
        assert re.search(r"rank 1: the vLLM engine died during", message)
        assert took < 60, "a dead engine must not be waited for as long as a slow one"
    after = [pids for pids, _ in worlds.run(2, family, run_dir, "replicas", timeout=START)]
    assert after[0] == before[0] and not set(after[1]) & set(before[1]), "only the dead engine is replaced"
    assert not any(map(alive, before[1]))
    got = together(worlds.run(2, generate, "replicas", run_dir, None, temperature=0.0, timeout=START))
    check(got, model("replicas", 1), greedy=True)


def generate_while_dying(run_dir: str) -> str:
    from rlscale.rollout.sampling import Sampling

    rollout = rollout_of("replicas", run_dir)
    if rollout.device.rank == 1:
        os.kill(rollout.host.processes[0].pid, signal.SIGKILL)
        rollout.host.processes[0].join(10)
    with pytest.raises(RuntimeError) as caught:
        rollout.generate(prompts(PROMPTS), Sampling(n=4, max_tokens=60))
    _rollouts.pop("replicas").close()
    rollout.close()
    return str(caught.value)


def test_a_dead_engine_is_named_on_every_rank_and_closing_leaves_nothing(run_dir: str) -> None:
    families = worlds.run(2, family, run_dir, "replicas", timeout=START)
    pids, shared = [pid for of_rank, _ in families for pid in of_rank], set().union(*(names for _, names in families))
    assert len(pids) >= 2 and all(map(alive, pids)) and shared <= set(os.listdir("/dev/shm")) and shared
    for message in worlds.run(2, generate_while_dying, run_dir, timeout=START):
        assert re.search(r"rank 1: the vLLM engine died during generation", message)
    assert not any(map(alive, pids))
    assert not set(os.listdir("/dev/shm")) & shared


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_an_engine_split_over_two_ranks(run_dir: str) -> None:
    """One kv head, so that both workers hold it; untied; each worker reads the bucket of its own rank."""
    computes_what_it_was_given("split", run_dir)
    refuses_an_incomplete_update("split", run_dir)
    finds_a_flipped_bit("split", run_dir)


# A world of one, in a process that ends badly.

SCRIPT = """
import sys, time
from pathlib import Path

def main():
    import torch
    from rlscale.cluster.device import Device
    from rlscale.rollout.engine import Rollout
    from tests.rollout import test_rollout as t

    device = Device("cpu", 0, 0, 1, 2)  # half of the machine
    for path, arguments in {cases!r}:
        cfg = t.configuration("one", path, engine_args=arguments)
        rollout = Rollout(cfg, device, {run_dir!r}, [t.EOS])
        started = time.time()
        try:
            rollout.start()
        except RuntimeError as error:
            print("error", round(time.time() - started), error, flush=True)
            continue
        print("pids", *t.engine_processes(rollout), flush=True)
        time.sleep(600)

if __name__ == "__main__":
    main()
"""


def run_script(run_dir: str, cases: list[tuple[str, dict[str, Any]]]) -> subprocess.Popen[str]:
    script = Path(run_dir) / "one.py"
    script.write_text(SCRIPT.format(cases=cases, run_dir=run_dir))
    root = Path(__file__).resolve().parents[2]
    return subprocess.Popen(
        [sys.executable, str(script)],
        env=os.environ | {"PYTHONPATH": str(root)},
        cwd=run_dir,
        text=True,
        stdout=subprocess.PIPE,
    )


def test_a_start_that_fails_says_why_and_a_killed_trainer_takes_its_engine_along(run_dir: str) -> None:
    good = tiny_model("llama", tied=True)
    process = run_script(run_dir, [
        (good, {"no_such_argument": 1}),
        (tiny_model("llama", head_dim=16, heads=4, kv_heads=2), {}),
        (good, {}),
    ])  # fmt: skip
    assert process.stdout is not None
    try:
        unknown, head, started = (process.stdout.readline() for _ in range(3))
        for line, reason in ((unknown, "no_such_argument"), (head, "head_dim=16")):
            assert re.match(rf"error \d+ rank 0: vLLM cannot start: .*({reason})", line), line
        pids = [int(word) for word in started.split()[1:]]
        assert pids and all(map(alive, pids))
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    deadline = time.monotonic() + 5.0
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(alive, pids))


def test_the_reason_is_the_error_that_came_first_in_the_innermost_process() -> None:
    log = """
(EngineCore pid=1) ERROR 11-30 10:00:00 [core.py:1] Traceback (most recent call last):
(EngineCore pid=1) ERROR 11-30 10:00:00 [core.py:1] ValueError: head size 16 is not supported
(EngineCore pid=1) RuntimeError: Engine core initialization failed. See root cause above.
"""
    assert last_error(log) == "ValueError: head size 16 is not supported"
    assert last_error("nothing here") is None
