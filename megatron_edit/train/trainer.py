"""The run: build, resume, iterate, evaluate, save, stop.

    Trainer(config, platform, checked_data, store).fit()

The run goes from boundary to boundary (`boundaries.py`): what needs all replicas (evaluation, saving, the end) happens
there, and in between nothing here waits for another replica.
"""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist

from megatron_edit.config.check_batch_schedule import undivided_batches
from megatron_edit.config.resolved import ResolvedConfig
from megatron_edit.config.schema import ConfigError
from megatron_edit.data.blend import is_validation, set_name
from megatron_edit.data.checked import CheckedData
from megatron_edit.log.lines import EvaluationReport
from megatron_edit.log.metrics import MetricsReducer, Reporter, throughput_of
from megatron_edit.log.output import RunOutput
from megatron_edit.log.sample_ids import SampleIdFile
from megatron_edit.log.sync_report import stage_sync_report
from megatron_edit.model.sharding import local_parameter_count
from megatron_edit.platform import Platform
from megatron_edit.ranks.presence import Presence
from megatron_edit.ranks.shared_paths import check_shared_paths
from megatron_edit.ranks.signals import StopCoordinator, StopReason
from megatron_edit.ranks.stopped import leave_mark
from megatron_edit.sync.inner_rate import check_inner_rates
from megatron_edit.tables.parameters import parameter_count
from megatron_edit.train.boundaries import Boundaries, EqualSteps, UnequalSteps
from megatron_edit.train.checkpointing import Position, RunCheckpoints, Start
from megatron_edit.train.data import RunData
from megatron_edit.train.evaluate import evaluate
from megatron_edit.train.feed import TrainingFeed
from megatron_edit.train.memory import largest_of_all_ranks, memory_table
from megatron_edit.train.pace import Pace
from megatron_edit.train.replica import build_replica, mesh_of
from megatron_edit.train.step import TrainStep


class Trainer:
    """One rank of a run. `config` must be checked; the default process group must exist.

    `store`: the rendezvous store of the job, through which stop requests travel. `presence`: is told where the run
    is. `owns_process`: the process ends after `fit`, so a signal that comes after a stop is ignored until then.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        platform: Platform,
        checked: CheckedData,
        store: dist.Store,
        *,
        presence: Presence | None = None,
        owns_process: bool = False,
    ) -> None:
        self.config = config
        self._presence = presence
        self._owns_process = owns_process
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
        position = start.position
        if problems := undivided_batches(config, self.mesh.layout.world_size, position.consumed_samples):
            raise ConfigError(problems)
        check_inner_rates(
            self.engine.method, self.engine.trigger, position.iteration, start.rates(), config.optimizer.lr
        )
        self.train_iters, self._resumed = start.train_iters, start.resumed
        self._schedule, self._schedule_samples = start.schedule, position.schedule_samples
        self.pace = Pace(
            iteration=position.iteration,
            consumed_samples=position.consumed_samples,
            fleet=self.engine.fleet,
            batch=start.batch,
            state=position.reserves,
        )
        self._rendezvous_store = store
        self._logged_iteration = self.iteration
        self._learning_rate, self._batch_size = 0.0, 0  # of the last step
        steps = position.reserves["replica_steps"] if position.reserves else [self.iteration]  # of the saved replicas
        self._sample_ids = SampleIdFile(config.data.log_sample_ids, self.mesh, self.engine.fleet, steps)
        self._feed = TrainingFeed(self.data, self.pace, self.engine.fleet, position.reserves)
        self._boundaries = self._build_boundaries(start)
        self._metrics = MetricsReducer(
            self.mesh.world_control_group,
            platform.device,
            Reporter.from_mesh(self.mesh, self.engine.fleet),
            train_iters=self.train_iters,
            throughput=throughput_of(config, self.vocab_size, self.mesh.layout.replica_size)
            if config.logging.log_throughput
            else None,
            z_loss=config.training.z_loss_coeff > 0,
        )

    def _build_boundaries(self, start: Start) -> Boundaries:
        if self.engine.method.equal_steps:
            return EqualSteps(self.engine, self.pace, self._feed, train_iters=start.train_iters)
        return UnequalSteps(
            self.engine,
            self.pace,
            self._feed,
            train_samples=self.config.training.train_samples,
            position=start.position,
            asks=self.mesh.is_replica_leader,
            say=self._output.say,
        )

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
            at_end = self._resumed and self._boundaries.is_end
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
            if self._boundaries.is_end:
                return None
            if reason is not None:
                return replace(reason, iteration=self.iteration)
            self._boundaries.begin()
            while not self._train_step(stop):
                self._output.show(self._metrics.poll())
            self._at_boundary()
            boundary += 1
            interval = self.config.training.exit_interval
            if self.pace.crossed(interval) and not self._boundaries.is_end:
                return f"--exit-interval {interval}: stop after iteration {self.iteration}"

    def _train_step(self, stop: StopCoordinator) -> bool:
        """One step of this replica; whether it came to a boundary."""
        self._note(f"step {self.pace.own_step + 1}")
        synchronous = self.engine.synchronous
        microbatches, sample_ids = self._feed.next_batch()
        self._batch_size = self.pace.global_batch_size
        self._learning_rate = self._schedule.at_samples(self.pace.schedule_samples - self._schedule_samples)
        outcome = self._step.run(
            microbatches, self._learning_rate, partial(self._boundaries.asks_for_sync, stop)
        )
        is_boundary = self._boundaries.after_step(outcome.meeting)
        self._sample_ids.write(self.pace.own_step, sample_ids)
        self._metrics.accumulate(
            outcome.loss_sum,
            outcome.tokens,
            outcome.grad_norm,
            samples=len(sample_ids),
            skipped=not outcome.updated,
            z_loss_sum=outcome.z_loss_sum,
        )
        self._report_sync()
        if synchronous and not self.engine.synchronous:
            self._say_memory()
        return is_boundary

    def _at_boundary(self) -> None:
        """What needs all replicas, when its interval is over."""
        if self.pace.crossed(self.config.logging.log_interval):
            self._emit()
        self._output.show(self._metrics.poll())
        self._output.advance(self.iteration)
        evaluation = self.config.evaluation
        if self.pace.crossed(evaluation.eval_interval) and not (self._boundaries.is_end and evaluation.eval_at_end):
            self._evaluate(self.data.validation_splits)
        if self._checkpoints.due(self.pace, at_sync=self._boundaries.at_sync) and not self._boundaries.is_end:
            self._save()
        self._checkpoints.poll()

    def _note(self, step: str) -> None:
        if self._presence is not None:
            self._presence.note(step)

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
            iteration = self._boundaries.iteration_of(result.decision)
            self._metrics.emit_sync(stage_sync_report(result, self.mesh, self.engine.modules, iteration))

    def _flush_log(self) -> None:
        self._output.show(self._metrics.flush(self.config.parallel.distributed_timeout_seconds))

    def _announce(self) -> None:
        """What was built, before the first iteration: blocks of ranks, and parameters counted over the ranks."""
        for index, ranks in enumerate(self.mesh.layout.replicas()):
            self._output.say(f"replica {index}: ranks {ranks[0]} to {ranks[-1]}")
        counted = torch.tensor(
            local_parameter_count(self.replica.chunks, self.vocab_size, self.mesh.process_groups.tp)
            if self.engine.fleet.replica == self.mesh.place.dp == self.mesh.place.cp == 0
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
            position = Position(
                self.iteration,
                self.consumed_samples,
                self._schedule_samples,
                reserves=self._boundaries.reserves,
                at_sync=self._boundaries.at_sync,
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
