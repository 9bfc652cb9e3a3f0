"""A task of its own, without rollout: next-token loss through the driver, stopped, resumed and exported."""

from __future__ import annotations

import faulthandler
import json
import signal
from pathlib import Path
from typing import Any

from rlscale.algo.segments import segment_sum
from rlscale.batch.types import PackedBatch, Trajectory, pack
from rlscale.batch.weights import loss_weights
from rlscale.config import read, save, schema
from rlscale.config.schema import Config, ModelConfig, SourceConfig, TaskEntry
from rlscale.data.dataset import PromptData
from rlscale.loop.tasks import Task, TaskData
from rlscale.model.arch import ModelSpec
from rlscale.testing.models import tiny_model
from tests import worlds


class Mean:
    """A running mean: what this task has for a state."""

    value = 0.0

    def add(self, number: float) -> float:
        self.value = 0.5 * (self.value + number)
        return self.value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def data(cfg: Config, tokenizer: Any) -> Any:
    train = PromptData(cfg.data.train, cfg.data, tokenizer, cfg.data.train_batch_size, cfg.trainer.seed, True)
    return TaskData(train, pack_texts(train.prompts[:4]), f"data: {len(train)} texts")


def models(checked: Any, device: Any, steps: int) -> dict[str, Any]:
    from rlscale.loop.models import build_model

    return {"actor": build_model("actor", checked, device, steps)}


def pack_texts(prompts: list[Any]) -> PackedBatch:
    texts = [p.token_ids for p in prompts]
    batch = pack([Trajectory(i, 0, t[:1], t[1:], [1] * len(t[1:]), [0.0] * len(t[1:])) for i, t in enumerate(texts)])
    batch.weights = loss_weights(batch.mask, batch.cu_seqlens, "token-mean")
    return batch


def next_token_loss(out: Any, micro: PackedBatch) -> Any:
    loss = -(out.logprobs * micro.weights).sum()
    return loss, {"nll": loss}


def step(run: Any, number: int) -> dict[str, float]:
    prompts = run.state.data.peek()
    record = run.actor.update(pack_texts(prompts), next_token_loss)
    run.state.data.advance()
    if number == 2 and run.device.rank == 1 and not run.resumed and "stopped" in run.cfg.trainer.run_dir:
        run.watch.request("SIGTERM on rank 1")
    return {"sft/nll": record["nll"], "sft/mean": run.state.parts["mean"].add(record["nll"])}


def validate(run: Any, number: int) -> dict[str, float]:
    logprobs, _ = run.actor.logprobs(run.val)
    return {"val/nll": -float(segment_sum(logprobs, run.val.cu_seqlens).mean())}


TASK = Task(data, models, step, validate, lambda cfg: {"mean": Mean()})


def run_task(file: str, folder: str) -> str | None:
    from rlscale.cluster.device import init_distributed
    from rlscale.loop.configure import Checked
    from rlscale.loop.driver import train

    schema.TASKS["next_token"] = TaskEntry(__name__, generates=False)
    cfg, misread = read(file, [f"trainer.run_dir={folder}"])
    assert not misread
    try:
        return train(Checked(cfg, ModelSpec.from_hf(cfg.model.path), None, "cpu"), init_distributed("cpu"), 0.0)
    finally:
        del schema.TASKS["next_token"]
        faulthandler.register(signal.SIGUSR1, all_threads=True)  # a world's own use of it


def test_a_task_without_rollout_is_stopped_and_resumed(tmp_path: Path) -> None:
    cfg = Config(task="next_token", model=ModelConfig(path=str(tiny_model("llama")), dtype="float32"))
    cfg.data.train, cfg.data.max_prompt_length = [SourceConfig(task="addition", size=20)], 128
    cfg.actor.optim.lr = 1e-3
    cfg.trainer.resume_mode, cfg.trainer.total_training_steps = "auto", 4
    file = str(tmp_path / "run.yaml")
    save(cfg, file)
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    assert worlds.run(2, run_task, file, str(whole), timeout=300.0) == [None] * 2
    assert worlds.run(2, run_task, file, str(stopped), timeout=300.0) == ["SIGTERM on rank 1"] * 2
    assert not (stopped / "export").exists()
    assert worlds.run(2, run_task, file, str(stopped), timeout=300.0) == [None] * 2
    records, resumed = (
        [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()] for run in (whole, stopped)
    )
    assert records == resumed and [r["step"] for r in records] == [0, 1, 2, 3, 4]
    assert records[-1]["val/nll"] < records[0]["val/nll"]
    assert (stopped / "export" / "step_000004" / "model.safetensors").is_file()
    assert not (stopped / "engines").exists() and not (stopped / "rollouts").exists()
