#!/usr/bin/env python
"""Real text without a download: Python's language reference, the standard library's docstrings and source."""

from megatron_edit.config.paths import PathParser
from megatron_edit.corpora.quickstart import build_quickstart_corpus
from megatron_edit.corpora.tool import run_tool


def main() -> None:
    parser = PathParser(
        description="Writes JSON lines of text that is part of Python.", allow_abbrev=False
    )
    parser.add_argument("--output", required=True, metavar="FILE.jsonl")
    parser.add_argument("--max-bytes", type=int, default=4_000_000, help="of text (default 4000000)")
    args = parser.parse_args()
    documents, size = build_quickstart_corpus(args.output, args.max_bytes)
    print(f"{args.output}: {documents} documents, {size} bytes of text")


if __name__ == "__main__":
    run_tool(main)
