"""Contradictions between keys: each is found, named with its keys and values, and says what would work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from rlscale.algo.needs import registries
from rlscale.algo.registry import Registry
from rlscale.config import Config, find_violations, schema
from rlscale.config.paths import is_hub_name
from rlscale.config.schema import SourceConfig


def check(config: Config, world: int | None = None, **given: object) -> list[str]:
    return [v.message for v in find_violations(config, world, **{"registries": registries(), **given})]


@dataclass
class Shapes:
    """A model's shapes, as `ModelSpec` has them."""

    heads: int = 9
    kv_heads: int = 3
    num_layers: int = 30
    tied: bool = True
    max_positions: int = 8192

    def violations(self, key: str, tp: int, pp: int, sp: int = 1, ep: int = 1) -> list[str]:
        out = [f"{key}.tensor_model_parallel_size: {tp} does not divide {self.heads} heads"] if self.heads % tp else []
        return out + (
            [f"{key}.pipeline_model_parallel_size: {pp}, {self.num_layers} layers"] if self.num_layers % pp else []
        )


@pytest.fixture
def config() -> Config:
    """A configuration without contradictions."""
    c = Config()
    c.model.path = "org/name"
    c.data.train = [SourceConfig(task="addition", seed=1)]
    c.data.val = [SourceConfig(task="addition", seed=2)]
    return c


def test_a_sound_configuration_passes(config: Config) -> None:
    for world in (None, 1, 2, 6):
        assert check(config, world) == []
    assert check(config, 3, spec=Shapes()) == []


def gae(c: Config) -> None:
    c.algorithm.adv_estimator = "gae"


def tied_zero2(c: Config) -> None:
    c.actor.parallel.zero_stage = 2
    c.actor.parallel.pipeline_model_parallel_size = 2


def layout(role: str, **sizes: int | bool) -> Callable[[Config], None]:
    def change(c: Config) -> None:
        for name, value in sizes.items():
            assert hasattr(getattr(c, role).parallel, name)
            setattr(getattr(c, role).parallel, name, value)

    return change


def put(key: str, value: object) -> Callable[[Config], None]:
    def change(c: Config) -> None:
        *parents, last = key.split(".")
        at: object = c
        for name in parents:
            at = at[int(name)] if isinstance(at, list) else getattr(at, name)
        assert hasattr(at, last), key
        setattr(at, last, value)

    return change


def both(*changes: Callable[[Config], None]) -> Callable[[Config], None]:
    def change(c: Config) -> None:
        for one in changes:
            one(c)

    return change


TP, PP, SP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "ulysses_sequence_parallel_size"
CASES: list[tuple[str, Callable[[Config], None], list[str]]] = [  # name, what is changed, what the one message holds
    (
        "mini batch",
        put("actor.ppo_mini_batch_size", 6),
        ["actor.ppo_mini_batch_size 6", "train_batch_size 8", "1, 2, 4, 8", "or data.train_batch_size 6, 12"],
    ),
    (
        "mini batch above batch",
        put("actor.ppo_mini_batch_size", 16),
        ["actor.ppo_mini_batch_size 16", "or data.train_batch_size 16"],
    ),
    ("critic mini batch", both(gae, put("critic.ppo_mini_batch_size", 3)), ["critic.ppo_mini_batch_size 3"]),
    (
        "token budget",
        put("actor.ppo_max_token_len_per_gpu", 1023),
        ["actor.ppo_max_token_len_per_gpu 1023", "at least 1024"],
    ),
    (
        "critic token budget",
        both(gae, put("critic.ppo_max_token_len_per_gpu", 100)),
        ["critic.ppo_max_token_len_per_gpu 100"],
    ),
    (
        "world",
        layout("actor", **{TP: 4}),
        ["actor.parallel", "4 x 1 = 4", "6 processes", "1, 2, 3, 6", "multiple of 4"],
    ),
    ("world pp", layout("actor", **{TP: 2, PP: 2}), ["2 x 2 = 4", "6 processes"]),
    ("critic world", both(gae, layout("critic", **{PP: 4})), ["critic.parallel", "6 processes"]),
    ("world ulysses", layout("actor", **{TP: 2, SP: 2}), ["TP x PP x Ulysses = 2 x 1 x 2 = 4", "6 processes"]),
    (
        "token budget over Ulysses ranks",
        both(put("actor.ppo_max_token_len_per_gpu", 511), layout("actor", **{SP: 2})),
        ["actor.ppo_max_token_len_per_gpu 511 on each of the 2 ranks", "at least 512"],
    ),
    (
        "sequence parallel",
        layout("actor", sequence_parallel=True),
        ["actor.parallel.sequence_parallel", "tensor_model_parallel_size > 1"],
    ),
    (
        "experts",
        layout("actor", expert_model_parallel_size=3, **{TP: 2}),
        ["actor.parallel.expert_model_parallel_size is 3", "must be 1", "tensor_model_parallel_size 2"],
    ),
    ("zero 3 pp", layout("actor", zero_stage=3, **{PP: 2}), ["actor.parallel.zero_stage is 3", "whole world"]),
    ("critic zero 3 pp", both(gae, layout("critic", zero_stage=3, **{PP: 2})), ["critic.parallel.zero_stage is 3"]),
    (
        "rollout tp",
        put("rollout.tensor_model_parallel_size", 4),
        ["rollout.tensor_model_parallel_size 4", "6 processes", "1, 2, 3, 6"],
    ),
    ("top k", put("rollout.top_k", 0), ["rollout.top_k is 0", "-1"]),
    ("greedy copies", put("rollout.val_n", 4), ["rollout.val_n is 4", "val_temperature"]),
    ("max model len", put("rollout.engine_args", {"max_model_len": 100}), ["max_model_len 100", "1024"]),
    ("group of one", put("rollout.n", 1), ["rollout.n is 1", "grpo", "at least 2"]),
    ("adaptive kl", put("algorithm.kl_ctrl.type", "adaptive"), ["algorithm.kl_ctrl.type", "use_kl_in_reward"]),
    ("scale factor", put("actor.loss_scale_factor", 2.0), ["actor.loss_scale_factor", "token-mean"]),
    ("betas", put("actor.optim.betas", [0.9]), ["actor.optim.betas", "two numbers"]),
    ("beta of one", put("actor.optim.betas", [0.9, 1.0]), ["actor.optim.betas", "below 1"]),
    ("warmup without critic", put("trainer.critic_warmup", 2), ["trainer.critic_warmup is 2", "grpo trains no critic"]),
    (
        "warmup only",
        both(gae, put("trainer.critic_warmup", 5), put("trainer.total_training_steps", 5)),
        ["trainer.critic_warmup", "never"],
    ),
    ("logger", put("trainer.logger", ["jsonl", "wandb"]), ["trainer.logger", "'wandb'", "tensorboard"]),
    (
        "no validation data",
        both(put("data.val", []), put("trainer.test_freq", 2)),
        ["trainer.test_freq is 2", "data.val"],
    ),
    (
        "path of what",
        put("trainer.resume_mode", "path"),
        ["trainer.resume_mode is path", "trainer.resume_from_path None", "needs the folder of a checkpoint"],
    ),
    ("path without mode", put("trainer.resume_from_path", "x"), ["resume_mode is disable", "resume_from_path x"]),
    (
        "no such checkpoint",
        both(put("trainer.resume_mode", "path"), put("trainer.resume_from_path", "nowhere/step_000001")),
        ["trainer.resume_from_path: no such folder: nowhere/step_000001"],
    ),
    ("no run dir", put("trainer.run_dir", ""), ["trainer.run_dir"]),
    ("run dir is a file", put("trainer.run_dir", __file__), ["trainer.run_dir", "not a folder"]),
    ("no model", put("model.path", ""), ["model.path must name"]),
    ("missing model", put("model.path", "models/SmolLM3-Instruct"), ["model.path", "models/SmolLM3-Instruct"]),
    ("missing model, absolute", put("model.path", "/no/such/model"), ["model.path", "/no/such/model"]),
    ("model without config", put("model.path", str(Path(__file__).parent)), ["model.path", "config.json"]),
    ("model is a file", put("model.path", __file__), ["model.path", "is a file"]),
    ("missing tokenizer", put("model.tokenizer_path", "./tok"), ["model.tokenizer_path", "./tok"]),
    ("missing critic", both(gae, put("critic.path", "./critic")), ["critic.path", "./critic"]),
    ("template", put("model.chat_template", "chat.jinja"), ["model.chat_template", "chat.jinja"]),
    ("no data", put("data.train", []), ["data.train"]),
    ("no kind", put("data.train", [SourceConfig()]), ["data.train.0", "exactly one", "none"]),
    ("two kinds", put("data.train.0.reasoning_gym", "chain_sum"), ["data.train.0", "task and reasoning_gym"]),
    ("missing file", put("data.val", [SourceConfig(files=["no/such.jsonl"])]), ["data.val.0.files", "no/such.jsonl"]),
    ("kind of file", put("data.val", [SourceConfig(files=[__file__])]), ["data.val.0.files", ".parquet"]),
    ("same prompts", put("data.val.0.seed", 1), ["data.val.0", "same prompts", "seed 1"]),
    ("few prompts", put("data.train.0.size", 5), ["data.train_batch_size is 8", "hold 5"]),
    ("scorer form", put("reward.scorer", "my module:score"), ["reward.scorer", "module:function"]),
    ("scorer function", put("reward.scorer", "module:1"), ["reward.scorer"]),
    ("scorer file", put("reward.scorer", "no/such.py:score"), ["reward.scorer", "no/such.py"]),
    ("scorer args", put("reward.scorer_args", {"a": 1}), ["reward.scorer_args", "null"]),
]


@pytest.mark.parametrize(("change", "says"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_each_contradiction_gives_one_message(
    config: Config, change: Callable[[Config], None], says: list[str]
) -> None:
    change(config)
    found = check(config, 6)
    assert len(found) == 1, found
    assert all(word in found[0] for word in says), found[0]
    assert "\n" not in found[0]


def test_several_are_reported_together(config: Config) -> None:
    for change in (
        put("actor.ppo_mini_batch_size", 3),
        put("rollout.n", 1),
        put("model.path", ""),
        layout("actor", **{TP: 4}),
    ):
        change(config)
    assert len(check(config, 6)) == 4


def test_what_would_work_does_work(config: Config) -> None:
    """The numbers a message offers are really accepted."""
    config.data.train_batch_size = 12
    config.actor.ppo_mini_batch_size = 5
    (message,) = check(config)
    sizes, batches = message.split("could be ")[1].split(", or data.train_batch_size ")
    for size in sizes.split(", "):
        config.actor.ppo_mini_batch_size = int(size)
        assert check(config) == []
    config.actor.ppo_mini_batch_size = 5
    for batch in batches.split(", "):
        config.data.train_batch_size = int(batch)
        assert check(config) == []


def test_what_needs_the_model_is_checked_with_its_shapes(config: Config) -> None:
    tied_zero2(config)
    assert check(config, 2) == []
    (message,) = check(config, 2, spec=Shapes())
    assert "actor.parallel.zero_stage is 2" in message and "tied" in message
    assert check(config, 2, spec=Shapes(tied=False)) == []
    config.actor.parallel.zero_stage = 1
    config.actor.parallel.tensor_model_parallel_size = 2
    (message,) = check(config, 4, spec=Shapes())
    assert "actor.parallel.tensor_model_parallel_size: 2" in message
    config.actor.parallel.tensor_model_parallel_size = 1
    config.rollout.tensor_model_parallel_size = 2
    (message,) = check(config, 4, spec=Shapes())
    assert "rollout.tensor_model_parallel_size 2" in message and "1, 3, 9" in message
    config.rollout.tensor_model_parallel_size = 1
    (message,) = check(config, 4, spec=Shapes(max_positions=1000))
    assert "1024 tokens" in message and "1000 positions" in message


def test_a_critic_with_its_own_value_head_may_use_zero_2_with_pp(config: Config) -> None:
    gae(config)
    config.critic.parallel.zero_stage = config.critic.parallel.pipeline_model_parallel_size = 2
    assert check(config, 2, spec=Shapes()) == []


def test_zero_3_is_for_any_layout_without_pipeline(config: Config) -> None:
    config.actor.parallel.zero_stage = 3
    config.actor.parallel.tensor_model_parallel_size, config.actor.parallel.sequence_parallel = 2, True
    assert check(config, 4) == []


def test_what_is_not_used_is_not_checked(config: Config) -> None:
    config.critic.parallel.zero_stage, config.critic.parallel.pipeline_model_parallel_size = 3, 2
    config.critic.ppo_mini_batch_size = 5
    config.critic.path = "./nowhere"
    config.actor.use_dynamic_bsz = False
    config.actor.ppo_max_token_len_per_gpu = 1
    assert check(config, 2) == []
    config.algorithm.adv_estimator, config.rollout.n = "reinforce", 1
    assert check(config, 2) == []


def test_a_task_that_does_not_generate_is_not_checked_for_what_it_does_not_use(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(schema.TASKS, "texts", schema.TaskEntry("nowhere", generates=False))
    config.rollout.n, config.data.max_prompt_length, config.actor.ppo_mini_batch_size = 1, 10**6, 3
    assert check(config, 2)
    config.task = "texts"
    assert check(config, 2) == []
    config.actor.parallel.tensor_model_parallel_size = 3
    assert check(config, 2)


def test_a_batch_beyond_any_machine_is_answered_at_once(config: Config) -> None:
    config.data.train_batch_size, config.actor.ppo_mini_batch_size = 10**20 + 1, 4
    assert any("ppo_mini_batch_size" in line for line in check(config, 2))


def test_names_of_registries(config: Config) -> None:
    estimators, losses = Registry("estimator"), Registry("loss")
    estimators.register("gae", "grpo")(lambda b: b)
    losses.register("ppo")(lambda x: x)
    names = {"algorithm.adv_estimator": estimators, "actor.policy_loss": losses}
    assert check(config, registries=names) == []
    config.algorithm.adv_estimator = "grppo"
    (violation,) = find_violations(config, registries=names)
    assert violation.keys == ("algorithm.adv_estimator",)
    assert "'grppo' is not one of gae, grpo; did you mean grpo?" in violation.message


def test_hub_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("gpt2", "Qwen/Qwen3-0.6B", "HuggingFaceTB/SmolLM2-135M-Instruct", "a.b/c_d"):
        assert is_hub_name(name)
    for name in ("./x", "/x/y", "~/x", "a/b/c", "models/x", "runs/x", "a b/c", "", "x/", "../x"):
        assert not is_hub_name(name)
    (tmp_path / "mine").mkdir()
    assert not is_hub_name("mine/model")
