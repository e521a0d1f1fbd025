"""Flags of the data in a run of the command: files of corpora, and documents kept apart."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import Corpora
from tests.e2e.runs import evaluations, losses, start, train
from tests.unit.test_datasets import write_corpus

DATA: dict[str, Any] = {
    "mock_data": None, "tokenizer_type": "ByteTokenizer", "split": "80,20", "train_iters": 4, "eval_iters": 1,
    "eval_interval": 4,
}  # fmt: skip


def test_a_blend_file_stands_for_data_path(corpora: Corpora, tmp_path: Path) -> None:
    blend = tmp_path / "blend.txt"
    blend.write_text(f"1.0 {corpora.documents_200}  # all there is\n")
    by_flag = train(2, data_path=["1.0", corpora.documents_200], **DATA)
    by_file = train(2, data_args_path=blend, **DATA)
    assert losses(by_file.stdout) == losses(by_flag.stdout)


def test_more_corpora_than_files_may_be_open(tmp_path: Path) -> None:
    """350 corpora in two splits under a limit of 300, of which a rank needs some 120 for its connections."""
    prefixes = [write_corpus(tmp_path / f"c{i}", [[i % 256] * 40] * 5) for i in range(350)]
    blend = tmp_path / "blend.txt"
    blend.write_text("\n".join(prefixes))

    def few_files(rank: int) -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (300, 300))

    result = train(1, in_rank=few_files, data_args_path=blend, edit_num_replicas=1, global_batch_size=200, **DATA)
    assert list(losses(result.stdout)) == [1, 2, 3, 4] and list(evaluations(result.stdout)) == [4]
    assert "350 corpora, and this process may open 300 files" in result.stdout


def test_documents_are_kept_apart_in_training_and_evaluation(corpora: Corpora) -> None:
    """Tensor and pipeline parallel runs see the same losses as one rank; and others than without the flags."""
    flags = {"reset_position_ids": True, "reset_attention_mask": True, "eod_mask_loss": True}
    settings = {**DATA, "data_path": corpora.documents_200, "edit_num_replicas": 1, "edit_method": "baseline"}
    expected = train(1, **settings, **flags)
    for layout in ("tensor", "pipeline"):
        result = train(2, **{f"{layout}_model_parallel_size": 2}, **settings, **flags)
        for read in (losses, evaluations):
            mine, right = read(result.stdout), read(expected.stdout)
            assert {k: float(v) for k, v in mine.items()} == pytest.approx(
                {k: float(v) for k, v in right.items()}, rel=1e-4
            )
    assert losses(train(1, **settings).stdout) != losses(expected.stdout)


def test_what_cannot_work_ends_before_training(corpora: Corpora, tmp_path: Path) -> None:
    for settings, reason in [
        ({"data_args_path": tmp_path / "none"}, "none cannot be read: No such file"),
        ({"data_path": corpora.documents_200, "data_args_path": tmp_path / "none"}, "are both given: give one"),
        ({"data_path": corpora.documents_200, "tokenizer_type": "NullTokenizer", "vocab_size": 300,
          "reset_position_ids": True}, "was made with another tokenizer"),
    ]:  # fmt: skip
        result = start(1, **{**DATA, "edit_num_replicas": 1, **settings})
        assert result.exit_codes == [2] and reason in result.stderr
