"""The table of the Llama's parameters: name, shape, tensor-parallel dim and kind of each.

Every room reads count, floating point operations, shapes and shards from it. Names are canonical: megatron-core's for
the unsharded model with local layers, layers counted globally from 0, such as `decoder.layers.7.mlp.linear_fc1.weight`.
The matrix of the head is a parameter of its own in untied models only. Shapes are those of the unsharded model, without
the padding of the vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, prod
from typing import Literal, Protocol

Kind = Literal["vocabulary", "linear", "gated", "bias", "norm"]

EMBEDDING = "embedding.word_embeddings.weight"
HEAD = "output_layer.weight"
FINAL_NORM = "decoder.final_layernorm.weight"

_LAYER_NAME = re.compile(r"decoder\.layers\.(\d+)\.(.+)")


class ModelSizes(Protocol):
    """What is asked of a model; `ResolvedModel` has it."""

    @property
    def num_layers(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def ffn_hidden_size(self) -> int: ...
    @property
    def num_attention_heads(self) -> int: ...
    @property
    def num_query_groups(self) -> int: ...
    @property
    def kv_channels(self) -> int: ...
    @property
    def seq_length(self) -> int: ...
    @property
    def untie_embeddings_and_output_weights(self) -> bool: ...
    @property
    def add_qkv_bias(self) -> bool: ...
    @property
    def add_attention_output_bias(self) -> bool: ...
    @property
    def qk_layernorm(self) -> bool: ...


@dataclass(frozen=True)
class Parameter:
    """One parameter of the whole model.

    name           canonical
    shape          unsharded, without the padding of the vocabulary
    partition_dim  dim along which tensor parallelism cuts it; None: every rank holds it whole
    kind           vocabulary: its rows are the vocabulary, so they are padded; linear: a projection; gated: gate and
                   up projection on top of each other, each half is cut by itself; bias; norm
    """

    name: str
    shape: tuple[int, ...]
    partition_dim: int | None
    kind: Kind

    @property
    def size(self) -> int:
        """Elements."""
        return prod(self.shape)


@dataclass(frozen=True)
class _Row:
    """A parameter of any model: `name` inside its layer, `shape` in the names of `_sizes`, `only_with`: a setting."""

    name: str
    shape: tuple[str, ...]
    partition_dim: int | None
    kind: Kind
    only_with: str | None = None


# fmt: off
_BEFORE = (_Row(EMBEDDING, ("vocabulary", "hidden"), 0, "vocabulary"),)
_LAYER = (
    _Row("input_layernorm.weight", ("hidden",), None, "norm"),
    _Row("self_attention.linear_qkv.weight", ("query_key_value", "hidden"), 0, "linear"),
    _Row("self_attention.linear_qkv.bias", ("query_key_value",), 0, "bias", "add_qkv_bias"),
    _Row("self_attention.q_layernorm.weight", ("head",), None, "norm", "qk_layernorm"),
    _Row("self_attention.k_layernorm.weight", ("head",), None, "norm", "qk_layernorm"),
    _Row("self_attention.linear_proj.weight", ("hidden", "query"), 1, "linear"),
    _Row("self_attention.linear_proj.bias", ("hidden",), None, "bias", "add_attention_output_bias"),
    _Row("pre_mlp_layernorm.weight", ("hidden",), None, "norm"),
    _Row("mlp.linear_fc1.weight", ("gate_and_up", "hidden"), 0, "gated"),
    _Row("mlp.linear_fc2.weight", ("hidden", "ffn"), 1, "linear"),
)
_AFTER = (
    _Row(FINAL_NORM, ("hidden",), None, "norm"),
    _Row(HEAD, ("vocabulary", "hidden"), 0, "vocabulary", "untie_embeddings_and_output_weights"),
)
# fmt: on
_BY_NAME = {row.name: row for row in (*_BEFORE, *_LAYER, *_AFTER)}


def parameters_of(model: ModelSizes, vocab_size: int) -> list[Parameter]:
    """Every parameter of the resolved `model`, in forward order; a tied matrix once."""
    sizes = _sizes(model, vocab_size)

    def of(rows: tuple[_Row, ...], prefix: str = "") -> Iterator[Parameter]:
        for row in rows:
            if row.only_with is None or getattr(model, row.only_with):
                shape = tuple(sizes[size] for size in row.shape)
                yield Parameter(prefix + row.name, shape, row.partition_dim, row.kind)

    layers = [parameter for n in range(model.num_layers) for parameter in of(_LAYER, f"decoder.layers.{n}.")]
    return [*of(_BEFORE), *layers, *of(_AFTER)]


def _sizes(model: ModelSizes, vocab_size: int) -> dict[str, int]:
    query = model.num_attention_heads * model.kv_channels
    return {
        "vocabulary": vocab_size,
        "hidden": model.hidden_size,
        "head": model.kv_channels,
        "query": query,
        "query_key_value": query + 2 * model.num_query_groups * model.kv_channels,
        "ffn": model.ffn_hidden_size,
        "gate_and_up": 2 * model.ffn_hidden_size,
    }


def full_parameter_shapes(model: ModelSizes, vocab_size: int) -> dict[str, tuple[int, ...]]:
    """Shape of every full tensor by canonical name, in forward order."""
    return {parameter.name: parameter.shape for parameter in parameters_of(model, vocab_size)}


def parameter_count(model: ModelSizes, vocab_size: int) -> int:
    """Parameters of the whole model, each counted once and without vocabulary padding."""
    return sum(parameter.size for parameter in parameters_of(model, vocab_size))


def training_flops_per_token(model: ModelSizes, vocab_size: int) -> float:
    """Floating point operations of one token's forward and backward pass in all matrix products.

    A product costs 2 operations a weight forward and twice that backward; the embedding is a look-up, but where it is
    tied it is the head too. Attention counts the full square of the sequence, as Megatron-LM and the usual model FLOP
    utilisation do (arXiv 2204.02311, appendix B); recomputation is not counted.
    """
    weights = sum(one.size for one in parameters_of(model, vocab_size) if one.kind in ("linear", "gated"))
    sizes = _sizes(model, vocab_size)
    head = sizes["vocabulary"] * sizes["hidden"]  # its own matrix or the embedding's
    attention_scores = model.num_layers * 2 * model.seq_length * sizes["query"]  # query x key, probabilities x value
    return 6.0 * (weights + attention_scores + head)


def padded_vocabulary_size(vocab_size: int, divisible_by: int, tensor_model_parallel_size: int) -> int:
    """Smallest multiple of divisible_by x tensor_model_parallel_size that holds the vocabulary, as in Megatron-LM."""
    multiple = divisible_by * tensor_model_parallel_size
    return ceil(vocab_size / multiple) * multiple


def partition_dim(name: str) -> int | None:
    """Dim along which tensor parallelism cuts the tensor; None for one that every rank holds whole."""
    return _row(name).partition_dim


def kind_of(name: str) -> Kind:
    """See `Parameter`."""
    return _row(name).kind


def is_gated(name: str) -> bool:
    """Whether the tensor is gate and up projection on top of each other; each half is cut by itself."""
    return kind_of(name) == "gated"


def is_vocabulary(name: str) -> bool:
    """Whether the rows of the tensor are the vocabulary, so that it is padded."""
    return kind_of(name) == "vocabulary"


def _row(name: str) -> _Row:
    layer = split_layer(name)
    return _BY_NAME[layer[1] if layer else name]


def split_layer(name: str) -> tuple[int, str] | None:
    """(layer, name inside it) of a parameter of a layer; None of another."""
    match = _LAYER_NAME.fullmatch(name)
    return (int(match[1]), match[2]) if match else None


def module_key(canonical: str, modules: str = "layer") -> str:
    """Module of the sync that a parameter belongs to: "embedding", "layers.N" or "head".

    A tied matrix is in "embedding" on both stages; "head" is then the final norm alone. With `modules` "sublayer" a
    layer is two, "layers.N.attention" and "layers.N.mlp", each with the norm before it.
    """
    if canonical == EMBEDDING:
        return "embedding"
    if layer := split_layer(canonical):
        number, rest = layer
        if modules == "layer":
            return f"layers.{number}"
        in_mlp = rest.startswith(("mlp.", "pre_mlp_layernorm."))
        return f"layers.{number}.{'mlp' if in_mlp else 'attention'}"
    assert canonical in (HEAD, FINAL_NORM), canonical
    return "head"


def module_keys(num_layers: int, modules: str = "layer") -> list[str]:
    """All modules of the whole model, in forward order."""
    parts = [""] if modules == "layer" else [".attention", ".mlp"]
    return ["embedding", *(f"layers.{n}{part}" for n in range(num_layers) for part in parts), "head"]
