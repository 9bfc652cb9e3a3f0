"""Reading configurations: types, inheritance, overrides, round trip, and every mistake reported with its key."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlscale.algo.needs import registries
from rlscale.config import Config, ConfigError, read, save, to_dict
from rlscale.config.load import drop_consequences
from rlscale.config.reference import reference, table
from rlscale.config.validate import find_violations
from rlscale.config.yaml12 import parse_yaml
from tests.configurations import load

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "yamls").glob("*.yaml"))


def write(tmp_path: Path, text: str, name: str = "run.yaml") -> Path:
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def violations(path: Path | str, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(path, overrides)
    return caught.value.violations


def all_fields(cls: type = Config, values: Any = None, prefix: str = "") -> list[tuple[str, Any, Any]]:
    """(dotted key, field, default) of every leaf of the schema, elements of lists of sections included."""
    values = cls() if values is None else values
    out = []
    for f in fields(cls):
        value = getattr(values, f.name)
        if is_dataclass(value):
            out += all_fields(type(value), value, f"{prefix}{f.name}.")
        else:
            out.append((f"{prefix}{f.name}", f, value))
    return out


# ---- what is read


def test_empty_file_is_the_defaults(tmp_path: Path) -> None:
    assert load(write(tmp_path, "# nothing\n")) == Config()


def test_types_are_exact_but_floats_take_ints_and_exponents(tmp_path: Path) -> None:
    c = load(
        write(
            tmp_path,
            """
actor: {optim: {lr: 1e-6, eps: "1e-8", grad_clip: 1, betas: [0.9, 1e-1]}, clip_ratio_c: null,
        policy_loss_args: {x: 1e-3, s: yes}}
data: {train: [{task: addition, size: 7}], prompt_key: off}
""",
        )
    )
    assert c.actor.optim.lr == 1e-6 and c.actor.optim.eps == 1e-8 and c.actor.optim.betas == [0.9, 0.1]
    assert type(c.actor.optim.grad_clip) is float
    assert c.actor.clip_ratio_c is None
    assert c.actor.policy_loss_args == {"x": 1e-3, "s": "yes"}
    assert c.data.train[0].size == 7 and c.data.train[0].files == []
    assert c.data.prompt_key == "off"


def test_lists_of_sections_do_not_share_defaults(tmp_path: Path) -> None:
    c = load(write(tmp_path, "data: {train: [{task: a}, {task: b}], val: [{task: a}]}"))
    c.data.train[0].params["x"] = 1
    assert c.data.train[1].params == {} and Config().data.train == []


def test_base_is_relative_to_the_file_and_merged_key_by_key(tmp_path: Path) -> None:
    write(
        tmp_path,
        "trainer: {seed: 3, run_dir: a}\nrollout: {n: 4, engine_args: {a: 1, b: 2}}\n"
        "data: {train: [{task: x}, {task: y}]}",
        "base/root.yaml",
    )
    write(tmp_path, "base: root.yaml\ntrainer: {run_dir: b}\nrollout: {n: 5}", "base/middle.yaml")
    top = write(tmp_path, "base: base/middle.yaml\nrollout: {engine_args: {b: 3}}\ndata: {train: [{task: z}]}")
    c = load(top)
    assert (c.trainer.seed, c.trainer.run_dir, c.rollout.n) == (3, "b", 5)
    assert c.rollout.engine_args == {"a": 1, "b": 3}
    assert [s.task for s in c.data.train] == ["z"]


def test_overrides_reach_sections_lists_and_whole_values(tmp_path: Path) -> None:
    path = write(tmp_path, "data: {train: [{task: a, params: {digits: 1}}, {task: b}]}")
    c = load(
        path,
        [
            "data.train.0.size=64",
            "data.train[1].task=c",
            "actor.optim.betas.1=0.95",
            "trainer.total_training_steps=5",
            "data.train.0.params.digits=2",
            "rollout.engine_args.new=[1, x]",
            "model.path=org/name",
            "trainer.total_training_steps=6",
            "actor.clip_ratio_c=null",
            "reward.scorer_args={a: 1e-3}",
            "data.system_prompt=a=b",
        ],
    )
    assert c.data.train[0].size == 64 and c.data.train[1].task == "c"
    assert c.data.train[0].params == {"digits": 2}
    assert c.actor.optim.betas == [0.9, 0.95]
    assert c.trainer.total_training_steps == 6 and c.actor.clip_ratio_c is None
    assert c.rollout.engine_args == {"new": [1, "x"]} and c.reward.scorer_args == {"a": 1e-3}
    assert c.data.system_prompt == "a=b"


def test_overriding_a_section_replaces_it(tmp_path: Path) -> None:
    path = write(tmp_path, "actor: {optim: {lr: 1.0, eps: 1.0}}")
    assert load(path, ["actor.optim={lr: 2}"]).actor.optim.eps == Config().actor.optim.eps


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_what_is_saved_is_read_back(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Whatever the strings and numbers: quoting and exponents survive the file."""
    c = Config()
    text = st.text(st.characters(blacklist_categories=("Cs", "Cc")), max_size=12)
    words = st.sampled_from(
        ["yes", "off", "null", "~", "1e-6", "1", "0x1f", "1:30", ".nan", "2020-01-01", "true", "<<", "=", ""]
    )
    c.trainer.run_dir = data.draw(text | words)
    c.data.system_prompt = data.draw(st.none() | text | words)
    c.actor.optim.lr = data.draw(st.floats(1e-300, 1e300))
    c.actor.policy_loss_args = data.draw(
        st.dictionaries(
            text | words,
            text | words | st.floats(allow_nan=False) | st.booleans() | st.integers() | st.none(),
            max_size=3,
        )
    )
    path = tmp_path_factory.mktemp("saved") / "config.yaml"
    save(c, path)
    assert load(path) == c


# ---- what is refused

WRONG: list[tuple[str, str, str]] = [  # text of the file, key that is named, what else the message says
    ("actr: {}", "actr", "did you mean 'actor'"),
    ("actor: {optm: {lr: 1}}", "actor.optm", "did you mean 'actor.optim'"),
    ("actor: {optim: {learning_rate: 1}}", "actor.optim.learning_rate", ""),
    ("actor: {lr: 1}", "actor.lr", "did you mean 'actor.optim.lr'"),
    ("actor: {kl_coef: 1}", "actor.kl_coef", "did you mean"),
    ("actor: {gamma: 1}", "actor.gamma", "did you mean 'algorithm.gamma'"),
    ("rollout: {N: 2}", "rollout.N", "did you mean 'rollout.n'"),
    ("rollout: {zzz: 2}", "rollout.zzz", "rollout has: tensor_model_parallel_size, n, "),
    ("data: {train: [{taks: x}]}", "data.train.0.taks", "did you mean 'data.train.0.task'"),
    ("trainer: {seed: true}", "trainer.seed", "whole number, not true (bool)"),
    ("trainer: {seed: 1.0}", "trainer.seed", "write 1"),
    ("trainer: {seed: 1.5}", "trainer.seed", "whole number, not 1.5 (float)"),
    ("trainer: {seed: '1'}", "trainer.seed", "whole number, not '1' (str)"),
    ("trainer: {seed: null}", "trainer.seed", "not null"),
    ("trainer: {seed: -1}", "trainer.seed", "at least 0, not -1"),
    ("trainer: {plots: yes}", "trainer.plots", "true or false, not 'yes' (str)"),
    ("trainer: {plots: 1}", "trainer.plots", "true or false, not 1 (int)"),
    ("trainer: {run_dir: 3}", "trainer.run_dir", "a string, not 3 (int)"),
    ("trainer: {device: cdua}", "trainer.device", "did you mean cuda"),
    ("trainer: {logger: jsonl}", "trainer.logger", "a list, not 'jsonl'"),
    ("trainer: {logger: [1]}", "trainer.logger.0", "a string"),
    ("trainer: [1]", "trainer", "a section"),
    ("trainer:", "trainer", "a section"),
    ("actor: {optim: {lr: fast}}", "actor.optim.lr", "a number, not 'fast'"),
    ("actor: {optim: {lr: true}}", "actor.optim.lr", "a number, not true"),
    ("actor: {optim: {lr: 0}}", "actor.optim.lr", "above 0"),
    ("actor: {optim: {lr: .inf}}", "actor.optim.lr", "finite"),
    ("actor: {optim: {lr: .nan}}", "actor.optim.lr", "finite"),
    ("actor: {optim: {betas: [0.9, x]}}", "actor.optim.betas.1", "a number"),
    ("actor: {clip_ratio_low: 1.5}", "actor.clip_ratio_low", "at most 1"),
    ("actor: {loss_agg_mode: token_mean}", "actor.loss_agg_mode", "did you mean token-mean"),
    ("actor: {parallel: {zero_stage: 4}}", "actor.parallel.zero_stage", "one of 1, 2, 3, not 4"),
    ("actor: {policy_loss_args: [1]}", "actor.policy_loss_args", "a mapping"),
    ("actor: {policy_loss_args: {1: 2}}", "actor.policy_loss_args", "strings as keys"),
    ("data: {train: {task: addition}}", "data.train", "a list"),
    ("data: {train: [addition]}", "data.train.0", "a section"),
    ("rollout: {dtype: fp8}", "rollout.dtype", "null"),
    ("rollout: {top_p: 0}", "rollout.top_p", "above 0"),
    ("task: sft_", "task", "one of"),
    ("base: 3", "base", "name of a YAML file"),
]


@pytest.mark.parametrize(("text", "key", "says"), WRONG, ids=[w[0] for w in WRONG])
def test_a_mistake_is_named(tmp_path: Path, text: str, key: str, says: str) -> None:
    path = write(tmp_path, text)
    found = violations(path)
    assert len(found) == 1
    assert re.search(rf"\b{re.escape(key)}\b", found[0]) and says in found[0]
    assert found[0].startswith(f"{path}: ") and "\n" not in found[0]


def test_all_mistakes_are_reported_together_with_where_they_stand(tmp_path: Path) -> None:
    base = write(tmp_path, "trainer: {seed: -1}\nactor: {shuffle: 1}", "base.yaml")
    path = write(tmp_path, "base: base.yaml\nactor: {shufle: true}\nrollout: {n: 0}")
    found = violations(path, "rollout.m=3", "actor.optim.lr=-1", "data.max_prompt_length=x")
    assert len(found) == 7
    text = "\n".join(found)
    assert f"{base}: trainer.seed" in text and f"{base}: actor.shuffle " in text
    assert f"{path}: unknown key 'actor.shufle'" in text and f"{path}: rollout.n " in text
    assert "override 'rollout.m=3': unknown key 'rollout.m'" in text
    assert "override 'actor.optim.lr=-1': actor.optim.lr must be above 0" in text
    with pytest.raises(ConfigError, match=r"^7 errors in the configuration:\n  - "):
        load(path, ["rollout.m=3", "actor.optim.lr=-1", "data.max_prompt_length=x"])


def test_contradictions_are_reported_in_the_same_error_unless_they_follow_from_a_default(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "data: {train: [{task: addition}], train_batch_size: x}\nmodel: {path: org/name}\n"
        "actor: {ppo_mini_batch_size: 3}\nrollout: {n: 1, tensor_model_parallel_size: 3}",
    )
    config, misread = read(path)
    contradictions = find_violations(config, 4, registries=registries())
    found = [v.message for v in (*misread, *drop_consequences(contradictions, misread))]
    assert [f for f in found if "data.train_batch_size must be" in f]
    assert [f for f in found if "rollout.n is 1" in f] and [
        f for f in found if "rollout.tensor_model_parallel_size 3" in f
    ]
    assert not [
        f for f in found if "ppo_mini_batch_size" in f
    ]  # 3 against the default 8 would be said of a wrong batch size
    assert len(found) == 3


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("foo", "not of the form section.key=value"),
        ("=3", "not of the form"),
        ("a..b=3", "not of the form"),
        ("rollout.n=[", "not valid YAML"),
        ("rollout.n={a: 1, a: 2}", "a second time"),
        ("data.train.1.size=3", "list of 1"),
        ("data.train.x.size=3", "list of 1"),
        ("trainer.seed.x=3", "trainer.seed holds a value"),
        ("trainer.sed=3", "did you mean 'trainer.seed'"),
        ("optim.lr=3", "unknown key 'optim'"),
    ],
)
def test_a_wrong_override_is_named(tmp_path: Path, override: str, says: str) -> None:
    found = violations(write(tmp_path, "data: {train: [{task: a}]}"), override)
    assert len(found) == 1 and found[0].startswith(f"override {override!r}") and says in found[0]


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    write(tmp_path, "trainer: {seed: 1}", "quickstart.yaml")
    assert "did you mean" in violations(tmp_path / "quikstart.yaml")[0]
    assert "no such configuration file" in violations(tmp_path / "nowhere" / "x.yaml")[0]
    assert "cannot be read" in violations(tmp_path)[0]
    child = write(tmp_path, "base: missing.yaml\nrollout: {n: 0}", "child.yaml")
    assert violations(child) == [f"no such configuration file: {tmp_path / 'missing.yaml'} (base of {child})"]
    circle = write(tmp_path, "base: b.yaml", "a.yaml")
    write(tmp_path, "base: a.yaml", "b.yaml")
    assert "leads back" in violations(circle)[0]
    twice = write(tmp_path, "rollout:\n  n: 1\n  top_k: 3\n  n: 2\n", "twice.yaml")
    assert violations(twice) == [f"{twice}, line 4: key 'n' appears a second time, after line 2"]
    assert "line 2" in violations(write(tmp_path, "a: 1\nb: [", "broken.yaml"))[0]
    assert "a mapping of keys" in violations(write(tmp_path, "- 1", "list.yaml"))[0]
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    assert "cannot be read" in violations(tmp_path / "binary.yaml")[0]
    for number, value in enumerate(("1" * 6000, "!!int foo", "!!timestamp foo", "[" * 5000)):
        file = write(tmp_path, f"trainer: {{seed: {value}}}", f"value{number}.yaml")
        assert violations(file)[0].startswith(str(file)) and len(violations(file)) == 1


def test_nothing_in_a_file_is_executed(tmp_path: Path) -> None:
    found = violations(write(tmp_path, "trainer: {run_dir: !!python/object/apply:os.getcwd []}"))
    assert "could not determine a constructor" in found[0]


# ---- the schema and the files of the repository


def test_every_field_is_documented_and_its_default_keeps_its_bounds(tmp_path: Path) -> None:
    for key, f, _ in all_fields():
        assert f.metadata["help"].strip(), key
        assert set(f.metadata) <= {"help", "choices", "min", "max", "above", "below"}, key
    everything = tmp_path / "all.yaml"
    save(Config(), everything)
    assert load(everything) == Config()


def test_reference_is_current_and_holds_every_key_with_its_default() -> None:
    text = (ROOT / "yamls/reference.yaml").read_text()
    assert text == reference(), "run: python -m rlscale.config.reference > yamls/reference.yaml"
    assert parse_yaml(text) == to_dict(Config())
    for key, f, _ in all_fields():
        assert re.search(rf"^ *{key.rpartition('.')[2]}:", text, re.M)
        assert " ".join(f.metadata["help"].split()[:4]) in text
    assert max(map(len, text.splitlines())) <= 120
    assert [row[0] for row in table()] == [key for key, _, _ in all_fields()]
    assert [row[0] for row in table("rollout.")] == [key for key, _, _ in all_fields() if key.startswith("rollout.")]


@pytest.mark.parametrize("path", RECIPES, ids=[p.name for p in RECIPES])
def test_recipes_load_and_hold_differences_only(path: Path) -> None:
    config = load(path)
    tree = parse_yaml(path.read_text())
    if "base" not in tree:
        return

    def equal_to_base(tree: Any, below: Any, prefix: str = "") -> list[str]:
        out = []
        for key, value in tree.items():
            if isinstance(value, dict) and isinstance(below.get(key), dict):
                out += equal_to_base(value, below[key], f"{prefix}{key}.")
            elif key != "base" and value == below[key]:
                out.append(prefix + key)
        return out

    base = load(path.parent / tree["base"])
    assert equal_to_base(tree, to_dict(base)) == []
    assert config.trainer.run_dir != base.trainer.run_dir


def test_reading_a_configuration_loads_nothing_heavy() -> None:
    """A faulty file is refused before torch, let alone an engine, is imported."""
    code = (
        "import sys; from rlscale.config import find_violations, read; "
        "find_violations(read('yamls/quickstart_cpu.yaml', ['model.path=org/name'])[0], 2); "
        "print([m for m in ('torch', 'vllm', 'transformers') if m in sys.modules])"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=20, check=False
    )
    assert run.stdout.strip() == "[]", run.stderr
