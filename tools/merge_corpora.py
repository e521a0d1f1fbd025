#!/usr/bin/env python
"""Several corpora laid end to end into one.

python tools/merge_corpora.py --input data/a_text_document data/b_text_document --output-prefix data/ab_text_document
"""

from megatron_edit.config.paths import PathParser
from megatron_edit.corpora.merge import merge_corpora
from megatron_edit.corpora.tool import run_tool


def main() -> None:
    parser = PathParser(description="Joins corpora made with one tokenizer.", allow_abbrev=False)
    parser.add_argument("--input", nargs="+", required=True, metavar="PREFIX", help="corpora, in their order")
    parser.add_argument("--output-prefix", required=True, metavar="PREFIX", help="of what is written")
    args = parser.parse_args()
    documents, tokens = merge_corpora(args.input, args.output_prefix)
    print(f"{args.output_prefix}: {documents} documents, {tokens} tokens")


if __name__ == "__main__":
    run_tool(main)
