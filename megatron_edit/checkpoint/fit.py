"""Whether a checkpoint's tensors are those of this run's model."""

from __future__ import annotations

from dataclasses import asdict

import torch.distributed as dist

from megatron_edit.checkpoint.errors import CheckpointError
from megatron_edit.checkpoint.folders import Candidate
from megatron_edit.checkpoint.torch_dist import stored_tensors
from megatron_edit.checkpoint.training_state import MODEL, TrainingState, expected_tensors, local_key, shared_key
from megatron_edit.config.settings import SETTINGS
from megatron_edit.ranks.collective import on_first_rank

_SHOWN = 12  # differences that are listed
_GEOMETRY = (
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels",
    "untie_embeddings_and_output_weights", "add_qkv_bias", "add_attention_output_bias", "qk_layernorm",
)  # fmt: skip
_MAY_CHANGE = ("make_vocab_size_divisible_by", "transformer_impl", "model_size", "init_method_std")


def check_fit(
    state: TrainingState, candidate: Candidate, group: dist.ProcessGroup, *, weights_only: bool = False
) -> list[str]:
    """Remarks on settings that differ; CheckpointError with every tensor that does."""
    differences, remarks = on_first_rank(lambda: _differences(state, candidate, weights_only), group)
    if differences:
        more = f"\n  and {len(differences) - _SHOWN} more" if len(differences) > _SHOWN else ""
        raise CheckpointError(
            f"{candidate.folder} does not fit this run's model:\n  " + "\n  ".join(differences[:_SHOWN]) + more
        )
    return remarks


def _differences(state: TrainingState, candidate: Candidate, weights_only: bool) -> tuple[list[str], list[str]]:
    saved, stored = candidate.manifest.content, stored_tensors(candidate.folder)
    own = asdict(state.model)
    differences = [
        f"{name}: expected {own[name]}, found {found}"
        for name in _GEOMETRY
        if own[name] != (found := saved["model"].get(name, SETTINGS[name].default))  # of before the setting was there
    ]
    if saved["vocab_size"] != state.vocab_size:
        differences.append(f"vocabulary: expected {state.vocab_size}, found {saved['vocab_size']}")
    if weights_only:
        expected = {weights_key(candidate, name): shape for name, shape in state.shapes.items()}
    else:
        expected = expected_tensors(saved, state.shapes)
    for name, shape in expected.items():
        if name not in stored:
            differences.append(f"{name}: expected {list(shape)}, not found")
        elif stored[name].shape != shape:
            differences.append(f"{name}: expected {list(shape)}, found {list(stored[name].shape)}")
        elif not stored[name].complete:
            differences.append(f"{name}: expected {list(shape)}, found {stored[name].elements_written} of its elements")
    # of another model's parameters one state is enough to name them
    prefix = weights_key(candidate, "")
    differences += [
        f"{name}: not expected, found {list(stored[name].shape)}"
        for name in sorted(stored)
        if name.startswith(prefix) and name.removeprefix(prefix) not in state.shapes
    ]
    # a converted model had no samples: its seq_length is a proposal
    may_change = (*_MAY_CHANGE, *(("seq_length",) if "converted_from" in saved else ()))
    remarks = [
        f"{name} was {saved['model'][name]} when it was saved, and is {own[name]} now"
        for name in own
        if name not in (*_GEOMETRY, *may_change) and own[name] != saved["model"].get(name, own[name])
    ]
    return differences, remarks


def weights_key(candidate: Candidate, name: str) -> str:
    """Key of the parameter `name` in what `--finetune` reads: the anchor where there is one."""
    if candidate.manifest.scope == "weights":
        return MODEL + name
    return shared_key("anchor", name) if candidate.manifest.content["has_anchor"] else local_key(0, "param", name)
