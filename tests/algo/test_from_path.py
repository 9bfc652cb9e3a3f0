"""Algorithms from a path: named in the configuration, checked when it is read, used by the objectives."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rlscale.algo.advantages import estimate_advantages
from rlscale.algo.needs import registries, uses_critic, uses_old_logprobs, uses_reference
from rlscale.batch.weights import loss_weights
from rlscale.config import Config, find_violations, functions, save
from rlscale.config.load import read
from rlscale.loop.objectives import actor_loss, contributing_samples
from rlscale.reward import scorers, worker
from rlscale.testing.batches import random_batch
from tests.configurations import load

ROOT = Path(__file__).parents[2]
ESTIMATOR = "examples/new_estimator.py:median_baseline"
LOSS = "examples/new_loss.py:squared_ratio"
REWARD = "examples/new_reward.py:right_and_short"


@pytest.fixture(autouse=True)
def at_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def messages(tmp_path: Path, *overrides: str) -> list[str]:
    """What is wrong with the algorithms of a configuration."""
    path = tmp_path / "run.yaml"
    path.write_text("model: {path: org/name}\ndata: {train: [{task: addition}]}\ntrainer: {test_freq: -1}\n")
    config, found = read(path, overrides)
    return [v.message for v in [*found, *find_violations(config, registries=registries())]]


def test_the_examples_are_taken_and_the_resolved_configuration_keeps_their_paths(tmp_path: Path) -> None:
    chosen = (f"algorithm.adv_estimator={ESTIMATOR}", f"actor.policy_loss={LOSS}", f"reward.scorer={REWARD}")
    assert messages(tmp_path, *chosen, "algorithm.adv_args.scale=2", "actor.policy_loss_args.strength=0.5") == []
    cfg = load(tmp_path / "run.yaml", chosen)
    save(cfg, tmp_path / "resolved.yaml")
    again = load(tmp_path / "resolved.yaml")
    assert again == cfg and again.algorithm.adv_estimator == ESTIMATOR and again.actor.policy_loss == LOSS


def test_an_estimator_from_a_path() -> None:
    cu, group = torch.tensor([0, 1, 3, 4, 5]), torch.tensor([0, 0, 0, 1])
    rewards = torch.tensor([1.0, 0.0, 3.0, 8.0, 5.0])
    common = dict(token_rewards=rewards, mask=torch.ones(5), cu_seqlens=cu, group=group)
    out = estimate_advantages(ESTIMATOR, **common, scale=2.0)
    assert out.advantages.tolist() == [-4.0, 0.0, 0.0, 10.0, 0.0]  # median 3; one alone learns nothing
    with pytest.raises(ValueError, match="takes no argument skale; it takes: scale"):
        estimate_advantages(ESTIMATOR, **common, skale=2.0)


def test_a_loss_from_a_path_goes_through_the_objectives() -> None:
    cfg = Config()
    cfg.actor.policy_loss, cfg.actor.policy_loss_args = LOSS, {"strength": 0.5}
    batch = random_batch(groups=2, n=2)
    batch.advantages = torch.zeros(batch.tokens.numel())
    batch.weights = loss_weights(batch.mask, batch.cu_seqlens, "token-mean")
    assert contributing_samples(cfg.actor, batch).numel() == batch.num_samples  # it does not say that 0 gives 0
    batch.old_logprobs = torch.full((batch.tokens.numel(),), -1.0)
    now = torch.full_like(batch.old_logprobs, -0.5).requires_grad_()
    loss, sums = actor_loss(cfg.actor, batch)(SimpleNamespace(logprobs=now, entropy=None, values=None), batch)
    moved = torch.tensor(0.5).exp() - 1.0
    assert float(loss) == pytest.approx(0.25 * float(moved) ** 2, rel=1e-5)
    loss.backward()
    assert bool((now.grad[batch.mask != 0] > 0).all()) and int(sums["pg_clipfrac"]) == int(batch.mask.sum())


@pytest.mark.parametrize(
    "returned, said",
    [
        ("x.d", "must return a tensor"),
        ("x.d.sum(), {}", "must return a tensor"),
        ("x.d, None", "must return a tensor"),
        ("x.d, {'share': 0.5}", "tensors .t., not share"),
        ("x.d.detach(), {}", "without a gradient"),
    ],
)
def test_what_a_loss_from_a_path_must_return(tmp_path: Path, returned: str, said: str) -> None:
    (tmp_path / "mine.py").write_text(f"def loss(x):\n    return {returned}\n")
    cfg, batch = Config(), random_batch(groups=2, n=2)
    cfg.actor.policy_loss = f"{tmp_path}/mine.py:loss"
    batch.advantages = torch.zeros(batch.tokens.numel())
    batch.weights = loss_weights(batch.mask, batch.cu_seqlens, "token-mean")
    batch.old_logprobs = torch.full((batch.tokens.numel(),), -1.0)
    now = torch.full_like(batch.old_logprobs, -0.5).requires_grad_()
    with pytest.raises(ValueError, match=said):
        actor_loss(cfg.actor, batch)(SimpleNamespace(logprobs=now, entropy=None, values=None), batch)


def test_a_reward_from_a_path() -> None:
    scorer = functions.load_function("reward.scorer", scorers.expand(REWARD))
    given = dict(data_source="", solution_str="it is 7", ground_truth="7", extra_info={})
    assert worker.call(scorer, given) == (1.0, "", {"right": 1.0, "words": 3.0})
    assert worker.call(scorer, given | {"words": 2})[0] == 0.5
    assert worker.call(scorer, given | {"solution_str": "it is 8"})[0] == 0.0


def test_what_a_function_from_a_path_says_that_it_needs(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from rlscale.algo.registry import declare\n"
        "@declare(needs={'values', 'old_logprobs'})\ndef estimator(b):\n    return b.r, b.r\n"
        "@declare(needs={'ref_logprobs'})\ndef loss(x):\n    return x.logp - x.ref, {}\n"
        "@declare(needs={'baselines'})\ndef greedy(b):\n    return b.r, b.r\n"
        "def wrong(b):\n    return b.r\n"
    )
    cfg = Config()
    assert not uses_critic(cfg) and not uses_reference(cfg) and not uses_old_logprobs(cfg)
    cfg.algorithm.adv_estimator, cfg.actor.policy_loss = (f"{tmp_path}/mine.py:{n}" for n in ("estimator", "loss"))
    assert uses_critic(cfg) and uses_reference(cfg) and uses_old_logprobs(cfg)
    (message,) = messages(tmp_path, f"algorithm.adv_estimator={tmp_path}/mine.py:greedy")
    assert "algorithm.adv_estimator" in message and "needs the reward of a greedy response, which no step" in message
    (message,) = messages(tmp_path, f"algorithm.adv_estimator={ESTIMATOR}", "rollout.n=1")
    assert "rollout.n is 1" in message and ESTIMATOR in message
    with pytest.raises(ValueError, match="must return two tensors, advantages and returns"):
        estimate_advantages(
            f"{tmp_path}/mine.py:wrong",
            token_rewards=torch.ones(2),
            mask=torch.ones(2),
            cu_seqlens=torch.tensor([0, 1, 2]),
        )


@pytest.mark.parametrize(
    "text, name, said",
    [
        (None, "f", "no such file: {path}"),
        ("x = 1", "f", "has no function 'f'"),
        ("def f(b", "f", "importing it raises SyntaxError"),
        ("raise OSError('disk')", "f", "importing it raises OSError: disk"),
        ("import sys\nsys.exit(0)", "f", "importing it raises SystemExit: 0"),
        ("import nothing_of_this_name", "f", "no module named 'nothing_of_this_name'"),
        ("def f(rewards, mask):\n    pass", "f", "must take one argument"),
        ("def f(b, **more):\n    pass", "f", "must take one argument"),
        ("def f(b):\n    pass", "f.g", "is not of the form module:function or path/file.py:function"),
    ],
)
@pytest.mark.parametrize("key", ["algorithm.adv_estimator", "actor.policy_loss"])
def test_a_path_that_cannot_be_used_is_one_clear_error(
    tmp_path: Path, key: str, text: str | None, name: str, said: str
) -> None:
    path = tmp_path / "mine.py"
    if text is not None:
        path.write_text(text)
    (message,) = messages(tmp_path, f"{key}={path}:{name}")
    assert key in message and str(path) in message and said.format(path=path) in message


@pytest.mark.parametrize(
    "overrides, said",
    [
        ("algorithm.adv_args.epz=1e-6", "epz: grpo takes no such argument; did you mean algorithm.adv_args.eps?"),
        ("algorithm.adv_args.foo=1", "algorithm.adv_args.foo: grpo takes no such argument; it takes: eps"),
        ("algorithm.adv_args.eps=abc", "algorithm.adv_args.eps must be a number, not 'abc' (str)"),
        ("algorithm.adv_args.eps=true", "algorithm.adv_args.eps must be a number, not true (bool)"),
        ("algorithm.adv_args.eps=0", "algorithm.adv_args.eps must be above 0, not 0"),
        ("algorithm.adv_args.norm_by_std=false", "norm_by_std is set by algorithm.norm_adv_by_std_in_grpo"),
        ("actor.policy_loss_args.clip_low=0.1", "actor.policy_loss_args.clip_low is set by actor.clip_ratio_low"),
        ("actor.policy_loss=dro actor.policy_loss_args.betta=1", "did you mean actor.policy_loss_args.beta?"),
        ("actor.policy_loss=kl_cov actor.policy_loss_args.kl_cov_ratio=2", "kl_cov_ratio must be at most 1, not 2"),
        ("actor.policy_loss=clip_cov actor.policy_loss_args.seed=1.5", "seed must be a whole number, not 1.5 (float)"),
        (f"algorithm.adv_estimator={ESTIMATOR} algorithm.adv_args.scale=0", "adv_args.scale must be above 0, not 0"),
        (f"actor.policy_loss={LOSS} actor.policy_loss_args.strenght=1", "did you mean actor.policy_loss_args.strength"),
        ("algorithm.adv_estimator=remax", "'remax' needs the reward of a greedy response, which no step provides yet"),
        ("algorithm.adv_estimator=grop", "'grop' is not one of gae, gpg, grpo"),
        ("actor.kl_loss_type=k4", "'k4' is not one of abs, abs+"),
    ],
)  # fmt: skip
def test_names_and_arguments_are_checked_when_the_configuration_is_read(
    tmp_path: Path, overrides: str, said: str
) -> None:
    (message,) = messages(tmp_path, *overrides.split())
    assert said in message


def test_an_argument_without_a_default_must_be_given(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def f(b, *, gamma, power: int, names: list[str] | None = None):\n    pass\n")
    chosen = f"algorithm.adv_estimator={tmp_path}/mine.py:f"
    (message,) = messages(tmp_path, chosen)
    assert "algorithm.adv_args.power is missing" in message
    assert messages(tmp_path, chosen, "algorithm.adv_args.power=2") == []
    (message,) = messages(tmp_path, chosen, "algorithm.adv_args={power: 2, names: [1]}")
    assert "algorithm.adv_args.names must be a list, each a string or null" in message
    cfg = Config()
    cfg.algorithm.adv_estimator = f"{tmp_path}/mine.py:f"
    assert any("adv_args.power is missing" in v.message for v in find_violations(cfg, registries=registries()))
