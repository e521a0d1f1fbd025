"""The command line of tools/verify_conversion.py: our logits against those of transformers, on given text."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_edit.config.paths import PathParser
from megatron_edit.config.schema import ConfigError
from megatron_edit.convert.errors import ConversionError
from megatron_edit.convert.safetensors_file import read_header
from megatron_edit.inference.start import Started, add_flags, run

_SPREADS = 3  # how many times transformers' difference from itself is let through: rounding, not another model
_TEXT = "The anchor is the set of weights that all replicas held after their last synchronisation. 0123456789"


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns the exit code: 0 equal within --tolerance, 1 different, 2 nothing to compare."""
    parser = PathParser(
        description="Logits of a checkpoint against those of transformers.", allow_abbrev=False
    )
    add_flags(parser)
    parser.add_argument("--hf", type=Path, required=True, metavar="DIR", help="Hugging Face folder for transformers")
    parser.add_argument("--text", default=_TEXT, help="text to compare on")
    parser.add_argument("--text-file", type=Path, metavar="FILE")
    parser.add_argument("--max-tokens", type=int, default=512, metavar="N", help="of the text")
    parser.add_argument(
        "--tolerance", type=float, default=1e-5,
        help="largest difference that is let through, as a part of the largest logit; more where transformers differs "
        "from itself by more",
    )  # fmt: skip
    parser.add_argument("--per-layer", action="store_true", help="list the layers though the logits agree")
    parser.set_defaults(dtype="float32")
    arguments = parser.parse_args(argv)
    outcome: list[bool] = []
    code = run(arguments, lambda started: outcome.append(_compare(arguments, started)))
    return code if code else int(not outcome[0])


def _compare(arguments: argparse.Namespace, started: Started) -> bool:
    """Whether the logits are equal, on all ranks: their largest difference is within the tolerance (a part of the
    largest logit), or within what transformers differs from itself between two ways to compute the attention (ours).

    A model with large hidden states loses more digits to rounding than any fixed bound would let through.
    """
    try:
        text = arguments.text_file.read_text(encoding="utf-8") if arguments.text_file else arguments.text
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"--text-file {arguments.text_file} cannot be read: {error}"]) from None
    ids = started.encode(text)[: arguments.max_tokens]
    if not ids:
        raise ConfigError(["the text has no tokens"])
    tokens = torch.tensor([ids])
    with tempfile.TemporaryDirectory() as folder:
        reference = _reference(arguments.hf, ids, Path(folder))  # each rank its own: they are few here
        mine = _layer_outputs(started, tokens)
        logits = started.model.logits(tokens)
        if logits.shape != reference["logits"].shape:
            raise ConversionError(
                f"{arguments.load} has logits {list(logits.shape)}, {arguments.hf} {list(reference['logits'].shape)}"
            )
        expected = reference["logits"]
        largest, scale, spread = _difference(logits, expected), _largest(expected), reference["spread"].item()
        layers = {
            number: (_difference(output, reference[f"layer.{number}"]), _largest(reference[f"layer.{number}"]))
            for number, output in mine.items()
        }
    gathered: list[Any] = [None] * dist.get_world_size(started.model.mesh.process_groups.pp)
    dist.all_gather_object(gathered, layers, group=started.model.mesh.process_groups.pp)
    equal = largest <= max(arguments.tolerance * scale, _SPREADS * spread)
    started.say(
        f"{len(ids)} tokens, vocabulary {logits.shape[-1]}: logits differ by at most {largest:.3e}, "
        f"{largest / scale:.1e} of the largest logit {scale:.3g}; transformers differs from itself by {spread:.1e} "
        "between two attentions"
    )
    if arguments.per_layer or not equal:
        for number, (difference, value) in sorted(item for stage in gathered for item in stage.items()):
            started.say(f"  layer {number}: {difference / value:.1e} of the largest value {value:.4g}")
    started.say(
        f"{'equal' if equal else 'different'}, with --tolerance {arguments.tolerance:g} of the largest logit, or "
        f"{_SPREADS} times transformers' own difference"
    )
    return equal


def _largest(tensor: torch.Tensor) -> float:
    """Largest absolute value, never 0."""
    return max(tensor.double().abs().max().item(), 1e-30)


def _difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """Largest absolute difference; NaN where either is NaN."""
    return (one.double() - other.double()).abs().max().item()


def _layer_outputs(started: Started, tokens: torch.Tensor) -> dict[int, torch.Tensor]:
    """Outputs [B, S, H] of this stage's layers by global number."""
    found: dict[int, torch.Tensor] = {}

    def keep(layer: Any, _: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        found[layer.layer_number - 1] = hidden.detach().transpose(0, 1).float().cpu()

    hooks = [layer.register_forward_hook(keep) for layer in started.model.chunk.decoder.layers]
    started.model.logits(tokens)
    for hook in hooks:
        hook.remove()
    return found


def _reference(model: Path, ids: list[int], folder: Path) -> dict[str, torch.Tensor]:
    """What transformers finds, in a process that this program's platform has not touched."""
    (folder / "tokens.json").write_text(json.dumps([ids]))
    result = subprocess.run(
        [sys.executable, "-m", "megatron_edit.convert.reference", "--model", str(model), "--tokens",
         str(folder / "tokens.json"), "--output", str(folder / "out.safetensors")],
        capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    if result.returncode:
        raise ConversionError(f"transformers cannot run {model}: {(result.stderr.strip().splitlines() or ['?'])[-1]}")
    return {name: tensor.read() for name, tensor in read_header(folder / "out.safetensors").items()}
