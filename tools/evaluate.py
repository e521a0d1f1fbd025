#!/usr/bin/env python
"""Perplexity of a checkpoint or Hugging Face folder on a corpus, and lm-eval tasks from local files.

python tools/evaluate.py --load runs/DIR --data-path data/corpus_text_document --split 95,5
python tools/evaluate.py --load runs/DIR --tasks paper --task-data DIR --output results.json
"""

import sys

from megatron_edit.inference.evaluate import main
from megatron_edit.log.streams import outlive_readers

if __name__ == "__main__":
    outlive_readers()
    sys.exit(main(sys.argv[1:]))
