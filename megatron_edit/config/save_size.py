"""Bytes of a checkpoint, from the number of parameters: for --dry-run, before a disk is full. Pure arithmetic.

Tensors are stored whole, without the padding of the vocabulary, each element once: see `checkpoint.training_state`.
"""

from __future__ import annotations

from megatron_edit.config.resolved import ResolvedConfig
from megatron_edit.tables.methods import METHODS

_FP32 = 4
_MASTER, _MOMENTS, _ANCHOR = 1, 2, 2  # fp32 copies of the model: master; exp_avg, exp_avg_sq; anchor, outer momentum


def copies_of_model(config: ResolvedConfig) -> int:
    """Whole fp32 copies of the parameters that a save between two syncs of `config` holds."""
    edit, method = config.edit, METHODS[config.edit.edit_method]
    replicas = edit.edit_num_replicas
    shared = _ANCHOR if method.has_anchor else 0
    per_replica = _MOMENTS
    if edit.edit_comm_dtype != "fp32" and method.is_local:  # what compression has not sent yet
        per_replica += 1
    if config.checkpoint.save_scope == "compact":  # of replica 0, at a sync: the anchor is the masters
        return per_replica + (shared or _MASTER)
    per_replica += _MASTER
    if method.placement == "round":  # an average is always under way
        shared += 1
    elif edit.edit_sync_delay > 0:  # in a part of each interval; with each replica's masters when it set out
        shared, per_replica = shared + 1, per_replica + 1
    return replicas * per_replica + shared


def save_line(config: ResolvedConfig, parameters: int) -> str:
    """What one save and `final/` take on the disk, and how much there is at most with --keep-checkpoints."""
    checkpoint, training = config.checkpoint, config.training
    copies = copies_of_model(config)
    size = copies * _FP32 * parameters
    final = (2 if training.bf16 or training.fp16 else 4) * parameters
    keep = checkpoint.keep_checkpoints
    most = f"; with --keep-checkpoints {keep} at most {human_bytes((keep + 1) * size + final)} at once" if keep else ""
    replicas = config.edit.edit_num_replicas
    whose = f"{checkpoint.save_scope}, {replicas} replica{'s' * (replicas != 1)}"
    return (
        f"save: about {human_bytes(size)} a checkpoint ({whose}: {copies} fp32 copies of the parameters), "
        f"{human_bytes(final)} for final/{most}"
    )


def human_bytes(size: float) -> str:
    """1234567 -> "1.2 MB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
