#!/usr/bin/env python
"""Converts weights: Hugging Face folders, checkpoints of this program, checkpoints of Megatron-LM (docs/conversion.md).

python tools/convert_checkpoint.py hf-to-megatron          --input HF_FOLDER  --output DIR
python tools/convert_checkpoint.py megatron-to-hf          --input CHECKPOINT --output HF_FOLDER
python tools/convert_checkpoint.py megatron-lm-to-megatron --input CHECKPOINT --output DIR --vocab-size N

Exit code: 0 done, 2 something that cannot be converted (named, nothing written), 1 anything else (a full disk).
"""

import sys

from megatron_edit.convert.command import main
from megatron_edit.log.streams import outlive_readers

if __name__ == "__main__":
    outlive_readers()
    sys.exit(main(sys.argv[1:]))
