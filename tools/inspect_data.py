#!/usr/bin/env python
"""Looks into a corpus, or into the order of samples of a run.

python tools/inspect_data.py corpus PREFIX ... [--document N] [--tokenizer-type T --tokenizer-model PATH]
    statistics; or one document, as ids or as text
python tools/inspect_data.py order --position K [--count N] [--decode] [flags of pretrain_llama.py]
    what comes at the positions around K, and what each replica reads in the iteration after K samples
"""

import argparse
import os
import sys

from megatron_edit.config import ConfigError, check, derive, load_config
from megatron_edit.config.derive import batch_schedule
from megatron_edit.config.paths import PathParser
from megatron_edit.corpora.inspect import corpus_lines, document_lines, order_lines, replica_lines
from megatron_edit.corpora.tool import run_tool
from megatron_edit.data.checked import check_data, document_ends
from megatron_edit.data.tokenizers import ALIASES, TOKENIZER_TYPES, build_tokenizer


def parse_args() -> tuple[argparse.Namespace, list[str]]:
    parser = PathParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    commands = parser.add_subparsers(dest="command", required=True)
    corpus = commands.add_parser("corpus", help="statistics, or a document", allow_abbrev=False)
    corpus.add_argument("prefixes", nargs="+", metavar="PREFIX")
    corpus.add_argument("--document", type=int, metavar="N", help="print this document")
    corpus.add_argument("--tokenizer-type", choices=(*TOKENIZER_TYPES, *ALIASES), help="print it as text")
    corpus.add_argument("--tokenizer-model", metavar="PATH")
    corpus.add_argument("--vocab-size", type=int)
    order = commands.add_parser("order", help="samples around a position", allow_abbrev=False)
    order.add_argument("--position", type=int, required=True, metavar="K", help="position, or samples consumed")
    order.add_argument("--count", type=int, default=8, metavar="N", help="positions to show (default 8)")
    order.add_argument("--data-split", choices=("train", "valid", "test"), default="train")
    order.add_argument("--decode", action="store_true", help="print the text of each sample")
    args, flags = parser.parse_known_args()
    if flags and args.command == "corpus":
        parser.error(f"unrecognized arguments: {' '.join(flags)}")
    if args.command == "order" and (args.position < 0 or args.count < 1):
        parser.error(f"--position {args.position} --count {args.count}: positions count from 0, one or more are shown")
    return args, flags


def show_corpora(args: argparse.Namespace) -> None:
    tokenizer = None
    if args.tokenizer_type is not None:
        tokenizer = build_tokenizer(args.tokenizer_type, args.tokenizer_model, args.vocab_size)
    for prefix in args.prefixes:
        lines = corpus_lines(prefix) if args.document is None else document_lines(prefix, args.document, tokenizer)
        print(*lines, sep="\n")


def show_order(args: argparse.Namespace, flags: list[str]) -> None:
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    config = load_config(flags)
    # Only the data is looked at: length, batch and mesh of the run may be left out.
    about = ("--data", "--train-data", "--valid-data", "--test-data", "--split", "--tokenizer", "--mock", "no training")
    problems = [line for line in check(config, ranks, ranks, "cpu") if line.startswith(about)]
    if problems:
        raise ConfigError(problems)
    config = derive(config, ranks, ranks, "cpu")
    checked = check_data(config)
    if checked.sources is not None and checked.sources[args.data_split] is None:
        raise ConfigError([f"there is no {args.data_split} split"])

    from megatron_edit.data.datasets import build_mock_split, build_split  # megatron-core takes seconds to import

    seq_length, seed, name = config.model.seq_length, config.training.seed, args.data_split
    if checked.sources is None:
        vocab_size = checked.tokenizer.vocab_size
        split = build_mock_split(name, seq_length=seq_length, vocab_size=vocab_size, seed=seed)
        names = ["generated sequences"]
    else:
        source = checked.sources[name]
        assert source is not None
        ends = document_ends(config.data)
        split = build_split(source, seq_length=seq_length, tokenizer=checked.tokenizer, document_ends=ends)
        names = [str(dataset.tokens.path.with_suffix("")) for dataset in split.datasets]
    order = split.training_order(seed) if name == "train" else split.evaluation_order()
    print(*checked.notes, sep="\n")
    for line, position in zip(
        order_lines(order, names, args.position, args.count, sum(split.sizes)),
        range(args.position, args.position + args.count),
        strict=True,
    ):
        print(line)
        if args.decode:
            dataset, sample = order[position]
            print(checked.tokenizer.detokenize(split.datasets[dataset][sample]["tokens"].tolist()))
    schedule, replicas = batch_schedule(config), config.edit.edit_num_replicas
    if name == "train" and schedule is not None and replicas is not None:
        batch = schedule.size_at(args.position)
        print(f"the iteration after {args.position} samples, global batch {batch}:")
        print(*replica_lines(order, args.position, batch, replicas), sep="\n")


def main() -> None:
    args, flags = parse_args()
    try:
        show_corpora(args) if args.command == "corpus" else show_order(args, flags)
    except ConfigError as error:
        print(*[f"error: {problem}" for problem in error.problems], sep="\n", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    run_tool(main)
