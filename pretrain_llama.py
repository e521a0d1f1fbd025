#!/usr/bin/env python
"""Trains a Llama with EDiT: `torchrun --nproc-per-node N pretrain_llama.py --help`."""

import sys

from megatron_edit.train.main import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
