"""The files of a run: what is logged is read back, also after a kill, a resume or a second run in the same folder."""

from __future__ import annotations

import contextlib
import json
import math
from pathlib import Path

import pytest

from rlscale.config import Config
from rlscale.observe.writers import METRICS, RunWriter, read_metrics, read_records
from tests.configurations import load
from tests.disk import small_file_system


@pytest.fixture
def config() -> Config:
    c = Config()
    c.trainer.logger = ["jsonl"]
    return c


def test_a_record_is_on_disk_before_the_next_step(config: Config, tmp_path: Path) -> None:
    writer = RunWriter(config, tmp_path / "a" / "run")
    writer.log(0, {"val/addition/mean@1": 0.5})
    writer.log(1, {"critic/score/mean": 0.25, "actor/grad_norm": math.nan})
    lines = (tmp_path / "a/run" / METRICS).read_text().splitlines()  # the writer is still open
    assert [json.loads(x) for x in lines] == [
        {"step": 0, "val/addition/mean@1": 0.5},
        {"step": 1, "critic/score/mean": 0.25, "actor/grad_norm": None},
    ]
    writer.close()
    writer.close()
    assert load(tmp_path / "a/run/config.yaml") == config


def test_records_of_one_step_are_merged_in_order(config: Config, tmp_path: Path) -> None:
    writer = RunWriter(config, tmp_path)
    writer.log(2, {"a": 1.0})
    writer.log(1, {"a": 3.0, "b": math.inf})
    writer.log(2, {"b": 2.0})
    writer.close()
    assert read_metrics(tmp_path) == [{"step": 1, "a": 3.0}, {"step": 2, "a": 1.0, "b": 2.0}]


def test_a_resumed_run_drops_what_was_cut_off_or_is_later_than_its_state(config: Config, tmp_path: Path) -> None:
    writer = RunWriter(config, tmp_path)
    for step in (1, 2, 3):
        writer.log(step, {"a": float(step)})
        writer.rollouts(step, [{"prompt": ""}])
        writer.rollouts(step, [{"prompt": ""}], kind="val")
    writer.close()
    with open(tmp_path / METRICS, "a") as file:
        file.write('{"step": 4, "a"')  # killed while writing
    assert [r["step"] for r in read_metrics(tmp_path)] == [1, 2, 3]
    writer = RunWriter(config, tmp_path, resume_step=2)
    assert sorted(p.name for p in tmp_path.glob("rollouts/*")) == [
        "step_000001.jsonl", "step_000002.jsonl", "val_000001.jsonl", "val_000002.jsonl",
    ]  # fmt: skip
    writer.log(3, {"a": 30.0})
    writer.close()
    assert [r["a"] for r in read_metrics(tmp_path)] == [1.0, 2.0, 30.0]


def test_a_step_that_was_not_yet_recorded_is_recorded_once(config: Config, tmp_path: Path) -> None:
    """Its checkpoint was saved before its validation; a later attempt to go on may have recorded it."""
    writer = RunWriter(config, tmp_path)
    for step in (1, 2, 3):
        writer.log(step, {"a": float(step)})
        writer.rollouts(step, [{"step": step}])
    writer.close()
    writer = RunWriter(config, tmp_path, resume_step=2, recorded=1)
    writer.log(2, {"a": 2.5})
    writer.close()
    assert [(r["step"], r["a"]) for r in read_records(tmp_path)] == [(1, 1.0), (2, 2.5)]
    assert len(list(tmp_path.glob("rollouts/step_*.jsonl"))) == 2


def test_a_new_run_moves_the_old_one_aside(config: Config, tmp_path: Path) -> None:
    for reward in (0.1, 0.2, 0.3):
        writer = RunWriter(config, tmp_path)
        writer.log(1, {"reward": reward})
        writer.rollouts(1, [{"reward": reward}])
        writer.close()
        (tmp_path / "checkpoints" / f"step_{round(10 * reward)}").mkdir(parents=True)
    assert read_metrics(tmp_path)[0]["reward"] == 0.3
    assert [read_metrics(tmp_path / "previous" / n)[0]["reward"] for n in "12"] == [0.1, 0.2]
    assert (tmp_path / "previous/1/rollouts/step_000001.jsonl").is_file()
    # a checkpoint of another run must never be taken for one of this
    assert [next((tmp_path / p / "checkpoints").iterdir()).name for p in ("previous/1", "previous/2", ".")] == [
        "step_1", "step_2", "step_3",
    ]  # fmt: skip


def test_rollouts_are_whole_files_of_rows(config: Config, tmp_path: Path) -> None:
    writer = RunWriter(config, tmp_path)
    rows = [{"prompt": "two\nlines", "response": "é 日", "token_ids": [1, 2], "reward": 0.0}, {"prompt": ""}]
    writer.rollouts(7, iter(rows))
    path = tmp_path / "rollouts" / "step_000007.jsonl"
    assert [json.loads(x) for x in path.read_text().splitlines()] == rows
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    writer.close()


def test_only_the_first_rank_writes(config: Config, tmp_path: Path) -> None:
    writer = RunWriter(config, tmp_path / "run", rank=1)
    writer.log(1, {"a": 1.0})
    writer.rollouts(1, [{}])
    writer.close()
    assert not (tmp_path / "run").exists()


def test_tensorboard_events_hold_the_same_numbers(config: Config, tmp_path: Path) -> None:
    config.trainer.logger = ["tensorboard"]
    writer = RunWriter(config, tmp_path)
    writer.log(1, {"critic/score/mean": 0.25})
    writer.log(2, {"critic/score/mean": 0.5})
    writer.close()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("critic/score/mean")] == [(1, 0.25), (2, 0.5)]
    assert not (tmp_path / METRICS).exists()


def test_a_folder_that_cannot_be_written_is_named(config: Config, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"trainer\.run_dir: .*file/run cannot be written"):
        RunWriter(config, tmp_path / "file" / "run")


def test_a_full_disk_is_an_error_that_names_the_file(config: Config, tmp_path: Path) -> None:
    writer = RunWriter(config, tmp_path)
    writer._file = open("/dev/full", "wb", buffering=0)
    with pytest.raises(OSError, match=rf"No space left on device: '{tmp_path}/metrics.jsonl'"):
        writer.log(1, {"a": 1.0})
    writer.close()


def test_a_disk_that_is_full_for_a_while_loses_nothing(config: Config, tmp_path: Path) -> None:
    with small_file_system(tmp_path / "disk", 64 * 2**10) as disk:
        ballast = disk / "ballast"
        made: list[None] = []
        writer = RunWriter(config, disk / "run", on_disk_full=lambda: made.append(ballast.unlink()))

        def fill() -> None:
            with contextlib.suppress(OSError), open(ballast, "wb", buffering=0) as file:
                while True:
                    file.write(bytes(512))

        metrics = {f"m{i}": float(i) for i in range(600)}
        for step in (1, 2):
            fill()
            writer.log(step, metrics)
            assert len(made) == 2 * step - 1
            fill()
            writer.rollouts(step, [{"text": "x" * 8000}])
            assert len(made) == 2 * step
        writer.close()
        assert [record["step"] for record in read_records(disk / "run")] == [1, 2]
        assert len((disk / "run/rollouts/step_000002.jsonl").read_text()) > 8000


def test_a_damaged_record_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such file"):
        read_metrics(tmp_path)
    for damaged in ("{]", "3", '{"no": "step"}'):
        (tmp_path / METRICS).write_text(f'{{"step": 1}}\n{damaged}\n{{"step": 3}}\n')
        with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2"):
            read_metrics(tmp_path)


def test_a_folder_is_written_by_one_run_at_a_time(tmp_path: Path) -> None:
    first = RunWriter(Config(), tmp_path)
    with pytest.raises(ValueError, match=f"trainer.run_dir: another run writes into {tmp_path}"):
        RunWriter(Config(), tmp_path)
    assert (tmp_path / METRICS).exists() and not (tmp_path / "previous").exists()
    first.close()
    RunWriter(Config(), tmp_path).close()
