"""From the command line to a checked Config in one call, for the entry script."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatron_edit.config.checks import check, not_about
from megatron_edit.config.derive import derive
from megatron_edit.config.flags import read_config
from megatron_edit.config.resolved import ResolvedConfig, UnresolvedError, resolved_config
from megatron_edit.config.schema import Config, ConfigError


def configure(argv: Sequence[str], environment: Mapping[str, str], device: str) -> ResolvedConfig | None:
    """The resolved, checked settings of `argv`; None with --help, which wants nothing to be right.

    `environment`: WORLD_SIZE and LOCAL_WORLD_SIZE as torchrun sets them (1 without torchrun), and the variables
    that paths name. `device`: "cpu" or "cuda", what the machine has. Raises ConfigError with all problems, of the
    flags and of their relations, at once.
    """
    result = read_config(argv, environment)
    if result.config.command.help:
        return None
    problems: list[str] = []
    world_size = _ranks(environment, "WORLD_SIZE", 1, problems)
    local_world_size = _ranks(environment, "LOCAL_WORLD_SIZE", world_size, problems)
    related = check(result.config, world_size, local_world_size, device)
    problems += not_about(result.doubtful, related)
    if error := result.error(problems):
        raise error
    return resolve(result.config, world_size, local_world_size, device)


def resolve(config: Config, world_size: int, local_world_size: int, device: str) -> ResolvedConfig:
    """`config` with every value that follows from others, noted as "derived" in `sources`.

    Raises ConfigError where a value that a run needs is missing and does not follow; `check` finds more. Arguments as
    of `derive`. Resolving twice gives the same; resolving for another number of ranks derives anew.
    """
    try:
        return resolved_config(derive(config, world_size, local_world_size, device), world_size)
    except UnresolvedError as error:
        problems = check(config, world_size, local_world_size, device)
        raise ConfigError(problems or error.problems) from None


def _ranks(environment: Mapping[str, str], name: str, default: int, problems: list[str]) -> int:
    text = environment.get(name)
    if text is None:
        return default
    if not text.isdecimal() or int(text) < 1:
        problems.append(f"the environment variable {name} must be a number of ranks from 1 on, not {text!r}")
        return default
    return int(text)
