"""All checks before anything is built: every problem at once, in flag names and with the numbers."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import chain

import psutil

from megatron_edit.config.check_batch_schedule import check_batch_schedule
from megatron_edit.config.check_layout import check_batch, check_mesh, check_model, check_pipeline
from megatron_edit.config.check_method import check_method, check_offload
from megatron_edit.config.check_run import (
    check_data,
    check_device,
    check_evaluation,
    check_folders,
    check_length,
    check_recompute,
    check_schedule,
)
from megatron_edit.config.derive import derive
from megatron_edit.config.schema import Config
from megatron_edit.config.settings import SETTINGS, flag_of, value_of, value_problem, with_values


def check(config: Config, world_size: int, local_world_size: int, device: str) -> list[str]:
    """All problems of `config` (resolved or not) on `world_size` ranks, `local_world_size` a node; [] when
    it works.

    `device`: "cpu" or "cuda", what the machine has. Pure apart from looking at paths; leaves nothing behind.
    """
    by_itself = {
        name: problem for name in SETTINGS if (problem := value_problem(SETTINGS[name], value_of(config, name)))
    }
    # what follows looks at relations, and takes the default for a value that is bad by itself
    sane = with_values(config, {name: SETTINGS[name].default for name in by_itself})
    sane = derive(sane, world_size, local_world_size, device)
    related = chain(
        check_mesh(sane, world_size, local_world_size),
        check_batch(sane, world_size),
        check_batch_schedule(sane, world_size),
        check_pipeline(sane, world_size),
        check_model(sane),
        check_method(sane),
        check_offload(sane, world_size, local_world_size, psutil.virtual_memory().available),
        check_length(sane),
        check_schedule(sane),
        check_device(sane, device),
        check_recompute(sane),
        check_data(sane),
        check_evaluation(sane),
        check_folders(sane),
    )
    return [f"{flag_of(name)} {problem}" for name, problem in by_itself.items()] + not_about(by_itself, related)


def not_about(names: Iterable[str], problems: Iterable[str]) -> list[str]:
    """`problems` without those that mention the flag of a setting whose intended value is unknown."""
    flags = [re.compile(re.escape(flag_of(name)) + r"(?![\w-])") for name in names]
    return [problem for problem in problems if not any(flag.search(problem) for flag in flags)]
