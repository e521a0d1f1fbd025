"""The same run by the engine and by `tests.reference.plain_edit`, and the names of all quantities that differ."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from megatron_edit.config.schema import Config
from megatron_edit.model.init import initial_tensor
from megatron_edit.testing.tiny import VOCABULARY
from tests.dist.engine_runs import Parameters, RankRecord, Run, learning_rate, run_engine
from tests.reference.plain_edit import LlamaShape, RunResult, RunSettings, run_edit

# Of weights absolute, of losses, norms and moments relative. A norm of Delta is that of a difference of fp32 numbers:
# next to weights of 1 (the norms' own) a step of 1e-3 has a relative error of 3e-5.
TOLERANCES = defaultdict(lambda: 1e-5, {"norms": 5e-5, "weights of the replicas": 5e-5, "clip coefficients": 5e-5})


def differences(run: Run, records: list[RankRecord] | None = None) -> dict[str, float]:
    """{quantity: largest error} of what is out of tolerance; empty when the engine does as the reference.

    Quantities: losses, grad norms, updated; of the syncs: iterations, one decision, norms, left out, flagged,
    weights, clip coefficients, rolled back; weights before a sync; parameters, anchor, outer momentum, moments.
    `records`: those of a run that was already made.
    """
    records = run_engine(run) if records is None else records
    reference = run_reference(run)
    errors: dict[str, float] = {}
    for name, error in _errors(run, records, reference):
        errors[name] = max(errors.get(name, 0.0), error)
    return {name: error for name, error in errors.items() if not error <= TOLERANCES[name]}


# ---- the reference ------------------------------------------------------------------------------------------------


def run_reference(run: Run) -> RunResult:
    """Reference of `run`, computed once for all layouts: they differ in nothing that it is told."""
    config = run.config
    assert config.edit.edit_num_replicas is not None
    key = (reference_shape(config), _settings(config), config.edit.edit_num_replicas, config.training.global_batch_size)
    return _reference(_Keyed(run, (*key, run.steps, id(run.data), id(run.spoil), config.optimizer.lr)))


class _Keyed:
    """A run that equals all runs with the same key."""

    def __init__(self, run: Run, key: tuple[Any, ...]) -> None:
        self.run, self.key = run, key

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Keyed) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


@lru_cache(maxsize=32)
def _reference(keyed: _Keyed) -> RunResult:
    run, config = keyed.run, keyed.run.config
    shape, replicas = reference_shape(config), config.edit.edit_num_replicas
    initial = {
        name: initial_tensor(name, size, config.model, config.training.seed).double()
        for name, size in shape.parameter_shapes().items()
    }
    batches, rates = [], []
    for iteration in range(1, run.steps + 1):
        whole = run.data(config, iteration)
        shares = [{key: value.chunk(replicas)[i] for key, value in whole.items()} for i in range(replicas)]
        batches.append(shares)
        rates.append(learning_rate(config, iteration))

    def spoil(iteration: int, replica: int, parameters: Parameters, anchor: Parameters | None) -> None:
        if run.spoil is not None and anchor is not None:
            for name, value in parameters.items():
                run.spoil(iteration, replica, name, value, anchor[name])

    return run_edit(shape, initial, batches, rates, _settings(config), spoil)


def reference_shape(config: Config) -> LlamaShape:
    model = config.model
    assert model.ffn_hidden_size and model.num_query_groups and model.kv_channels
    return LlamaShape(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.num_query_groups,
        vocab_size=VOCABULARY,
        head_size=model.kv_channels,
        tied=not model.untie_embeddings_and_output_weights,
        norm_epsilon=model.norm_epsilon,
        rotary_base=model.rotary_base,
    )


def _settings(config: Config) -> RunSettings:
    edit, optimizer = config.edit, config.optimizer
    never_ends = 10**9
    return RunSettings(
        sync_interval=edit.edit_sync_interval,
        warmup_steps=never_ends if edit.edit_method == "baseline" else edit.edit_warmup_steps,
        betas=(optimizer.adam_beta1, optimizer.adam_beta2),
        eps=optimizer.adam_eps,
        weight_decay=optimizer.weight_decay,
        clip_grad=optimizer.clip_grad,
        outer_lr=edit.edit_outer_lr,
        outer_momentum=edit.edit_outer_momentum,
        pseudo_grad_clip=edit.edit_pseudo_grad_clip,
        anomaly_threshold=edit.edit_anomaly_threshold,
        anomaly_alpha=edit.edit_anomaly_alpha,
        anomaly_warmup_syncs=edit.edit_anomaly_warmup_syncs,
        weighting=edit.edit_weighting,
        softmax_temperature=edit.edit_softmax_temperature,
    )


# ---- the comparison -----------------------------------------------------------------------------------------------


def _errors(run: Run, records: list[RankRecord], reference: RunResult) -> Iterator[tuple[str, float]]:
    yield from _step_errors(records, reference)
    yield from _sync_errors(run, records, reference)
    leaders = [record for record in records if record.snapshots]
    for i, leader in enumerate(leaders):
        for k, sync in enumerate(reference.syncs, 1):
            before = leader.snapshots[f"before sync {k}"]
            yield "weights before a sync", _largest(before, sync.local_parameters[i])
        yield "parameters", _largest(leader.snapshots["parameters"], reference.parameters[i])
        for j, name in enumerate(("exp_avg", "exp_avg_sq")):
            moments = {key: torch.zeros_like(value) for key, value in reference.parameters[i].items()}
            moments |= {key: pair[j] for key, pair in reference.moments[i].items()}  # none before a first step
            for key, expected in moments.items():
                length = max(float(expected.norm()), 1e-12)
                yield "moments", float((leader.snapshots[name][key].double() - expected).norm()) / length
        if reference.anchor is not None:
            yield "anchor", _largest(leader.snapshots["anchor"], reference.anchor)
        if reference.syncs:
            momentum = reference.syncs[-1].outer_momentum
            yield "outer momentum", _largest(leader.snapshots["outer momentum"], momentum)


def _step_errors(records: list[RankRecord], reference: RunResult) -> Iterator[tuple[str, float]]:
    for iteration, expected in enumerate(reference.iterations):
        for i, (loss, norm) in enumerate(zip(expected.losses, expected.grad_norms, strict=True)):
            ranks = [record for record in records if record.place.sync == i]
            shares = [r.losses[iteration] for r in ranks if r.place.tp == 0]
            tokens = sum(count for _, count in shares)
            found = sum(loss_sum for loss_sum, _ in shares) / max(tokens, 1)
            yield "losses", _relative(found, loss)
            for record in ranks:
                mine = record.grad_norms[iteration]
                yield "grad norms", _relative(mine, norm) if mine is not None else float(expected.updated[i])
                yield "updated", float(record.updated[iteration] != expected.updated[i])


def _sync_errors(run: Run, records: list[RankRecord], reference: RunResult) -> Iterator[tuple[str, float]]:
    keys = [key.replace("layer ", "layers.") for key in reference_shape(run.config).modules()]
    for record in records:
        iterations = [view.iteration for view in record.syncs]
        yield "iterations of the syncs", float(iterations != [sync.iteration for sync in reference.syncs])
    for k, sync in enumerate(reference.syncs):
        one_decision: dict[str, Any] = {}
        for record in records:
            if k >= len(record.syncs):
                continue
            view = record.syncs[k]
            for column, key in enumerate(view.keys):
                m = keys.index(key)
                decision, verdict = view.decision, view.decision.verdict
                assert view.clip_coefficients is not None, f"sync {k + 1} was not completed"
                beta = view.clip_coefficients[column]
                found = [t[..., column] for t in (decision.norms, decision.weights)]
                flags = [t[..., column] for t in (verdict.flagged, verdict.left_out, decision.rolled_back)]
                mine = repr([t.tolist() for t in (*found, *flags)] + [beta])
                yield "one decision", float(one_decision.setdefault(key, mine) != mine)
                yield "norms", max(map(_relative, found[0].tolist(), sync.norms[:, m].tolist()))
                yield "weights of the replicas", float((found[1] - sync.weights[:, m]).abs().max())
                yield "clip coefficients", _relative(beta, float(sync.betas[m]))
                expected = (sync.flagged[:, m], sync.left_out[:, m], sync.rolled_back[m])
                for name, flag, right in zip(("flagged", "left out", "rolled back"), flags, expected, strict=True):
                    yield name, float(not torch.equal(flag, right))


def _largest(found: Parameters, expected: dict[str, Tensor]) -> float:
    if found.keys() != expected.keys():
        return math.inf
    worst = 0.0
    for name, tensor in found.items():
        both_nan = tensor.isnan() & expected[name].isnan()
        error = (tensor.double() - expected[name]).abs().masked_fill(both_nan, 0.0)
        worst = max(worst, float(error.nan_to_num(math.inf).max()))
    return worst


def _relative(found: float, expected: float) -> float:
    if math.isfinite(found) and math.isfinite(expected):
        return abs(found - expected) / max(abs(expected), 1e-12)
    return 0.0 if math.isfinite(found) == math.isfinite(expected) else math.inf
