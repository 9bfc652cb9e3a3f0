"""Builds a run, its parts in the order of what needs what: nothing is given to a part later."""

from __future__ import annotations

import contextlib

from rlscale.cluster.device import Device
from rlscale.cluster.mesh import RolloutDims
from rlscale.config.schema import TASKS, Config
from rlscale.data.tokenizers import eos_token_ids, load_tokenizer
from rlscale.loop.checkpoint import CheckpointManager, restore
from rlscale.loop.configure import Checked
from rlscale.loop.resume import ResumePoint, archive_later, find
from rlscale.loop.run import GeneratingRun, Run, trained
from rlscale.loop.run_state import RunState
from rlscale.loop.schedule import planned_steps
from rlscale.loop.stopping import Watch
from rlscale.loop.tasks import Task
from rlscale.observe.progress import Progress
from rlscale.observe.writers import RunWriter
from rlscale.reward.pool import RewardPool, targets_of
from rlscale.rollout.backend import Backend
from rlscale.rollout.rollout import Rollout


def build(checked: Checked, task: Task, device: Device, started: float, backend: Backend | None) -> Run:
    """Load data and models, start engines if the task generates, resume from a checkpoint if there is one.

    Collective; raises before anything trains if a part does not fit.
    """
    cfg, generates = checked.cfg, TASKS[checked.cfg.task].generates
    with contextlib.ExitStack() as parts:  # where a part fails, those before it are closed
        watch = Watch(grace_s=cfg.trainer.stop_grace_s, max_time_s=cfg.trainer.max_time, since=started)
        parts.callback(watch.close)
        point = find(cfg, device)
        tokenizer = load_tokenizer(cfg.model)
        data = task.data(cfg, tokenizer)
        if point is not None:
            data.train.load_state_dict(point.state["data"])  # other data is refused before the models are loaded
        steps = planned_steps(cfg, len(data.train))
        progress = Progress(steps, point.step if point else 0, rank=device.rank)
        parts.callback(progress.close)
        targets_of(cfg.reward, data.scorers)  # on every rank, so that all refuse a bad scorer alike
        if point is not None:
            archive_later(cfg, point)
        checkpoints = CheckpointManager(cfg, device, progress)
        writer = _writer(cfg, device, point, checkpoints)
        parts.callback(writer.close)
        for line in [data.summary, *_announcement(cfg, device, point)]:
            progress.message(line)
        rollout = pool = None
        if generates:
            rollout = Rollout(
                cfg, device, eos_token_ids(cfg.model.path, tokenizer), tokenizer,
                interrupted=lambda: watch.reason is not None, backend=backend,
            )  # fmt: skip
            parts.callback(rollout.close)
            if rollout.is_leader:
                pool = RewardPool(cfg.reward, data.scorers)
                parts.callback(pool.close)
        models = task.models(checked, device, steps)
        for model in models.values():
            model.release_device()
        if rollout:
            rollout.start()  # on CPU the engines have begun to start before this rank joined the others
        state = RunState(data.train, task.state(cfg) | ({"rollout": rollout} if rollout else {}))
        if point is not None:
            restore(point, state, trained(models), device.rank)
            if rollout:
                rollout.sync(lambda: (models["actor"].layout, models["actor"].tensors()))
        progress.restart_clock()
        of_any = (
            cfg, device, started, point is not None, steps, state, data.val, models, writer, progress, checkpoints,
            watch, parts.pop_all(),
        )  # fmt: skip
        return GeneratingRun(*of_any, rollout, pool) if rollout else Run(*of_any)


def _writer(cfg: Config, device: Device, point: ResumePoint | None, checkpoints: CheckpointManager) -> RunWriter:
    """The run folder: a new run moves the files of an earlier one away, a resumed one drops what came after."""
    step = recorded = None
    if point is not None and point.in_place:  # a step that a stop left unvalidated is recorded by this run
        step, recorded = point.step, point.step - (point.state.get("unfinished") is not None)
    # a checkpoint may be on its way that will not be completed
    return RunWriter(cfg, cfg.trainer.run_dir, device.rank, step, recorded, on_disk_full=checkpoints.wait)


def _announcement(cfg: Config, device: Device, point: ResumePoint | None) -> list[str]:
    """What a run says before its models are loaded and its engines started."""
    lines = [] if point is None else [*point.messages, f"resuming after step {point.step} from {point.manifest.path}"]
    lines.append(f"loading {cfg.model.path}")
    if TASKS[cfg.task].generates:
        engines = RolloutDims(cfg.rollout.tensor_model_parallel_size, device.world).replicas
        lines.append(f"starting {engines} vLLM engine(s); their logs: {cfg.trainer.run_dir}/engines")
    return lines
