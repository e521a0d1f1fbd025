"""How the tools of inference start: flags that they share, the ranks, the model, the tokenizer."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megatron_edit.checkpoint.errors import CheckpointError
from megatron_edit.config.schema import ConfigError
from megatron_edit.convert.errors import ConversionError
from megatron_edit.convert.open import open_weights
from megatron_edit.convert.weights import Weights, parse_dtype
from megatron_edit.data.added_tokens import read_mapping
from megatron_edit.data.errors import DataError
from megatron_edit.data.tokenizers import TOKENIZER_TYPES, Tokenizer, build_tokenizer
from megatron_edit.model.transformer_engine import TransformerEngineError
from megatron_edit.platform import PlatformError, get_platform
from megatron_edit.ranks.launcher import launched

if TYPE_CHECKING:
    from megatron_edit.inference.model import InferenceModel

USER_ERRORS = (ConfigError, DataError, PlatformError, TransformerEngineError, CheckpointError, ConversionError)
_TIMEOUT = timedelta(minutes=10)
_SECONDS_FOR_THE_CAUSE = 5.0


@dataclass(frozen=True)
class Started:
    """What a tool works with. `stop_ids` end a text."""

    model: InferenceModel
    weights: Weights
    tokenizer: Tokenizer
    begins_with_bos: bool
    stop_ids: list[int]
    is_first_rank: bool

    def say(self, line: str) -> None:
        """On one rank."""
        if self.is_first_rank:
            print(line, flush=True)

    def encode(self, text: str) -> list[int]:
        """Ids of a text from its beginning on; one begin id, also where the text itself spells it and is parsed."""
        ids, bos_id = self.tokenizer.tokenize(text), self.tokenizer.bos_id
        return [bos_id, *ids] if self.begins_with_bos and bos_id is not None and ids[:1] != [bos_id] else ids


def add_flags(parser: argparse.ArgumentParser, *, parse_special_tokens: bool = False) -> None:
    """Flags of every tool here. `parse_special_tokens`: the default of that flag."""
    group = parser.add_argument_group("model")
    group.add_argument("--load", type=Path, required=True, metavar="DIR", help="checkpoint, or Hugging Face folder")
    group.add_argument("--ckpt-step", type=int, metavar="N", help="iteration; default: weights of the end, or the last")
    group.add_argument("--replica", type=int, metavar="I", help="local weights of this replica, not the anchor")
    group.add_argument("--tensor-model-parallel-size", type=int, default=1, metavar="N")
    group.add_argument("--pipeline-model-parallel-size", type=int, default=1, metavar="N")
    group.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    group.add_argument("--dtype", help="default: as stored, float32 on a CPU")
    group.add_argument("--tokenizer-type", choices=TOKENIZER_TYPES, help="default: what came with the weights")
    group.add_argument("--tokenizer-model", metavar="PATH")
    group.add_argument("--vocab-size", type=int, help="of NullTokenizer")
    group.add_argument(
        "--add-bos", action=argparse.BooleanOptionalAction, default=None,
        help="begin every text with the begin id; default: as the tokenizer's own file says",
    )  # fmt: skip
    group.add_argument(
        "--parse-special-tokens", action=argparse.BooleanOptionalAction, default=parse_special_tokens,
        help="a special token that a text spells (<|im_start|>) becomes its id; otherwise it is plain text; default "
        f"here: {'on' if parse_special_tokens else 'off'}",
    )  # fmt: skip


def run(
    arguments: argparse.Namespace, work: Callable[[Started], None], environment: Mapping[str, str] = os.environ
) -> int:
    """Starts the ranks, builds the model, does `work`; the exit code: 0, 2 for what the user can mend, else 1."""
    rank = int(environment.get("RANK", "0"))
    try:
        if (found := launched(environment)) is not None:
            os.environ.update(found.environment)
            environment = {**environment, **found.environment}
            rank = int(environment["RANK"])
        started = _start(arguments, environment)
        for note in started.weights.notes:
            started.say(f"note: {note}")
        work(started)
    except USER_ERRORS as error:
        if rank != 0:
            time.sleep(_SECONDS_FOR_THE_CAUSE)  # the first rank has mostly the same to say
        else:
            print("\n".join(f"error: {line}" for line in str(error).splitlines()), file=sys.stderr, flush=True)
        return 2
    dist.barrier()
    return 0


def _start(arguments: argparse.Namespace, environment: Mapping[str, str]) -> Started:
    weights = open_weights(arguments.load, step=arguments.ckpt_step, replica=arguments.replica)
    dtype = parse_dtype(arguments.dtype)
    tokenizer, folder = _tokenizer(arguments, weights)
    platform = get_platform(arguments.device, int(environment.get("LOCAL_RANK", "0")))
    platform.initialize()
    tensor, pipeline = arguments.tensor_model_parallel_size, arguments.pipeline_model_parallel_size
    world_size = int(environment.get("WORLD_SIZE", "1"))
    if tensor * pipeline != world_size:
        raise ConfigError([
            f"--tensor-model-parallel-size {tensor} x --pipeline-model-parallel-size {pipeline} needs "
            f"{tensor * pipeline} ranks, {world_size} were started: torchrun --nproc-per-node {tensor * pipeline}"
        ])  # fmt: skip
    from megatron_edit.convert.megatron import layout_settings  # late: megatron-core takes seconds
    from megatron_edit.inference.model import InferenceModel
    from megatron_edit.parallel.layout import Layout
    from megatron_edit.parallel.mesh import build_mesh

    layout_settings(weights, tensor, pipeline, None)
    _initialize_process_group(platform.backend, environment)
    mesh = build_mesh(Layout(tp=tensor, pp=pipeline), platform, timeout_seconds=_TIMEOUT.total_seconds())
    if dtype is None:
        dtype = torch.float32 if platform.name == "cpu" else weights.dtype(next(iter(weights.shapes)))
    bos = arguments.add_bos if arguments.add_bos is not None else _adds_bos(tokenizer, folder)
    return Started(
        InferenceModel(weights, mesh, dtype), weights, tokenizer, bos, _stop_ids(tokenizer, weights), mesh.rank == 0
    )


def _initialize_process_group(backend: str, environment: Mapping[str, str]) -> None:
    if dist.is_initialized():
        return
    if "RANK" in environment:
        dist.init_process_group(backend, timeout=_TIMEOUT)
    else:  # started without torchrun: one rank
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=_TIMEOUT)


def _tokenizer(arguments: argparse.Namespace, weights: Weights) -> tuple[Tokenizer, Path | None]:
    """The tokenizer of the flags, or of the weights, and the folder of its tokenizer.json."""
    from megatron_edit.convert.assets import JSON, SENTENCEPIECE

    kind, path, vocab_size = arguments.tokenizer_type, arguments.tokenizer_model, arguments.vocab_size
    if kind is None:
        assets, record = weights.assets, weights.tokenizer or {}
        if path is not None:
            kind = "SentencePieceTokenizer" if path.endswith(".model") else "HuggingFaceTokenizer"
        elif assets is not None and (assets / JSON).exists():
            kind, path = "HuggingFaceTokenizer", str(assets)
        elif assets is not None and (assets / SENTENCEPIECE).exists():
            kind, path = "SentencePieceTokenizer", str(assets / SENTENCEPIECE)
        elif record.get("type") is not None:
            kind, path = record["type"], record["model"]
            vocab_size = weights.vocab_size - 1 if kind == "NullTokenizer" else None
        else:
            raise DataError(f"{weights.folder} came without a tokenizer: give --tokenizer-type and --tokenizer-model")
    tokenizer = build_tokenizer(kind, path, vocab_size, parse_special_tokens=arguments.parse_special_tokens)
    folder = Path(path) if path is not None and kind == "HuggingFaceTokenizer" else None
    return tokenizer, folder if folder is None or folder.is_dir() else folder.parent


def _adds_bos(tokenizer: Tokenizer, folder: Path | None) -> bool:
    """Whether the tokenizer's own template begins a text with its begin id, as the model then was trained."""
    if folder is None or tokenizer.bos_id is None:
        return False
    from tokenizers import Tokenizer as Backend

    ids = Backend.from_file(str(folder / "tokenizer.json")).encode("x").ids
    return bool(ids) and ids[0] == tokenizer.bos_id


def _stop_ids(tokenizer: Tokenizer, weights: Weights) -> list[int]:
    """Of the tokenizer, and those that config.json and generation_config.json name: one or a list."""
    from megatron_edit.convert.assets import generation_config

    ids: list[Any] = [tokenizer.eod_id]
    path = generation_config(weights)
    generation = read_mapping(path) if path is not None else {}
    for config in (weights.origin.get("config", {}), generation):
        named = config.get("eos_token_id")
        ids += named if isinstance(named, list) else [named]
    return sorted({i for i in ids if isinstance(i, int)})
