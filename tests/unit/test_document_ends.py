"""--reset-position-ids, --reset-attention-mask, --eod-mask-loss: what a sample tells, against megatron-core's rule."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.datasets.gpt_dataset import _get_ltor_masks_and_position_ids

from megatron_edit.config import check
from megatron_edit.config.batch_schedule import BatchSchedule
from megatron_edit.config.schema import Config
from megatron_edit.config.settings import with_values
from megatron_edit.config.values import Blend
from megatron_edit.corpora.indexed_writer import IndexedWriter
from megatron_edit.data.blend import SplitSource, resolve_sources
from megatron_edit.data.check import DocumentEnds, check_data_files
from megatron_edit.data.datasets import build_split, number_documents, positions_in_documents
from megatron_edit.data.errors import DataError
from megatron_edit.data.loader import MicrobatchLoader, RankPlace
from megatron_edit.data.tokenizers import ByteTokenizer
from megatron_edit.model.loss import document_attention_mask
from megatron_edit.testing.tiny import TINY

BYTES = ByteTokenizer()
EOD = BYTES.eod_id


@given(st.lists(st.sampled_from([1, 2, EOD]), min_size=1, max_size=60))
def test_masks_and_positions_are_megatrons(ids: list[int]) -> None:
    tokens = torch.tensor(ids)
    mask, loss_mask, positions = _get_ltor_masks_and_position_ids(tokens, EOD, True, True, True, True)
    numbers = number_documents(tokens, EOD)
    assert torch.equal(document_attention_mask(numbers[None])[0], ~mask)
    assert torch.equal(positions_in_documents(numbers), positions)
    assert torch.equal(loss_mask, (tokens != EOD).float())


def corpus(prefix: Path, documents: list[list[int]], *, append_eod: bool = True) -> str:
    with IndexedWriter(str(prefix), np.uint16) as writer:
        for document in documents:
            writer.add_documents(np.array(document), [len(document)])
        writer.prepare(BYTES, append_eod=append_eod)
        writer.finish()
    return str(prefix)


@pytest.mark.parametrize("position", [False, True])
@pytest.mark.parametrize("attention", [False, True])
def test_flags_add_keys_and_change_nothing_else(tmp_path: Path, attention: bool, position: bool) -> None:
    prefix = corpus(tmp_path / "c", [[1, 2, EOD], [EOD], [3, 4, 5, EOD], [6, 7]])
    source = SplitSource("--data-path", Blend((prefix,)))
    ends = DocumentEnds(reset_attention_mask=attention, reset_position_ids=position)
    split = build_split(source, seq_length=9, tokenizer=BYTES, document_ends=ends)
    loader = MicrobatchLoader(
        split.datasets, split.training_order(0), consumed_samples=0, place=RankPlace(1, 0, 1, 0, 1),
        batch=BatchSchedule.constant(1), num_workers=0,
    )  # fmt: skip
    ((batch,), _) = loader.next_batch()
    extra = {"document_ids": [0, 0, 0, 1, 2, 2, 2, 2, 3]} if attention else {}
    extra |= {"reset_position_ids": [0, 1, 2, 0, 0, 1, 2, 3, 0]} if position else {}
    assert {key: batch[key][0].tolist() for key in batch} == extra | {
        "tokens": [1, 2, EOD, EOD, 3, 4, 5, EOD, 6], "labels": [2, EOD, EOD, 3, 4, 5, EOD, 6, 7],
        "loss_mask": [1.0] * 9, "position_ids": list(range(9)),
    }  # fmt: skip


@pytest.mark.parametrize("name", ["eod_mask_loss", "reset_position_ids", "reset_attention_mask"])
def test_a_corpus_without_end_ids_is_refused(tmp_path: Path, name: str) -> None:
    prefix = corpus(tmp_path / "c", [[1] * 40], append_eod=False)
    sources = resolve_sources(train_data_path=[prefix])
    ends = DocumentEnds(**{name: True})
    with pytest.raises(DataError, match=rf"--{name.replace('_', '-')} acts at end ids, and .* without --append-eod"):
        check_data_files(sources, seq_length=8, tokenizer=BYTES, wanted=("train",), document_ends=ends)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"context_parallel_size": 2}, "does not work with --context-parallel-size 2"),
        ({"transformer_impl": "transformer_engine"}, "does not work with --transformer-impl transformer_engine"),
        ({}, "has nothing to act on: --mock-data"),
    ],
)
@pytest.mark.parametrize("name", ["reset_position_ids", "reset_attention_mask"])
def test_what_cannot_keep_documents_apart_is_refused(name: str, settings: dict[str, object], reason: str) -> None:
    config = with_values(Config(), {**TINY, name: True, **settings}, "flag")
    flag = f"--{name.replace('_', '-')}"
    assert any(problem.startswith(f"{flag} {reason}") for problem in check(config, 2, 2, "cpu"))
