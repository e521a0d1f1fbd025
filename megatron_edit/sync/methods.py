"""The table of synchronisation methods: a method is a trigger, a place, an average and an outer optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

TriggerKind = Literal["never", "steps"]
Placement = Literal["gradient", "forward"]
Averaging = Literal["gradient-mean", "penalty"]
OuterOptimizer = Literal["none", "nesterov"]


@dataclass(frozen=True)
class Method:
    """One synchronisation method.

    name             value of --edit-method
    trigger          when parameters are synchronised; never: replicas do not differ, the warm-up has no end
    placement        where: with the gradient reduction of every step, or layer by layer in the forward pass
                     of the step after (`--edit-sync-placement step` moves the latter behind the step)
    averaging        of what and how: plain mean of gradients, or EDiT's penalty on parameter differences
    has_anchor       whether the parameters of the last sync are kept
    outer_optimizer  how the average moves the anchor
    outer_lr, outer_momentum  its defaults; None without one
    source           where the method and its defaults come from
    """

    name: str
    trigger: TriggerKind
    placement: Placement
    averaging: Averaging
    has_anchor: bool
    outer_optimizer: OuterOptimizer
    outer_lr: float | None
    outer_momentum: float | None
    source: str


class UnknownMethodError(ValueError):
    """--edit-method names no row of the table."""


_ROWS = (
    Method(
        name="baseline",
        trigger="never",
        placement="gradient",
        averaging="gradient-mean",
        has_anchor=False,
        outer_optimizer="none",
        outer_lr=None,
        outer_momentum=None,
        source="synchronous data parallelism: every step averages the gradients over all replicas",
    ),
    Method(
        name="edit",
        trigger="steps",
        placement="forward",
        averaging="penalty",
        has_anchor=True,
        outer_optimizer="nesterov",
        outer_lr=0.7,
        outer_momentum=0.8,
        source="EDiT, arXiv 2412.07210; outer learning rate and momentum as in the authors' example (ours: "
        "the paper's values are not public)",
    ),
)
METHODS: dict[str, Method] = {row.name: row for row in _ROWS}


def get_method(name: str) -> Method:
    """The row of that name. Raises UnknownMethodError, which lists the known ones."""
    if name not in METHODS:
        raise UnknownMethodError(f"unknown method {name!r}; known: {', '.join(METHODS)}")
    return METHODS[name]
