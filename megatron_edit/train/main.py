"""The command: flags -> checks -> process group -> Trainer, and the exit codes that users rely on.

0 finished, or stopped on request after saving; 2 bad flags, sizes or files, found before training; 1 anything else.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
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
from megatron_edit.config.schema import Config, ConfigError
from megatron_edit.data.errors import DataError
from megatron_edit.model.transformer_engine import TransformerEngineError, check_transformer_engine
from megatron_edit.platform import Platform, PlatformError, get_platform
from megatron_edit.sync.notices import NothingStepsError
from megatron_edit.train.checked_data import CheckedData, check_data
from megatron_edit.train.writers import package_problems

USER_ERRORS = (ConfigError, DataError, PlatformError, TransformerEngineError, CheckpointError)
SECONDS_FOR_THE_CAUSE = 10.0  # ranks that fail after another did wait so long to speak; a launcher ends them sooner


def main(argv: Sequence[str], environment: Mapping[str, str] = os.environ) -> int:
    """Runs the command; returns the exit code."""
    rank = int(environment.get("RANK", "0"))
    try:
        config, plan = configure(argv, environment, "cuda" if torch.cuda.is_available() else "cpu")
        if config.command.help or config.command.print_config:
            if rank == 0:
                print(help_text() if config.command.help else print_config(config))
            return 0
        assert plan is not None
        if not config.command.dry_run:
            _check_launcher(environment)
        check_transformer_engine(config.model.transformer_impl)
        platform = get_platform(config.training.device, int(environment.get("LOCAL_RANK", "0")))
        check_load(config.checkpoint.load, config.checkpoint.save)
        if problems := package_problems(config.logging):
            raise ConfigError(problems)
        checked = check_data(config)
        if rank == 0:
            done = done_by(config.checkpoint)
            for line in (*notes(config), *checked.notes, describe(config, plan, checked.vocab_size, done)):
                print(line, flush=True)
        if config.command.dry_run:
            return 0
    except USER_ERRORS as error:
        _say_on_one_rank(rank, error)
        return 2
    return _train(config, platform, checked, environment)


def _check_launcher(environment: Mapping[str, str]) -> None:
    """WORLD_SIZE alone stands in for ranks in a --dry-run; to train, a launcher must have started them."""
    ranks = environment.get("WORLD_SIZE", "1")
    if ranks != "1" and "RANK" not in environment:
        raise ConfigError([
            f"WORLD_SIZE is {ranks} but RANK is not set, so this is no rank of {ranks}: start with "
            f"torchrun --nproc-per-node {ranks}, or give --dry-run to make the checks alone"
        ])  # fmt: skip


def _train(config: Config, platform: Platform, checked: CheckedData, environment: Mapping[str, str]) -> int:
    if config.training.deterministic_mode and platform.name == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it starts
        torch.use_deterministic_algorithms(True)
    platform.initialize()
    from megatron_edit.train.trainer import Trainer  # late: the errors above come in seconds without megatron-core

    try:
        rank, store = _initialize_process_group(config, platform, environment)
    except ValueError as error:  # RANK without MASTER_ADDR, and the like
        print(f"error: the launcher's environment: {error}", file=sys.stderr, flush=True)
        return 2
    try:
        Trainer(config, platform, checked, store).fit()
    except USER_ERRORS as error:
        _say_on_one_rank(rank, error)
        code = 2
    except (SaveError, NothingStepsError) as error:
        _say_on_one_rank(rank, error)
        code = 1
    except BaseException as error:
        if _follows_from_another_rank(error):
            time.sleep(SECONDS_FOR_THE_CAUSE)
        print(f"[rank {rank}] {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        traceback.print_exc()
        code = 1
    else:
        dist.barrier()
        dist.destroy_process_group()
        return 0
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # no collectives and no exit handlers: other ranks may be gone


def _initialize_process_group(
    config: Config, platform: Platform, environment: Mapping[str, str]
) -> tuple[int, dist.Store]:
    timeout = timedelta(seconds=config.parallel.distributed_timeout_seconds)
    if "RANK" in environment:
        store, rank, world_size = next(dist.rendezvous("env://", timeout=timeout))
    else:  # started without torchrun: one rank
        store, rank, world_size = dist.TCPStore("127.0.0.1", 0, 1, is_master=True), 0, 1
    store.set_timeout(timeout)
    dist.init_process_group(
        platform.backend,
        store=dist.PrefixStore("default_group", store),
        rank=rank,
        world_size=world_size,
        timeout=timeout,
        device_id=platform.device if platform.name == "cuda" else None,
    )
    return rank, store


def _say_on_one_rank(rank: int, error: Exception) -> None:
    """Rank 0 speaks at once. Another rank speaks only when rank 0, by then ended, had nothing to say."""
    if rank != 0:
        time.sleep(SECONDS_FOR_THE_CAUSE)
    prefix = "error" if rank == 0 else f"error on rank {rank}"
    for line in str(error).splitlines():
        print(f"{prefix}: {line}", file=sys.stderr, flush=True)
    for line in getattr(error, "advice", ()):
        print(line, file=sys.stderr, flush=True)


def _follows_from_another_rank(error: BaseException) -> bool:
    """Whether the error is that a collective found another rank gone or late."""
    signs = (
        "Connection closed by peer", "Connection reset by peer", "Timed out", "timeout caused pair closure", "NCCL"
    )  # fmt: skip
    return isinstance(error, dist.DistError) or any(sign in str(error) for sign in signs)
