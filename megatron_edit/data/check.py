"""All that can be wrong with the data files, found in seconds: before any process group, without torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_edit.data.blend import SplitSource
from megatron_edit.data.errors import DataError
from megatron_edit.data.indexed import IndexedFiles, Manifest, sampled_pieces, sampled_sha256
from megatron_edit.data.tokenizers import Tokenizer

WHY_WANTED = {
    "train": "training",
    "valid": "evaluation (--eval-iters above 0)",
    "test": "the last test",
}


@dataclass(frozen=True)
class DocumentEnds:
    """What the end of a document inside a sample changes; each as Megatron-LM's flag of that name."""

    eod_mask_loss: bool = False  # no loss where the input is an end id
    reset_position_ids: bool = False  # positions count from 0 again: key `reset_position_ids`
    reset_attention_mask: bool = False  # no attention to earlier documents: key `document_ids`

    @property
    def flags(self) -> list[str]:
        """Flags that are on."""
        return [f"--{name.replace('_', '-')}" for name, on in vars(self).items() if on]


NO_ENDS = DocumentEnds()


def samples_of(tokens: int, seq_length: int) -> int:
    """Samples of seq_length inputs, each with the token after its last: neighbours share one token, a rest
    that is too short is dropped (megatron-core's rule)."""
    return max(0, (tokens - 1) // seq_length)


def check_data_files(
    sources: Mapping[str, SplitSource | None],
    *,
    seq_length: int,
    tokenizer: Tokenizer,
    wanted: Sequence[str] = ("train", "valid"),
    document_ends: DocumentEnds = NO_ENDS,
) -> list[str]:
    """Checks files, tokenizer and sizes of the splits in `wanted`; returns lines for the user that say what
    was found (documents, tokens and samples of each split, and what could not be checked).

    Raises:
        DataError: all problems at once, one a line: a file missing, empty, cut or of another format; ids of
            another tokenizer; a flag of `document_ends` without end ids; a wanted split without documents, or shorter
            than one sample.
    """
    problems: list[str] = []
    notes: list[str] = []
    if document_ends.flags and tokenizer.eod_id is None:
        problems.append(f"{document_ends.flags[0]} needs an end id, and the {tokenizer.name} given has none")
    present = {name: source for name in wanted if (source := sources[name]) is not None}
    measured: dict[str, dict[str, _Share] | None] = {}
    for name in wanted:
        source = sources[name]
        if source is None:
            problems.append(f"there is no {name} split, but {WHY_WANTED[name]} wants one: give it a share of "
                            f"--split, or --{name}-data-path")  # fmt: skip
            continue
        for prefix in source.blend.prefixes:
            if prefix not in measured:
                parts = {split: one for split, one in present.items() if prefix in one.blend.prefixes}
                measured[prefix] = _measure(prefix, parts, tokenizer, document_ends, problems, notes)
        shares = [share[name] for prefix in source.blend.prefixes if (share := measured[prefix]) is not None]
        if len(shares) == len(source.blend.prefixes):
            _check_size(name, source, shares, seq_length, problems, notes)
    if problems:
        raise DataError("\n".join(problems))
    return notes


@dataclass(frozen=True)
class _Share:
    """What a split has of a corpus."""

    documents: int
    documents_of_corpus: int
    tokens: int


def _measure(
    prefix: str,
    parts: Mapping[str, SplitSource],
    tokenizer: Tokenizer,
    document_ends: DocumentEnds,
    problems: list[str],
    notes: list[str],
) -> dict[str, _Share] | None:
    """Checks one corpus; the share of each of the splits `parts`. Its files are closed again: there may be many."""
    try:
        files = IndexedFiles(prefix)
        manifest = Manifest.read(prefix)
        notes.extend(_check_tokenizer(files, manifest, tokenizer))
        if document_ends.flags and manifest is not None and not manifest.append_eod:
            raise DataError(f"{document_ends.flags[0]} acts at end ids, and {prefix} was made without --append-eod")
    except DataError as error:
        problems.append(str(error))
        return None
    shares = {}
    for name, source in parts.items():
        first, last = source.documents(len(files.lengths))
        begin, end = files.documents_range(first, last)
        shares[name] = _Share(last - first, len(files.lengths), end - begin)
    return shares


def _check_tokenizer(files: IndexedFiles, manifest: Manifest | None, tokenizer: Tokenizer) -> list[str]:
    prefix = files.prefix
    if manifest is None:
        largest = max(int(piece.max()) for piece in sampled_pieces(files.tokens))
        note = [f"{prefix}: no manifest tells which tokenizer made it; a sample of its ids was checked"]
    else:
        largest, note = manifest.largest_token_id, []
        if (manifest.documents, manifest.tokens) != (len(files.lengths), files.total_tokens):
            raise DataError(
                f"{Manifest.path(prefix)} tells of {manifest.tokens} tokens in {manifest.documents} "
                f"documents, {prefix}.idx of {files.total_tokens} in {len(files.lengths)}: "
                "make the corpus anew"
            )
        if manifest.sampled_sha256 != sampled_sha256(files.tokens):
            raise DataError(f"{prefix}.bin is not the file that {Manifest.path(prefix)} was written for")
        if manifest.tokenizer_fingerprint != tokenizer.fingerprint:
            raise DataError(
                f"{prefix} was made with another tokenizer: {manifest.tokenizer}, vocabulary "
                f"{manifest.vocab_size}, fingerprint {manifest.tokenizer_fingerprint[:12]}; given is "
                f"{tokenizer.name}, {tokenizer.vocab_size}, {tokenizer.fingerprint[:12]} (--tokenizer-type, "
                "--tokenizer-model): give the one that made it. If both give the same ids, delete "
                f"{Manifest.path(prefix)}"
            )
    if largest >= tokenizer.vocab_size:
        raise DataError(
            f"{prefix}.bin has token id {largest}, but the vocabulary of {tokenizer.name} ends at "
            f"{tokenizer.vocab_size - 1} (--tokenizer-type, --tokenizer-model)"
        )
    return note


def _check_size(
    name: str,
    source: SplitSource,
    shares: Sequence[_Share],
    seq_length: int,
    problems: list[str],
    notes: list[str],
) -> None:
    short = [
        f"the {name} split of {prefix} is too short: {share.tokens} tokens in {share.documents} of its "
        f"{share.documents_of_corpus} documents, one sample of --seq-length {seq_length} needs {seq_length + 1}"
        for prefix, share in zip(source.blend.prefixes, shares, strict=True)
        if samples_of(share.tokens, seq_length) == 0
    ]
    documents, tokens = sum(share.documents for share in shares), sum(share.tokens for share in shares)
    samples = sum(samples_of(share.tokens, seq_length) for share in shares)
    # Without weights the corpora count as one, so a short one among them does no harm.
    if short and (source.blend.weights is not None or samples == 0):
        problems.extend(short)
    else:
        notes.extend(short)
        notes.append(f"{name}: {samples} samples of {seq_length} tokens, from {tokens} tokens in {documents} documents")
