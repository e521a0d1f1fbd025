"""What an input holds where its name does not say, or does not say the truth."""

import bz2
import gzip
import io
import json
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import sentencepiece

from megatron_edit.corpora.inputs import find_inputs
from megatron_edit.corpora.preprocess import preprocess
from megatron_edit.corpora.train_tokenizer import train_sentencepiece
from megatron_edit.data.errors import DataError
from tests.unit.test_corpus_tools import BYTES, texts_of
from tests.unit.test_preprocess import as_lines, write_parquet, zstd

TEXTS = ["one", "two {", "three"]


def made(path: Path, content: bytes, **options: object) -> tuple[list[str], list[str]]:
    """Texts of the corpus of a file, and what was said."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    said: list[str] = []
    (report,) = preprocess([str(path)], f"{path}.out", BYTES, log=said.append, **options)  # type: ignore[arg-type]
    return texts_of(report.prefix), said


@pytest.mark.parametrize("name", ["a.JSONL", "a.Json", "a.NDJSON", "a.JSONL.GZ", "a.jsonl.Bz2", "a.JSONL.zst"])
def test_endings_count_without_regard_to_case(tmp_path: Path, name: str) -> None:
    pack = {".gz": gzip.compress, ".bz2": bz2.compress, ".zst": zstd}.get(Path(name).suffix.lower(), bytes)
    assert made(tmp_path / name, pack(as_lines(TEXTS))) == (TEXTS, [])
    (found,) = find_inputs([str(tmp_path / name)])
    other = tmp_path / "folder" / name
    other.parent.mkdir()
    other.write_bytes((tmp_path / name).read_bytes())
    (in_folder,) = find_inputs([str(other.parent)])
    assert (in_folder.kind, in_folder.packed) == (found.kind, found.packed)


@pytest.mark.parametrize("name", ["wiki_00", "a.jsonl.bak", "a.jsonl-01-of-02", "part.0", "dump.gz", "dump.bz2"])
@pytest.mark.parametrize("before", [b"", b"\xef\xbb\xbf", b"\n \n"])
def test_json_lines_under_a_name_that_says_nothing(tmp_path: Path, name: str, before: bytes) -> None:
    pack = {".gz": gzip.compress, ".bz2": bz2.compress}.get(Path(name).suffix, bytes)
    content = pack(before + as_lines(TEXTS))
    texts, said = made(tmp_path / name, content)
    assert texts == TEXTS
    (line,) = said
    assert line.endswith(f"{name} is read as JSON lines, by its content; --input-format text would read it as text")
    texts, said = made(tmp_path / name, content, input_kind="text")
    assert len(texts) == 1 and texts[0].count("{") == 4 and said == []


def test_a_first_line_longer_than_what_is_looked_at(tmp_path: Path) -> None:
    texts = ["x" * 200_000, "y"]
    assert made(tmp_path / "long", as_lines(texts))[0] == texts


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, zstd])
@pytest.mark.parametrize("name", ["a.jsonl", "a"])
def test_a_packed_file_whose_name_does_not_say_so(tmp_path: Path, pack: Callable[[bytes], bytes], name: str) -> None:
    texts, said = made(tmp_path / name, pack(as_lines(TEXTS)))
    assert texts == TEXTS and len(said) == 1
    assert f"{tmp_path / name} is " in said[0] and "by its content: it is unpacked" in said[0]


def test_plain_text_under_any_name(tmp_path: Path) -> None:
    for name in ("README", "a.md", "a.py", "a.txt", "a.tex"):
        assert made(tmp_path / name, b"ein Text {mit Klammern}\n") == (["ein Text {mit Klammern}\n"], [])


@pytest.mark.parametrize("name", ["a", "a.txt"])
@pytest.mark.parametrize("content", [b'{\n  "text": "pretty"\n}\n', b"{\\bf TeX}", b'[{"text": "a"}]', b"{'text': 1}"])
def test_text_that_begins_like_json_is_said_loudly(tmp_path: Path, name: str, content: bytes) -> None:
    texts, said = made(tmp_path / name, content)
    assert texts == [content.decode()] and len(said) == 1
    assert said[0].startswith(f"*** {tmp_path / name} begins like JSON (") and "read as plain text" in said[0]


def test_json_lines_named_as_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    with pytest.raises(DataError, match=r"a\.txt: the name says plain text, and its first line is a JSON object\. Say"):
        made(path, as_lines(TEXTS))
    assert made(path, as_lines(TEXTS), input_kind="jsonl") == (TEXTS, [])
    assert len(made(path, as_lines(TEXTS), input_kind="text")[0]) == 1


def archive(kind: str) -> bytes:
    stream = io.BytesIO()
    if kind == "zip":
        with zipfile.ZipFile(stream, "w") as packed:
            packed.writestr("a.txt", "text")
    else:
        with tarfile.open(fileobj=stream, mode="w") as tar:
            tar.addfile(tarfile.TarInfo("a.txt"))
    return stream.getvalue()


@pytest.mark.parametrize("name", ["a", "a.txt", "a.jsonl", "a.txt.gz"])
@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (archive("tar"), "a tar archive: unpack it"),
        (archive("zip"), "a zip archive"),
        (b"%PDF-1.7\ntext", "PDF"),
        (b"\xfd7zXZ\x00rest", "xz, which is not supported"),
        (b"MMIDIDX\x00\x00rest", "the index of a corpus"),
        ("text in UTF-16".encode("utf-16"), "UTF-16: convert it"),
        ("text in UTF-16".encode("utf-16-le"), "many zero bytes: UTF-16 without its mark"),
    ],
)
def test_binary_files_are_refused(tmp_path: Path, name: str, content: bytes, reason: str) -> None:
    if name.endswith(".gz"):
        content = gzip.compress(content)
    with pytest.raises(DataError, match=rf"{name} does not hold text but {reason}"):
        made(tmp_path / name, content)


def test_parquet_under_another_name(tmp_path: Path) -> None:
    write_parquet(tmp_path / "part-0", {"text": TEXTS})
    (report,) = preprocess([str(tmp_path / "part-0")], str(tmp_path / "out"), BYTES, log=lambda line: None)
    assert texts_of(report.prefix) == TEXTS
    (tmp_path / "a.txt").write_bytes((tmp_path / "part-0").read_bytes())
    with pytest.raises(DataError, match=r"a\.txt does not hold text but a Parquet file \(--input-format parquet"):
        find_inputs([str(tmp_path / "a.txt")])


@pytest.mark.parametrize("rest", [b"", b"BZh9 no stream", b"\0\0"])
def test_a_cut_bzip2_file_and_bytes_behind_a_stream(tmp_path: Path, rest: bytes) -> None:
    content = bz2.compress(as_lines(TEXTS * 100))
    content = content + rest if rest else content[:-10]
    with pytest.raises(DataError, match=r"a\.jsonl\.bz2 is damaged or cut, after line"):
        made(tmp_path / "a.jsonl.bz2", content)


def test_what_a_folder_passes_over_is_said(tmp_path: Path) -> None:
    for name in ("a.jsonl", "wiki_00", "sub/wiki_01", ".hidden"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(as_lines(TEXTS))
    said: list[str] = []
    (file,) = find_inputs([str(tmp_path)], log=said.append)
    assert file.path == str(tmp_path / "a.jsonl")
    assert said == [
        f"{tmp_path}: files with other endings are passed over, 2 of them (sub/wiki_01, wiki_00); as a pattern, "
        f"'{tmp_path}/**/*', all files are taken"
    ]
    assert len(find_inputs([f"{tmp_path}/**/*"], log=said.append)) == 3 and len(said) == 3
    (tmp_path / "a.jsonl").unlink()
    with pytest.raises(DataError, match=r"without files whose names end .*; it holds sub/wiki_01, wiki_00: as a pat"):
        find_inputs([str(tmp_path)])


def test_many_notes_are_counted(tmp_path: Path) -> None:
    for i in range(12):
        (tmp_path / f"wiki_{i:02}").write_bytes(as_lines(TEXTS))
    said: list[str] = []
    find_inputs([f"{tmp_path}/wiki_*"], log=said.append)
    assert len(said) == 11 and said[-1] == "12 such files in all, of which the first 10 are named above"


def test_a_tokenizer_is_trained_on_the_texts_alone(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Of JSON lines under another name: no piece knows the key or a brace."""
    path = tmp_path / "wiki_00"
    path.write_text("".join(json.dumps({"text": f"word{i % 7} and word{i % 5}"}) + "\n" for i in range(200)))
    model = train_sentencepiece([str(path)], str(tmp_path / "t"), 285)
    assert "wiki_00 is read as JSON lines, by its content" in capfd.readouterr().err
    processor = sentencepiece.SentencePieceProcessor(str(model))
    pieces = [processor.id_to_piece(i) for i in range(260, processor.get_piece_size())]
    assert not any("{" in piece or '"' in piece or "text" in piece for piece in pieces)
    path.write_bytes(archive("zip"))
    with pytest.raises(DataError, match="does not hold text but a zip archive"):
        train_sentencepiece([str(path)], str(tmp_path / "t"), 285)
