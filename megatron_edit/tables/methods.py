"""The table of synchronisation methods: a method is a trigger, a place, an average and an outer step.

Adding one is adding a row here and, when its outer step is new, a function in `sync/outer.py`; docs/methods.md shows
how. A row also holds the method's defaults; `config/derive.py` puts them where a flag was not given.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

TriggerKind = Literal["never", "steps", "staggered", "time"]
Placement = Literal["gradient", "step", "forward", "round"]
Weighting = Literal["mean", "softmax"]
OuterStep = Literal["none", "nesterov", "slowmo", "co2"]


@dataclass(frozen=True)
class Method:
    """One synchronisation method.

    name             value of --edit-method
    source           where the method and its defaults come from
    trigger          never: replicas do not differ, the warm-up has no end; steps: all modules every interval;
                     staggered: each fragment of the modules at an offset inside the interval; time: by wall clock
    placement        gradient: with the gradient reduction of every step; step: blocking, after the step; forward:
                     layer by layer in the forward pass of the step after; round: during the whole next interval
    outer_step       how the average moves the anchor, a name in `sync/outer.py`; none: parameters := average, and no
                     anchor is kept
    outer_lr, outer_momentum  its defaults; None without one
    takes_penalty    whether EDiT's penalty can be asked for: softmax weights, anomaly elimination, clip
    weighting, anomaly_threshold, pseudo_grad_clip  defaults of the penalty's three parts; mean, 0, 0: off
    shards_over_sync the anchor and the outer momentum are dealt out over the replicas, and gathered when used
    """

    name: str
    source: str
    trigger: TriggerKind = "steps"
    placement: Placement = "forward"
    outer_step: OuterStep = "none"
    outer_lr: float | None = None
    outer_momentum: float | None = None
    takes_penalty: bool = False
    weighting: Weighting = "mean"
    anomaly_threshold: float = 0.0
    pseudo_grad_clip: float = 0.0
    shards_over_sync: bool = False

    @property
    def is_local(self) -> bool:
        """Whether replicas take steps of their own; False for `baseline`."""
        return self.trigger != "never"

    @property
    def has_anchor(self) -> bool:
        """Whether the parameters of the last sync are kept."""
        return self.outer_step != "none"

    @property
    def equal_steps(self) -> bool:
        """Whether all replicas take the same number of steps between two syncs."""
        return self.trigger != "time"


class UnknownMethodError(ValueError):
    """--edit-method names no row of the table."""


_PENALTY = {"takes_penalty": True, "weighting": "softmax", "anomaly_threshold": 3.0, "pseudo_grad_clip": 10.0}

_ROWS = (
    Method(
        name="baseline",
        source="synchronous data parallelism: every step averages the gradients over all replicas",
        trigger="never",
        placement="gradient",
    ),
    Method(
        name="post-local-sgd",
        source="Post-local SGD, arXiv 1808.07217",
        placement="step",
    ),
    Method(
        name="slowmo",
        source="SlowMo, arXiv 1910.00643: beta 0.5, slow learning rate 1",
        placement="step",
        outer_step="slowmo",
        outer_lr=1.0,
        outer_momentum=0.5,
    ),
    Method(
        name="diloco",
        source="DiLoCo, arXiv 2311.08105: outer Nesterov 0.7, 0.9",
        placement="step",
        outer_step="nesterov",
        outer_lr=0.7,
        outer_momentum=0.9,
        takes_penalty=True,
    ),
    Method(
        name="co2",
        source="CO2, arXiv 2401.16265; defaults ours",
        placement="round",
        outer_step="co2",
        outer_lr=1.0,
        outer_momentum=0.5,
    ),
    Method(
        name="co2-sharded",
        source="CO2*, arXiv 2401.16265; defaults ours",
        placement="round",
        outer_step="co2",
        outer_lr=1.0,
        outer_momentum=0.5,
        shards_over_sync=True,
    ),
    Method(
        name="edit",
        source="EDiT, arXiv 2412.07210; outer learning rate and momentum as in the authors' example (ours: "
        "the paper's values are not public)",
        outer_step="nesterov",
        outer_lr=0.7,
        outer_momentum=0.8,
        **_PENALTY,  # type: ignore[arg-type]
    ),
    Method(
        name="a-edit",
        source="A-EDiT, arXiv 2412.07210; outer learning rate and momentum as for edit",
        trigger="time",
        outer_step="nesterov",
        outer_lr=0.7,
        outer_momentum=0.8,
        **_PENALTY,  # type: ignore[arg-type]
    ),
    Method(
        name="streaming",
        source="Streaming DiLoCo, arXiv 2501.18512: outer Nesterov 0.7, 0.9",
        trigger="staggered",
        outer_step="nesterov",
        outer_lr=0.7,
        outer_momentum=0.9,
        takes_penalty=True,
    ),
)
METHODS: dict[str, Method] = {row.name: row for row in _ROWS}


def get_method(name: str) -> Method:
    """The row of that name. Raises UnknownMethodError, which lists the known ones."""
    if name not in METHODS:
        raise UnknownMethodError(f"unknown method {name!r}; known: {', '.join(METHODS)}")
    return METHODS[name]
