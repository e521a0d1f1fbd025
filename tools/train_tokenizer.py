#!/usr/bin/env python
"""A sentencepiece tokenizer from text.

python tools/train_tokenizer.py --input corpus.jsonl --vocab-size 4096 --output-prefix data/tokenizer
writes data/tokenizer.model, for --tokenizer-type SentencePieceTokenizer.
"""

from megatron_edit.config.paths import PathParser
from megatron_edit.corpora.tool import run_tool
from megatron_edit.corpora.train_tokenizer import train_sentencepiece


def main() -> None:
    parser = PathParser(description="Trains a sentencepiece tokenizer.", allow_abbrev=False)
    parser.add_argument(
        "--input", nargs="+", required=True, metavar="PATH",
        help="files, folders, patterns or -, as those of tools/preprocess_data.py",
    )  # fmt: skip
    parser.add_argument("--input-format", choices=("auto", "jsonl", "text", "parquet"), default="auto")
    parser.add_argument("--output-prefix", required=True, metavar="PREFIX", help="writes PREFIX.model")
    parser.add_argument("--vocab-size", type=int, required=True, help="marks and the 256 bytes included")
    parser.add_argument("--model-type", choices=("bpe", "unigram"), default="bpe", help="default bpe")
    parser.add_argument("--json-key", default="text", metavar="KEY", help="key of the texts (default text)")
    parser.add_argument(
        "--max-sentences", type=int, default=0, help="train on so many lines, drawn at random; 0 (default): on all"
    )
    args = parser.parse_args()
    path = train_sentencepiece(
        args.input,
        args.output_prefix,
        args.vocab_size,
        json_key=args.json_key,
        model_type=args.model_type,
        input_kind=None if args.input_format == "auto" else args.input_format,
        max_sentences=args.max_sentences,
    )
    print(f"{path}: {args.vocab_size} pieces")


if __name__ == "__main__":
    run_tool(main)
