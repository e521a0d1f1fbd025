"""Tokenizer and data files of a run, checked in seconds: before any process group, and without megatron-core."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_edit.config.schema import Config, DataConfig
from megatron_edit.data.blend import SplitSource, resolve_sources, validation_splits
from megatron_edit.data.check import DocumentEnds, check_data_files
from megatron_edit.data.errors import DataError
from megatron_edit.data.open_files import open_files_notes, raise_open_files_limit
from megatron_edit.data.tokenizers import Tokenizer, build_tokenizer


@dataclass(frozen=True)
class CheckedData:
    """What was found in seconds, without torch.distributed. `sources` is None with --mock-data."""

    tokenizer: Tokenizer
    sources: dict[str, SplitSource | None] | None
    splits: tuple[str, ...]  # those that will be read: "train", "valid" or "valid:NAME" of each set, "test"
    notes: list[str]
    vocab_size: int  # rows of the model: the tokenizer's ids, or --vocab-size where that is more


def document_ends(data: DataConfig) -> DocumentEnds:
    """The flags about ends of documents."""
    return DocumentEnds(
        eod_mask_loss=data.eod_mask_loss,
        reset_position_ids=data.reset_position_ids,
        reset_attention_mask=data.reset_attention_mask,
    )


def check_data(config: Config) -> CheckedData:
    """Opens tokenizer and files. Raises DataError with all problems: missing, damaged, too short, not fitting."""
    data, evaluation = config.data, config.evaluation
    open_files = raise_open_files_limit()
    open_files_notes(0, open_files)
    if data.tokenizer_type is None:
        raise DataError("--tokenizer-type is not given; ByteTokenizer needs no file")
    tokenizer = build_tokenizer(data.tokenizer_type, data.tokenizer_model, data.vocab_size)
    vocab_size = max(tokenizer.vocab_size, data.vocab_size or 0)
    evaluates = evaluation.eval_iters > 0 and (evaluation.eval_interval is not None or evaluation.eval_at_end)
    if data.mock_data:
        splits = ("train", "valid") if evaluates else ("train",)
        return CheckedData(tokenizer, None, splits, ["training on generated sequences (--mock-data)"], vocab_size)
    sources = resolve_sources(
        data_path=data.data_path,
        split=data.split,
        train_data_path=data.train_data_path,
        valid_data_path=data.valid_data_path,
        test_data_path=data.test_data_path,
    )
    wanted = ["train"]
    validation = validation_splits(sources)
    if evaluates and (evaluation.eval_interval is not None or validation):
        wanted += validation or ["valid"]
    if evaluates and data.test_data_path:
        wanted.append("test")

    def check(splits: list[str]) -> list[str]:
        return check_data_files(
            sources,
            seq_length=config.model.seq_length,
            tokenizer=tokenizer,
            wanted=splits,
            document_ends=document_ends(data),
        )

    notes = check(wanted)
    if evaluates and sources["test"] is not None and "test" not in wanted:
        try:
            notes += check(["test"])
            wanted.append("test")
        except DataError as error:  # nobody asked for it: --split has a third share by default
            notes.append(f"no last test: {error}")
    read = {prefix for name in wanted if (source := sources[name]) is not None for prefix in source.blend.prefixes}
    notes += open_files_notes(len(read), open_files)
    return CheckedData(tokenizer, sources, tuple(wanted), notes, vocab_size)
