"""A run as a value: all that it needs to go on, saved with the weights, found again, and put back.

What is saved: fp32 master weights and AdamW moments of every trained model as slices of canonical tensors, so that
another layout can read them; the optimizer's step counts (the learning rate follows from them); the position in the
data; the KL controller; counters; the random states of every rank; the resolved configuration. What is not: the weights
in the working dtype (they follow from the masters), the reference model (it is the one the run started from), and the
sampler, whose seeds follow from seed, step, prompt and sample. Which checkpoint is the best is read from the markers
of those on the disk.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from rlscale.checkpoint import Content, Damaged, Record, Retention, SaveError, Saver, Shards, Store
from rlscale.checkpoint.saver import RUN, own_file
from rlscale.checkpoint.shards import State
from rlscale.checkpoint.store import ABANDONED, read_record
from rlscale.config import to_dict
from rlscale.config.schema import Config
from rlscale.observe.progress import Progress
from rlscale.train import zero
from rlscale.train.engine import Engine

if TYPE_CHECKING:
    from rlscale.cluster.device import Device
    from rlscale.loop.state import Run

#: a run with another value of these is another run; the prompts themselves are compared by `PromptData`
FIXED = ("task", "trainer.seed", "model.path", "critic.path", "data.shuffle")
#: keys, or sections, that say where and how the same numbers are computed, and how long
NEUTRAL = (
    "trainer.", "actor.parallel.", "critic.parallel.", "actor.use_dynamic_bsz", "critic.use_dynamic_bsz",
    "actor.ppo_max_token_len_per_gpu", "critic.ppo_max_token_len_per_gpu", "actor.ppo_micro_batch_size_per_gpu",
    "critic.ppo_micro_batch_size_per_gpu", "actor.recompute", "critic.recompute", "actor.head_chunk_tokens",
    "actor.share_prompt_prefix", "rollout.tensor_model_parallel_size", "rollout.max_num", "rollout.kv_cache",
    "rollout.gpu_memory", "rollout.enforce_eager", "rollout.enable_prefix", "rollout.prefetch", "rollout.sync_bucket",
    "rollout.start_timeout_s", "rollout.request_timeout_s", "reward.num_workers", "data.val",
)  # fmt: skip
#: and those among them that say more
OTHER = ("trainer.critic_warmup",)
#: keys about which nothing is said
SILENT = ("trainer.run_dir", "trainer.resume_mode", "trainer.resume_from_path")


def folder_of(cfg: Config) -> Path:
    """Where the checkpoints of a run are."""
    return Path(cfg.trainer.run_dir) / "checkpoints"


# Finding ------------------------------------------------------------------------------------------


@dataclass
class Resume:
    """The checkpoint that a run continues from, whole and checked.

    Attributes:
        in_place: it is one of the run's own folder, whose records go on; otherwise the run only starts from it.
        messages: for the user.
    """

    record: Record
    in_place: bool
    messages: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.state: dict[str, Any] = self.record.json(RUN)

    @property
    def step(self) -> int:
        return self.record.step


def find(cfg: Config, device: Device) -> Resume | None:
    """The checkpoint to resume from as ``trainer.resume_mode`` says, every checksum compared; None: start anew.

    That is the last one of the run's own folder (auto), or the one of ``resume_from_path`` (path, and auto while the
    folder has none).

    With ``auto`` a damaged checkpoint is set aside with a message, and the one before it is taken. Collective.

    Raises:
        ValueError: the checkpoint of ``resume_from_path`` is not whole, or of several in ``auto`` none is; the
            configuration is that of another run. On every rank.
    """
    if cfg.trainer.resume_mode == "disable":
        return None
    store, given = Store(folder_of(cfg)), cfg.trainer.resume_from_path
    found, messages = _latest_whole(store, device) if cfg.trainer.resume_mode == "auto" else (None, [])
    if found is not None:
        resume = Resume(read_record(found), True, messages)
    elif given is not None:
        path = Path(given).expanduser()
        problem = _problem(path, device)
        if problem is not None:
            raise ValueError(f"trainer.resume_from_path: {problem}")
        resume = Resume(read_record(path), path.resolve().parent == store.root.resolve(), messages)
    else:
        return None
    resume.messages += check_config(resume.state["config"], to_dict(cfg), resume.record.path)
    return resume


def _latest_whole(store: Store, device: Device) -> tuple[Path | None, list[str]]:
    """The last checkpoint without fault; those after it that have one are renamed."""
    _on_first(device, store.clean)
    messages: list[str] = []
    while True:
        steps = _on_first(device, store.steps)
        if not steps:
            break
        problem = _problem(store.path(steps[-1]), device)
        if problem is None:
            return store.path(steps[-1]), messages
        aside = _on_first(device, lambda step=steps[-1]: store.set_aside(step))
        messages.append(f"WARNING: damaged checkpoint: {problem}; it is now {aside}, and the one before it is used")
    damaged = _on_first(device, lambda: sorted(map(str, store.root.glob("*.damaged"))))
    if damaged:
        raise ValueError(
            "\n".join([*messages, f"trainer.resume_mode auto: no whole checkpoint is left in {store.root}, only "
                       f"{', '.join(damaged)}; trainer.resume_mode=disable starts anew"])
        )  # fmt: skip
    return None, messages


def set_later_aside(cfg: Config, resume: Resume, device: Device) -> list[str]:
    """Rename the later checkpoints of the folder when the user resumes from an earlier one; says so. Collective."""
    store = Store(folder_of(cfg))
    if not resume.in_place:
        return []
    later = _on_first(
        device, lambda: [store.set_aside(step, ABANDONED).name for step in store.steps() if step > resume.step]
    )
    return [f"later checkpoints are now {', '.join(later)}"] if later else []


def _problem(path: Path, device: Device) -> str | None:
    """What is wrong with a checkpoint; every rank reads a share of its files, and all get the same answer."""
    problem: str | None = None
    try:
        record = read_record(path)
        record.verify(sorted(record.files)[device.rank :: device.world])
    except Damaged as error:
        problem = str(error)
    everyone: list[Any] = [None] * device.world
    dist.all_gather_object(everyone, problem)
    return next((p for p in everyone if p is not None), None)


def _on_first(device: Device, action: Any) -> Any:
    """What the first rank's action returns, on every rank; an OSError there is a ValueError everywhere."""
    box: list[Any] = [None, None]
    if device.rank == 0:
        try:
            box[0] = action()
        except OSError as error:
            box[1] = f"trainer.run_dir: checkpoints cannot be read or moved: {error}"
    dist.broadcast_object_list(box, src=0)
    if box[1] is not None:
        raise ValueError(box[1])
    return box[0]


def check_config(saved: Mapping[str, Any], now: Mapping[str, Any], path: Path) -> list[str]:
    """What to tell about a configuration that is not the checkpoint's.

    Raises:
        ValueError: it is that of another run; names every key.
    """
    before, after = _flat(saved), _flat(now)
    changed = {key for key in before.keys() & after.keys() if before[key] != after[key]} - set(SILENT)
    refused = sorted(key for key in changed if key in FIXED)
    if refused:
        lines = [f"{key}: {_show(before[key])} in the checkpoint, {_show(after[key])} now" for key in refused]
        raise ValueError(
            f"{path} is of another run:\n  " + "\n  ".join(lines) + "\nto start a new run from its weights, export "
            "them (rlscale export) and set model.path to the export"
        )
    neutral = sorted(key for key in changed if key.startswith(NEUTRAL) and key not in OTHER)
    messages = []
    if neutral:
        messages.append("resuming with another layout, budget or length: " + _changes(neutral, before, after))
    others = sorted(changed - set(neutral))
    if others:
        messages.append("WARNING: resuming with other settings than before: " + _changes(others, before, after))
    return messages


def _changes(keys: list[str], before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {_show(before[key])} -> {_show(after[key])}" for key in keys)


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict) and not key.endswith("_args"):  # those are the user's own, and one value
            out |= _flat(value, f"{prefix}{key}.")
        else:
            out[f"{prefix}{key}"] = value
    return out


def _show(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else text[:77] + "..."


# Saving -------------------------------------------------------------------------------------------


class Checkpoints:
    """Saves the checkpoints of a run as ``trainer`` says. All methods are collective."""

    def __init__(self, cfg: Config, progress: Progress):
        t = cfg.trainer
        self.progress, self.tolerant = progress, t.continue_on_save_error
        self.best = (t.keep_best or "").removeprefix("-")  # until something has been said about it
        retention = Retention(t.keep_last, t.keep_every, t.keep_best)
        self.saver = Saver(
            Store(folder_of(cfg)), retention, asynchronous=t.async_save, timeout_s=t.collective_timeout_s
        )

    def save(self, run: Run, step: int, metrics: Mapping[str, float]) -> None:
        """Save the state after ``step``.

        Raises:
            SaveError: it failed (or the asynchronous save before it), unless ``trainer.continue_on_save_error``.
        """
        started = time.monotonic()
        run.writer.flush()  # what the checkpoint says has happened is on the disk before the checkpoint is
        numbers = {name: float(value) for name, value in metrics.items() if math.isfinite(float(value))}
        if self.best and self.best not in numbers:
            lacks = f"WARNING: trainer.keep_best: step {step} has no metric {self.best}"
            self.progress.message(f"{lacks}; a checkpoint without it is never the best")
            self.best = ""
        content = Content(
            model_states(run.trained), run_state(run, step), {"random": random_states()}, {"metrics": numbers}
        )
        self.wait()  # a save before this one that failed is no reason to leave this one out
        if self._attempt(lambda: self.saver.save(step, content)):
            how = "copied; it is written beside the next steps" if self.saver.asynchronous else "written"
            self.progress.message(f"checkpoint of step {step} {how} ({time.monotonic() - started:.1f} s)")
        self.progress.restart_clock()

    def save_stopped(self, run: Run) -> bool:
        """Save what a run that was asked to stop has reached, unless that is saved, or ``trainer.save_freq`` is -1.

        Returns:
            whether there is a checkpoint to go on from.
        """
        self.wait()
        saved = _on_first(run.device, self.saver.store.steps)
        if run.cfg.trainer.save_freq >= 0 and run.step > max(saved, default=0):
            self.save(run, run.step, {})
            self.wait()
            saved = _on_first(run.device, self.saver.store.steps)
        return bool(saved)

    def wait(self) -> None:
        """Wait for an asynchronous save; errors as in `save`."""
        self._attempt(self.saver.wait)

    def _attempt(self, action: Any) -> bool:
        try:
            action()
        except SaveError as error:
            if not self.tolerant:
                raise
            self.progress.message(f"WARNING: {error}; the run goes on (trainer.continue_on_save_error)")
            return False
        return True


def model_states(engines: Mapping[str, Engine]) -> dict[str, State]:
    """``<role>/<state>`` of the models that are trained. Collective."""
    return {f"{role}/{name}": held for role, engine in engines.items() for name, held in zero.states(engine).items()}


def engine_state(engine: Engine) -> dict[str, int]:
    """Counters of an engine, beside its tensors."""
    return {
        "steps": engine.steps,
        "adam_step": zero.optimizer_step(engine),
        "skipped_in_a_row": engine.skipped_in_a_row,
    }


def run_state(run: Run, step: int) -> dict[str, Any]:
    """What is the same on every rank."""
    config = to_dict(run.cfg)
    return {
        "step": step,
        "unfinished": run.unfinished and {name: float(value) for name, value in run.unfinished.items()},
        "world": run.device.world,
        "data": run.train.state_dict(),
        "kl_controller": run.kl_controller.state_dict(),
        "tokens_seen": run.tokens_seen,
        "rollout": {"restarts": run.rollout.restarts, "resampled": run.rollout.resampled},
        "engines": {role: engine_state(engine) for role, engine in run.trained.items()},
        "config": config,
        "config_sha256": hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest(),
    }


def random_states() -> dict[str, Any]:
    """The random states of this rank: Python, NumPy, torch, CUDA and Megatron's named ones."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    name, keys, *rest = np.random.get_state()
    out = {
        "python": random.getstate(),
        "numpy": [name, np.asarray(keys).tolist(), *rest],
        "torch": _pack(torch.get_rng_state()),
        "megatron": {key: _pack(state) for key, state in get_cuda_rng_tracker().get_states().items()},
    }
    if torch.cuda.is_available():
        out["cuda"] = _pack(torch.cuda.get_rng_state())
    return out


def set_random_states(states: Mapping[str, Any]) -> None:
    """The inverse of `random_states`; Megatron's names that this rank does not know are left out."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    version, keys, gauss = states["python"]
    random.setstate((version, tuple(keys), gauss))
    np.random.set_state(tuple(states["numpy"]))
    torch.set_rng_state(_unpack(states["torch"]))
    tracker = get_cuda_rng_tracker()
    own = tracker.get_states()
    tracker.set_states(
        {key: _unpack(states["megatron"][key]) if key in states["megatron"] else own[key] for key in own}
    )
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(_unpack(states["cuda"]))


def _pack(state: torch.Tensor) -> str:
    return base64.b64encode(state.cpu().numpy().tobytes()).decode()


def _unpack(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


# Putting back -------------------------------------------------------------------------------------


def restore(run: Run, resume: Resume) -> None:
    """Put the state of a checkpoint into a run that has just been built, and hand its weights to the engines.

    The layout may be another one. Random states are those of the rank with the same number; a rank that the
    checkpoint's run did not have keeps its own, made from the seed.

    Raises:
        ValueError: the checkpoint lacks a model, or holds one of another shape.
    """
    state, shards = resume.state, Shards(resume.record)
    for role, engine in run.trained.items():
        load_engine(shards, role, engine, state["engines"].get(role))
        engine.rest(parameters=False)
    run.kl_controller.load_state_dict(state["kl_controller"])
    run.tokens_seen, run.step = state["tokens_seen"], resume.step
    lost = state.get("rollout", {})
    run.rollout.restarts, run.rollout.resampled = lost.get("restarts", 0), lost.get("resampled", 0)
    run.unfinished, run.resumed = state.get("unfinished"), True
    own = own_file(run.device.rank)
    if own in resume.record.files:
        set_random_states(resume.record.json(own)["random"])
    run.rollout.sync(run.actor.layout, run.actor.tensors())


def load_engine(shards: Shards, role: str, engine: Engine, counters: Mapping[str, int] | None) -> None:
    """Fill an engine's master weights and moments from the slices that this rank needs. Collective.

    Raises:
        ValueError: the checkpoint does not hold this model.
    """
    path = shards.record.path
    for name, (layout, buffers) in zero.states(engine).items():
        if counters is None or f"{role}/{name}" not in shards.states:
            raise ValueError(f"{path} holds no {role} (algorithm.adv_estimator), so this run cannot continue from it")
        saved = shards.layout(f"{role}/{name}").shapes
        for tensor, shape in layout.shapes.items():
            if saved.get(tensor) != shape:
                raise ValueError(f"{path}: {role} has {tensor} {saved.get(tensor)}, this run needs {shape}")
        shards.read(f"{role}/{name}", layout.of_rank(engine.device.rank), buffers)
    assert counters is not None
    zero.set_optimizer_step(engine, counters["adam_step"])
    engine.steps, engine.skipped_in_a_row = counters["steps"], counters["skipped_in_a_row"]
    zero.after_load(engine)
