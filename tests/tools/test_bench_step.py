"""The benchmark: CPU time and memory of a whole process tree, steps between lines, rates over all rounds."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tools import bench_step
from tools.common import follow

# a program whose child does the work: 200 MiB of memory, and half a second of CPU time before each of two lines
PROGRAM = """
import subprocess, sys
child = '''
import sys, time
memory = bytearray(b"x" * (200 << 20))
for step in (1, 2):
    end = time.process_time() + 0.5
    while time.process_time() < end:
        pass
    with open(sys.argv[1], "a") as f:
        f.write('{"step": %d}\\\\n' % step)
    time.sleep(2.5)  # the line is seen before more time is used
'''
sys.exit(subprocess.run([sys.executable, "-c", child, sys.argv[1]]).returncode)
"""


def test_a_program_is_measured_with_its_children(tmp_path: Path) -> None:
    lines, log = tmp_path / "lines", tmp_path / "log"
    seen, peak = follow([sys.executable, "-c", PROGRAM, str(lines)], {}, lines, log, limit=60)
    (first_time, first_cpu, first), (second_time, second_cpu, second) = seen
    assert (first["step"], second["step"]) == (1, 2)
    assert second_time - first_time > 0.4
    assert 0.4 < second_cpu - first_cpu < 0.8 and first_cpu > 0.4
    assert 0.19 < peak < 0.5


def test_a_program_that_fails_ends_the_benchmark(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="ended with status 3"):
        follow([sys.executable, "-c", "exit(3)"], {}, tmp_path / "lines", tmp_path / "log", limit=60)


def test_rates_are_ratios_of_totals_over_the_kept_steps() -> None:
    def steps(*seconds: float) -> list[object]:
        return [bench_step.Step(s, 2 * s, 100.0, 300.0, 0.5, {"gen": s / 2}) for s in seconds]

    rounds = [bench_step.Result(steps(50.0, 1.0, 3.0), 4.0), bench_step.Result(steps(60.0, 2.0, 2.0), 5.0)]
    figures = bench_step.report("ours", rounds, drop=2)  # steps 1 (never timed) and 2 of each round
    assert figures["steps"] == 4 and figures["rounds"] == 2
    assert figures["seconds_per_step"] == 2.0 and figures["seconds_per_step_by_round"] == [2.0, 2.0]
    assert figures["tokens_per_s"] == 50.0 and figures["tokens_with_prompts_per_s"] == 200.0
    assert figures["cpu_seconds_per_step"] == 4.0 and figures["seconds_by_phase"] == {"gen": 1.0}
    assert figures["peak_memory_gib"] == 5.0
    with pytest.raises(SystemExit, match="no step left"):
        bench_step.report("ours", rounds, drop=9)
