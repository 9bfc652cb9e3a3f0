"""`rlscale compare`: the first difference of two runs by step and metric, times left out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlscale import cli

RECORDS = [
    {"step": 0, "val/addition/mean@1": 0.25, "timing_s/testing": 3.0},
    {"step": 1, "actor/pg_loss": 0.1, "perf/throughput": 10.0, "perf/total_tokens": 7.0, "rollout/sync_s": 0.1},
    {"step": 2, "actor/pg_loss": 0.2, "perf/throughput": 11.0, "perf/total_tokens": 9.0, "rollout/sync_s": 0.2,
     "critic/vf_explained_var": None},
]  # fmt: skip


def write(folder: Path, records: list[dict[str, Any]]) -> str:
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(folder)


def changed(step: int, **values: Any) -> list[dict[str, Any]]:
    return [r | {k.replace("__", "/"): v for k, v in values.items()} if r["step"] == step else r for r in RECORDS]


@pytest.mark.parametrize(
    "other, status, says",
    [
        (RECORDS, 0, "equal: 3 steps, 4 training metrics"),
        (changed(1, perf__throughput=99.0, rollout__sync_s=9.0, timing_s__gen=1.0), 0, "equal"),
        (changed(1, actor__pg_loss=0.1000000001), 1, "step 1: actor/pg_loss is 0.1 in A, 0.1000000001 in B"),
        (changed(2, perf__total_tokens=8.0), 1, "step 2: perf/total_tokens is 9.0 in A, 8.0 in B"),
        (changed(2, critic__vf_explained_var=0.0), 1, "critic/vf_explained_var is None in A, 0.0 in B"),
        (changed(1, actor__new=1.0), 1, "step 1: actor/new is absent in A, 1.0 in B"),
        (changed(0, **{"val__addition__mean@1": 0.5}), 1, "step 0: val/addition/mean@1"),
        (RECORDS[:2], 1, "step 2: recorded 1 time(s) in A, 0 in B"),
        ([*RECORDS, RECORDS[1]], 1, "step 1: recorded 1 time(s) in A, 2 in B"),
        ([RECORDS[0], RECORDS[2], RECORDS[1]], 1, "steps of B are not in order: [0, 2, 1]"),
    ],
)
def test_the_first_difference_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], other: list[dict[str, Any]], status: int, says: str
) -> None:
    assert cli.main(["compare", write(tmp_path / "a", RECORDS), write(tmp_path / "b", other)]) == status
    assert says in capsys.readouterr().out


def test_a_tolerance_lets_rounding_pass(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a", RECORDS), write(tmp_path / "b", changed(1, actor__pg_loss=0.1000001))
    assert [cli.main(["compare", a, b, "--rtol", "1e-5"]), cli.main(["compare", a, b, "--rtol", "1e-7"])] == [0, 1]


def test_what_cannot_be_read_is_not_equal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = write(tmp_path / "a", RECORDS)
    assert cli.main(["compare", a, str(tmp_path / "none")]) == 2 and "no such file" in capsys.readouterr().err
    (tmp_path / "a" / "metrics.jsonl").write_text("{]\n")
    assert cli.main(["compare", a, a]) == 2 and "line 1" in capsys.readouterr().err
    empty = write(tmp_path / "empty", [])
    assert cli.main(["compare", empty, empty]) == 2
