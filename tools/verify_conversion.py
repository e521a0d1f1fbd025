#!/usr/bin/env python
"""Logits of a checkpoint against those of transformers on given text; layer by layer when they differ.

python tools/verify_conversion.py --load CHECKPOINT --hf HF_FOLDER --text "Some text"

Exit code: 0 equal within --tolerance, 1 different, 2 nothing to compare.
"""

import sys

from megatron_edit.config.streams import outlive_readers
from megatron_edit.inference.verify import main

if __name__ == "__main__":
    outlive_readers()
    sys.exit(main(sys.argv[1:]))
