"""Checks of the run: length, schedule, precision, recompute, data, evaluation, folders. Each message names
flags, numbers and a way out. `config` is resolved; each check yields nothing when all is well.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

from megatron_edit.config.derive import batch_schedule, schedule_lengths
from megatron_edit.config.schema import Config
from megatron_edit.config.settings import flag_of, is_given, value_of
from megatron_edit.config.values import parse_blend, parse_named_sets, parse_split
from megatron_edit.tables.methods import METHODS

NEED_MODEL_FILE = (
    "SentencePieceTokenizer",
    "GPTSentencePieceTokenizer",
    "Llama2Tokenizer",
    "HuggingFaceTokenizer",
)
CORPUS_SETTINGS = ("data_path", "train_data_path", "valid_data_path", "test_data_path")


def check_length(config: Config) -> Iterator[str]:
    """Exactly one of iterations and samples."""
    training = config.training
    iters_given, samples_given = is_given(config, "train_iters"), is_given(config, "train_samples")
    method = METHODS[config.edit.edit_method]
    if not method.equal_steps and not samples_given and not iters_given:
        yield f"--edit-method {method.name} needs --train-samples, for example --train-samples 10000"
    elif not method.equal_steps and iters_given:
        pass  # check_method says why it contradicts
    elif iters_given and samples_given:
        yield (
            f"--train-iters {training.train_iters} and --train-samples {training.train_samples} are both "
            "given: give one"
        )
    elif not iters_given and not samples_given:
        yield "neither --train-iters nor --train-samples is given: give one, for example --train-iters 1000"
    elif samples_given and (batch := batch_schedule(config)) and 0 < (training.train_samples or 0) < batch.size_at(0):
        yield (
            f"--train-samples {training.train_samples} is less than one global batch of {batch.size_at(0)}: "
            f"{batch.size_at(0)} or more would work"
        )


def check_schedule(config: Config) -> Iterator[str]:
    """One form of each length, warm-up inside the decay, rates in order."""
    optimizer = config.optimizer
    for forms in (
        ("lr_warmup_iters", "lr_warmup_samples", "lr_warmup_fraction"),
        ("lr_decay_iters", "lr_decay_samples"),
        ("lr_wsd_decay_iters", "lr_wsd_decay_samples"),
    ):
        given = [name for name in forms if is_given(config, name)]
        if len(given) > 1:
            yield " and ".join(f"{flag_of(n)} {value_of(config, n)}" for n in given) + " contradict: give one"
    if optimizer.min_lr > optimizer.lr:
        yield f"--min-lr {optimizer.min_lr:g} is above --lr {optimizer.lr:g}, the peak"
    if optimizer.lr_warmup_init > optimizer.lr:
        yield (f"--lr-warmup-init {optimizer.lr_warmup_init:g} is above --lr {optimizer.lr:g}, the end of the warm-up")
    yield from _check_schedule_lengths(config)


def _check_schedule_lengths(config: Config) -> Iterator[str]:
    optimizer, training = config.optimizer, config.training
    wsd = optimizer.lr_decay_style == "WSD"
    if wsd and optimizer.lr_wsd_decay_iters is None and optimizer.lr_wsd_decay_samples is None:
        yield "--lr-decay-style WSD needs --lr-wsd-decay-iters or --lr-wsd-decay-samples"
    batch = batch_schedule(config)
    if training.train_iters is None or batch is None or training.train_iters == 0:
        return
    lengths = schedule_lengths(optimizer, training.train_iters, batch)
    in_iterations = batch.is_constant and _in_iterations(config)
    unit, per = ("iterations", batch.last_size) if in_iterations else ("samples", 1)
    warmup, decay, wsd_decay = (f"{n / per:g} {unit}" for n in (lengths.warmup, lengths.decay, lengths.wsd_decay))
    whose = "the run, as --lr-decay-iters is not given" if not _decay_is_given(config) else "--lr-decay-iters/-samples"
    if lengths.warmup >= lengths.decay:
        yield (
            f"the warm-up of {warmup} (--lr-warmup-iters/-samples/-fraction) is not shorter than the decay "
            f"of {decay} ({whose}), which includes it: shorten the one or lengthen the other"
        )
    elif wsd and lengths.warmup + lengths.wsd_decay > lengths.decay:
        room = (lengths.decay - lengths.warmup) / per
        yield (
            f"the warm-up of {warmup} and the final decay of {wsd_decay} (--lr-wsd-decay-iters/-samples) "
            f"are together longer than the whole schedule of {decay} ({whose}): a final decay of {room:g} "
            f"{unit} would fit"
        )


def check_device(config: Config, device: str) -> Iterator[str]:
    """Precision, kernels and parallelism that the device can do."""
    training, on_cpu = config.training, config.training.device == "cpu"
    if training.device == "cuda" and device != "cuda":
        yield "--device cuda: no CUDA device was found; --device cpu would work"
    if training.bf16 and training.fp16:
        yield "--bf16 and --fp16 are both given: give one"
    if training.fp16 and on_cpu:
        yield "--fp16 needs a GPU: on the CPU leave it off (fp32), or give --bf16"
    cp = config.parallel.context_parallel_size
    transformer_engine = config.model.transformer_impl == "transformer_engine"
    if cp > 1 and on_cpu:
        yield f"--context-parallel-size {cp} needs a GPU with Transformer Engine: on the CPU only 1 works"
    elif cp > 1 and not transformer_engine:
        yield f"--context-parallel-size {cp} needs --transformer-impl transformer_engine"
    if transformer_engine and on_cpu:
        yield "--transformer-impl transformer_engine needs a GPU: on the CPU --transformer-impl local works"


def check_recompute(config: Config) -> Iterator[str]:
    """The three recompute settings go together."""
    parallel = config.parallel
    granularity, method, layers = (
        parallel.recompute_granularity,
        parallel.recompute_method,
        parallel.recompute_num_layers,
    )
    if granularity == "full":
        if method is None or layers is None:
            yield (
                "--recompute-granularity full needs --recompute-method and --recompute-num-layers, for "
                "example uniform and 1"
            )
            return
    elif method is not None or layers is not None:
        given = [name for name in ("recompute_method", "recompute_num_layers") if value_of(config, name) is not None]
        shown = " and ".join(f"{flag_of(name)} {value_of(config, name)}" for name in given)
        yield f"{shown} needs --recompute-granularity full, not {granularity or 'none'}"
        return
    pp = parallel.pipeline_model_parallel_size
    if layers is None or config.model.num_layers % pp:
        return
    chunk = parallel.num_layers_per_virtual_pipeline_stage or config.model.num_layers // pp
    if layers > chunk or (method == "uniform" and chunk % layers):
        works = [d for d in range(1, chunk + 1) if method == "block" or chunk % d == 0]
        yield (
            f"--recompute-num-layers {layers} does not fit the {chunk} layers of a stage's chunk with "
            f"--recompute-method {method}: these would work: {', '.join(map(str, works))}"
        )


def check_data(config: Config) -> Iterator[str]:
    """Corpora, shares, tokenizer."""
    data = config.data
    given = [name for name in CORPUS_SETTINGS if value_of(config, name)]
    if data.mock_data and given:
        yield f"--mock-data and {flag_of(given[0])} are both given: give one"
    if data.data_path and len(given) > 1:
        others = " and ".join(flag_of(name) for name in given if name != "data_path")
        yield (f"--data-path (split by --split) and {others} (one corpus for each split) are both given: give one kind")
    if not data.mock_data and not data.data_path and not data.train_data_path:
        yield "no training data: give --data-path, or --train-data-path, or --mock-data"
    for name in given:
        try:
            words = value_of(config, name)
            for blend in parse_named_sets(words).values() if name == "valid_data_path" else [words]:
                parse_blend(blend)
        except ValueError as error:
            yield f"{flag_of(name)} {' '.join(value_of(config, name))} {error}"
    try:
        train_share = parse_split(data.split)[0]
        if train_share == 0 and not data.train_data_path:
            yield f"--split {data.split} leaves nothing for training: its first share must be above 0"
    except ValueError as error:
        yield f"--split {data.split} {error}"
    yield from _check_tokenizer(config)
    yield from _check_document_ends(config)


def _check_document_ends(config: Config) -> Iterator[str]:
    """What only the attention and the samples built here can do."""
    for name in ("reset_position_ids", "reset_attention_mask"):
        if not value_of(config, name):
            continue
        if config.parallel.context_parallel_size > 1:
            yield (
                f"{flag_of(name)} does not work with --context-parallel-size {config.parallel.context_parallel_size}: "
                "leave it out, or give --context-parallel-size 1"
            )
        elif config.model.transformer_impl == "transformer_engine":
            yield f"{flag_of(name)} does not work with --transformer-impl transformer_engine: give local"
        if config.data.mock_data:
            yield f"{flag_of(name)} has nothing to act on: --mock-data has no documents"


def _check_tokenizer(config: Config) -> Iterator[str]:
    data = config.data
    if data.tokenizer_type is None:
        yield "--tokenizer-type is not given; ByteTokenizer needs no file"
    elif data.tokenizer_type in NEED_MODEL_FILE:
        if data.tokenizer_model is None:
            yield f"--tokenizer-type {data.tokenizer_type} needs --tokenizer-model PATH"
        elif not os.path.exists(data.tokenizer_model):
            yield f"--tokenizer-model {data.tokenizer_model} does not exist{_if_hub_name(data.tokenizer_model)}"
    elif data.tokenizer_type == "NullTokenizer" and data.vocab_size is None:
        yield "--tokenizer-type NullTokenizer needs --vocab-size"


def _if_hub_name(name: str) -> str:
    """How to get the files, where `name` looks like OWNER/MODEL on the Hugging Face hub."""
    owner, _, model = name.partition("/")
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", name) or os.path.exists(owner):
        return ""
    return (
        "; it looks like a name on the Hugging Face hub, and nothing is downloaded here: fetch the files once, for "
        f"example with `hf download {name} --include 'token*' --local-dir {model}`, and give --tokenizer-model {model}"
    )


def has_validation(config: Config) -> bool:
    """Whether there is a validation split to evaluate on."""
    data = config.data
    if data.mock_data or data.valid_data_path:
        return True
    if data.train_data_path:
        return False
    try:
        return parse_split(data.split)[1] > 0
    except ValueError:
        return True  # check_data reports it


def check_evaluation(config: Config) -> Iterator[str]:
    """Evaluation needs data."""
    interval = config.evaluation.eval_interval
    if interval is not None and not has_validation(config):
        why = (
            "--train-data-path comes without --valid-data-path"
            if config.data.train_data_path
            else f"--split {config.data.split} has no share for it"
        )
        yield f"--eval-interval {interval} needs validation data: {why}"


def check_folders(config: Config) -> Iterator[str]:
    """What is read exists; what is written can be made. Nothing is left behind."""
    save, load = config.checkpoint.save, config.checkpoint.load
    if config.checkpoint.save_interval is not None and save is None:
        yield f"--save-interval {config.checkpoint.save_interval} needs --save DIR"
    yield from _checkpoint_problems(config)
    first_start = save is not None and load is not None and Path(load).absolute() == Path(save).absolute()
    if load is not None and not first_start and (reason := _not_a_folder(load)):
        yield f"--load {load} {reason}"
    for name in ("save", "tensorboard_dir"):
        folder = value_of(config, name)
        if folder is not None and os.path.isfile(folder):
            yield f"{flag_of(name)} {folder} is a file, but a folder is written there"
        elif folder is not None:
            yield from _cannot_write(flag_of(name), Path(folder))
    for name in ("metrics_file", "log_sample_ids"):
        file = value_of(config, name)
        if file is not None and os.path.isdir(file):
            yield f"{flag_of(name)} {file} is a folder, but a file is written there"
        elif file is not None:
            yield from _cannot_write(flag_of(name), Path(file))


def _not_a_folder(path: str) -> str:
    """Why `path` cannot be listed; "" where it can."""
    try:
        os.listdir(path)
    except (FileNotFoundError, NotADirectoryError):
        return "is not a folder; only a --load that equals --save may be missing, for a first start"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return ""


def _checkpoint_problems(config: Config) -> Iterator[str]:
    """Flags of loading that contradict each other or have nothing to act on."""
    checkpoint = config.checkpoint
    given = {
        "--ckpt-step": checkpoint.ckpt_step is not None,
        "--load-fallback": checkpoint.load_fallback,
        "--finetune": checkpoint.finetune,
        "--no-load-optim": not checkpoint.load_optim,
        "--no-load-rng": not checkpoint.load_rng,
        "--use-checkpoint-opt_param-scheduler": checkpoint.use_checkpoint_opt_param_scheduler,
    }
    for flag in (flag for flag, on in given.items() if on and checkpoint.load is None):
        yield f"{flag} needs --load DIR"
    if checkpoint.use_checkpoint_opt_param_scheduler:
        for flag, other in (
            ("--override-opt_param-scheduler", checkpoint.override_opt_param_scheduler),
            ("--finetune", checkpoint.finetune),
            ("--no-load-optim", not checkpoint.load_optim),
        ):
            if other:
                yield (
                    f"--use-checkpoint-opt_param-scheduler and {flag} contradict each other: the learning rate comes "
                    "from the checkpoint or from the flags"
                )
    if checkpoint.finetune and checkpoint.load is not None and checkpoint.load == checkpoint.save:
        yield (
            f"--finetune with --load equal to --save {checkpoint.save} would begin anew at every start: load from "
            "another folder, and leave --finetune out to go on"
        )
    if checkpoint.keep_checkpoints and checkpoint.save is None:
        yield f"--keep-checkpoints {checkpoint.keep_checkpoints} needs --save DIR"


def _cannot_write(flag: str, path: Path) -> Iterator[str]:
    """Says why `path`, a file or a folder, can be neither written nor made.

    Tried with a file without a name where it is to be made, as permissions do not tell of file systems that are
    full or read-only.
    """
    nearest = path.absolute()
    try:
        while not nearest.exists():
            nearest = nearest.parent
        if nearest.is_dir():
            with tempfile.TemporaryFile(dir=nearest):
                return
        if nearest == path.absolute():
            with open(nearest, "ab"):
                return
        reason = f"{nearest} is a file"
    except OSError as error:
        reason = f"{error.strerror}: {nearest}"
    yield f"{flag} {path} cannot be written: {reason}"


def _decay_is_given(config: Config) -> bool:
    return is_given(config, "lr_decay_iters") or is_given(config, "lr_decay_samples")


def _in_iterations(config: Config) -> bool:
    optimizer = config.optimizer
    return optimizer.lr_warmup_samples is None and optimizer.lr_decay_samples is None
