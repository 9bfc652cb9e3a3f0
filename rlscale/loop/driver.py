"""A run from its first step to its last, whatever its task: steps, validation, checkpoints, exports, stopping."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rlscale.cluster.device import Device
from rlscale.config.paths import resolve_folder
from rlscale.loop import report
from rlscale.loop.build import build
from rlscale.loop.configure import Checked
from rlscale.loop.run import Run, trained
from rlscale.loop.schedule import due, exports, saves, unreached_learning_rates
from rlscale.loop.stopping import LIMIT, Stopped
from rlscale.loop.tasks import Task, load_task
from rlscale.reshard.hf_export import export_hf
from rlscale.rollout.backend import Backend


def train(
    checked: Checked, device: Device, started: float, backend: Backend | None = None,
    watching: Callable[[], None] = lambda: None,
) -> str | None:  # fmt: skip
    """Run the configured task to its end, or until it is asked to stop: then the state reached is saved, and the
    reason is returned. Collective over the world; errors end the process with a message.

    Args:
        started: `time.monotonic` when the program began.
        backend: this leader's engine, where its start has begun.
        watching: called when the run takes signals itself.
    """
    task = load_task(checked.cfg.task)
    run = build(checked, task, device, started, backend)
    run.watch.start()
    watching()
    try:
        for warning in unreached_learning_rates(trained(run.models)):
            run.progress.message(f"WARNING: {warning}")
        return Driver(run, task).run_until_stopped()
    except Exception as error:
        first = run.watch.failed(error)
        if first is None or isinstance(error, ValueError):  # what is wrong with the user's input, all ranks find alike
            raise
        what = str(error).partition("\n")[0]  # the launcher ends compilers too, and their output would hide the cause
        follows = RuntimeError(f"rank {first} has failed; then this rank with {type(error).__name__}: {what}")
        for note in getattr(error, "__notes__", []):
            follows.add_note(note)
        raise follows from error
    finally:
        run.close()


@dataclass
class Driver:
    """Takes the steps of a run."""

    run: Run
    task: Task

    def run_until_stopped(self) -> str | None:
        """All that is left of the run; the reason where it was asked to stop before the end."""
        run, state = self.run, self.run.state
        began = state.step
        try:
            self.steps()
        except Stopped as stop:
            run.writer.flush()
            saved = run.checkpoints.save_stopped(state, trained(run.models))
            run.watch.state_saved()
            if str(stop).startswith(LIMIT) and state.step == began:  # a limit this short never lets a step finish
                raise RuntimeError(
                    f"{stop} before a step was finished, so a resumed run would make no progress; increase {LIMIT}"
                ) from stop
            what = f"nothing is saved ({'no step was finished' if state.step == 0 else 'trainer.save_freq -1'})"
            run.progress.message(
                f"stopped: {stop}; " + ("resume with the same command and trainer.resume_mode=auto" if saved else what)
            )
            return str(stop)
        return None

    def steps(self) -> None:
        """Every step that is left, and what comes before the first and after the last.

        Raises:
            Stopped: as `_finish`.
        """
        run, state, trainer = self.run, self.run.state, self.run.cfg.trainer
        last = state.step == run.total_steps
        if trainer.val_before_train and state.step == 0 and run.val is not None:
            run.writer.log(0, self._validate(0))
        if state.unfinished is not None:
            self._finish(state.step, state.unfinished, save=trainer.save_freq >= 0)  # at once: it is recorded now
        elif run.resumed and exports(run.cfg, state.step, last) and not self._export_folder().exists():
            self._export()  # the run ended between its checkpoint and this
        for step in range(state.step + 1, run.total_steps + 1):
            metrics = self.task.step(run, step)
            self._finish(step, metrics, save=saves(run.cfg, step, step == run.total_steps))
        run.checkpoints.wait()
        report.finish(run)

    def _finish(self, step: int, metrics: dict[str, float], save: bool) -> None:
        """What comes after the updates of a step: validation, its record, checkpoint and export where they are due.

        Raises:
            Stopped: the run was asked to stop. In the validation: the metrics so far are in ``state.unfinished``, so
                that the run that resumes validates and records the step as if nothing had happened.
        """
        run, state, trainer = self.run, self.run.state, self.run.cfg.trainer
        last = step == run.total_steps
        state.step, state.unfinished = step, metrics
        if run.val is not None and trainer.test_freq >= 0 and (last or due(step, trainer.test_freq)):
            run.watch.raise_if_stopped()  # before engines that a launcher may have ended are used
            metrics = metrics | self._validate(step)
        state.unfinished = None
        run.writer.log(step, metrics)
        run.progress.step(step, metrics)
        if save:
            run.phase(step, "save")
            run.writer.flush()  # what the checkpoint says has happened is on the disk before the checkpoint is
            run.checkpoints.save(state, trained(run.models), metrics)
        if exports(run.cfg, step, last):
            self._export()
        if not last:
            run.watch.raise_if_stopped()

    def _validate(self, step: int) -> dict[str, float]:
        run = self.run
        run.phase(step, "validate")
        metrics = self.task.validate(run, step)
        numbers = ", ".join(f"{k} {v:.4f}" for k, v in metrics.items() if k.startswith("val/"))
        run.progress.message(f"validation at step {step}: {numbers}")
        run.progress.restart_clock()
        return metrics

    def _export_folder(self) -> Path:
        return Path(self.run.cfg.trainer.run_dir) / "export" / f"step_{self.run.state.step:06d}"

    def _export(self) -> None:
        """Write the task's first model as a Hugging Face folder that transformers and vLLM open."""
        run, step, folder = self.run, self.run.state.step, self._export_folder()
        run.phase(step, "export")
        role, engine = next(iter(run.models.items()))
        origin = resolve_folder(run.cfg.model.path)
        export_hf(folder, engine.layout, engine.tensors(), reference_folder=origin, dtype=engine.dtype)
        run.progress.message(f"exported the {'policy' if role == 'actor' else role} of step {step} to {folder}")
        run.progress.restart_clock()
