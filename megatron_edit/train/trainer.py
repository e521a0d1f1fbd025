"""The run: build, resume, iterate, evaluate, save, stop.

    Trainer(config, platform, checked_data, store).fit()

The run goes from boundary to boundary: what needs all replicas (evaluation, saving, the end) happens there, and in
between nothing here waits for another replica. Where all replicas take equal numbers of steps a boundary lies after
every iteration, one optimizer step of every replica. With unequal ones (a-edit, after its warm-up) it is a meeting: the
step after which all replicas decide their next sync. An iteration is then a global batch of samples.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist

from megatron_edit.config.check_batch_schedule import undivided_batches
from megatron_edit.config.schema import Config, ConfigError
from megatron_edit.data.blend import is_validation, set_name
from megatron_edit.model.sharding import local_parameter_count
from megatron_edit.platform import Platform
from megatron_edit.sync.event import Meeting
from megatron_edit.sync.trigger import StepTrigger
from megatron_edit.tables.parameters import parameter_count
from megatron_edit.train.checked_data import CheckedData
from megatron_edit.train.checkpointing import Position, RunCheckpoints
from megatron_edit.train.data import RunData
from megatron_edit.train.evaluate import evaluate
from megatron_edit.train.feed import TrainingFeed
from megatron_edit.train.loglines import EvaluationReport
from megatron_edit.train.memory import largest_of_all_ranks, memory_table
from megatron_edit.train.metrics import MetricsReducer, Reporter, throughput_of
from megatron_edit.train.output import RunOutput
from megatron_edit.train.pace import Pace
from megatron_edit.train.presence import Presence
from megatron_edit.train.replica import build_replica, mesh_of
from megatron_edit.train.sample_ids import SampleIdFile
from megatron_edit.train.shared_paths import check_shared_paths
from megatron_edit.train.signals import StopCoordinator, StopReason
from megatron_edit.train.step import TrainStep
from megatron_edit.train.stopped import leave_mark
from megatron_edit.train.sync_report import stage_sync_report


class Trainer:
    """One rank of a run. `config` must be resolved and checked; the default process group must exist.

    `store`: the rendezvous store of the job, through which stop requests travel. `presence`: is told where the run
    is. `owns_process`: the process ends after `fit`, so a signal that comes after a stop is ignored until then.
    """

    def __init__(
        self,
        config: Config,
        platform: Platform,
        checked: CheckedData,
        store: dist.Store,
        *,
        presence: Presence | None = None,
        owns_process: bool = False,
    ) -> None:
        training = config.training
        assert training.train_samples is not None
        self.config = config
        self._presence = presence
        self._owns_process = owns_process
        self.train_samples: int = training.train_samples
        self.vocab_size = checked.vocab_size
        self.mesh = mesh_of(config, platform)
        self._output = RunOutput(config, writes=self.mesh.rank == 0)
        for remark in check_shared_paths(config, self.mesh.checkpoint_group):
            self._output.say(remark)
        self.data = RunData(config, checked, self.mesh)
        self.replica = build_replica(config, self.mesh, self.vocab_size)
        self.engine = self.replica.engine
        self._step = TrainStep(self.replica)
        self._checkpoints = RunCheckpoints(config, self.replica, self.vocab_size, self._output.say)
        start = self._checkpoints.load()
        self.train_iters = start.train_iters
        position, batch = start.position, start.batch
        if problems := undivided_batches(config, self.mesh.layout.world_size, position.consumed_samples):
            raise ConfigError(problems)
        self.pace = Pace(
            iteration=position.iteration,
            consumed_samples=position.consumed_samples,
            num_replicas=self.mesh.num_replicas,
            replica=self.mesh.replica,
            batch=batch,
            state=position.reserves,
        )
        self._schedule, self._schedule_samples = start.schedule, position.schedule_samples
        self._resumed = start.resumed
        self._refuse_syncs_without_learning_rate()
        self._rendezvous_store = store
        self._logged_iteration = self.iteration
        self._learning_rate, self._batch_size = 0.0, 0  # of the last step
        self._at_sync = position.at_sync is not False  # with unequal steps: whether the last meeting was averaged
        # Of an interval that another method has begun.
        self._steps_before = 0 if self.engine.synchronous else self.engine.trigger.steps_since_sync
        steps = position.reserves["replica_steps"] if position.reserves else [self.iteration]  # of the saved replicas
        self._met_at: dict[int, int] = {}  # sync -> iteration, until it is reported
        self._steps_ahead = self.engine.trigger.steps - self.iteration
        self._sample_ids = SampleIdFile(config.data.log_sample_ids, self.mesh, steps)
        self._feed = TrainingFeed(self.data, self.pace, self.mesh.replica, position.reserves)
        self._metrics = MetricsReducer(
            self.mesh.world_control_group,
            platform.device,
            Reporter.from_mesh(self.mesh),
            train_iters=self.train_iters,
            throughput=throughput_of(config, self.vocab_size, self.mesh.layout.replica_size)
            if config.logging.log_throughput
            else None,
            z_loss=config.training.z_loss_coeff > 0,
        )

    def _refuse_syncs_without_learning_rate(self) -> None:
        """SlowMo divides by the inner learning rate of the step before a sync. Raises ConfigError where that is 0."""
        if self.engine.method.outer_step != "slowmo":
            return
        trigger, before = self.engine.trigger, self.consumed_samples
        assert isinstance(trigger, StepTrigger)
        timetable, ahead = trigger.timetable, trigger.steps - self.iteration
        for iteration in range(self.iteration + 1, self.train_iters + 1):
            at_end = iteration == self.train_iters and iteration + ahead > timetable.warmup_end
            rate = self._schedule.at_samples(before - self._schedule_samples)
            if rate == 0 and (at_end or timetable.due_after(iteration + ahead)):
                raise ConfigError([
                    f"--edit-method slowmo divides by the learning rate, which is 0 at iteration {iteration}, before a "
                    f"sync: give --min-lr (or in its warm-up --lr-warmup-init) above 0, for example "
                    f"{self.config.optimizer.lr / 10:g}"
                ])  # fmt: skip
            before += self.pace.batch.size_at(before)

    @property
    def iteration(self) -> int:
        """Completed iterations, at the last boundary."""
        return self.pace.iteration

    @property
    def consumed_samples(self) -> int:
        """Samples that all replicas have used, at the last boundary."""
        return self.pace.consumed_samples

    def fit(self) -> None:
        """Trains to the end, or until a stop is asked for; saves; writes and evaluates `final/` at the end."""
        try:
            self._announce()
            self._output.begin(self.iteration, self.train_iters)
            at_end = self._resumed and self._is_done
            if at_end and not self._checkpoints.lacks_final(self.iteration):
                self._output.say(f"nothing left to do: resumed at iteration {self.iteration} of {self.train_iters}")
                return
            training = self.config.training
            with StopCoordinator(
                self._rendezvous_store,
                self.mesh.rank,
                self.mesh.layout.world_size,
                next_boundary=self.iteration,
                timeout_seconds=self.config.parallel.distributed_timeout_seconds,
                exit_duration_minutes=training.exit_duration_in_mins,
                handle_signals=training.exit_signal_handler,
                until_exit=self._owns_process,
            ) as stop:
                self._end(self._iterate(stop))
            self._feed.close()
            self._sample_ids.close()
        finally:
            self._output.close()

    def _iterate(self, stop: StopCoordinator) -> StopReason | str | None:
        """Goes on to the end (None) or to the reason why the run stops before."""
        boundary = self.iteration  # the same as the iteration where steps are equal, else syncs count on from it
        while True:
            reason = stop.should_stop(boundary)
            if self._is_done:
                return None
            if reason is not None:
                return replace(reason, iteration=self.iteration)
            if self.engine.method.equal_steps or self.engine.synchronous:
                self._train_iteration()
            else:
                self._train_to_meeting(stop)
            self._at_boundary()
            boundary += 1
            interval = self.config.training.exit_interval
            if self.pace.crossed(interval) and not self._is_done:
                return f"--exit-interval {interval}: stop after iteration {self.iteration}"

    @property
    def _is_done(self) -> bool:
        if self.engine.method.equal_steps:
            return self.iteration >= self.train_iters
        return self.consumed_samples >= self.train_samples

    def _train_iteration(self) -> None:
        """One step of every replica."""
        synchronous = self.engine.synchronous
        self._train_step(lambda: False)
        self.pace.meet_after_one_step()
        if synchronous and not self.engine.synchronous:
            self._say_memory()

    def _at_boundary(self) -> None:
        """What needs all replicas, when its interval is over."""
        if self.pace.crossed(self.config.logging.log_interval):
            self._emit()
        self._output.show(self._metrics.poll())
        self._output.advance(self.iteration)
        evaluation = self.config.evaluation
        if self.pace.crossed(evaluation.eval_interval) and not (self._is_done and evaluation.eval_at_end):
            self._evaluate(self.data.validation_splits)
        if self._checkpoints.due(self.pace, at_sync=self._known_at_sync) and not self._is_done:
            self._save()
        self._checkpoints.poll()

    def _train_to_meeting(self, stop: StopCoordinator) -> None:
        """Steps on this replica's reserve until T is over, a stop is asked for, or the reserve is used up."""
        self._feed.deal(self.train_samples)
        trigger = self.engine.trigger
        trigger.restart_clock()  # evaluation and saving are not time between two syncs

        def asks_for_sync() -> bool:
            return self.mesh.is_replica_leader and (trigger.wants_sync() or stop.requested or self._feed.is_empty)

        meeting = None
        while meeting is None:
            meeting = self._train_step(asks_for_sync)
            self._output.show(self._metrics.poll())

    def _train_step(self, asks_for_sync: Callable[[], bool]) -> Meeting | None:
        self._note(f"step {self.pace.own_step + 1}")
        microbatches, sample_ids = self._feed.next_batch()
        self._batch_size = self.pace.global_batch_size
        self._learning_rate = self._schedule.at_samples(self.pace.schedule_samples - self._schedule_samples)
        outcome = self._step.run(microbatches, self._learning_rate, asks_for_sync)
        self.pace.step()
        self._sample_ids.write(self.pace.own_step, sample_ids)
        self._metrics.accumulate(
            outcome.loss_sum,
            outcome.tokens,
            outcome.grad_norm,
            samples=len(sample_ids),
            skipped=not outcome.updated,
            z_loss_sum=outcome.z_loss_sum,
        )
        if outcome.meeting is not None and not self.engine.method.equal_steps:
            self._meet(outcome.meeting)
        self._report_sync()
        return outcome.meeting

    def _meet(self, meeting: Meeting) -> None:
        """All replicas know now how many steps each has taken."""
        steps = tuple(n - self._steps_before for n in meeting.steps)
        self._steps_before = 0
        self._feed.give_back(steps)
        self.pace.meet(steps)
        self._at_sync = meeting.averaged
        if meeting.averaged:
            self._met_at[meeting.index] = self.iteration
        else:
            self._output.say(
                f"sync {meeting.index} at iteration {self.iteration}: put off, all replicas together have taken fewer "
                f"than --edit-min-total-steps {self.config.edit.edit_min_total_steps}"
            )

    def _note(self, step: str) -> None:
        if self._presence is not None:
            self._presence.note(step)

    @property
    def _known_at_sync(self) -> bool | None:
        return None if self.engine.method.equal_steps else self._at_sync

    # ---- the log -----------------------------------------------------------------------------------------------------

    def _emit(self) -> None:
        """A line on the iterations since the last one, if there were any."""
        if self._logged_iteration == self.iteration:
            return
        self._logged_iteration = self.iteration
        self._metrics.emit(
            self.iteration,
            consumed_samples=self.consumed_samples,
            learning_rate=self._learning_rate,
            global_batch_size=self._batch_size,
            local_steps=not self.engine.synchronous,
            loss_scale=float(self.replica.optimizer.get_loss_scale()) if self.config.training.fp16 else None,
        )

    def _report_sync(self) -> None:
        """A sync is complete on every rank before its next boundary, so all of them report it here in one order."""
        for result in self.engine.take_results():
            place = self.mesh.place
            if place.sync == place.dp == place.cp == place.tp == 0:  # one rank of each stage
                self._output.warn(self.engine.take_warnings())
            iteration = self.iteration
            if self.engine.method.equal_steps:  # a replica's own steps are more or fewer after a run of a-edit
                iteration = result.decision.iteration - self._steps_ahead
            iteration = self._met_at.pop(result.decision.index, iteration)
            self._metrics.emit_sync(stage_sync_report(result, self.mesh, self.engine.modules, iteration))

    def _flush_log(self) -> None:
        self._output.show(self._metrics.flush(self.config.parallel.distributed_timeout_seconds))

    def _announce(self) -> None:
        """What was built, before the first iteration: blocks of ranks, and parameters counted over the ranks."""
        for index, ranks in enumerate(self.mesh.layout.replicas()):
            self._output.say(f"replica {index}: ranks {ranks[0]} to {ranks[-1]}")
        counted = torch.tensor(
            local_parameter_count(self.replica.chunks, self.vocab_size, self.mesh.process_groups.tp)
            if self.mesh.replica == self.mesh.place.dp == self.mesh.place.cp == 0
            else 0
        )
        dist.all_reduce(counted, group=self.mesh.world_control_group)
        expected = parameter_count(self.config.model, self.vocab_size)
        self._output.say(f"parameters: {int(counted):,}, counted over the ranks of replica 0 (formula: {expected:,})")
        if int(counted) != expected:
            raise RuntimeError(f"the ranks hold {int(counted):,} parameters, the flags ask for {expected:,}")
        self._say_memory()

    def _say_memory(self) -> None:
        """At the start, and again when the synchronous warm-up is over: what the sync adds comes then."""
        table = memory_table(self.replica, self._checkpoints.state)
        self._output.say(largest_of_all_ranks(table, self.mesh).line())

    # ---- evaluation, saving, the end -------------------------------------------------------------------------------

    def _evaluate(self, splits: list[str]) -> None:
        """Losses of the anchor on `splits`; nothing of it changes what training reads or draws."""
        self._note(f"the evaluation after iteration {self.iteration}")
        for split in splits:
            with self._metrics.untimed():
                result = evaluate(self.replica, self.data.evaluation(split))
            self._report_sync()
            self._flush_log()
            shown = "validation" if is_validation(split) else "test"
            report = EvaluationReport(self.iteration, shown, result.loss, result.tokens, set_name(split))
            self._output.show([report])

    def _save(self, *, wait: bool = False) -> None:
        self._note(f"the save after iteration {self.iteration}")
        with self._metrics.untimed():
            self._flush_log()  # a start that resumes here finds the lines up to here
            unequal = self.pace.is_uneven or not self.engine.method.equal_steps
            position = Position(
                self.iteration,
                self.consumed_samples,
                self._schedule_samples,
                reserves={**self._feed.state, **self.pace.state} if unequal else None,
                at_sync=self._known_at_sync,
            )
            self._checkpoints.save(position, self._schedule, wait=wait)
        self._report_sync()

    def _end(self, reason: StopReason | str | None) -> None:
        """The resumable checkpoint; at the end of training also a last sync, `final/` and the last evaluation."""
        self._emit()
        self._save(wait=True)
        self._flush_log()
        if reason is not None:
            self._output.say(str(reason))
            if self.mesh.rank == 0:
                leave_mark(self.config.checkpoint.save, str(reason), os.environ)
            return
        self.engine.sync_now()
        self._report_sync()
        self._flush_log()
        self._checkpoints.save_final(self.iteration)
        if self.config.evaluation.eval_at_end:
            self._evaluate(self.data.evaluation_splits)
            if not self.data.evaluation_splits:
                self._output.say("nothing was evaluated: no validation data, or --eval-iters 0")
