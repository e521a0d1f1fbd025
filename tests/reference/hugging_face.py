"""Models of transformers with random weights, and their logits: python -m tests.reference.hugging_face FOLDER.

Run as a process of its own, since the CPU platform replaces attributes of torch. FOLDER/models.json names the models:
{"NAME": {"class": "Llama", "dtype": "float32", "config": {...}, "greedy": true}}. Written are FOLDER/NAME, a Hugging
Face folder, FOLDER/NAME.logits, a safetensors file with "tokens" int64 [2, 64] and "logits" fp32 [2, 64, V], and, where
it is asked for, FOLDER/NAME.greedy, the most likely continuation of each of PROMPTS.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
VOCABULARY = 259
SEQUENCE = 64
PROMPTS = [[5, 9, 200, 31, 8, 77], [1], list(range(100, 140))]
NEW_TOKENS = 8


def make_models(folder: Path, models: dict[str, dict[str, Any]]) -> None:
    """Runs this file for `models`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "models.json").write_text(json.dumps(models))
    run_python("-m", "tests.reference.hugging_face", str(folder))


def run_python(*words: str) -> str:
    """What a fresh Python prints that imports this tree."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    result = subprocess.run([sys.executable, *words], capture_output=True, text=True, env=environment, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def tiny(**changes: Any) -> dict[str, Any]:
    """The tests' tiny Llama as values of config.json, changed."""
    return {
        "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4,
        "num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 128, **changes,
    }  # fmt: skip


def _main(folder: Path) -> None:
    import torch
    import transformers
    from safetensors.torch import save_file

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    for number, (name, wanted) in enumerate(json.loads((folder / "models.json").read_text()).items()):
        torch.manual_seed(number)
        config = getattr(transformers, wanted["class"] + "Config")(**wanted["config"])
        model = getattr(transformers, wanted["class"] + "ForCausalLM")(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():  # no two parts alike, norms and biases too
                parameter.normal_(0, 0.06) if parameter.dim() > 1 else parameter.normal_(1, 0.3)
        model = model.to(getattr(torch, wanted.get("dtype", "float32")))
        model.save_pretrained(folder / name, max_shard_size=wanted.get("max_shard_size", "5GB"))
        model = type(model).from_pretrained(folder / name, dtype=torch.float32).eval()  # to() rounds the rotary buffers
        tokens = torch.randint(0, config.vocab_size, (2, SEQUENCE))
        with torch.no_grad():
            logits = model(tokens, use_cache=False).logits
        save_file({"tokens": tokens, "logits": logits.contiguous()}, folder / f"{name}.logits")
        greedy = []
        for prompt in PROMPTS if wanted.get("greedy") else []:
            ids = torch.tensor([prompt])
            new = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None
            )
            greedy.append(new[0, len(prompt) :].tolist())
        (folder / f"{name}.greedy").write_text(json.dumps(greedy))


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
