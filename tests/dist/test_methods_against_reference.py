"""Every method equals its plain PyTorch reference over 12 steps on several layouts, and the methods' identities."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_edit.config.schema import Config
from megatron_edit.tables.methods import METHODS as TABLE
from megatron_edit.sync.outer import OUTER_STEPS
from tests.dist.against_reference import differences
from tests.dist.engine_runs import Batch, RankRecord, Run, masked_batch, run_engine
from tests.dist.test_against_reference import LAYOUTS
from tests.dist.test_identities import PLAIN_MEAN, PLAIN_SGD, SGD_RATE, equally_masked, largest_difference, leaders

STEPS, INTERVAL = 12, 3
# Clips are active and weights of the replicas differ; see test_against_reference.
INNER: dict[str, Any] = {"clip_grad": 0.5, "adam_eps": 1e-6, "edit_sync_interval": INTERVAL}
PENALTY: dict[str, Any] = {
    "edit_weighting": "softmax",
    "edit_softmax_temperature": 0.01,
    "edit_anomaly_threshold": 3.0,
    "edit_pseudo_grad_clip": 0.12,
}

# method or feature: settings
METHODS: dict[str, dict[str, Any]] = {
    "post-local-sgd": {"edit_method": "post-local-sgd"},
    "slowmo": {"edit_method": "slowmo"},
    "slowmo in the forward pass": {"edit_method": "slowmo", "edit_sync_placement": "forward"},
    "diloco": {"edit_method": "diloco"},
    "diloco with the penalty, in the forward pass": {
        "edit_method": "diloco",
        "edit_sync_placement": "forward",
        **PENALTY,
    },
    "co2": {"edit_method": "co2"},
    "co2 with gap penalty and clip": {
        "edit_method": "co2",
        "edit_co2_gap_penalty": 2.0,
        "edit_co2_momentum_clip": 5e-4,
    },
    "co2-sharded": {"edit_method": "co2-sharded"},
    "edit, sublayers": {"edit_modules": "sublayer", **PENALTY},
    "a-edit": {"edit_method": "a-edit", **PENALTY},
    "streaming": {"edit_method": "streaming"},
    "streaming with a delay and the penalty": {
        "edit_method": "streaming",
        "edit_sync_delay": 2,
        "edit_num_fragments": 2,
        "edit_warmup_steps": 1,
        **PENALTY,
    },
    "streaming with a delay, mixed": {
        "edit_method": "streaming",
        "edit_sync_delay": INTERVAL,
        "edit_mixing_alpha": 0.5,
        "edit_modules": "sublayer",
    },
    "averaged moments": {"edit_inner_moments": "average", "edit_inner_moments_interval": 2, **PENALTY},
    "consensus by sum": {"edit_consensus": "sum", **PENALTY},
    "consensus by count": {"edit_consensus": "count", **PENALTY},
    "sparsity": {"edit_sparsity": 0.4, **PENALTY},
    "bf16": {"edit_comm_dtype": "bf16", **PENALTY},
    "int8": {"edit_comm_dtype": "int8", **PENALTY},
    "int4": {"edit_comm_dtype": "int4", **PENALTY},
    "int8, streaming with a delay": {"edit_comm_dtype": "int8", "edit_method": "streaming", "edit_sync_delay": 1},
    "int8, co2": {"edit_comm_dtype": "int8", "edit_method": "co2"},
}
# What looks at positions in a module's vector sees another vector where tensor parallelism cuts it.
BY_POSITION = ("sparsity", "bf16", "int8", "int4", "int8, streaming with a delay", "int8, co2")
STEPS_OF_INTERVALS = ((3, 1, 2), (4, 4, 1), (1, 5, 3), (4, 2, 2))  # a-edit: [interval][replica]

R2, R3, TP2, PP2 = "R2", "R3", "R2xTP2", "R2xPP2"
SECOND = {  # layout beside R2 that is run every time
    "post-local-sgd": R3,
    "slowmo": TP2,
    "diloco": R3,
    "diloco with the penalty, in the forward pass": PP2,
    "co2": PP2,
    "co2 with gap penalty and clip": R3,
    "co2-sharded": R3,
    "edit, sublayers": PP2,
    "a-edit": R3,
    "streaming": PP2,
    "streaming with a delay and the penalty": TP2,
    "streaming with a delay, mixed": R3,
    "averaged moments": TP2,
    "consensus by sum": R3,
    "int8": R3,
}
CASES = [
    pytest.param(
        layout,
        name,
        id=f"{layout}-{name}",
        marks=[] if layout in (R2, SECOND.get(name)) else pytest.mark.full("the rest of layouts x methods"),
    )
    for name in METHODS
    for layout in (R2, R3, TP2, PP2)
    if not (layout == TP2 and name in BY_POSITION)
]


def make_run(layout: str, name: str = "", **settings: Any) -> Run:
    """The method on that layout, unevenly masked tokens, 12 steps (a-edit: four intervals)."""
    world_size, layout_settings = LAYOUTS[layout]
    merged = {"edit_num_replicas": 2, **INNER, **layout_settings, **METHODS.get(name, {}), **settings}
    intervals = None
    if merged.get("edit_method") == "a-edit":
        intervals = tuple(counts[: merged["edit_num_replicas"]] for counts in STEPS_OF_INTERVALS)
    return Run(world_size, merged, STEPS, masked_batch, steps_of_intervals=intervals)


def replicas_are_equal(records: list[RankRecord], what: str = "parameters") -> bool:
    first, *others = leaders(records)
    return all(largest_difference(first.snapshots[what], other.snapshots[what]) == 0 for other in others)


@pytest.mark.parametrize(("layout", "name"), CASES)
def test_equals_the_reference(layout: str, name: str) -> None:
    run = make_run(layout, name)
    records = run_engine(run)
    assert differences(run, records) == {}
    config = run.config.edit
    streams = config.edit_method == "streaming"
    assert len(records[0].syncs) >= STEPS // INTERVAL if streams else len(records[0].syncs) == 4
    assert streams or replicas_are_equal(records), "12 steps end in a sync"
    if config.edit_method != "post-local-sgd":
        assert replicas_are_equal(records, "anchor") and replicas_are_equal(records, "outer momentum")
    moved = largest_difference(records[0].snapshots["initial"], records[0].snapshots["parameters"])
    assert moved > 1e-3, "nothing was learnt"


# ---- faults ----------------------------------------------------------------------------------------------------------

VICTIM, OTHER = 1, 0  # replicas
BROKEN = "decoder.layers.1.mlp.linear_fc1.weight"


def faulty_batch(config: Config, iteration: int) -> Batch:
    """The victim makes no step from the end of the second sync to the third: none of its tokens counts."""
    batch = masked_batch(config, iteration)
    if iteration in (7, 8, 9):
        assert config.edit.edit_num_replicas is not None
        batch["loss_mask"].chunk(config.edit.edit_num_replicas)[VICTIM].zero_()
    return batch


def faults(iteration: int, replica: int, name: str, value: torch.Tensor, anchor: torch.Tensor) -> None:
    """NaN in a module of the victim before the second sync; another replica's norms times 100 before the fourth."""
    if iteration == 6 and replica == VICTIM and name == BROKEN:
        value.view(-1)[0] = math.nan
    if iteration == 12 and replica == OTHER and name.startswith("decoder.layers.2."):
        value.copy_(anchor + 100 * (value - anchor))


@pytest.mark.parametrize(
    "name",
    [
        "post-local-sgd",
        "co2",
        "edit",
        "streaming with a delay and the penalty",
        *(
            pytest.param(name, marks=pytest.mark.full("the other methods"))
            for name in ("slowmo", "diloco", "co2-sharded", "streaming", "streaming with a delay, mixed", "int8")
        ),
    ],
)
def test_faults_end_as_the_reference_says(name: str) -> None:
    """Non-finite, without steps, far out: left out where that is the rule, and everything finite at the end."""
    settings = {"edit_anomaly_warmup_syncs": 3, **(PENALTY if name == "edit" else {})}
    plain = make_run(R3, "" if name == "edit" else name, **settings)
    run = replace(plain, data=faulty_batch, spoil=faults)
    records = run_engine(run)
    assert differences(run, records, error_of_weights=1e-4) == {}, "100 times a step, and 10 times its rounding"
    left_out = [view.decision.verdict.left_out[VICTIM] for view in records[0].syncs]
    non_finite = [view.decision.verdict.non_finite[VICTIM] for view in records[0].syncs]
    assert sum(int(flags.sum()) for flags in non_finite) == 1, "one module, once"
    streams = run.config.edit.edit_method == "streaming"  # its intervals begin elsewhere: it may have made a step
    assert sum(bool(flags.any()) for flags in left_out) >= (1 if streams else 2)
    for leader in leaders(records):
        assert all(value.isfinite().all() for value in leader.snapshots["parameters"].values())
    if name == "edit":
        last = records[0].syncs[3].decision.verdict
        assert last.flagged.nonzero().tolist() == [[OTHER, records[0].keys.index("layers.2")]]


# ---- identities ------------------------------------------------------------------------------------------------------


def hashes(run: Run, *names: str) -> list[tuple[str, ...]]:
    """Of each rank's shards at the end."""
    return [tuple(record.digests[name] for name in names) for record in run_engine(run)]


NO_PENALTY = {"edit_weighting": "mean", "edit_anomaly_threshold": 0.0, "edit_pseudo_grad_clip": 0.0}


@pytest.mark.parametrize("layout", [R3, pytest.param(TP2, marks=pytest.mark.full("the same on another layout"))])
def test_diloco_is_edit_without_the_penalty(layout: str) -> None:
    """Up to the place: bit for bit, as no sum is taken in another order."""
    rates = {"edit_outer_lr": 0.7, "edit_outer_momentum": 0.9}
    diloco = make_run(layout, "diloco", **rates)
    edit = make_run(layout, edit_method="edit", **NO_PENALTY, **rates)
    assert diloco.config.edit.edit_sync_placement == "step" and edit.config.edit.edit_sync_placement == "forward"
    assert hashes(diloco, "masters", "anchor", "outer momentum") == hashes(edit, "masters", "anchor", "outer momentum")


@pytest.mark.parametrize("layout", [PP2, pytest.param(R3, marks=pytest.mark.full("the same on another layout"))])
@pytest.mark.parametrize("penalty", [NO_PENALTY, PENALTY], ids=["mean", "penalty"])
def test_streaming_with_one_fragment_and_no_delay_is_edit(layout: str, penalty: dict[str, Any]) -> None:
    rates = {"edit_outer_lr": 0.7, "edit_outer_momentum": 0.8, **penalty}
    streaming = make_run(layout, edit_method="streaming", edit_num_fragments=1, **rates)
    edit = make_run(layout, edit_method="edit", **rates)
    assert hashes(streaming, "masters", "anchor", "outer momentum") == hashes(
        edit, "masters", "anchor", "outer momentum"
    )


@pytest.mark.parametrize(
    ("layout", "method"),
    [
        ("R2xS2", "edit"),
        (R2, "streaming with a delay and the penalty"),
        pytest.param(PP2, "edit", marks=pytest.mark.full("the same with other methods")),
        pytest.param(R2, "co2", marks=pytest.mark.full("the same with other methods")),
        pytest.param(R3, "slowmo", marks=pytest.mark.full("the same with other methods")),
    ],
)
def test_offload_changes_no_bit(layout: str, method: str) -> None:
    run = make_run(layout, "" if method == "edit" else method)
    offloaded = run.changed(edit_cpu_offload=True)
    assert hashes(run, "masters", "anchor", "outer momentum") == hashes(
        offloaded, "masters", "anchor", "outer momentum"
    )


@pytest.mark.parametrize("layout", [R2, pytest.param(PP2, marks=pytest.mark.full("the same on another layout"))])
def test_co2_sharded_is_co2_bit_for_bit(layout: str) -> None:
    whole, sharded = run_engine(make_run(layout, "co2")), run_engine(make_run(layout, "co2-sharded"))
    for name in ("parameters", "anchor", "outer momentum"):
        for mine, theirs in zip(leaders(whole), leaders(sharded), strict=True):
            assert largest_difference(mine.snapshots[name], theirs.snapshots[name]) == 0, name
    for mine, theirs in zip(whole, sharded, strict=True):
        assert mine.digests["masters"] == theirs.digests["masters"]


def test_post_local_sgd_with_interval_1_is_synchronous_sgd() -> None:
    """Equal token counts: the mean of the replicas' steps is the step with the mean of their gradients."""
    settings = {"edit_sync_interval": 1, "lr": SGD_RATE * 1e6, **PLAIN_SGD}
    world_size, layout_settings = LAYOUTS["R2xS2"]
    merged = {"edit_num_replicas": 2, **layout_settings, **settings, "edit_method": "post-local-sgd"}
    run = Run(world_size, merged, 5, equally_masked)
    local, synchronous = run_engine(run), run_engine(run.changed(edit_method="baseline"))
    assert len(local[0].syncs) == 5
    found, expected = local[0].snapshots["parameters"], synchronous[0].snapshots["parameters"]
    # The bound of the references: sums in another order, amplified over five steps (1.2e-6 on some processors).
    assert largest_difference(found, expected) < 1e-5
    assert largest_difference(found, local[0].snapshots["initial"]) > 1e-3, "nothing was learnt"


def test_post_local_sgd_is_diloco_with_the_plain_mean() -> None:
    mean = {name: value for name, value in PLAIN_MEAN.items() if name.startswith("edit_outer")}
    first, second = run_engine(make_run(R3, "post-local-sgd")), run_engine(make_run(R3, "diloco", **mean))
    for mine, theirs in zip(leaders(first), leaders(second), strict=True):
        assert largest_difference(mine.snapshots["parameters"], theirs.snapshots["parameters"]) < 1e-5


@pytest.mark.parametrize("dtype", ["bf16", "int8", "int4"])
def test_compressed_syncs_leave_the_replicas_bit_equal_on_every_layout(dtype: str) -> None:
    """Where a module's vector is cut by tensor parallelism or in shards, too."""
    layout = {"bf16": TP2, "int8": "R2xS2", "int4": TP2}[dtype]
    records = run_engine(make_run(layout, dtype))
    for record in records:
        twins = [other for other in records if other.place.tp == record.place.tp and other.place.dp == record.place.dp]
        assert len(twins) == 2 and len({twin.digests["masters"] for twin in twins}) == 1
    exact = run_engine(make_run(layout, edit_method="edit", **PENALTY))
    found, expected = (leaders(each)[0].snapshots["parameters"] for each in (records, exact))
    moved = largest_difference(expected, leaders(exact)[0].snapshots["initial"])
    assert 0 < largest_difference(found, expected) < 0.5 * moved


def test_the_worked_example_of_the_docs_runs_on_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/methods.md, "Adding a method": the anchor follows torch's heavy ball on the mean of the replicas."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "methods.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"^```python run\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    monkeypatch.setitem(TABLE, "heavy-ball", None)  # type: ignore[arg-type]  # both are taken out again afterwards
    monkeypatch.setitem(OUTER_STEPS, "heavy-ball", None)  # type: ignore[arg-type]
    exec(compile(example, "docs/methods.md", "exec"), {})
    records = leaders(run_engine(make_run(R2, edit_method="heavy-ball")))
    names = list(records[0].snapshots["initial"])
    theta = {name: torch.nn.Parameter(records[0].snapshots["initial"][name].clone()) for name in names}
    outer = torch.optim.SGD(theta.values(), lr=0.7, momentum=0.9)
    for k in range(1, 5):
        for name in names:
            local = [record.snapshots[f"before sync {k}"][name] for record in records]
            theta[name].grad = theta[name].detach() - torch.stack(local).mean(0)
        outer.step()
    for record in records:
        assert largest_difference(record.snapshots["anchor"], {n: p.detach() for n, p in theta.items()}) < 1e-6
