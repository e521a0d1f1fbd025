"""The run: build, resume, iterate, evaluate, save, stop.

    Trainer(config, platform, checked_data, store).fit()

An iteration is one optimizer step of every replica. What needs all replicas (evaluation, saving, the end) happens at
iterations that are the same on all of them; in between, nothing here waits for another replica.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_edit.config.schema import Config
from megatron_edit.model.sharding import local_parameter_count, parameter_count
from megatron_edit.parallel.mesh import Mesh
from megatron_edit.platform import Platform
from megatron_edit.train.checked_data import CheckedData
from megatron_edit.train.checkpointing import Position, RunCheckpoints
from megatron_edit.train.data import RunData
from megatron_edit.train.evaluate import evaluate
from megatron_edit.train.loglines import EvaluationReport
from megatron_edit.train.metrics import MetricsReducer, Reporter, Throughput, training_flops_per_token
from megatron_edit.train.output import RunOutput
from megatron_edit.train.replica import build_replica, mesh_of
from megatron_edit.train.signals import StopCoordinator, StopReason, exit_interval_reached
from megatron_edit.train.step import StepOutcome, TrainStep
from megatron_edit.train.sync_report import stage_sync_report
from megatron_edit.train.writers import drop_lines_after


class Trainer:
    """One rank of a run. `config` must be resolved and checked; the default process group must exist.

    `store`: the rendezvous store of the job, through which stop requests travel.
    """

    def __init__(self, config: Config, platform: Platform, checked: CheckedData, store: dist.Store) -> None:
        training = config.training
        assert training.train_iters is not None and training.global_batch_size is not None
        self.config = config
        self.global_batch_size: int = training.global_batch_size
        self.vocab_size = checked.vocab_size
        self.mesh = mesh_of(config, platform)
        self.data = RunData(config, checked, self.mesh)
        self.replica = build_replica(config, self.mesh, self.vocab_size)
        self.engine = self.replica.engine
        self._step = TrainStep(self.replica)
        self._output = RunOutput(config, writes=self.mesh.rank == 0)
        self._checkpoints = RunCheckpoints(config, self.replica, self.vocab_size, self._output.say)
        start = self._checkpoints.load()
        self.train_iters = start.train_iters
        self.iteration = start.position.iteration  # completed iterations
        self.consumed_samples = start.position.consumed_samples  # of all replicas, in the completed iterations
        self._schedule, self._schedule_samples = start.schedule, start.position.schedule_samples
        self._resumed = start.resumed
        self._rendezvous_store = store
        self._logged_iteration = self.iteration
        self._learning_rate = 0.0  # of the last step
        self._sample_ids = _SampleIdFile(config.data.log_sample_ids, self.mesh, self.iteration)
        self._loader = self.data.loader(self.consumed_samples)
        self._metrics = MetricsReducer(
            self.mesh.world_control_group,
            platform.device,
            Reporter.from_mesh(self.mesh),
            train_iters=self.train_iters,
            throughput=self._throughput() if config.logging.log_throughput else None,
        )

    def fit(self) -> None:
        """Trains to the end, or until a stop is asked for; saves; writes and evaluates `final/` at the end."""
        try:
            self._announce()
            self._output.begin(self.iteration, self.train_iters)
            at_end = self._resumed and self.iteration >= self.train_iters
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
            ) as stop:
                self._end(self._iterate(stop))
            self._loader.close()
        finally:
            self._output.close()

    def _iterate(self, stop: StopCoordinator) -> StopReason | str | None:
        """Iterations up to the end (None) or to the reason why the run stops before."""
        while True:
            reason = stop.should_stop(self.iteration)
            if self.iteration >= self.train_iters:
                return None
            if reason is not None:
                return reason
            self._train_iteration()
            interval = self.config.training.exit_interval
            if exit_interval_reached(self.iteration, interval) and self.iteration < self.train_iters:
                return f"--exit-interval {interval}: stop after iteration {self.iteration}"

    def _train_iteration(self) -> None:
        microbatches, sample_ids = self._loader.next_batch()
        self._learning_rate = self._schedule.at_samples(self.consumed_samples - self._schedule_samples)
        outcome = self._step.run(microbatches, self._learning_rate)
        self.iteration += 1
        self.consumed_samples += self.global_batch_size
        self._sample_ids.write(self.iteration, sample_ids)
        self._log(outcome)
        interval = self.config.evaluation.eval_interval
        if interval and self.iteration % interval == 0 and self.iteration < self.train_iters:
            self._evaluate("validation", self.data.evaluation_splits[:1])
        if self._checkpoints.due(self.iteration) and self.iteration < self.train_iters:
            self._save()
        self._checkpoints.poll()

    # ---- the log -----------------------------------------------------------------------------------------------------

    def _log(self, outcome: StepOutcome) -> None:
        self._metrics.accumulate(outcome.loss_sum, outcome.tokens, outcome.grad_norm, skipped=not outcome.updated)
        self._report_sync()
        if self.iteration % self.config.logging.log_interval == 0:
            self._emit()
        self._output.show(self._metrics.poll())
        self._output.advance(self.iteration)

    def _emit(self) -> None:
        """A line on the iterations since the last one, if there were any."""
        if self._logged_iteration == self.iteration:
            return
        self._logged_iteration = self.iteration
        self._metrics.emit(
            self.iteration,
            consumed_samples=self.consumed_samples,
            learning_rate=self._learning_rate,
            global_batch_size=self.global_batch_size,
            local_steps=not self.engine.synchronous,
            loss_scale=float(self.replica.optimizer.get_loss_scale()) if self.config.training.fp16 else None,
        )

    def _report_sync(self) -> None:
        """A sync is complete after the same iteration on every rank, so all of them report it here together."""
        result = self.engine.take_result()
        if result is not None:
            place = self.mesh.place
            if place.sync == place.dp == place.cp == place.tp == 0:  # one rank of each stage
                self._output.warn(self.engine.take_warnings())
            self._metrics.emit_sync(stage_sync_report(result, self.mesh, self.engine.modules))

    def _flush_log(self) -> None:
        self._output.show(self._metrics.flush(self.config.parallel.distributed_timeout_seconds))

    def _throughput(self) -> Throughput:
        model, training = self.config.model, self.config.training
        assert model.ffn_hidden_size and model.num_query_groups and model.kv_channels and training.replica_batch_size
        return Throughput(
            replica_tokens=training.replica_batch_size * model.seq_length,
            replica_devices=self.mesh.layout.replica_size,
            flops_per_token=training_flops_per_token(
                num_layers=model.num_layers,
                hidden_size=model.hidden_size,
                ffn_hidden_size=model.ffn_hidden_size,
                num_attention_heads=model.num_attention_heads,
                num_query_groups=model.num_query_groups,
                kv_channels=model.kv_channels,
                seq_length=model.seq_length,
                vocab_size=self.vocab_size,
            ),
        )

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

    # ---- evaluation, saving, the end -------------------------------------------------------------------------------

    def _evaluate(self, name: str, splits: list[str]) -> None:
        """Losses of the anchor on `splits`; nothing of it changes what training reads or draws."""
        for split in splits:
            with self._metrics.untimed():
                result = evaluate(self.replica, self.data.evaluation(split))
            self._report_sync()
            self._flush_log()
            shown = name if split == "valid" else "test"
            self._output.show([EvaluationReport(self.iteration, shown, result.loss, result.tokens)])

    def _save(self, *, wait: bool = False) -> None:
        with self._metrics.untimed():
            self._flush_log()  # a start that resumes here finds the lines up to here
            position = Position(self.iteration, self.consumed_samples, self._schedule_samples)
            self._checkpoints.save(position, self._schedule, wait=wait)
        self._report_sync()

    def _end(self, reason: StopReason | str | None) -> None:
        """The resumable checkpoint; at the end of training also a last sync, `final/` and the last evaluation."""
        self._emit()
        self._save(wait=True)
        self._flush_log()
        if reason is not None:
            self._output.say(str(reason))
            return
        self.engine.sync_now()
        self._report_sync()
        self._flush_log()
        self._checkpoints.save_final(self.iteration)
        if self.config.evaluation.eval_at_end:
            self._evaluate("validation", self.data.evaluation_splits)
            if not self.data.evaluation_splits:
                self._output.say("nothing was evaluated: no validation data, or --eval-iters 0")


class _SampleIdFile:
    """--log-sample-ids: one JSON line per iteration and replica, appended by the first rank of each replica.

    Lines of an earlier start after `iteration`, which the checkpoint does not know of, move to `FILE.dropped`.
    """

    def __init__(self, path: str | None, mesh: Mesh, iteration: int) -> None:
        self._replica = mesh.replica
        self._file: Any = None
        if path is None:
            return
        if mesh.rank == 0:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            drop_lines_after(Path(path), iteration)
        dist.barrier(mesh.world_control_group)
        if mesh.is_replica_leader:
            self._file = open(path, "a", buffering=1)  # noqa: SIM115  line by line: lines of replicas do not mix

    def write(self, iteration: int, sample_ids: list[int]) -> None:
        if self._file is not None:
            entry = {"iteration": iteration, "replica": self._replica, "samples": sample_ids}
            self._file.write(json.dumps(entry) + "\n")
