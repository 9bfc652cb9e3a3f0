"""Every command, script and block of code in README, docs, examples and configurations does what it says.

A command that is cheap is run as it stands. One that starts a run is checked by a dry run of the same arguments, and
`RUN_BY` names the test that runs the program; what no test can afford to run whole (minutes, downloads, other sizes)
is in `RUN_BY` as well. A new command in the docs fails here until it is one of these.
"""

from __future__ import annotations
import __future__

import ast
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from rlscale import cli
from rlscale.config import schema
from rlscale.config.load import read
from rlscale.config.schema import Config
from rlscale.data import files, procedural
from rlscale.loop import launch
from tests.docs.pages import BLOCKS, PAGES, ROOT, Block, commands

RUNS, RESUME, EXAMPLES = "tests/e2e/test_runs.py::", "tests/e2e/test_resume.py::", "tests/e2e/test_examples.py::"
PAGES_PY, PARITY = "tests/docs/test_pages.py::", "tests/tools/test_parity.py::"
BENCH = "tests/tools/test_benchmarks.py::"
COMMANDS_PY, SETUP = "tests/docs/test_commands.py::", "tests/config/test_setup_env.py::"
TRAIN = "deepspeed --num_gpus 2 launchers/train.py --yaml yamls/quickstart_cpu.yaml"
WHOLE, NEWCOMER = RUNS + "test_run_folder_holds_what_the_readme_says", EXAMPLES + "test_a_newcomer_in_one_sitting"
FIGURES = "tests/tools/test_bench_engine.py::test_a_run_prints_figures_of_equal_work"
RESHARD = "deepspeed --num_gpus 4 tools/bench_reshard.py"
BENCH_ENGINE = "python tools/bench_engine.py"
#: commands that are not run here as they stand -> the test that runs the same program
RUN_BY = {
    "bash tools/quickstart.sh": COMMANDS_PY + "test_the_quickstart_is_its_documented_parts",
    TRAIN: WHOLE,
    f"{TRAIN} rollout.n=16 actor.optim.lr=1e-5": WHOLE,
    f"{TRAIN} actor.optim.lr=1e-5 rollout.n=16": WHOLE,
    f"{TRAIN} trainer.save_freq=20 trainer.resume_mode=auto": RESUME
    + "test_interrupted_and_damaged_runs_end_as_if_they_had_not_been",
    "python -m pytest tests/e2e/test_resume.py -m exhaustive -k killed --kills 20 -s": RESUME
    + "test_killed_runs_end_as_if_they_had_not_been",
    "rlscale plan --model CONFIG --source tp=8,pp=4,dp=8 --destination tp=4": COMMANDS_PY
    + "test_the_figures_of_a_plan_are_those_of_the_pages",
    f"{TRAIN} trainer.deterministic=true trainer.total_training_steps=3": RESUME
    + "test_interrupted_and_damaged_runs_end_as_if_they_had_not_been",
    f"{TRAIN} actor.parallel.zero_stage=1 actor.parallel.pipeline_model_parallel_size=2": RUNS
    + "test_layout_changes_nothing",
    f"{TRAIN} 'data.train=[{{files: [my.jsonl]}}]' 'data.val=[]' reward.scorer=my_reward.py:score": NEWCOMER,
    f"{TRAIN} trainer.resume_mode=auto trainer.total_training_steps=60 actor.parallel.zero_stage=1 "
    "actor.parallel.pipeline_model_parallel_size=2": NEWCOMER,
    "deepspeed --num_gpus 2 launchers/train.py --yaml yamls/ppo_cpu.yaml": RUNS
    + "test_ppo_with_a_critic_and_a_flawed_scorer_outlives_an_engine",
    "deepspeed launchers/train.py --yaml my_run.yaml trainer.save_freq=20 trainer.resume_mode=auto "
    "trainer.stop_grace_s=100": COMMANDS_PY + "test_the_job_script_passes_the_signal_on_and_waits",
    "deepspeed --num_gpus 2 examples/minimal_grpo.py --yaml yamls/quickstart_cpu.yaml "
    "trainer.total_training_steps=10": EXAMPLES + "test_grpo_in_one_file",
    "rlscale export runs/quickstart/checkpoints/step_000040 exported": NEWCOMER,
    "source .venv/bin/activate": SETUP + "test_a_ready_environment_is_used_and_a_changed_lock_is_noticed",
    "pip install -e .": SETUP + "test_a_ready_environment_is_used_and_a_changed_lock_is_noticed",
    "bash tools/setup_env.sh": SETUP + "test_no_python",
    "python -m rlscale.config.reference --page docs/configuration.md README.md": PAGES_PY
    + "test_tables_of_keys_are_current",
    "python tools/list_algorithms.py docs/algorithms.md": PAGES_PY + "test_the_table_of_algorithms_is_current",
    "python tools/parity.py --readme docs/parallelism.md": PARITY + "test_readme_table_is_current",
    "python tools/parity.py --all": PARITY + "test_the_documented_command_prints_differences",
    "deepspeed --num_gpus 4 tools/parity.py --tp 2 --sp --zero 2": PARITY
    + "test_the_documented_command_prints_differences",
    "python tools/draw_pictures.py --run runs/quickstart": PAGES_PY + "test_pictures_are_current",
    "python tools/bench_step.py --rounds 2 --steps 5 --drop 2": "tests/tools/test_bench_step.py::"
    "test_a_program_is_measured_with_its_children",
    "python tools/bench_algo.py": BENCH + "test_algorithms",
    "python tools/bench_algo.py --chunk 512": BENCH + "test_algorithms",
    "python tools/bench_start.py --rounds 3": BENCH + "test_a_start",
    "python tools/bench_checkpoint.py --rounds 5": BENCH + "test_checkpoints",
    f"{RESHARD} --rounds 5 --buckets 32,64": BENCH + "test_a_weight_update_and_loading",
    f"{RESHARD} --source tp=4 --destination tp=1 --rounds 5 --buckets 32,64": BENCH
    + "test_a_weight_update_and_loading",
    f"{RESHARD} --source pp=2,dp=2 --load models/SmolLM2-135M-Instruct": BENCH + "test_a_weight_update_and_loading",
    f"{BENCH_ENGINE} --layouts dp1 --padded --rounds 2 --sequences 12 --prompt 32 --median 64 --longest 384 "
    "--max-tokens 1024 --cores 1": FIGURES,
    f"{BENCH_ENGINE} --model random --no-plain --layouts dp1 --padded --rounds 2 --sequences 32 --prompt 16 "
    "--median 48 --longest 512 --max-tokens 1024 --cores 1": FIGURES,
    f"{BENCH_ENGINE} --model random --activations dp1,ulysses4 --sequences 8 --longest 512 --median 256 "
    "--dtype float32": "tests/tools/test_bench_engine.py::test_ulysses_divides_the_activations",
}
#: programs that check the sources themselves: CI runs them beside the tests
OF_CI = ("bash tools/test.sh", "ruff ", "mypy")
#: shapes of the two models that the commands name
SMOL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536,
    "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152,
    "rms_norm_eps": 1e-5, "hidden_act": "silu", "max_position_embeddings": 8192, "tie_word_embeddings": True,
}  # fmt: skip
LLAMA_70B = SMOL | {
    "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
    "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072, "tie_word_embeddings": False,
}  # fmt: skip
COMMANDS = commands()


@pytest.fixture(autouse=True)
def at_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[tuple[str, ...]], str]:
    """The folder (of a config.json alone) that a command means by the name of its model."""
    folder = tmp_path_factory.mktemp("models")
    for name, config in (("smol", SMOL), ("llama_70b", LLAMA_70B)):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    return lambda words: str(folder / ("llama_70b" if any("ppo_70b" in w or "tp=8" in w for w in words) else "smol"))


def starts_a_run(words: tuple[str, ...]) -> bool:
    return any(w in ("launchers/train.py", "examples/minimal_grpo.py") for w in words)


def dry_run(words: tuple[str, ...], model: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check a run as its program does: every key, the sizes of the model, the placement of every rank."""
    for name in ("yamls", "examples"):
        (folder / name).symlink_to(ROOT / name)
    for block in BLOCKS:  # the reader's own files are those that the page shows
        if block.page == "docs/data_and_rewards.md" and block.language in ("json", "python"):
            (folder / {"json": "my.jsonl", "python": "my_reward.py"}[block.language]).write_text(block.text)
    monkeypatch.chdir(folder)
    script = next(i for i, w in enumerate(words) if w.endswith(".py"))
    args = launch.parse(list(words[script + 1 :]))
    ranks = args.world_size or (int(words[words.index("--num_gpus") + 1]) if "--num_gpus" in words else 2)
    of_reader = args.yaml in ("FILE", "my_run.yaml")  # a file of the reader's
    argv = ["--yaml", "yamls/quickstart_cpu.yaml" if of_reader else args.yaml, *args.overrides, f"model.path={model}"]
    assert launch.main([*argv, "--dry-run", "--world-size", str(ranks)]) == 0


def run_folders(folder: Path) -> None:
    """The run folders that `rlscale compare` and `rlscale plot` are shown with."""
    for name in ("runs/a", "runs/b", "runs/quickstart"):
        (folder / name).mkdir(parents=True)
        records = [{"step": n, "critic/score/mean": 0.1 * n, "timing_s/step": float(n)} for n in (1, 2)]
        (folder / name / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))


def run(words: tuple[str, ...], model: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a cheap command as it stands; models and runs that it names have stand-ins."""
    if words[0] == "rlscale":
        run_folders(folder)
        monkeypatch.chdir(folder)
        named = {"CONFIG", "FOLDER", "models/SmolLM2-135M-Instruct"}
        assert cli.main([model if w in named else w for w in words[1:]]) == 0
        return
    command, _, target = shlex.join(words).partition(" '>' ")
    done = subprocess.run(
        [sys.executable, *shlex.split(command)[1:]], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert not target or done.stdout == (ROOT / target).read_text(encoding="utf-8")


@pytest.mark.parametrize("words", COMMANDS, ids=shlex.join)
def test_a_documented_command_works(
    words: tuple[str, ...],
    models: Callable[[tuple[str, ...]], str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = shlex.join(words)
    shown_in = COMMANDS[words]
    if words[0] == "rlscale" and len(words) == 2 and words[1] != "keys":  # a sentence about the command
        assert words[1] in cli.COMMANDS
    elif starts_a_run(words):
        dry_run(words, models(words), tmp_path, monkeypatch)
        assert "rank 0" in capsys.readouterr().out
        known = text in RUN_BY or "--dry-run" in words or "FILE" in words
        assert known, f"{shown_in}: no test runs {text!r}; name it in RUN_BY"
    elif text.startswith(OF_CI):
        assert all((ROOT / w).exists() for w in words if "/" in w)
    elif text in RUN_BY:
        options = [w for w in words if w.startswith("--") and w != "--num_gpus"]
        script = next((ROOT / w for w in words if w.endswith((".py", ".sh"))), None)
        assert script is None or script.is_file()
        if options and script is not None:
            source = "".join(p.read_text() for p in (script, ROOT / "rlscale/testing/parity/run.py"))
            assert all(f'"{w}"' in source or w[2:].replace("-", "_") in source for w in options)
    else:
        try:
            run(words, models(words), tmp_path, monkeypatch)
        except (StopIteration, FileNotFoundError) as error:
            raise AssertionError(f"{shown_in}: {text!r} cannot be run here; name a test in RUN_BY") from error


def test_the_tests_that_run_commands_exist() -> None:
    shown = {shlex.join(words) for words in COMMANDS}
    assert not [command for command in RUN_BY if command not in shown], "commands that no page shows"
    for test in set(RUN_BY.values()):
        file, _, name = test.partition("::")
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, test


def test_every_block_is_code_of_a_known_kind_or_the_output_of_a_run() -> None:
    outputs = [block for block in BLOCKS if not block.language and not block.is_shell]
    assert [block.page for block in outputs] == ["README.md"] and outputs[0].text.startswith("data: ")
    assert {block.language for block in BLOCKS} <= {"", "bash", "python", "yaml", "json"}


def test_the_figures_of_a_plan_are_those_of_the_pages(
    models: Callable[[tuple[str, ...]], str], capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ("--source", "tp=8,pp=4,dp=8", "--destination", "tp=4")
    assert cli.main(["plan", "--json", "--model", models(sizes), *sizes]) == 0
    ways = json.loads(capsys.readouterr().out)["ways"]
    mean = [f"{way['received']['mean'] / 1e9:.1f}" for way in ways.values()]
    assert mean == ["34.2", "136.7", "98.5"]
    for page in ("docs/resharding.md", "docs/benchmarks.md"):
        assert all(f"{figure} GB" in PAGES[page] for figure in mean)
    assert "34 GB per rank instead of 137" in PAGES["README.md"]


# ---- blocks of code


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "python"], ids=str)
def test_a_python_block_runs_and_has_the_signatures_of_the_code(block: Block, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block that names files of the code shows functions of these files."""
    for module, table in ((procedural, "GENERATORS"), (schema, "TASKS")):  # in which a block registers
        monkeypatch.setattr(module, table, dict(getattr(module, table)))
    flags = __future__.annotations.compiler_flag  # annotations may name what a reader need not import
    built_in = set(procedural.GENERATORS)
    exec(compile(block.text, str(block), "exec", flags), {})
    for name in set(procedural.GENERATORS) - built_in:
        assert len(procedural.make(name, 3, 0, {})) == 3
    homes = re.findall(r"\brlscale/\S+\.py\b", block.text)
    real = {name: names for home in homes for name, names in parameters((ROOT / home).read_text("utf-8")).items()}
    if homes:
        assert all(names == real[name] for name, names in parameters(block.text).items())


def parameters(text: str) -> dict[str, list[str]]:
    """The names of the parameters of every function of a module."""
    functions = [n for n in ast.parse(text).body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    return {f.name: [a.arg for a in (*f.args.args, *f.args.kwonlyargs)] for f in functions}


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language in ("yaml", "json")], ids=str)
def test_a_block_of_data_is_read(block: Block, tmp_path: Path) -> None:
    if block.language == "json":
        for line in block.text.splitlines():
            assert files.parse(json.loads(line), Config().data, "a line", "a file").messages
        return
    (tmp_path / "run.yaml").write_text(block.text)
    _, misread = read(tmp_path / "run.yaml", [])
    assert yaml.safe_load(block.text) and not misread


# ---- scripts


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "bash"], ids=str)
def test_a_script_is_bash(block: Block) -> None:
    subprocess.run(["bash", "-n"], input=block.text, text=True, check=True)


def program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def test_the_job_script_passes_the_signal_on_and_waits(tmp_path: Path) -> None:
    """As SLURM runs it: USR1 to the shell reaches the ranks, the launcher lives, the script waits for the end."""
    [script] = [b.text for b in BLOCKS if b.language == "bash" and "#SBATCH" in b.text]
    rank = "import pathlib, signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])\n"
    rank += "pathlib.Path('ready').touch()\nsignal.sigwait([signal.SIGUSR1])\npathlib.Path('saved').touch()\n"
    program(tmp_path / "launchers/train.py", rank)
    program(tmp_path / "bin/deepspeed", f"#!/bin/bash\n{sys.executable} launchers/train.py --local_rank=0 $*\n")
    env = os.environ | {"PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    (tmp_path / "job").write_text(script)
    job = subprocess.Popen(["bash", "job"], cwd=tmp_path, env=env, start_new_session=True)
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "ready").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        job.send_signal(signal.SIGUSR1)
        assert job.wait(60) == 0 and (tmp_path / "saved").exists()
    finally:
        job.kill()


def test_the_quickstart_is_its_documented_parts(tmp_path: Path) -> None:
    """The script itself, with programs that only note how they were called."""
    note = f'#!/bin/bash\necho "$(basename "$0") $*" >> "{tmp_path}/called"\n'
    program(tmp_path / "tools/quickstart.sh", (ROOT / "tools/quickstart.sh").read_text(encoding="utf-8"))
    program(tmp_path / "tools/setup_env.sh", note)
    for name in ("python", "deepspeed"):
        program(tmp_path / ".venv/bin" / name, note)
    done = subprocess.run(["bash", str(tmp_path / "tools/quickstart.sh")], cwd="/", capture_output=True, text=True)
    assert done.returncode == 0 and "quickstart: done in" in done.stdout, done.stderr
    assert (tmp_path / "called").read_text().splitlines() == [
        "setup_env.sh ",
        "python tools/prepare_model.py --out models/SmolLM2-135M-Instruct",
        TRAIN,
        "python tools/check_run.py runs/quickstart",
    ]
