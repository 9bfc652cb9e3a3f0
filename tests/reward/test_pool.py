"""Whatever a scorer does, every response gets a score, the pool goes on, and no process stays."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlscale.config.schema import RewardConfig
from rlscale.data.dataset import Prompt
from rlscale.reward.pool import RewardPool, Score

FAULTY = str(Path(__file__).with_name("faulty.py")) + ":by_text"


def make_prompt(scorer: str = "last_number", **changes: object) -> Prompt:
    messages = [{"role": "system", "content": "1 2 3"}, {"role": "user", "content": "What is 3 + 4?"}]
    return Prompt(messages, "made_up", "7", **{"scorer": scorer, **changes})  # type: ignore[arg-type]


def score_all(pool: RewardPool, texts: list[str], prompt: Prompt | None = None) -> list[Score]:
    async def gather() -> list[Score]:
        return await asyncio.gather(*(pool.score(prompt or make_prompt(), text) for text in texts))

    return asyncio.run(gather())


def alive(pid: int) -> bool:
    """Whether a process runs (a zombie of another parent doesn't count)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until_gone(pids: list[int], seconds: float = 10.0) -> list[int]:
    deadline = time.monotonic() + seconds
    while (left := [pid for pid in pids if alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


@pytest.fixture
def pool() -> Iterator[RewardPool]:
    made = RewardPool(RewardConfig(scorer=FAULTY, num_workers=2, timeout_s=20.0, scorer_args={"bonus": 2}), set())
    yield made
    made.close()


@pytest.mark.parametrize(
    ("text", "value", "extra"),
    [("half", 0.5, {}), ("true", 1.0, {}), ("dict", 1.0, {"format": 0.25, "ok": 1.0}), ("arguments", 1.0, {})],
)
def test_valid_results(pool: RewardPool, text: str, value: float, extra: dict[str, float]) -> None:
    (score,) = score_all(pool, [text])
    assert score == Score(value, "", extra)


def test_workers_hold_nothing_heavy(pool: RewardPool) -> None:
    assert score_all(pool, ["heavy"])[0].value == 0.0


def test_invalid_results_are_failures_with_a_reason(pool: RewardPool) -> None:
    reasons = {
        "raise": "RuntimeError: no idea",
        "nan": "nan, which isn't a finite number",
        "inf": "inf, which",
        "none": "None, which",
        "text": "'1.0', which",
        "complex": "1j, which",
        "huge": "which isn't a finite number",
        "keyless": "without 'score'",
        "lambda": "function",
        "exit": "SystemExit",
        "no such action": "KeyError",
    }
    for (text, reason), score in zip(reasons.items(), score_all(pool, list(reasons)), strict=True):
        assert score.failed and score.value == 0.0, text
        assert reason in score.error, (text, score.error)


def test_crash_costs_one_response_only(pool: RewardPool) -> None:
    """Sixty responses of which six kill their process: each of those is named, all others are scored."""
    texts = ["crash" if i % 10 == 5 else "half" for i in range(60)]
    scores = score_all(pool, texts)
    for text, score in zip(texts, scores, strict=True):
        assert (score.failed, score.value) == ((True, 0.0) if text == "crash" else (False, 0.5))
    assert "died (exit status 3)" in scores[5].error


@pytest.mark.parametrize("hang", ["sleep", "regex"])
def test_hanging_scorer_is_killed_in_time(hang: str) -> None:
    """The time-out bites even where the scorer never lets go of the interpreter lock, and the others are scored."""
    pool = RewardPool(RewardConfig(scorer=FAULTY, num_workers=1, timeout_s=0.5), set())
    try:
        (before,) = score_all(pool, ["pid"])
        started = time.monotonic()
        scores = score_all(pool, ["half", hang, "half", "pid"])
        assert 0.5 <= time.monotonic() - started < 10
        assert [score.value for score in scores[:3]] == [0.5, 0.0, 0.5]
        assert scores[1].failed and "more than 0.5 s" in scores[1].error
        assert scores[3].value != before.value and wait_until_gone([int(before.value)]) == []
        assert [score.failed for score in scores] == [False, True, False, False]
    finally:
        pool.close()


def test_close_ends_busy_workers_and_later_scores_fail() -> None:
    pool = RewardPool(RewardConfig(scorer=FAULTY, num_workers=2, timeout_s=60.0), set())
    pids = [worker.process.pid for worker in pool._workers if worker.process]
    assert len(pids) == 2 and all(map(alive, pids))

    async def close_while_busy() -> list[Score]:
        busy = [asyncio.create_task(pool.score(make_prompt(), text)) for text in ("sleep", "regex")]
        await asyncio.sleep(0.3)
        await asyncio.get_running_loop().run_in_executor(None, pool.close)
        return await asyncio.gather(*busy)

    started = time.monotonic()
    scores = asyncio.run(close_while_busy())
    assert time.monotonic() - started < 10
    assert all(score.failed for score in scores)
    assert not any(map(alive, pids))
    pool.close()
    assert score_all(pool, ["half"])[0].failed


def test_arguments_that_cannot_be_sent_are_a_failure(pool: RewardPool) -> None:
    scores = score_all(pool, ["half"], make_prompt(extra_info={"f": lambda: 1}))
    assert scores[0].failed and "pickle" in scores[0].error
    assert score_all(pool, ["half"])[0].value == 0.5


def test_each_prompt_brings_its_own_scorer() -> None:
    pool = RewardPool(RewardConfig(), {"last_number", "exact_match", "source:openai/gsm8k"})
    try:
        for scorer, text, value in [
            ("last_number", "3 + 4 = 7", 1.0),
            ("last_number", "7 or 8", 0.0),
            ("exact_match", "3 + 4 = 7", 0.0),
            ("source:openai/gsm8k", "first $3$, then $\\boxed{\\frac{14}{2}}$", 1.0),
        ]:
            assert score_all(pool, [text], make_prompt(scorer))[0] == Score(value), (scorer, text)
    finally:
        pool.close()


def test_bad_scorers_are_errors_at_once(tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("import module_that_is_not_there\n")
    unparsable = tmp_path / "unparsable.py"
    unparsable.write_text("def f(:\n")
    good = tmp_path / "good.py"
    good.write_text("def f(**_):\n    return 1.0\nx = 3\n")
    for spec, reason in {
        f"{tmp_path}/none.py:f": "none.py",
        "no_such_module_at_all:f": "no module named 'no_such_module_at_all'",
        f"{good}:g": "has no function 'g'",
        f"{good}:x": "has no function 'x'",
        f"{broken}:f": "no module named 'module_that_is_not_there'",
        f"{unparsable}:f": "SyntaxError",
        "nonsense": "not of the form module:function",
        "module:": "not of the form module:function",
    }.items():
        with pytest.raises(ValueError, match="reward.scorer") as error:
            RewardPool(RewardConfig(scorer=spec), set())
        assert reason in str(error.value), (spec, str(error.value))
    with pytest.raises(ValueError, match="data source 'mine' has no default"):
        RewardPool(RewardConfig(), {"source:mine"})


def test_scorer_that_ends_its_process_while_loading(tmp_path: Path) -> None:
    (tmp_path / "ends.py").write_text("import os\nos._exit(5)\n")
    with pytest.raises(ValueError, match="ended while loading .* 5"):
        RewardPool(RewardConfig(scorer=f"{tmp_path}/ends.py:f", num_workers=2), set())


def test_relative_path_and_module_of_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text("def f(solution_str, **_):\n    return len(solution_str)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for spec in ("mine.py:f", "./mine.py:f", "mine:f"):
        pool = RewardPool(RewardConfig(scorer=spec), set())
        assert score_all(pool, ["four"])[0].value == 4.0
        pool.close()


def test_workers_die_with_a_killed_parent_and_at_a_plain_exit(tmp_path: Path) -> None:
    """No orphan: neither when the trainer is killed while a scorer hangs in C code, nor when it just ends."""
    script = tmp_path / "parent.py"
    script.write_text(
        textwrap.dedent(f"""
        import asyncio, sys, threading
        sys.path[:0] = {sys.path!r}
        from rlscale.config.schema import RewardConfig
        from rlscale.reward.pool import RewardPool
        from tests.reward.test_pool import make_prompt
        pool = RewardPool(RewardConfig(scorer={FAULTY!r}, num_workers=2, timeout_s=600.0), set())
        print(*(worker.process.pid for worker in pool._workers), flush=True)
        if sys.argv[1] == "busy":
            asyncio.run(pool.score(make_prompt(), "regex"))
        """)
    )
    for how in ("busy", "plain"):
        parent = subprocess.Popen([sys.executable, str(script), how], stdout=subprocess.PIPE, text=True)
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
        if how == "busy":
            time.sleep(0.3)
            assert all(map(alive, pids))
            os.kill(parent.pid, signal.SIGKILL)
        assert parent.wait(30) == (-signal.SIGKILL if how == "busy" else 0)
        parent.stdout.close()
        assert wait_until_gone(pids) == []
