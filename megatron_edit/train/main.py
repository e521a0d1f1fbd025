"""The command: flags -> checks -> all ranks compare -> process group -> Trainer, and the exit codes that users rely on.

0 finished, or stopped on request after saving; 2 bad flags, sizes or files, found before training; 1 anything else.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_edit.checkpoint.errors import CheckpointError, SaveError
from megatron_edit.checkpoint.folders import check_load
from megatron_edit.checkpoint.progress import done_by
from megatron_edit.config.arithmetic import describe
from megatron_edit.config.configure import configure
from megatron_edit.config.notes import notes
from megatron_edit.config.printing import help_text, print_config
from megatron_edit.config.resolved import ResolvedConfig
from megatron_edit.config.schema import Config, ConfigError
from megatron_edit.config.settings import SETTINGS
from megatron_edit.data.checked import CheckedData, check_data
from megatron_edit.data.errors import DataError
from megatron_edit.log.streams import outlive_readers
from megatron_edit.log.writers import package_problems
from megatron_edit.model.transformer_engine import TransformerEngineError, check_transformer_engine
from megatron_edit.platform import Platform, PlatformError, get_platform
from megatron_edit.platform.megatron_core import installed_release, release_notes
from megatron_edit.ranks import ending
from megatron_edit.ranks.agreement import AbsentRankError, RanksDifferError, Report, agree
from megatron_edit.ranks.facts import data_facts, program_facts, setting_facts
from megatron_edit.ranks.launcher import launched
from megatron_edit.ranks.presence import Presence
from megatron_edit.ranks.signal_pipe import ignore_stop_signals
from megatron_edit.ranks.stopped import restart_notes, stopped_before
from megatron_edit.ranks.store import Rendezvous, StoreError, first_line, open_store
from megatron_edit.sync.notices import NothingStepsError

USER_ERRORS = (ConfigError, DataError, PlatformError, TransformerEngineError, CheckpointError)


@dataclass(frozen=True)
class _Checked:
    """What is known of a run before anything is built."""

    config: ResolvedConfig
    platform: Platform
    data: CheckedData
    lines: list[str]  # for the user


def main(argv: Sequence[str], environment: Mapping[str, str] = os.environ, *, owns_process: bool = False) -> int:
    """Runs the command; returns the exit code. After an error in training it does not return: the process ends.

    `owns_process`: the process ends with this code, so that signals which come after a stop are ignored until then, and
    its standard output and error may lose their readers.
    """
    ending.trace_fatal_signals()
    if owns_process:
        outlive_readers()  # of --help, say
    try:
        found = launched(environment)
    except ConfigError as error:
        ending.say_error(error)
        return 2
    if found is not None:
        os.environ.update(found.environment)
        environment = {**environment, **found.environment}
    facts = program_facts(environment)
    checked: _Checked | Exception | None
    try:
        checked = _check(argv, environment, facts)
    except USER_ERRORS as error:
        checked = error
    if checked is None:
        return 0
    rendezvous, problem, timeout = None, None, SETTINGS["distributed_timeout_seconds"].default
    alone = environment.get("WORLD_SIZE") == "1" or "RANK" not in environment
    if isinstance(checked, Exception):
        problem = checked
    else:
        timeout = checked.config.parallel.distributed_timeout_seconds
        if checked.config.command.dry_run and "MASTER_ADDR" not in environment:
            alone = True  # the checks of one rank, without the others
    if not alone:
        try:
            rendezvous = open_store(environment, timeout, found.job if found else "")
            report = Report(facts, "" if problem is None else str(problem))
            agree(rendezvous, report, timeout_seconds=timeout, before_refusal=ignore_stop_signals)
        except Exception as error:
            return _cannot_start(error, problem, rendezvous, environment)
    if isinstance(checked, Exception):
        ending.say_error(checked)
        return 2
    if owns_process:
        outlive_readers("the run goes on without what it would say there")
    if environment.get("RANK", "0") == "0":
        for line in [found.note] if found else []:
            print(line, flush=True)
        for line in (*checked.lines, *restart_notes(checked.config.checkpoint.save, environment)):
            print(line, flush=True)
    return 0 if checked.config.command.dry_run else _train(checked, rendezvous, environment, owns_process)


def _check(argv: Sequence[str], environment: Mapping[str, str], facts: dict[str, str]) -> _Checked | None:
    """All that can be checked on one rank, in seconds; fills `facts` as far as it comes. None: nothing is to be run."""
    config = configure(argv, environment, "cuda" if torch.cuda.is_available() else "cpu")
    if config is None or config.command.print_config:
        if environment.get("RANK", "0") == "0":
            print(help_text() if config is None else print_config(config), flush=True)
        return None
    facts.update(setting_facts(config))
    if not config.command.dry_run:
        _check_launcher(environment)
    check_transformer_engine(config.model.transformer_impl)
    platform = get_platform(config.training.device, int(environment.get("LOCAL_RANK", "0")))
    check_load(config.checkpoint.load, config.checkpoint.save)
    if problems := package_problems(config.logging):
        raise ConfigError(problems)
    data = check_data(config)
    facts.update(data_facts(data))
    done = done_by(config.checkpoint)
    lines = [*notes(config), *release_notes(installed_release()), *data.notes]
    lines.append(describe(config, data.vocab_size, done))
    return _Checked(config, platform, data, lines)


def _check_launcher(environment: Mapping[str, str]) -> None:
    """WORLD_SIZE alone stands in for ranks in a --dry-run; to train, a launcher must have started them."""
    ranks = environment.get("WORLD_SIZE", "1")
    if ranks != "1" and "RANK" not in environment:
        raise ConfigError([
            f"WORLD_SIZE is {ranks} but RANK is not set, so this is not a rank of {ranks}: start with "
            f"torchrun --nproc-per-node {ranks}, or give --dry-run to make the checks alone"
        ])  # fmt: skip


def _cannot_start(
    error: Exception, problem: Exception | None, rendezvous: Rendezvous | None, environment: Mapping[str, str]
) -> int:
    """Exit code when the ranks have not come together, once it is said on one of them."""
    if isinstance(error, RanksDifferError):
        if rendezvous is not None and rendezvous.rank == 0:
            ending.say_error(error, advice_of=problem)
        return 2
    if problem is not None:  # this rank has something to say, whatever the others do
        ending.say_error(problem)
        return 2
    if isinstance(error, ValueError):  # RANK without MASTER_ADDR, and the like
        ending.say_error(ValueError(f"the launcher's environment: {error}"))
        return 2
    if not isinstance(error, (AbsentRankError, StoreError, dist.DistError)):
        raise error
    if environment.get("LOCAL_RANK", "0") == "0":  # once a node
        ending.say_error(StoreError(first_line(error)))
    return 1


def _train(
    checked: _Checked, rendezvous: Rendezvous | None, environment: Mapping[str, str], owns_process: bool
) -> int:
    config, platform = checked.config, checked.platform
    timeout = config.parallel.distributed_timeout_seconds
    try:
        rendezvous = rendezvous or open_store(environment, timeout)
    except (ValueError, StoreError) as error:
        return _cannot_start(error, None, None, environment)
    reason = _stopped_before(config, rendezvous, environment)
    if reason:
        if rendezvous.rank == 0:
            print(f"restarted by the launcher after a stop on request ({reason}): nothing is left to do", flush=True)
        return 0
    presence = Presence(rendezvous, environment) if rendezvous.world_size > 1 else None
    try:
        if config.training.deterministic_mode and platform.name == "cuda":
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it starts
            torch.use_deterministic_algorithms(True)
        platform.initialize()
        from megatron_edit.train.trainer import Trainer  # late: the checks come in seconds without megatron-core

        _initialize_process_group(config, platform, rendezvous)
        trainer = Trainer(
            config, platform, checked.data, rendezvous.store, presence=presence, owns_process=owns_process
        )  # fmt: skip
        trainer.fit()
        if presence is not None:
            presence.begin_end()
        dist.barrier()
        dist.destroy_process_group()
    except USER_ERRORS as error:
        ending.end_for_user_error(error, 2, rendezvous, presence)
    except (SaveError, NothingStepsError) as error:
        ending.end_for_user_error(error, 1, rendezvous, presence)
    except BaseException as error:
        ending.end_after_another(error, rendezvous, presence)
        ending.end_for_own_cause(error, rendezvous, presence)
    if presence is not None:
        presence.leave(failed=False)
    return 0


def _initialize_process_group(config: Config, platform: Platform, rendezvous: Rendezvous) -> None:
    dist.init_process_group(
        platform.backend,
        store=dist.PrefixStore("default_group", rendezvous.store),
        rank=rendezvous.rank,
        world_size=rendezvous.world_size,
        timeout=timedelta(seconds=config.parallel.distributed_timeout_seconds),
        device_id=platform.device if platform.name == "cuda" else None,
    )


def _stopped_before(config: Config, rendezvous: Rendezvous, environment: Mapping[str, str]) -> str:
    """Why the run had stopped before the launcher restarted it; "" when it goes on. Rank 0 looks, all ranks follow."""
    if rendezvous.rank == 0:
        rendezvous.store.set("stopped_before", stopped_before(config.checkpoint.save, environment) or "")
    return rendezvous.store.get("stopped_before").decode()
