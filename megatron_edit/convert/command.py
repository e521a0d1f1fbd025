"""The command line of tools/convert_checkpoint.py. It needs no GPU and leaves torch as it is."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import megatron_edit.platform.base as platform
from megatron_edit.checkpoint.errors import CheckpointError
from megatron_edit.config.paths import PathParser
from megatron_edit.config.schema import ConfigError
from megatron_edit.convert.errors import ConversionError
from megatron_edit.convert.folder import Written
from megatron_edit.convert.hugging_face import MAX_SHARD_BYTES, HuggingFaceWeights, write_hugging_face
from megatron_edit.convert.weights import Weights, parse_dtype
from megatron_edit.data.errors import DataError
from megatron_edit.tables.parameters import parameter_count

USER_ERRORS = (ConversionError, CheckpointError, ConfigError, DataError)
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def run(main: Callable[[], None]) -> int:
    """Exit code of `main`: 0, 2 for what the user can mend (one message), 1 for a failing disk."""
    try:
        main()
    except USER_ERRORS as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: {error}; nothing was left behind", file=sys.stderr)
        return 1
    return 0


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns the exit code."""
    arguments = _parser().parse_args(argv)
    platform.quiet_megatron_warnings()
    return run(lambda: arguments.convert(arguments))


def _parser() -> argparse.ArgumentParser:
    parser = PathParser(description="Converts weights.", allow_abbrev=False)
    commands = parser.add_subparsers(required=True, metavar="DIRECTION")

    def command(name: str, convert: Callable[[argparse.Namespace], None], help: str) -> argparse.ArgumentParser:
        one = commands.add_parser(name, help=help, description=help, allow_abbrev=False)
        one.set_defaults(convert=convert)
        one.add_argument("--input", type=Path, required=True, metavar="DIR")
        one.add_argument("--output", type=Path, required=True, metavar="DIR")
        one.add_argument("--overwrite", action="store_true", help="replace --output if it exists")
        one.add_argument("--dtype", help="float32, bfloat16 or float16; default: as stored")
        one.add_argument("--quiet", action="store_true", help="do not print each tensor")
        return one

    def layout(one: argparse.ArgumentParser) -> None:
        one.add_argument(
            "--tensor-model-parallel-size", type=int, default=1, help="for model.yaml; a load can change it"
        )
        one.add_argument("--pipeline-model-parallel-size", type=int, default=1, help="for model.yaml")
        one.add_argument("--num-layers-per-virtual-pipeline-stage", type=int, help="for model.yaml")

    one = command("hf-to-megatron", _hf_to_megatron, "Hugging Face folder -> weights that --finetune starts from")
    layout(one)
    one.add_argument("--max-position-embeddings", type=int, help="use the model for so many tokens at most")
    one = command("megatron-to-hf", _megatron_to_hf, "checkpoint of this program -> Hugging Face folder")
    one.add_argument("--ckpt-step", type=int, metavar="N", help="iteration; default: the newest weights")
    one.add_argument("--replica", type=int, metavar="I", help="local weights of this replica instead of the anchor")
    one.add_argument(
        "--architecture", metavar="NAME", help="llama, qwen2, qwen3, mistral; default: the first that fits"
    )
    one.add_argument("--tokenizer-model", type=Path, metavar="PATH", help="another tokenizer than the run's")
    one.add_argument("--max-shard-size", type=_size, default=MAX_SHARD_BYTES, metavar="5GB")
    one = command("megatron-lm-to-megatron", _megatron_lm, "torch_dist checkpoint of Megatron-LM -> the same")
    layout(one)
    one.add_argument("--vocab-size", type=int, help="ids of the tokenizer, without padding; default: the checkpoint's")
    one.add_argument("--config", type=Path, metavar="FILE.yaml", help="model settings, where the checkpoint lacks them")
    one.add_argument("--tokenizer-model", type=Path, metavar="DIR", help="folder with the tokenizer's files")
    return parser


def _hf_to_megatron(arguments: argparse.Namespace) -> None:
    _to_megatron(
        arguments,
        lambda: HuggingFaceWeights(arguments.input, max_position_embeddings=arguments.max_position_embeddings),
    )


def _megatron_lm(arguments: argparse.Namespace) -> None:
    from megatron_edit.convert.megatron_lm import MegatronLMWeights

    _to_megatron(
        arguments,
        lambda: MegatronLMWeights(
            arguments.input, vocab_size=arguments.vocab_size, config=arguments.config, assets=arguments.tokenizer_model
        ),
    )


def _to_megatron(arguments: argparse.Namespace, opened: Callable[[], Weights]) -> None:
    from megatron_edit.convert.megatron import SETTINGS_FILE, layout_settings, write_megatron

    started = time.monotonic()
    dtype = parse_dtype(arguments.dtype)
    weights = opened()
    layout = layout_settings(
        weights,
        arguments.tensor_model_parallel_size,
        arguments.pipeline_model_parallel_size,
        arguments.num_layers_per_virtual_pipeline_stage,
    )
    _say_what(weights)
    written = write_megatron(
        weights, arguments.output, dtype=dtype, layout=layout, overwrite=arguments.overwrite,
        progress=_progress(arguments),
    )  # fmt: skip
    _say_written(written, started)
    print(f"train with: --load {written.folder} --finetune --config {written.folder / SETTINGS_FILE}, which holds:")
    print("  " + (written.folder / SETTINGS_FILE).read_text().rstrip().replace("\n", "\n  "))


def _megatron_to_hf(arguments: argparse.Namespace) -> None:
    from megatron_edit.convert.megatron import MegatronWeights

    started = time.monotonic()
    dtype = parse_dtype(arguments.dtype)
    weights = MegatronWeights(arguments.input, step=arguments.ckpt_step, replica=arguments.replica)
    _say_what(weights)
    written = write_hugging_face(
        weights, arguments.output, dtype=dtype, architecture=arguments.architecture,
        max_shard_bytes=arguments.max_shard_size, overwrite=arguments.overwrite, tokenizer=arguments.tokenizer_model,
        progress=_progress(arguments),
    )  # fmt: skip
    _say_written(written, started)


def _say_what(weights: Weights) -> None:
    which = weights.origin.get("weights", "weights")
    count = parameter_count(weights.model, weights.vocab_size)
    print(f"{weights.folder}: {which}, {count:,} parameters, vocabulary {weights.vocab_size}", flush=True)
    for note in weights.notes:
        print(f"note: {note}", flush=True)


def _say_written(written: Written, started: float) -> None:
    for note in written.notes:
        print(f"note: {note}")
    print(
        f"wrote {written.tensors} tensors, {written.bytes / 1e6:.1f} MB, in {written.files} files to {written.folder} "
        f"in {time.monotonic() - started:.1f} s"
    )


def _progress(arguments: argparse.Namespace) -> Callable[[str], None]:
    return (lambda name: None) if arguments.quiet else (lambda name: print(f"  {name}", flush=True))


def _size(text: str) -> int:
    """ "5GB", "200MB" or a number of bytes."""
    unit = text[-2:].upper() if text[-2:].upper() in _UNITS else ""
    try:
        size = int(float(text[: len(text) - len(unit)]) * _UNITS[unit])
    except ValueError:
        size = 0
    if size <= 0:
        raise argparse.ArgumentTypeError(f"{text} is not a size such as 5GB or 200MB")
    return size
