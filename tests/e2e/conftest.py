"""Small corpora for the command."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from megatron_edit.corpora.preprocess import TokenizerSpec, preprocess


@dataclass(frozen=True)
class Corpora:
    """Prefixes of .bin and .idx files, made with the byte tokenizer."""

    folder: Path
    documents_200: str
    """200 short documents."""
    one_short: str
    """One document of 10 bytes and an end mark."""


@pytest.fixture(scope="session")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> Corpora:
    folder = tmp_path_factory.mktemp("corpora")

    def make(name: str, texts: list[str]) -> str:
        lines = folder / f"{name}.jsonl"
        lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        spec = TokenizerSpec("ByteTokenizer")
        (report,) = preprocess([str(lines)], str(folder / name), spec, append_eod=True, log=lambda line: None)
        return report.prefix

    draw = np.random.default_rng(5)
    words = ["anchor", "replica", "sync", "shard", "outer", "local", "step", "mean"]
    texts = [" ".join(draw.choice(words, size=int(draw.integers(3, 20)))) for _ in range(200)]
    return Corpora(folder, make("many", texts), make("one", ["0123456789"]))
