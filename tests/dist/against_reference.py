"""The same run by the engine and by the plain PyTorch reference, and the names of all quantities that differ.

The reference is `plain_edit` for EDiT and the baseline, `plain_methods` for whatever else the settings ask for.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from megatron_edit.config.schema import Config
from megatron_edit.model.init import initial_tensor
from megatron_edit.testing.tiny import VOCABULARY
from tests.dist.engine_runs import Parameters, RankRecord, Run, learning_rate, run_engine
from tests.reference.plain_edit import EMBEDDING, OUTPUT, LlamaShape, RunResult, SyncRecord, run_edit
from tests.reference.plain_methods import MethodResult, MethodSettings, MethodSyncRecord, modules_of, run_method

# Of weights absolute, of losses, norms and moments relative. A norm of Delta is that of a difference of fp32 numbers:
# next to weights of 1 (the norms' own) a step of 1e-3 has a relative error of 3e-5.
TOLERANCES = defaultdict(lambda: 1e-5, {"norms": 5e-5, "weights of the replicas": 5e-5, "clip coefficients": 5e-5})
# Rounding to few levels, voting on signs and keeping the largest are not continuous: an error of 1e-8 turns a few
# elements over, each by a step of its block or to 0 and back. So one in a hundred may be off, and what is made of all
# of them is off a little. Without error feedback weights are off 2 to 3 times as much as is allowed here.
TURNED_OVER = 0.01
DISCONTINUOUS = defaultdict(lambda: 1e-3, {"moments": 1e-2, "grad norms": 5e-3})
WEIGHTS = ("weights before a sync", "parameters", "anchor", "outer momentum")
ERROR_OF_WEIGHTS = {"fp32": 1e-5, "bf16": 8e-6, "int8": 2.5e-5, "int4": 3e-4}


# A module's vector in the engine: its bucket, which megatron-core fills from the end of the model.
BUCKET_ORDER = (
    "mlp.linear_fc2.weight",
    "mlp.linear_fc1.weight",
    "pre_mlp_layernorm.weight",
    "self_attention.linear_qkv.weight",
    "self_attention.linear_proj.weight",
    "input_layernorm.weight",
)


def differences(
    run: Run, records: list[RankRecord] | None = None, error_of_weights: float | None = None
) -> dict[str, float]:
    """{quantity: largest error} of what is out of tolerance; empty when the engine does as the reference.

    Quantities: losses, grad norms, updated; of the syncs: iterations, one decision, norms, left out, flagged,
    weights, clip coefficients, rolled back; weights before a sync; parameters, anchor, outer momentum, moments.
    `records`: those of a run that was already made. `error_of_weights`: another tolerance of what is absolute.
    """
    records = run_engine(run) if records is None else records
    reference = run_reference(run)
    errors: dict[str, float] = {}
    for name, error in _errors(run, records, reference):
        errors[name] = max(errors.get(name, 0.0), error)
    tolerances: Mapping[str, float] = TOLERANCES
    if is_discontinuous(run.config):
        tolerances = {name: DISCONTINUOUS[name] for name in errors}
        error_of_weights = error_of_weights or ERROR_OF_WEIGHTS[run.config.edit.edit_comm_dtype]
    if error_of_weights is not None:
        tolerances = {name: tolerances[name] for name in errors} | dict.fromkeys(WEIGHTS, error_of_weights)
    return {name: error for name, error in errors.items() if not error <= tolerances[name]}


def is_discontinuous(config: Config) -> bool:
    """Whether the smallest difference can become one of a finite size."""
    return (
        config.edit.edit_comm_dtype != "fp32" or config.edit.edit_sparsity > 0 or config.edit.edit_consensus != "none"
    )


# ---- the reference ------------------------------------------------------------------------------------------------


def run_reference(run: Run) -> RunResult:
    """Reference of `run`, computed once for all layouts: they differ in nothing that it is told."""
    config = run.config
    assert config.edit.edit_num_replicas is not None
    key = (reference_shape(config), _settings(run), config.edit.edit_num_replicas, config.training.global_batch_size)
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
    for iteration in range(1, steps_of(run) + 1):
        whole = run.data(config, iteration)
        shares = [{key: value.chunk(replicas)[i] for key, value in whole.items()} for i in range(replicas)]
        batches.append(shares)
        rates.append(learning_rate(config, iteration))

    settings = _settings(run)

    def spoil(iteration: int, replica: int, parameters: Parameters, anchor: Parameters | None) -> None:
        if run.spoil is None or iteration <= settings.warmup_steps:
            return
        for name, value in parameters.items():
            run.spoil(iteration, replica, name, value, value if anchor is None else anchor[name])

    if settings == MethodSettings(**_edit_settings(run)):
        return run_edit(shape, initial, batches, rates, settings, spoil)
    return run_method(shape, initial, batches, rates, settings, spoil)


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


def steps_of(run: Run) -> int:
    """Steps of the replica that makes the most."""
    return max(map(sum, zip(*run.steps_of_intervals, strict=True))) if run.steps_of_intervals else run.steps


def _settings(run: Run) -> MethodSettings:
    edit, shape, settings = run.config.edit, reference_shape(run.config), _edit_settings(run)
    names = list(shape.parameter_shapes())
    if edit.edit_method not in ("baseline", "edit"):
        settings["method"] = edit.edit_method
    if edit.edit_modules == "sublayer":
        settings["sublayer"] = True
    if edit.edit_method == "streaming":
        modules = modules_of(shape, MethodSettings(**settings))
        settings["num_fragments"] = edit.edit_num_fragments or min(len(modules), edit.edit_sync_interval)
        settings["delay"], settings["mixing_alpha"] = edit.edit_sync_delay, edit.edit_mixing_alpha
    if edit.edit_method == "a-edit":
        settings["step_weight_ratio"] = edit.edit_step_weight_ratio
        settings["min_total_steps"] = edit.edit_min_total_steps
        settings["steps_of_intervals"] = run.steps_of_intervals
        settings["last_interval_is_open"] = False
    if edit.edit_method in ("co2", "co2-sharded"):
        settings["gap_penalty"], settings["momentum_clip"] = edit.edit_co2_gap_penalty, edit.edit_co2_momentum_clip
    if edit.edit_inner_moments == "average":
        settings["average_moments_every"] = edit.edit_inner_moments_interval
    if is_discontinuous(run.config):
        assert edit.edit_sparsity == 0 or edit.edit_sparsity_method == "magnitude", "random numbers have no reference"
        settings["consensus"], settings["sparsity"] = edit.edit_consensus, edit.edit_sparsity
        settings["comm_dtype"] = edit.edit_comm_dtype
        in_bucket = [f"decoder.layers.{i}.{name}" for i in range(shape.num_layers) for name in BUCKET_ORDER]
        settings["flat_order"] = (EMBEDDING, *in_bucket, OUTPUT, "decoder.final_layernorm.weight")
        unit = run.config.model.make_vocab_size_divisible_by * run.config.parallel.tensor_model_parallel_size
        padding = (-VOCABULARY % unit) * shape.hidden_size
        settings["padding"] = tuple((name, padding) for name in (EMBEDDING, OUTPUT) if name in names)
    return MethodSettings(**settings)


def _edit_settings(run: Run) -> dict[str, Any]:
    """What `plain_edit` knows."""
    edit, optimizer = run.config.edit, run.config.optimizer
    never_ends = 10**9
    outer = {"outer_lr": edit.edit_outer_lr, "outer_momentum": edit.edit_outer_momentum}
    return {
        "sync_interval": edit.edit_sync_interval,
        "warmup_steps": never_ends if edit.edit_method == "baseline" else edit.edit_warmup_steps,
        "betas": (optimizer.adam_beta1, optimizer.adam_beta2),
        "eps": optimizer.adam_eps,
        "weight_decay": optimizer.weight_decay,
        "clip_grad": optimizer.clip_grad,
        "z_loss_coeff": run.config.training.z_loss_coeff,
        **{name: value for name, value in outer.items() if value is not None},
        "pseudo_grad_clip": edit.edit_pseudo_grad_clip,
        "anomaly_threshold": edit.edit_anomaly_threshold,
        "anomaly_alpha": edit.edit_anomaly_alpha,
        "anomaly_warmup_syncs": edit.edit_anomaly_warmup_syncs,
        "weighting": edit.edit_weighting,
        "softmax_temperature": edit.edit_softmax_temperature,
    }


# ---- the comparison -----------------------------------------------------------------------------------------------


def _errors(run: Run, records: list[RankRecord], reference: RunResult) -> Iterator[tuple[str, float]]:
    yield from _step_errors(records, reference)
    yield from _sync_errors(run, records, reference)
    leaders = [record for record in records if record.snapshots]
    share = TURNED_OVER if is_discontinuous(run.config) else 0.0
    # SlowMo's momentum is in units of a gradient: 1 / learning rate times those of a weight.
    momentum_unit = learning_rate(run.config, 1) if run.config.edit.edit_method == "slowmo" else 1.0
    for i, leader in enumerate(leaders):
        for k, sync in enumerate(reference.syncs, 1):
            before = leader.snapshots[f"before sync {k}"]
            yield "weights before a sync", _largest(before, sync.local_parameters[i], share)
        yield "parameters", _largest(leader.snapshots["parameters"], reference.parameters[i], share)
        for j, name in enumerate(("exp_avg", "exp_avg_sq")):
            moments = {key: torch.zeros_like(value) for key, value in reference.parameters[i].items()}
            moments |= {key: pair[j] for key, pair in reference.moments[i].items()}  # none before a first step
            for key, expected in moments.items():
                length = max(float(expected.norm()), 1e-12)
                yield "moments", float((leader.snapshots[name][key].double() - expected).norm()) / length
        if reference.anchor is not None:
            yield "anchor", _largest(leader.snapshots["anchor"], reference.anchor, share)
        if reference.syncs and reference.anchor is not None:
            momentum = reference.syncs[-1].outer_momentum
            if isinstance(reference, MethodResult):
                momentum = reference.outer_momentum
            yield "outer momentum", momentum_unit * _largest(leader.snapshots["outer momentum"], momentum, share)


def _step_errors(records: list[RankRecord], reference: RunResult) -> Iterator[tuple[str, float]]:
    for iteration, expected in enumerate(reference.iterations):
        for i, (loss, norm) in enumerate(zip(expected.losses, expected.grad_norms, strict=True)):
            ranks = [record for record in records if record.place.sync == i]
            if iteration >= len(ranks[0].losses):
                assert math.isnan(loss), f"replica {i} made {iteration} steps"
                continue
            shares = [r.losses[iteration] for r in ranks if r.place.tp == 0]
            tokens = sum(count for _, count in shares)
            found = sum(loss_sum for loss_sum, _ in shares) / max(tokens, 1)
            yield "losses", _relative(found, loss)
            for record in ranks:
                mine = record.grad_norms[iteration]
                yield "grad norms", _relative(mine, norm) if mine is not None else float(expected.updated[i])
                yield "updated", float(record.updated[iteration] != expected.updated[i])


def _sync_errors(run: Run, records: list[RankRecord], reference: RunResult) -> Iterator[tuple[str, float]]:
    keys = [_engine_key(module) for module in modules_of(reference_shape(run.config), _settings(run))]
    in_flight = reference.in_flight if isinstance(reference, MethodResult) else []
    for record in records:
        found = [view.iteration for view in record.syncs]
        yield "iterations of the syncs", float(found != [_iteration(sync, record) for sync in reference.syncs])
    for k, sync in enumerate(reference.syncs):
        one_decision: dict[str, Any] = {}
        for record in records:
            if k >= len(record.syncs):
                continue
            view = record.syncs[k]
            yield "completed", float((view.clip_coefficients is None) != (k in in_flight))
            for column, key in enumerate(view.keys):
                m = keys.index(key)
                decision, verdict = view.decision, view.decision.verdict
                beta = view.clip_coefficients[column] if view.clip_coefficients else 1.0
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
                if isinstance(sync, MethodSyncRecord):
                    yield "due", float(bool(decision.due[column]) != bool(sync.due[m]))
                    yield "steps", float(decision.steps[:, column].tolist() != sync.steps[:, m].tolist())


def _engine_key(module: str) -> str:
    """ "layer 3 mlp" of the reference is "layers.3.mlp"."""
    return module.replace("layer ", "layers.").replace(" ", ".")


def _iteration(sync: SyncRecord, record: RankRecord) -> int:
    """Steps that the rank's replica had made before it."""
    return sync.iterations[record.place.sync] if isinstance(sync, MethodSyncRecord) else sync.iteration


def _largest(found: Parameters, expected: dict[str, Tensor], share: float = 0.0) -> float:
    """Largest error, but for this share of the elements of the whole model."""
    if found.keys() != expected.keys():
        return math.inf
    errors = []
    for name, tensor in found.items():
        both_nan = tensor.isnan() & expected[name].isnan()
        error = (tensor.double() - expected[name]).abs().masked_fill(both_nan, 0.0)
        errors.append(error.nan_to_num(math.inf).flatten())
    joined = torch.cat(errors)
    return float(joined.kthvalue(joined.numel() - int(share * joined.numel())).values)


def _relative(found: float, expected: float) -> float:
    if math.isfinite(found) and math.isfinite(expected):
        return abs(found - expected) / max(abs(expected), 1e-12)
    return 0.0 if math.isfinite(found) == math.isfinite(expected) else math.inf
