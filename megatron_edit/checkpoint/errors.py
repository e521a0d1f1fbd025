"""What goes wrong with checkpoints, by name."""

from __future__ import annotations


class CheckpointError(ValueError):
    """A checkpoint that cannot be read or a folder that cannot be used, and what was looked for."""


class SaveError(RuntimeError):
    """A checkpoint could not be written. The ones before it are as they were."""
