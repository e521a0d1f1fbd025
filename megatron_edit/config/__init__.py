"""Settings: one schema, read from flags and YAML, completed, checked. Imports no torch."""

from megatron_edit.config.arithmetic import describe, planned_syncs
from megatron_edit.config.checks import check
from megatron_edit.config.configure import configure, resolve
from megatron_edit.config.derive import BatchPlan, derive
from megatron_edit.config.flags import load_config
from megatron_edit.config.notes import notes
from megatron_edit.config.resolved import ResolvedConfig
from megatron_edit.config.schema import Config, ConfigError

__all__ = [
    "BatchPlan",
    "Config",
    "ConfigError",
    "ResolvedConfig",
    "check",
    "configure",
    "derive",
    "describe",
    "load_config",
    "notes",
    "planned_syncs",
    "resolve",
]
