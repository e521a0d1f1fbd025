#!/usr/bin/env python
"""Text from a checkpoint of this program or a Hugging Face folder.

python tools/generate.py --load runs/DIR --prompt "The anchor" --max-new-tokens 40
torchrun --nproc-per-node 4 tools/generate.py --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 ...
"""

import sys

from megatron_edit.inference.generate import main
from megatron_edit.log.streams import outlive_readers

if __name__ == "__main__":
    outlive_readers()
    sys.exit(main(sys.argv[1:]))
