#!/usr/bin/env python
"""Trains a Llama with EDiT: `torchrun --nproc-per-node N pretrain_llama.py --help`."""

import os
import sys

# Before torch: its C++ side writes pages of frames when the store's process has ended; what that means is said anyway.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

from megatron_edit.train.main import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], owns_process=True))
