"""The run: build, resume, iterate, evaluate, save, stop.

    Trainer(config, platform, checked_data, store).fit()

An iteration is one optimizer step of every replica. What needs all replicas (evaluation, saving, the end) happens at
iterations that are the same on all of them; in between, nothing here waits for another replica.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_edit.checkpoint.rank_state import load_rank_state_dict, rank_state_dict
from megatron_edit.checkpoint.store import CheckpointError, CheckpointStore
from megatron_edit.config.schema import Config
from megatron_edit.config.settings import flag_of
from megatron_edit.model.sharding import local_parameter_count, parameter_count
from megatron_edit.parallel.mesh import Mesh
from megatron_edit.platform import Platform
from megatron_edit.sync.trigger import WarmupError
from megatron_edit.train.checked_data import CheckedData
from megatron_edit.train.data import RunData
from megatron_edit.train.evaluate import evaluate
from megatron_edit.train.final_weights import save_final
from megatron_edit.train.loglines import EvaluationReport
from megatron_edit.train.metrics import MetricsReducer, Reporter, Throughput, training_flops_per_token
from megatron_edit.train.output import RunOutput
from megatron_edit.train.replica import build_replica, mesh_of
from megatron_edit.train.schedule import LearningRateSchedule
from megatron_edit.train.signals import StopCoordinator, StopReason, exit_interval_reached
from megatron_edit.train.step import StepOutcome, TrainStep
from megatron_edit.train.sync_report import stage_sync_report
from megatron_edit.train.writers import drop_lines_after

MAY_CHANGE = (  # settings of the model that a run may be resumed with
    "model_size", "seq_length", "max_position_embeddings", "attention_dropout", "hidden_dropout", "init_method_std",
    "transformer_impl",
)  # fmt: skip


class Trainer:
    """One rank of a run. `config` must be resolved and checked; the default process group must exist.

    `store`: the rendezvous store of the job, through which stop requests travel.
    """

    def __init__(self, config: Config, platform: Platform, checked: CheckedData, store: dist.Store) -> None:
        training = config.training
        assert training.train_iters is not None and training.global_batch_size is not None
        self.config = config
        self.train_iters: int = training.train_iters
        self.global_batch_size: int = training.global_batch_size
        self.iteration = 0  # completed iterations
        self.consumed_samples = 0  # of all replicas, in the completed iterations
        self.vocab_size = checked.tokenizer.vocab_size
        self.mesh = mesh_of(config, platform)
        self.data = RunData(config, checked, self.mesh)
        self.replica = build_replica(config, self.mesh, self.vocab_size)
        self.engine = self.replica.engine
        self._step = TrainStep(self.replica)
        self._schedule = LearningRateSchedule(config.optimizer, self.train_iters, self.global_batch_size)
        self._checkpoints = _store_of(config.checkpoint.save, self.mesh.world_control_group)
        self._output = RunOutput(config, writes=self.mesh.rank == 0, train_iters=self.train_iters)
        self._rendezvous_store = store
        self._saved_iteration: int | None = None  # what --save holds already
        self._resumed = self._resume()
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
            self._output.begin(self.iteration)
            if self._resumed and self.iteration >= self.train_iters and not self._lacks_final():
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
        self._learning_rate = self._schedule.at_samples(self.consumed_samples)
        outcome = self._step.run(microbatches, self._learning_rate)
        self.iteration += 1
        self.consumed_samples += self.global_batch_size
        self._sample_ids.write(self.iteration, sample_ids)
        self._log(outcome)
        interval = self.config.evaluation.eval_interval
        if interval and self.iteration % interval == 0 and self.iteration < self.train_iters:
            self._evaluate("validation", self.data.evaluation_splits[:1])
        interval = self.config.checkpoint.save_interval
        if interval and self.iteration % interval == 0 and self.iteration < self.train_iters:
            self._save()

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

    def _save(self) -> None:
        if self._checkpoints is None:
            self._output.say(f"no --save: iteration {self.iteration} is not saved")
            return
        if self._saved_iteration == self.iteration:
            return  # writing it anew would put the only copy at risk
        with self._metrics.untimed():
            self._flush_log()  # a start that resumes here finds the lines up to here
            state = rank_state_dict(self.engine, self.replica.optimizer)
            metadata = {"consumed_samples": self.consumed_samples, **self._saved_for()}
            folder = self._checkpoints.save(self.iteration, state, metadata)
            self._saved_iteration = self.iteration
        self._report_sync()
        self._output.say(f"saved iteration {self.iteration} to {folder}")

    def _end(self, reason: StopReason | str | None) -> None:
        """The resumable checkpoint; at the end of training also a last sync, `final/` and the last evaluation."""
        self._emit()
        self._save()
        self._flush_log()
        if reason is not None:
            self._output.say(str(reason))
            return
        self.engine.sync_now()
        self._report_sync()
        self._flush_log()
        if self._checkpoints is not None:
            save_final(self._checkpoints, self.replica, iteration=self.iteration, vocab_size=self.vocab_size)
            self._output.say(f"saved the final weights to {self._checkpoints.directory / 'final'}")
        if self.config.evaluation.eval_at_end:
            self._evaluate("validation", self.data.evaluation_splits)
            if not self.data.evaluation_splits:
                self._output.say("nothing was evaluated: no validation data, or --eval-iters 0")

    def _resume(self) -> bool:
        """Takes up the checkpoint of --load, when there is one. Returns whether it did."""
        checkpoint = self.config.checkpoint
        store = _store_of(checkpoint.load, self.mesh.world_control_group)
        if store is None:
            return False
        found = store.latest()
        if found is None:  # and `check_load` has found that --load is --save
            self._output.say(f"--load {checkpoint.load} is empty: first start")
            return False
        iteration = found["iteration"]
        differences = [
            f"{what} was {saved}, is {value}"
            for part, values in self._saved_for().items()
            for what, value in values.items()
            if (saved := found[part].get(what, value)) != value
        ]
        if differences:
            raise CheckpointError(
                f"--load {checkpoint.load}: iteration {iteration} is of another run ({'; '.join(differences)}), and "
                "resuming with another model or layout is not supported yet"
            )
        try:
            load_rank_state_dict(store.load(iteration), self.engine, self.replica.optimizer)
        except WarmupError as error:
            raise CheckpointError(f"--load {checkpoint.load}, --edit-warmup-steps: {error}") from None
        self.iteration, self.consumed_samples = iteration, found["consumed_samples"]
        if self._checkpoints is not None and self._checkpoints.directory.absolute() == store.directory.absolute():
            self._saved_iteration = iteration
        self._output.say(f"resumed iteration {iteration} of {self.train_iters} from {checkpoint.load}")
        return True

    def _lacks_final(self) -> bool:
        """Whether an earlier start saved the last iteration here and then did not come to write `final/`."""
        if self._checkpoints is None or self._saved_iteration != self.iteration:
            return False
        return self._checkpoints.final_iteration() != self.iteration

    def _saved_for(self) -> dict[str, dict[str, Any]]:
        """What must be equal in a run that takes up a checkpoint of this one."""
        model = {flag_of(name): value for name, value in asdict(self.config.model).items() if name not in MAY_CHANGE}
        chunk = "num_layers_per_virtual_pipeline_stage"
        layout = {**asdict(self.mesh.layout), flag_of(chunk): getattr(self.config.parallel, chunk)}
        return {"layout": layout, "model": {"vocabulary size": self.vocab_size, **model}}


def _store_of(directory: str | None, group: dist.ProcessGroup) -> CheckpointStore | None:
    return CheckpointStore(directory, group) if directory else None


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
