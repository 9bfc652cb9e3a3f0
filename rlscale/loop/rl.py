"""Reinforcement learning as a task: its prompts, its models and its state. Its step is `rlscale.loop.step`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlscale.algo.kl import make_controller
from rlscale.algo.needs import uses_critic, uses_reference
from rlscale.cluster.device import Device
from rlscale.config.schema import Config
from rlscale.data.dataset import PromptData
from rlscale.loop.configure import Checked
from rlscale.loop.models import build_model
from rlscale.loop.run_state import Stateful
from rlscale.loop.schedule import optimizer_steps
from rlscale.loop.step import train_step
from rlscale.loop.tasks import Task, TaskData
from rlscale.loop.validation import validate
from rlscale.train.engine import Engine

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_prompts(cfg: Config, tokenizer: PreTrainedTokenizerBase) -> TaskData:
    """Training and held-out prompts."""
    seed = cfg.trainer.seed
    data = PromptData(cfg.data.train, cfg.data, tokenizer, cfg.data.train_batch_size, seed, cfg.data.shuffle)
    val = PromptData(cfg.data.val, cfg.data, tokenizer, None, seed, False, "data.val") if cfg.data.val else None
    line = f"data: {len(data)} prompts" + (f", {len(val)} held out" if val else "")
    filtered = data.filtered + (val.filtered if val else 0)
    if filtered:
        line += f"; {filtered} longer than data.max_prompt_length {cfg.data.max_prompt_length} were left out"
    shared = data.overlap(val) if val else 0
    if shared:
        line += f"; warning: {shared} of the held-out prompts are training prompts too"
    return TaskData(data, val, line, {p.scorer for p in data.prompts + (val.prompts if val else [])})


def build_models(checked: Checked, device: Device, steps: int) -> dict[str, Engine]:
    """The actor, and the reference and the critic where the algorithm uses them."""
    cfg, temperature, updates = checked.cfg, checked.cfg.rollout.temperature, optimizer_steps(checked.cfg, steps)
    models = {"actor": build_model("actor", checked, device, updates["actor"], temperature)}
    if uses_reference(cfg):
        models["reference"] = build_model("reference", checked, device, None, temperature)
    if uses_critic(cfg):
        models["critic"] = build_model("critic", checked, device, updates["critic"])
    return models


def state(cfg: Config) -> dict[str, Stateful]:
    """The controller of the KL coefficient in the reward."""
    return {"kl_controller": make_controller(cfg.algorithm.kl_ctrl)}


TASK = Task(load_prompts, build_models, train_step, validate, state)
