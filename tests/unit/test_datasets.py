"""Splits, blends, file checks and samples. Field reports B16 (data side), B29 (checks), B35."""

import json
import os
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from megatron.core.datasets import helpers
from megatron.core.datasets.blended_megatron_dataset_config import (
    convert_split_vector_to_split_matrix,
    parse_and_normalize_split,
)
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, _build_document_index
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from megatron.core.datasets.utils import Split

from megatron_edit.config.values import Blend
from megatron_edit.corpora.indexed_writer import IndexedWriter
from megatron_edit.data.blend import SplitSource, resolve_sources, set_name, validation_splits
from megatron_edit.data.check import DocumentEnds, check_data_files
from megatron_edit.data.datasets import MockDataset, build_mock_split, build_split
from megatron_edit.data.errors import DataError
from megatron_edit.data.indexed import Manifest
from megatron_edit.data.tokenizers import ByteTokenizer, NullTokenizer, Tokenizer

BYTES = ByteTokenizer()


def write_corpus(prefix: Path, documents: list[list[int]], tokenizer: Tokenizer = BYTES) -> str:
    """A corpus with our own writer."""
    with IndexedWriter(str(prefix), np.uint16) as writer:
        for document in documents:
            writer.add_documents(np.array(document), [len(document)])
        writer.prepare(tokenizer, append_eod=False)
        writer.finish()
    return str(prefix)


def write_core_corpus(prefix: Path, documents: list[list[int]], dtype: type = np.int32) -> str:
    """A corpus with megatron-core's writer: no manifest."""
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for document in documents:
        builder.add_document(torch.tensor(document), [len(document)])
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


def random_documents(count: int, seed: int = 0, longest: int = 50) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 256, rng.integers(1, longest)).tolist() for _ in range(count)]


class _CoreTokenizer:
    """The little of a tokenizer that megatron-core's datasets ask for; no pad id, whose loss they would take."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.vocab_size, self.eod = tokenizer.vocab_size, tokenizer.eod_id
        self.unique_identifiers = OrderedDict(fingerprint=tokenizer.fingerprint)


class CoresDataset(GPTDataset):
    """megatron-core's own dataset for one epoch of a split, in file order: what our samples are compared with."""

    def __init__(self, prefix: str, first: int, last: int, seq_length: int, tokenizer: Tokenizer, mask: bool) -> None:
        config = GPTDatasetConfig(
            random_seed=0, sequence_length=seq_length, blend=([prefix], None), split="1",
            tokenizer=_CoreTokenizer(tokenizer), reset_position_ids=False, reset_attention_mask=False,
            eod_mask_loss=mask, create_attention_mask=False,
        )  # fmt: skip
        documents = np.arange(first, last, dtype=np.int32)
        super().__init__(IndexedDataset(prefix), prefix, documents, None, Split.train, config)

    def _build_document_sample_shuffle_indices(self) -> tuple[np.ndarray, np.ndarray, range]:
        lengths = self.dataset.sequence_lengths
        tokens = int(lengths[self.indices].sum(dtype=np.int64))
        sample_index = helpers.build_sample_idx(lengths, self.indices, self.config.sequence_length, 1, tokens)
        return self.indices, sample_index, range(len(sample_index) - 1)


def source(prefix: str, start: float = 0.0, end: float = 1.0) -> SplitSource:
    return SplitSource("--data-path", Blend((prefix,)), start, end)


@given(shares=st.tuples(*[st.integers(0, 1000)] * 3).filter(any), count=st.integers(0, 5000))
def test_documents_of_a_split_are_megatrons(shares: tuple[int, int, int], count: int) -> None:
    text = ",".join(map(str, shares))
    matrix = convert_split_vector_to_split_matrix(parse_and_normalize_split(text))
    if shares[0] == 0:
        return
    sources = resolve_sources(data_path=["A"], split=text)
    for split, bookends in zip(sources.values(), matrix, strict=True):
        assert (split is None) == (bookends is None)
        if split is not None:
            assert split.documents(count) == tuple(round(end * float(count)) for end in bookends)


def test_named_validation_sets_are_splits_of_their_own() -> None:
    sources = resolve_sources(train_data_path=["T"], valid_data_path=["wiki=A", "code=0.5", "B", "1.5", "C"])
    assert validation_splits(sources) == ["valid:wiki", "valid:code"]
    assert sources["valid"] is None and set_name("valid:wiki") == "wiki" and set_name("valid") is None
    source = sources["valid:code"]
    assert source is not None and source.flag == "--valid-data-path code=" and str(source.blend) == "0.25 B 0.75 C"
    assert validation_splits(resolve_sources(train_data_path=["T"], valid_data_path=["A"])) == ["valid"]
    assert validation_splits(resolve_sources(data_path=["T"], split="90,10")) == ["valid"]
    assert validation_splits(resolve_sources(train_data_path=["T"])) == []
    with pytest.raises(DataError, match="--valid-data-path wiki=A wiki=B has the name wiki twice"):
        resolve_sources(train_data_path=["T"], valid_data_path=["wiki=A", "wiki=B"])


def test_sources_of_splits() -> None:
    sources = resolve_sources(train_data_path=["0.5", "A", "0.5", "B"], valid_data_path=["C"], split="1,1,1")
    assert sources["test"] is None
    assert sources["valid"] == SplitSource("--valid-data-path", Blend(("C",)))
    for arguments, reason in [
        ({}, "no training data"),
        ({"data_path": [], "valid_data_path": ["C"]}, "no training data"),
        ({"data_path": ["A"], "test_data_path": ["B"]}, "exclude each other"),
        ({"data_path": ["A"], "split": "0,1"}, "the share of training is 0"),
    ]:
        with pytest.raises(DataError, match=reason):
            resolve_sources(**arguments)  # type: ignore[arg-type]


@settings(deadline=None, max_examples=25)
@given(
    lengths=st.lists(st.integers(0, 30), min_size=1, max_size=30),
    seq_length=st.integers(1, 20),
    data=st.data(),
)
def test_samples_are_the_documents_laid_end_to_end(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], seq_length: int, data: st.DataObject
) -> None:
    """Every token of the split is a label once, in file order (but the first, and a rest too short); nothing
    of the neighbouring splits is read. Also with empty documents, which other tools leave in files."""
    first = data.draw(st.integers(0, len(lengths) - 1))
    last = data.draw(st.integers(first + 1, len(lengths)))
    documents = [[100 * (i % 2) + j for j in range(length)] for i, length in enumerate(lengths)]
    flat = [token for document in documents[first:last] for token in document]
    assume(len(flat) > seq_length)
    prefix = write_core_corpus(tmp_path_factory.mktemp("c") / "c", documents)
    split = build_split(
        source(prefix, first / len(lengths), last / len(lengths)), seq_length=seq_length, tokenizer=BYTES
    )
    (dataset,) = split.datasets
    reference = CoresDataset(prefix, first, last, seq_length, BYTES, mask=False)
    assert len(dataset) == len(reference) == (len(flat) - 1) // seq_length
    for i in range(len(dataset)):
        sample = dataset[i]
        expected = flat[i * seq_length : (i + 1) * seq_length + 1]
        cores = reference[i]
        assert sample.keys() == cores.keys() and all(torch.equal(sample[key], cores[key]) for key in cores)
        assert sample["tokens"].tolist() == expected[:-1]
        assert sample["labels"].tolist() == expected[1:]
        assert sample["position_ids"].tolist() == list(range(seq_length))
        assert sample["loss_mask"].tolist() == [1.0] * seq_length
        assert [sample[key].dtype for key in sorted(sample)] == [
            torch.int64,
            torch.float32,
            *[torch.int64] * 2,
        ]
    for outside in (-1, len(dataset)):
        with pytest.raises(IndexError):
            dataset[outside]


def test_our_files_are_megatron_cores(tmp_path: Path) -> None:
    """Byte for byte what megatron-core writes, and read by its IndexedDataset."""
    documents = random_documents(40)
    ours = write_corpus(tmp_path / "ours", documents)
    theirs = write_core_corpus(tmp_path / "theirs", documents, np.uint16)
    for suffix in (".bin", ".idx"):
        assert Path(ours + suffix).read_bytes() == Path(theirs + suffix).read_bytes()
    read = IndexedDataset(ours)
    assert [read[i].tolist() for i in range(len(read))] == documents
    assert read.document_indices.tolist() == list(range(41))


def test_no_index_file_is_left_behind(tmp_path: Path) -> None:
    prefix = write_corpus(tmp_path / "c", random_documents(20))
    before = sorted(os.listdir(tmp_path))
    build_split(source(prefix), seq_length=8, tokenizer=BYTES)
    assert sorted(os.listdir(tmp_path)) == before


def test_order_of_samples_differs_from_megatrons_shuffle(tmp_path: Path) -> None:
    """The test above would pass by luck if megatron-core's shuffle happened to be the identity: it is not."""
    shuffled = _build_document_index(np.arange(20, dtype=np.int32), 1, np.random.RandomState(0), False)
    assert shuffled.tolist() != list(range(20))


class PadIsEod(ByteTokenizer):
    pad_id = ByteTokenizer.eod_id


class NoEod(ByteTokenizer):
    eod_id = None


@pytest.mark.parametrize("tokenizer", [BYTES, PadIsEod()])
def test_end_marks_keep_their_loss(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """B16: the true end mark is a label of weight 1, its id is not replaced, whatever the pad id is; the flag
    takes the loss of what follows the mark, by position."""
    eod = 257
    prefix = write_corpus(tmp_path / "c", [[1, 2, eod], [eod], [3, 0, 258, 4, eod], [5]], tokenizer)
    for flag, mask in [(False, [1] * 9), (True, [1, 1, 0, 0, 1, 1, 1, 1, 0])]:
        ends = DocumentEnds(eod_mask_loss=flag)
        split = build_split(source(prefix), seq_length=9, tokenizer=tokenizer, document_ends=ends)
        sample, cores = split.datasets[0][0], CoresDataset(prefix, 0, 4, 9, tokenizer, flag)[0]
        assert all(torch.equal(sample[key], cores[key]) for key in cores)
        assert sample["tokens"].tolist() == [1, 2, eod, eod, 3, 0, 258, 4, eod]
        assert sample["labels"].tolist() == [2, eod, eod, 3, 0, 258, 4, eod, 5]
        assert sample["loss_mask"].tolist() == mask


def test_eod_mask_loss_of_documents_of_nothing_but_the_end(tmp_path: Path) -> None:
    """B16: a fully masked sample is a sample with weight 0 throughout."""
    prefix = write_corpus(tmp_path / "c", [[257]] * 10)
    split = build_split(source(prefix), seq_length=9, tokenizer=BYTES, document_ends=DocumentEnds(eod_mask_loss=True))
    assert split.datasets[0][0]["loss_mask"].sum() == 0
    with pytest.raises(DataError, match="--eod-mask-loss needs an end id"):
        check_data_files(
            resolve_sources(train_data_path=[prefix]),
            seq_length=9,
            tokenizer=NoEod(),
            wanted=["train"],
            document_ends=DocumentEnds(eod_mask_loss=True),
        )


def test_bad_token_id_is_named_when_it_is_read(tmp_path: Path) -> None:
    prefix = write_core_corpus(tmp_path / "c", [[1] * 20, [1, 2, 300, 4, 5]])
    (dataset,) = build_split(source(prefix), seq_length=4, tokenizer=BYTES).datasets
    assert dataset[0]["tokens"].tolist() == [1] * 4
    with pytest.raises(DataError, match=r"c\.bin has token id 300 in sample 5, the vocabulary ends at 258"):
        dataset[5]


def test_check_reports_what_it_found(tmp_path: Path) -> None:
    prefix = write_corpus(tmp_path / "c", [[i] * 10 for i in range(20)])
    sources = resolve_sources(data_path=[prefix], split="90,10")
    notes = check_data_files(sources, seq_length=4, tokenizer=BYTES)
    assert notes == [
        "train: 44 samples of 4 tokens, from 180 tokens in 18 documents",
        "valid: 4 samples of 4 tokens, from 20 tokens in 2 documents",
    ]
    for name, samples in (("train", 44), ("valid", 4)):
        split = sources[name]
        assert split is not None
        assert build_split(split, seq_length=4, tokenizer=BYTES).sizes == [samples]


@pytest.mark.parametrize(
    ("documents", "split", "message"),
    [
        (
            [[1] * 10],
            "1",
            "the train split of .* is too short: 10 tokens in 1 of its 1 documents, .* needs 33",
        ),
        ([[1] * 32], "1", "the train split .* 32 tokens"),
        ([[1] * 33], "1", None),
        ([[1] * 500] * 3, "90,5,5", "the valid split of .* is too short: 0 tokens in 0 of its 3 documents"),
        ([[1] * 500] * 3, "100,0,0", "there is no valid split, but evaluation"),
    ],
)
def test_data_shorter_than_a_sample_names_the_split(
    tmp_path: Path, documents: list[list[int]], split: str, message: str | None
) -> None:
    """B35."""
    prefix = write_corpus(tmp_path / "c", documents)
    sources = resolve_sources(data_path=[prefix], split=split)
    wanted = ("train",) if split == "1" else ("train", "valid")
    if message is None:
        assert check_data_files(sources, seq_length=32, tokenizer=BYTES, wanted=wanted)
        return
    with pytest.raises(DataError, match=message):
        check_data_files(sources, seq_length=32, tokenizer=BYTES, wanted=wanted)


def test_short_corpus_of_a_blend(tmp_path: Path) -> None:
    """With weights each corpus must have samples; without, they count as one."""
    long = write_corpus(tmp_path / "long", [[1] * 100])
    short = write_corpus(tmp_path / "short", [[1] * 3])
    weighted = resolve_sources(train_data_path=["0.5", long, "0.5", short])
    with pytest.raises(DataError, match="short is too short"):
        check_data_files(weighted, seq_length=9, tokenizer=BYTES, wanted=("train",))
    plain = resolve_sources(train_data_path=[long, short])
    assert any("too short" in note for note in check_data_files(plain, seq_length=9, tokenizer=BYTES, wanted=["train"]))
    assert plain["train"] is not None
    assert build_split(plain["train"], seq_length=9, tokenizer=BYTES).sizes == [11]


def damaged(tmp_path: Path, how: str) -> str:
    """A corpus with one fault; returns the prefix to give."""
    prefix = write_corpus(tmp_path / "c", random_documents(30))
    other = write_corpus(tmp_path / "other", random_documents(32, seed=1))
    bin_path, idx_path = Path(f"{prefix}.bin"), Path(f"{prefix}.idx")
    if how == "bin missing":
        bin_path.unlink()
    elif how == "bin empty":
        bin_path.write_bytes(b"")
    elif how == "bin of another":
        bin_path.write_bytes(Path(f"{other}.bin").read_bytes())
    elif how == "bin of another, of equal size":
        bin_path.write_bytes(bin_path.read_bytes()[::-1])
    elif how == "bin cut":
        bin_path.write_bytes(bin_path.read_bytes()[:-1])
    elif how == "idx missing":
        idx_path.unlink()
    elif how == "idx cut":
        idx_path.write_bytes(idx_path.read_bytes()[:-1])
    elif how == "idx header cut":
        idx_path.write_bytes(idx_path.read_bytes()[:20])
    elif how == "idx is text":
        idx_path.write_text("some text\n" * 20)
    elif how == "idx version":
        content = bytearray(idx_path.read_bytes())
        content[9] = 7
        idx_path.write_bytes(content)
    elif how == "idx lengths":
        content = bytearray(idx_path.read_bytes())
        content[34] += 1
        idx_path.write_bytes(content)
    elif how == "idx marks":
        idx_path.write_bytes(idx_path.read_bytes()[:-8] + bytes(8))
    elif how == "with extension":
        return str(bin_path)
    elif how == "nothing there":
        return str(tmp_path / "nothing")
    elif how == "stale manifest":
        entries = json.loads(Manifest.path(prefix).read_text())
        Manifest.path(prefix).write_text(json.dumps(entries | {"tokens": 1}))
    elif how == "broken manifest":
        Manifest.path(prefix).write_text("{")
    return prefix


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("bin missing", r"c\.bin does not exist$"),
        ("bin empty", r"c\.bin is empty"),
        ("bin of another", "do not belong together"),
        ("bin of another, of equal size", r"c\.bin is not the file that .*c\.manifest\.json was written for"),
        ("bin cut", "do not belong together, or one is cut"),
        ("idx missing", r"c\.idx does not exist$"),
        ("idx cut", r"c\.idx is cut"),
        ("idx header cut", r"c\.idx is cut"),
        ("idx is text", "is not an index file of megatron-core"),
        ("idx version", "has version 7"),
        ("idx lengths", "lengths and offsets of its documents do not agree"),
        ("idx marks", "does not end at its last sequence"),
        ("with extension", r"c\.bin\.idx does not exist; give the prefix, .*/c$"),
        ("nothing there", r"nothing\.idx does not exist$"),
        ("stale manifest", "manifest.json tells of 1 tokens"),
        ("broken manifest", "manifest.json cannot be read"),
    ],
)
def test_damaged_files_are_refused_by_name(tmp_path: Path, how: str, message: str) -> None:
    """B29: one line that names the file and the reason."""
    sources = resolve_sources(train_data_path=[damaged(tmp_path, how)])
    with pytest.raises(DataError, match=message) as caught:
        check_data_files(sources, seq_length=8, tokenizer=BYTES, wanted=("train",))
    assert "\n" not in str(caught.value)


def test_all_problems_at_once(tmp_path: Path) -> None:
    sources = resolve_sources(train_data_path=[str(tmp_path / "a"), str(tmp_path / "b")])
    with pytest.raises(DataError) as caught:
        check_data_files(sources, seq_length=8, tokenizer=BYTES)
    assert [line.split()[0] for line in str(caught.value).splitlines()] == [
        f"{tmp_path}/a.idx", f"{tmp_path}/b.idx", "there"
    ]  # fmt: skip


def test_tokenizer_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    with_manifest = write_corpus(tmp_path / "m", random_documents(30))
    without = write_core_corpus(tmp_path / "n", [[1, 2, 3, 257] * 20])
    for prefix, tokenizer, message in [
        (with_manifest, NullTokenizer(400), "made with another tokenizer: ByteTokenizer, vocabulary 259"),
        (
            without,
            NullTokenizer(100),
            r"n\.bin has token id 257, but the vocabulary of NullTokenizer ends at 100",
        ),
    ]:
        sources = resolve_sources(train_data_path=[prefix])
        with pytest.raises(DataError, match=message):
            check_data_files(sources, seq_length=8, tokenizer=tokenizer, wanted=("train",))
    notes = check_data_files(
        resolve_sources(train_data_path=[without]), seq_length=8, tokenizer=BYTES, wanted=("train",)
    )
    assert "no manifest" in notes[0]


def test_failed_writer_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), IndexedWriter(str(tmp_path / "c"), np.uint16) as writer:
        writer.add_documents(np.array([1, 2]), [2])
        raise KeyboardInterrupt
    assert os.listdir(tmp_path) == []


def test_mock_data_is_a_function_of_index_and_seed_and_can_be_learnt() -> None:
    first, again = (MockDataset(1000, 64, 500, seed=3) for _ in range(2))
    other = MockDataset(1000, 64, 500, seed=4)
    for i in (0, 1, 999):
        assert torch.equal(first[i]["tokens"], again[i]["tokens"])
        assert not torch.equal(first[i]["tokens"], other[i]["tokens"])
        assert torch.equal(first[i]["tokens"][1:], first[i]["labels"][:-1])
        assert int(first[i]["tokens"].min()) >= 0 and int(first[i]["tokens"].max()) < 256
    steps = torch.stack([(s["labels"] - s["tokens"]) % 256 for s in (first[i] for i in range(100))])
    assert ((steps >= 1) & (steps <= 4)).float().mean() > 0.8
    train, valid = (build_mock_split(n, seq_length=8, vocab_size=9, seed=1) for n in ("train", "valid"))
    assert not torch.equal(train.datasets[0][0]["tokens"], valid.datasets[0][0]["tokens"])
    assert int(train.datasets[0][5]["tokens"].max()) < 9
