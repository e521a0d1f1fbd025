"""Settings after resolution: the schema's sections, with a value where the schema may have none. Pure.

A field here narrows one of `schema.py` of the same name from optional to required; flag, help and default stay there.
What is still optional afterwards has a meaning: a length that is given in another unit, a folder that is not wanted.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_edit.config.batch_schedule import BatchSchedule
from megatron_edit.config.derive import BatchPlan, batch_plan, batch_schedule, derived_model
from megatron_edit.config.schema import Config, ConfigError, EditConfig, ModelConfig, TrainingConfig
from megatron_edit.config.settings import flag_of
from megatron_edit.tables.methods import METHODS


class UnresolvedError(ConfigError):
    """Settings without a value that nothing else implies."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__([f"{flag_of(name)} is not given, and does not follow from other settings" for name in names])


class _Resolved:
    """A section in which every field that it declares itself has a value. Raises UnresolvedError otherwise."""

    def __post_init__(self) -> None:
        names = [*inspect.get_annotations(type(self)), *self._also_needed()]
        if missing := [name for name in names if getattr(self, name) is None]:
            raise UnresolvedError(missing)

    def _also_needed(self) -> Sequence[str]:
        """Fields that are needed because of the value of another."""
        return ()


@dataclass(frozen=True, kw_only=True)
class ResolvedModel(_Resolved, ModelConfig):
    """The Llama that is trained, with every size."""

    ffn_hidden_size: int
    num_query_groups: int
    kv_channels: int
    max_position_embeddings: int


@dataclass(frozen=True, kw_only=True)
class ResolvedEdit(_Resolved, EditConfig):
    """The sync between replicas, with the method's own values."""

    edit_num_replicas: int
    edit_pseudo_grad_clip: float
    edit_anomaly_threshold: float
    edit_weighting: str

    @property
    def sync_seconds(self) -> float | None:
        """T: seconds between two syncs of a method by wall clock; None of one by steps."""
        return self.edit_sync_time if METHODS[self.edit_method].trigger == "time" else None

    @property
    def outer_lr_and_momentum(self) -> tuple[float, float]:
        """eta and mu of the outer step; 0 and 0 of a method without one."""
        return self.edit_outer_lr or 0.0, self.edit_outer_momentum or 0.0

    def _also_needed(self) -> Sequence[str]:
        method = METHODS[self.edit_method]
        time = ("edit_sync_time",) if method.trigger == "time" else ()
        return (*time, *(("edit_outer_lr", "edit_outer_momentum") if method.has_anchor else ()))


@dataclass(frozen=True, kw_only=True)
class ResolvedTraining(_Resolved, TrainingConfig):
    """Length and batch in every unit; of a batch that grows the last."""

    global_batch_size: int
    replica_batch_size: int
    train_iters: int
    train_samples: int


@dataclass(frozen=True, kw_only=True)
class ResolvedConfig(Config):
    """All settings of a run on a certain number of ranks, with what follows from them.

    batch_plan      how the ranks share the batch; of a batch that grows the last
    batch_schedule  the global batch of every iteration
    """

    model: ResolvedModel
    edit: ResolvedEdit
    training: ResolvedTraining
    batch_plan: BatchPlan
    batch_schedule: BatchSchedule


def resolved_model(model: ModelConfig) -> ResolvedModel:
    """`model` with the sizes that follow from others. Raises UnresolvedError where one does not."""
    return ResolvedModel(**{**vars(model), **derived_model(model)})


def resolved_config(derived: Config, world_size: int) -> ResolvedConfig:
    """The resolved form of what `derive` returned for `world_size` ranks. Raises UnresolvedError."""
    model, edit = ResolvedModel(**vars(derived.model)), ResolvedEdit(**vars(derived.edit))
    plan, schedule = batch_plan(derived, world_size), batch_schedule(derived)
    if plan is None or schedule is None:
        raise UnresolvedError(["global_batch_size"])
    sections = {**vars(derived), "model": model, "edit": edit, "training": ResolvedTraining(**vars(derived.training))}
    return ResolvedConfig(**{**sections, "batch_plan": plan, "batch_schedule": schedule})
