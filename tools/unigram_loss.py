#!/usr/bin/env python
"""Validation loss of a model that knows only how often each token occurs in the training split.

python tools/unigram_loss.py --data-path data/corpus_text_document --split 95,5
prints nats per token over all tokens of the validation split but its first (which no sample predicts).
"""


import numpy as np

from megatron_edit.config.paths import PathParser
from megatron_edit.corpora.tool import run_tool
from megatron_edit.corpora.unigram import count_tokens, unigram_loss
from megatron_edit.data.blend import resolve_sources
from megatron_edit.data.errors import DataError
from megatron_edit.data.indexed import IndexedFiles, Manifest


def main() -> None:
    parser = PathParser(description="Prints the loss of a unigram model.", allow_abbrev=False)
    parser.add_argument("--data-path", required=True, metavar="PREFIX", help="one corpus")
    parser.add_argument("--split", default="969,30,1", help="as in training")
    parser.add_argument("--vocab-size", type=int, help="default: that of the corpus' manifest")
    parser.add_argument(
        "--max-tokens", type=int, help="predict only this many validation tokens: eval-iters x batch x length"
    )
    args = parser.parse_args()

    sources = resolve_sources(data_path=[args.data_path], split=args.split)
    train, valid = sources["train"], sources["valid"]
    files, manifest = IndexedFiles(args.data_path), Manifest.read(args.data_path)
    vocab_size = args.vocab_size or (manifest.vocab_size if manifest else None)
    if train is None or valid is None:
        raise DataError(f"--split {args.split} has no validation split; 95,5 would work")
    if vocab_size is None:
        raise DataError(f"{args.data_path} has no manifest: give --vocab-size")

    count = len(files.lengths)
    begin, end = files.documents_range(*valid.documents(count))
    end = min(end, begin + 1 + args.max_tokens) if args.max_tokens else end
    train_range = files.documents_range(*train.documents(count))
    counts = count_tokens(files.token_chunks(*train_range), vocab_size)
    tokens = np.asarray(files.tokens[begin + 1 : end], dtype=np.int64)
    loss = unigram_loss(counts, tokens)
    print(f"unigram loss {loss:.4f} nats a token over {len(tokens)} validation tokens")


if __name__ == "__main__":
    run_tool(main)
