"""What a run saves and takes up: the trainer's side of `checkpoint/`, what the flags mean and what is said of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from megatron_edit.checkpoint.errors import CheckpointError
from megatron_edit.checkpoint.finder import find_checkpoint
from megatron_edit.checkpoint.folders import Candidate, same_folder
from megatron_edit.checkpoint.restore import describe_candidate, layout_description, restore, restore_weights
from megatron_edit.checkpoint.training_state import TrainingState
from megatron_edit.checkpoint.writer import CheckpointWriter, Saved
from megatron_edit.config.batch_schedule import BatchSchedule
from megatron_edit.config.resolved import ResolvedConfig
from megatron_edit.config.settings import is_given
from megatron_edit.ranks.collective import on_first_rank
from megatron_edit.train.pace import Pace, samples_beyond_iteration
from megatron_edit.train.replica import Replica
from megatron_edit.train.resumed_rate import change_of_batch, describe_change, first_sample, saved_batch, saved_schedule
from megatron_edit.train.schedule import LearningRateSchedule


@dataclass(frozen=True)
class Position:
    """Where a run stands. Samples are those of all replicas."""

    iteration: int = 0  # completed
    consumed_samples: int = 0
    schedule_samples: int = 0  # consumed before the first step of the learning rate schedule, see `resumed_rate`
    # `SamplePool.state` and `Pace.state` of a run with unequal step counts, where the counts above do not say it all.
    reserves: dict[str, Any] | None = None
    at_sync: bool | None = None  # whether all replicas hold the same weights; None: the trigger's steps tell


@dataclass(frozen=True)
class Start:
    """What a run begins with."""

    position: Position
    train_iters: int
    schedule: LearningRateSchedule
    batch: BatchSchedule
    resumed: bool  # the run of the checkpoint goes on; False for a new one, --finetune included

    def rates(self) -> Iterator[float]:
        """Learning rates of the iterations that are left, all replicas taking equal steps."""
        samples = self.position.consumed_samples
        for _ in range(self.position.iteration, self.train_iters):
            yield self.schedule.at_samples(samples - self.position.schedule_samples)
            samples += self.batch.size_at(samples)


class RunCheckpoints:
    """Checkpoints of one run. Every method is collective over all ranks.

    Raises CheckpointError when another run saves into the folder of --save.
    """

    def __init__(self, config: ResolvedConfig, replica: Replica, vocab_size: int, say: Callable[[str], None]) -> None:
        self._config = config
        self._settings = config.checkpoint
        self._replica = replica
        self._engine = replica.engine
        self._group = replica.mesh.checkpoint_group
        self._say = say
        self._vocab_size = vocab_size
        self.state = TrainingState(replica.engine.state, replica.optimizer, config.model, vocab_size)
        self._saved_iteration: int | None = None
        self._is_due = False
        self._writer: CheckpointWriter | None = None
        if self._settings.save:
            self._writer = CheckpointWriter(
                self._settings.save, self._group, keep=self._settings.keep_checkpoints, say=say
            )

    # ---- saving ----------------------------------------------------------------------------------------------------

    def due(self, pace: Pace, *, at_sync: bool | None = None) -> bool:
        """Whether where `pace` stands is to be saved. A compact checkpoint waits for the next sync."""
        self._is_due = self._is_due or pace.crossed(self._settings.save_interval)
        return self._is_due and (self._settings.save_scope == "full" or self._is_at_sync(at_sync))

    def save(self, position: Position, schedule: LearningRateSchedule, *, wait: bool = False) -> None:
        """Completes a due sync and saves; says so when it is durable. Nothing is done twice for one iteration.

        `wait`: also with --async-save the checkpoint is complete on return.
        """
        self._engine.drain()
        if self._writer is None:
            self._say(f"no --save: iteration {position.iteration} is not saved")
        elif self._saved_iteration != position.iteration:
            self._report(self._writer.finished(wait=True))
            self._write(self._writer, position, schedule)
        if self._writer is not None and wait:
            self._report(self._writer.finished(wait=True))

    def poll(self) -> None:
        """Says when a save in the background is complete. Raises SaveError when it failed."""
        if self._writer is not None:
            self._report(self._writer.finished())

    def lacks_final(self, iteration: int) -> bool:
        """Whether an earlier start saved `iteration` here, its last, and then did not come to write `final/`."""
        if self._writer is None or self._saved_iteration != iteration:
            return False
        return on_first_rank(self._writer.folder.final_iteration, self._group) != iteration

    def save_final(self, iteration: int) -> None:
        """Writes `final/`: weights only, of the last sync, in the model's dtype. Any layout can read it."""
        if self._writer is None:
            return
        self._engine.drain()
        content = {**self._description(iteration), "scope": "weights"}
        saved = self._writer.save(self.state.checkpoint(content))
        if saved.remark:
            self._say(saved.remark)
        self._say(f"saved the final weights to {saved.folder}")

    def _write(self, writer: CheckpointWriter, position: Position, schedule: LearningRateSchedule) -> None:
        scope = self._settings.save_scope if self._is_at_sync(position.at_sync) else "full"
        if scope != self._settings.save_scope:
            self._say(f"iteration {position.iteration} lies between two syncs: its checkpoint is a full one")
        numbers = self.state.numbers(self._group)
        content = {
            **self._description(position.iteration),
            "scope": scope,
            "consumed_samples": position.consumed_samples,
            "order": self._order(),
            **({"reserves": position.reserves} if position.reserves is not None else {}),
            "schedule": {
                "samples": position.schedule_samples,
                "global_batch_size": schedule.batch.last_size,
                "batch_steps": [list(step) for step in schedule.batch.steps],
                "train_iters": schedule.train_iters,
                "optimizer": asdict(schedule.optimizer),
            },
            **numbers,
            "replicas": numbers["replicas"] if scope == "full" else numbers["replicas"][:1],
        }
        checkpoint = self.state.checkpoint(content)
        if self._settings.async_save:
            writer.save_in_background(checkpoint)
        else:
            self._report(writer.save(checkpoint))
        self._saved_iteration = position.iteration
        self._is_due = False

    def _report(self, saved: Saved | None) -> None:
        if saved is None:
            return
        if saved.remark:
            self._say(saved.remark)
        self._say(f"saved iteration {saved.iteration} to {saved.folder}")
        if saved.deleted:
            self._say(f"deleted the checkpoints of iterations {', '.join(map(str, saved.deleted))}")

    def _description(self, iteration: int) -> dict[str, Any]:
        return {
            "iteration": iteration,
            "layout": layout_description(self.state),
            "method": self._config.edit.edit_method,
            "vocab_size": self._vocab_size,
            "model": asdict(self._config.model),
            "tokenizer": self._tokenizer(),
            "versions": {name: _version(name) for name in ("megatron_edit", "megatron-core", "torch")},
        }

    def _tokenizer(self) -> dict[str, Any]:
        """For the export of the weights, which takes the tokenizer along."""
        data = self._config.data
        path = os.path.abspath(data.tokenizer_model) if data.tokenizer_model else None
        return {"type": data.tokenizer_type, "model": path}

    def _order(self) -> dict[str, Any]:
        """What the order of samples follows from: with another value, the position counts other samples."""
        data = self._config.data
        return {
            "seed": self._config.training.seed,
            "seq_length": self._config.model.seq_length,
            "data_path": list(data.data_path),
            "train_data_path": list(data.train_data_path),
            "split": data.split if data.data_path else None,
        }

    def _is_at_sync(self, known: bool | None) -> bool:
        """Whether all replicas hold the same weights, once a due sync is completed."""
        if known is not None:
            return known
        return self._engine.state.replicas_agree

    # ---- loading ---------------------------------------------------------------------------------------------------

    def load(self) -> Start:
        """Takes up the checkpoint of --load, if there is one. Raises CheckpointError."""
        settings = self._settings
        candidate = None if settings.load is None else self._find(settings.load)
        if self._writer is not None:
            on_first_rank(self._writer.folder.clean_up, self._group)
            self._warn_of_used_folder(self._writer, candidate)
        if candidate is None:
            return self._start(Position(), resumed=False)
        saved = candidate.manifest.content
        reserves = None if settings.finetune else saved.get("reserves")
        if settings.finetune or not settings.load_optim:
            what = "started from the weights of"
            start, remarks = self._start_from_weights(candidate, reserves)
        else:
            what = "resumed"
            start, remarks = self._resume(candidate, reserves)
        self._check_reserves(candidate, reserves)
        self._say(f"loaded {describe_candidate(candidate.folder, saved)}")
        for remark in remarks:
            self._say(remark)
        self._say(f"{what} iteration {candidate.manifest.iteration} of {start.train_iters} from {settings.load}")
        return start

    def _find(self, load: str) -> Candidate | None:
        """What is to be loaded; None where a run that goes on by itself is at its first start."""
        settings = self._settings
        candidate = find_checkpoint(
            load,
            self._group,
            step=settings.ckpt_step,
            fallback=settings.load_fallback,
            weights_only=settings.finetune,
            say=self._say,
        )
        goes_on = same_folder(load, settings.save)
        if candidate is None and not goes_on:
            raise CheckpointError(f"--load {load}: there is no complete checkpoint in it")
        if candidate is None:
            self._say(f"--load {load} holds no checkpoint: first start")
        elif self._writer is not None and goes_on and settings.load_fallback and settings.ckpt_step is None:
            self._set_aside(self._writer, candidate)
        return candidate

    def _start_from_weights(self, candidate: Candidate, reserves: dict[str, Any] | None) -> tuple[Start, list[str]]:
        """With --finetune or --no-load-optim: the start, and what the user should know."""
        finetune = self._settings.finetune
        iteration = 0 if finetune else candidate.manifest.iteration
        consumed = 0 if finetune else candidate.manifest.content.get("consumed_samples")
        if consumed is None:
            raise CheckpointError(f"{candidate.folder} holds weights only: give --finetune to start from them")
        remarks = restore_weights(self.state, candidate, self._group, iteration=iteration)
        remarks.append("learning rate: the flags' schedule, from its first step: only weights were loaded")
        return self._start(Position(iteration, consumed, consumed, reserves), resumed=iteration > 0), remarks

    def _resume(self, candidate: Candidate, reserves: dict[str, Any] | None) -> tuple[Start, list[str]]:
        """With everything: the start, and what the user should know."""
        settings, saved = self._settings, candidate.manifest.content
        remarks = restore(
            self.state,
            candidate,
            self._group,
            random_states=settings.load_rng,
            seed=self._config.training.seed,
        )
        if not settings.load_rng:
            remarks.append("--no-load-rng: generators (dropout) are as at the start of a run")
        schedule, consumed = saved["schedule"], saved["consumed_samples"]
        use_checkpoint = settings.use_checkpoint_opt_param_scheduler
        resized = saved["layout"]["sync"] != self._engine.fleet.num_replicas
        position = Position(
            candidate.manifest.iteration,
            consumed,
            schedule["samples"] if use_checkpoint else first_sample(self._config, consumed, schedule),
            reserves,
            at_sync=resized or not any(max(each["updates_since_sync"]) for each in saved["replicas"]),
        )
        start = self._start(position, resumed=True)
        remarks += self._schedule_remarks(start.schedule, position, schedule)
        remarks += self._order_remarks(saved.get("order", {}))
        if use_checkpoint:
            start = replace(start, schedule=saved_schedule(schedule))
        self._saved_iteration = self._iteration_here(candidate)
        return start, remarks

    def _check_reserves(self, candidate: Candidate, reserves: dict[str, Any] | None) -> None:
        """Steps that all replicas take together read on from one position: no sample may be left out before it."""
        if reserves and reserves["ranges"] and self._engine.equal_steps:
            unused = sum(stop - start for start, stop in reserves["ranges"])
            raise CheckpointError(
                f"{candidate.folder} was saved by --edit-method {candidate.manifest.content['method']}: {unused} "
                f"samples before its position {reserves['frontier']} are still to be used, which --edit-method "
                f"{self._config.edit.edit_method}{' in its warm-up' if self._engine.synchronous else ''} cannot do; go "
                "on with that method, or start from the weights with --finetune"
            )

    def _set_aside(self, writer: CheckpointWriter, candidate: Candidate) -> None:
        """After a fallback: what is damaged is kept under another name, as the run will save those iterations anew."""
        iteration = candidate.manifest.iteration
        for name in on_first_rank(lambda: writer.folder.set_aside_after(iteration), self._group):
            self._say(f"*** the damaged checkpoint is kept as {writer.folder.directory / name} ***")

    def _warn_of_used_folder(self, writer: CheckpointWriter, candidate: Candidate | None) -> None:
        """A run that starts elsewhere, in the folder of another, writes over it; --load would have gone on with it."""
        settings = self._settings
        goes_on = candidate is not None and same_folder(str(candidate.folder.parent), settings.save)
        if goes_on and not settings.finetune:
            return
        iterations = on_first_rank(writer.folder.iterations, self._group)
        if iterations:
            start = "anew" if candidate is None else f"from {candidate.folder}"
            words = ", without --finetune," if settings.finetune else ""
            self._say(
                f"*** --save {settings.save} holds a run at iteration {max(iterations)}, and this one starts {start} "
                f"and writes over it: give --load {settings.save}{words} to go on with it, or a folder of its own ***"
            )

    def _order_remarks(self, saved: dict[str, Any]) -> list[str]:
        """Loud lines where the samples after the position are not those that the saved run would have read."""
        ours = self._order()
        return [
            f"*** --{name.replace('_', '-')} was {saved[name]}, is {ours[name]}: the order of samples is another one, "
            "so some may be read twice and others not at all in this epoch ***"
            for name in ours
            if name in saved and saved[name] != ours[name]
        ]

    def _iteration_here(self, candidate: Candidate) -> int | None:
        """The loaded iteration when --save already holds it as its last: to write it anew would risk the only copy."""
        writer, iteration = self._writer, candidate.manifest.iteration
        if writer is None or not same_folder(str(candidate.folder.parent), self._settings.save):
            return None
        return iteration if on_first_rank(lambda: writer.folder.is_last(iteration), self._group) else None

    def _start(self, position: Position, *, resumed: bool) -> Start:
        """With the flags' schedule; a decay whose length is not given ends with the run."""
        training, optimizer, batch = self._config.training, self._config.optimizer, self._config.batch_schedule
        train_iters = training.train_iters
        beyond = samples_beyond_iteration(position.reserves, batch)
        counted = position.consumed_samples - beyond  # where the completed iterations end
        if is_given(self._config, "train_samples"):
            train_iters = position.iteration + batch.iterations_until(training.train_samples, counted)
        if self._config.sources.get("lr_decay_iters") == "derived":
            end = batch.samples_after(max(1, train_iters - position.iteration), counted)
            optimizer = replace(optimizer, lr_decay_iters=None, lr_decay_samples=end - position.schedule_samples)
        schedule = LearningRateSchedule(optimizer, train_iters, batch, position.schedule_samples)
        return Start(position, train_iters, schedule, batch, resumed)

    def _schedule_remarks(
        self, flags: LearningRateSchedule, position: Position, saved: dict[str, Any]
    ) -> list[str]:
        """Which source won, and what it changes."""
        use_checkpoint = self._settings.use_checkpoint_opt_param_scheduler
        changed = describe_change(
            flags,
            position.schedule_samples,
            saved,
            iteration=position.iteration,
            consumed_samples=position.consumed_samples,
            tells_batch=not use_checkpoint,  # the flags' batches hold all the same
        )
        if use_checkpoint:
            batch = change_of_batch(saved_batch(saved), flags.batch, position.consumed_samples)
            lost = f"; not used of the flags: {changed}" if changed else ""
            return [
                f"learning rate: the checkpoint's schedule (--use-checkpoint-opt_param-scheduler){lost}",
                *(f"{line}: the flags' batches hold" for line in batch),
            ]
        how = " (--override-opt_param-scheduler)" if self._settings.override_opt_param_scheduler else ""
        return [f"learning rate: the flags' schedule{how}; " + (changed or "the checkpoint's is the same")]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
