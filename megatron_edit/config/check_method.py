"""Checks of the synchronisation method: its trigger, and settings that it does not take. `config` is resolved."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_edit.config.arithmetic import count_modules
from megatron_edit.config.resolved import resolved_model
from megatron_edit.config.schema import Config
from megatron_edit.config.settings import SETTINGS, flag_of, is_given, value_of
from megatron_edit.tables.methods import METHODS, Method, settings_of_others
from megatron_edit.tables.parameters import parameter_count

PENALTY = ("edit_weighting", "edit_anomaly_threshold", "edit_pseudo_grad_clip")
_NEEDS_ANCHOR = ("edit_consensus", "edit_sparsity", "edit_cpu_offload", "edit_outer_lr", "edit_outer_momentum")


def check_method(config: Config) -> Iterator[str]:
    """Contradictions between --edit-method and the other settings of the sync."""
    edit = config.edit
    if edit.edit_method not in METHODS:
        return  # reported by itself
    method = METHODS[edit.edit_method]
    yield from _check_trigger(config, method)
    if method.is_local:
        yield from _check_taken(config, method)
        yield from _check_combinations(config, method)


def _check_trigger(config: Config, method: Method) -> Iterator[str]:
    edit, training = config.edit, config.training
    name = f"--edit-method {method.name}"
    if method.trigger != "time":
        for setting, owner in settings_of_others(method).items():
            if owner.trigger == "time" and _changed(config, setting):
                yield (
                    f"{flag_of(setting)} {value_of(config, setting)} is {owner.name}'s, and {name} synchronises by "
                    f"steps: leave it out, or give --edit-method {owner.name}"
                )
        if edit.edit_sync_interval == 0 and method.is_local:
            yield (
                f"--edit-sync-interval 0 means --edit-method baseline, and {name} is given: give an interval of 1 or "
                "more, for example 128, or leave the method out"
            )
        return
    if _changed(config, "edit_sync_interval") or config.sources.get("edit_sync_interval") == "flag":
        yield (
            f"--edit-sync-interval {edit.edit_sync_interval} and {name} contradict: {method.name} synchronises by wall "
            f"clock, every --edit-sync-time {edit.edit_sync_time:g} seconds; leave the interval out"
        )
    if not method.equal_steps and is_given(config, "train_iters"):
        samples = (training.train_iters or 0) * (training.global_batch_size or 1)
        yield (
            f"--train-iters {training.train_iters} and {name} contradict: its replicas make different numbers of "
            f"iterations; give --train-samples, for example {samples}"
        )
    if edit.edit_step_weight_ratio > 1:
        yield f"--edit-step-weight-ratio {edit.edit_step_weight_ratio:g} is above 1; 0.5 would work"


def _check_taken(config: Config, method: Method) -> Iterator[str]:
    """Settings that the method has no use for. (`baseline` has no use for any: a note says so.)"""
    name = f"--edit-method {method.name}"

    def refused(settings: tuple[str, ...], why: str) -> Iterator[str]:
        for setting in settings:
            if _changed(config, setting) and value_of(config, setting) != _row_default(method, setting):
                yield f"{flag_of(setting)} {value_of(config, setting)} has no place in {name}: {why}"

    for setting, owner in settings_of_others(method).items():
        if owner.trigger != "time":  # said above
            yield from refused((setting,), f"it is {owner.name}'s; --edit-method {owner.name} takes it")
    if not method.takes_penalty:
        others = ", ".join(row.name for row in METHODS.values() if row.takes_penalty)
        yield from refused(PENALTY, f"it takes the plain mean; these take the penalty: {others}")
    if not method.has_anchor:
        yield from refused(_NEEDS_ANCHOR, "it averages parameters and keeps no anchor")
    if method.placement == "round" and is_given(config, "edit_sync_placement"):
        yield f"--edit-sync-placement {config.edit.edit_sync_placement} has no place in {name}: its sync takes a round"
    if method.shards_over_sync:
        yield from refused(("edit_cpu_offload",), "its anchor and outer momentum are dealt out over the replicas")


def _check_combinations(config: Config, method: Method) -> Iterator[str]:
    edit = config.edit
    delay, interval = edit.edit_sync_delay, edit.edit_sync_interval
    if method.trigger == "staggered":
        if delay > interval:
            yield (
                f"--edit-sync-delay {delay} is longer than --edit-sync-interval {interval}: a module's next sync would "
                f"begin before its last is applied; 0 to {interval} would work"
            )
        if edit.edit_mixing_alpha is not None and not delay:
            yield f"--edit-mixing-alpha {edit.edit_mixing_alpha:g} needs --edit-sync-delay of 1 or more"
        if delay and is_given(config, "edit_sync_placement"):
            yield (
                f"--edit-sync-placement {edit.edit_sync_placement} and --edit-sync-delay {delay} contradict: a delayed "
                "sync is applied after a step; leave the placement out"
            )
        modules = count_modules(config)
        if (edit.edit_num_fragments or 0) > modules:
            yield (
                f"--edit-num-fragments {edit.edit_num_fragments} is more than the {modules} modules of the model "
                f"(--edit-modules {edit.edit_modules}): 1 to {modules} would work"
            )
    delayed = delay > 0 or method.placement == "round"
    if edit.edit_inner_moments == "average" and delayed:
        how = f"--edit-sync-delay {delay}" if delay else f"--edit-method {method.name}"
        yield f"--edit-inner-moments average and {how} contradict: the moments move on before the result is applied"
    if _changed(config, "edit_inner_moments_interval") and edit.edit_inner_moments == "keep":
        yield f"--edit-inner-moments-interval {edit.edit_inner_moments_interval} needs --edit-inner-moments average"
    if edit.edit_consensus != "none" and edit.edit_comm_dtype != "fp32":
        yield (
            f"--edit-consensus {edit.edit_consensus} and --edit-comm-dtype {edit.edit_comm_dtype} contradict: the "
            "votes on signs are counted in fp32"
        )
    if _changed(config, "edit_sparsity_method") and edit.edit_sparsity == 0:
        yield f"--edit-sparsity-method {edit.edit_sparsity_method} needs --edit-sparsity above 0, for example 0.5"
    if config.checkpoint.save_scope == "compact" and (delayed or method.trigger == "staggered"):
        yield (
            f"--save-scope compact and --edit-method {method.name} contradict: its replicas are never all at a sync; "
            "--save-scope full would work"
        )


def check_offload(config: Config, world_size: int, local_world_size: int, free_bytes: int) -> Iterator[str]:
    """Room in host memory for --edit-cpu-offload: fp32 anchor and outer momentum of the ranks of a node.

    `free_bytes`: of this node. A lower bound: the vocabulary is left out, as the tokenizer is not known here.
    """
    replicas, model = config.edit.edit_num_replicas, config.model
    if not config.edit.edit_cpu_offload or not replicas or model.kv_channels is None:
        return
    needed = 8 * parameter_count(resolved_model(model), 0) * local_world_size * replicas // world_size
    if needed > free_bytes:
        yield (
            f"--edit-cpu-offload needs at least {needed / 1e9:.1f} GB of host memory on a node (anchor and outer "
            f"momentum of its {local_world_size} ranks), {free_bytes / 1e9:.1f} GB are free: leave it out, or let "
            "fewer replicas share a node"
        )


def _row_default(method: Method, setting: str) -> object:
    """The row's own value: a file that --print-config wrote gives it, and that is not a contradiction."""
    rows = {
        "edit_weighting": method.weighting,
        "edit_anomaly_threshold": method.anomaly_threshold,
        "edit_pseudo_grad_clip": method.pseudo_grad_clip,
    }
    return rows.get(setting, SETTINGS[setting].default)


def _changed(config: Config, name: str) -> bool:
    return is_given(config, name) and value_of(config, name) != SETTINGS[name].default
