"""From the command line to a checked Config in one call, for the entry script."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatron_edit.config.checks import check, not_about
from megatron_edit.config.derive import BatchPlan, batch_plan, resolve
from megatron_edit.config.flags import read_config
from megatron_edit.config.schema import Config


def configure(argv: Sequence[str], environment: Mapping[str, str], device: str) -> tuple[Config, BatchPlan | None]:
    """The resolved, checked Config of `argv` and its batch plan.

    `environment`: WORLD_SIZE and LOCAL_WORLD_SIZE as torchrun sets them (1 without torchrun), and the variables
    that paths name. `device`: "cpu" or "cuda", what the machine has. Raises ConfigError with all problems, of the
    flags and of their relations, at once. With --help the Config holds nothing else and there is no plan.
    """
    result = read_config(argv, environment)
    if result.config.command.help:
        return result.config, None
    problems: list[str] = []
    world_size = _ranks(environment, "WORLD_SIZE", 1, problems)
    local_world_size = _ranks(environment, "LOCAL_WORLD_SIZE", world_size, problems)
    related = check(result.config, world_size, local_world_size, device)
    problems += not_about(result.doubtful, related)
    if error := result.error(problems):
        raise error
    config = resolve(result.config, world_size, local_world_size, device)
    return config, batch_plan(config, world_size)


def _ranks(environment: Mapping[str, str], name: str, default: int, problems: list[str]) -> int:
    text = environment.get(name)
    if text is None:
        return default
    if not text.isdecimal() or int(text) < 1:
        problems.append(f"the environment variable {name} must be a number of ranks from 1 on, not {text!r}")
        return default
    return int(text)
