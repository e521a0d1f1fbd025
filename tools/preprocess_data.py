#!/usr/bin/env python
"""Text to the token files that training reads.

python tools/preprocess_data.py --input corpus.jsonl --output-prefix data/corpus \\
    --tokenizer-type SentencePieceTokenizer --tokenizer-model tokenizer.model --append-eod
writes data/corpus_text_document.bin, .idx and .manifest.json, for --data-path data/corpus_text_document.
A command that was killed goes on when it is given again. docs/corpora.md tells all.
"""

import argparse

from megatron_edit.config.paths import PathParser
from megatron_edit.corpora.preprocess import TokenizerSpec, preprocess
from megatron_edit.corpora.tool import run_tool
from megatron_edit.data.tokenizers import ALIASES, TOKENIZER_TYPES


def parse_args() -> argparse.Namespace:
    parser = PathParser(description="Text to .bin/.idx for --data-path.", allow_abbrev=False)
    parser.add_argument(
        "--input", nargs="+", required=True, metavar="PATH",
        help="files, folders, patterns in quotes, or - for standard input; .jsonl, .json, .ndjson: one JSON object a "
        "line; .parquet; .txt: plain text; each of them but .parquet also with .gz, .bz2 or .zst; under any other name "
        "the content decides",
    )  # fmt: skip
    parser.add_argument(
        "--input-format", choices=("auto", "jsonl", "text", "parquet"), default="auto",
        help="what the inputs hold, whatever names and content say (default auto; standard input: jsonl)",
    )  # fmt: skip
    parser.add_argument(
        "--output-prefix", required=True, metavar="PREFIX", help="files are named PREFIX_KEY_document.*"
    )
    parser.add_argument(
        "--json-keys", nargs="+", default=["text"], metavar="KEY", help="keys or columns of the texts; files for each"
    )
    parser.add_argument("--tokenizer-type", required=True, choices=(*TOKENIZER_TYPES, *ALIASES))
    parser.add_argument("--tokenizer-model", metavar="PATH", help="file or folder of the tokenizer")
    parser.add_argument("--vocab-size", type=int, help="vocabulary of NullTokenizer")
    parser.add_argument("--append-eod", action="store_true", help="an end id after each document")
    parser.add_argument(
        "--parse-special-tokens", action=argparse.BooleanOptionalAction, default=False,
        help="a special token that a text spells (<|im_start|>, <filename>) becomes its id; without it, plain text",
    )  # fmt: skip
    parser.add_argument(
        "--text-unit", choices=("file", "paragraph", "line"), default="file",
        help="what is a document in plain text: the file (default), paragraphs between blank lines, or lines",
    )  # fmt: skip
    parser.add_argument(
        "--on-error", choices=("fail", "skip"), default="fail",
        help="a document that is not UTF-8, no JSON or has no text: stop (default), or leave it out and count it",
    )  # fmt: skip
    parser.add_argument("--workers", type=int, default=1, help="processes that tokenize (default 1)")
    parser.add_argument(
        "--partitions", type=int, default=1, metavar="N",
        help="parts of the input, read and written at the same time by workers / N processes each, then merged",
    )  # fmt: skip
    parser.add_argument(
        "--partition", type=int, metavar="I",
        help="do only part I (0 to N - 1), on this machine; tools/merge_corpora.py joins the parts",
    )  # fmt: skip
    parser.add_argument("--log-interval", type=int, default=10000, help="documents between progress lines")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    reports = preprocess(
        args.input,
        args.output_prefix,
        TokenizerSpec(args.tokenizer_type, args.tokenizer_model, args.vocab_size, args.parse_special_tokens),
        json_keys=args.json_keys,
        append_eod=args.append_eod,
        workers=args.workers,
        text_unit=args.text_unit,
        input_kind=None if args.input_format == "auto" else args.input_format,
        on_error=args.on_error,
        partitions=args.partitions,
        partition=args.partition,
        log_interval=args.log_interval,
    )
    for report in reports:
        print(report)


if __name__ == "__main__":
    run_tool(main)
