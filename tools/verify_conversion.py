#!/usr/bin/env python
"""Logits of a checkpoint against those of transformers on given text; layer by layer when they differ.

python tools/verify_conversion.py --load CHECKPOINT --hf HF_FOLDER --text "Some text"

Exit code: 0 equal within --tolerance, 1 different, 2 nothing to compare.
"""

import sys

from megatron_edit.inference.verify import main
from megatron_edit.log.streams import outlive_readers

if __name__ == "__main__":
    outlive_readers()
    sys.exit(main(sys.argv[1:]))
