"""What all ranks must have in common before they train, by name: for `agreement`. No process group.

Left out is what may differ from node to node: spellings of paths (their content counts), and what one rank alone uses.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

import megatron_edit
from megatron_edit.config.schema import Config
from megatron_edit.config.settings import SETTINGS, value_of
from megatron_edit.data.checked import CheckedData

# Of one node or one rank alone: where it reports, how it reads ahead, which file its settings came from.
OF_ONE_RANK = ("config", "metrics_file", "tensorboard_dir", "wandb_project", "progress", "num_workers")
CORPORA = ("data_path", "train_data_path", "valid_data_path", "test_data_path")  # their content is compared
PATHS = ("PATH", "DIR", "FILE")  # metavar of settings of which only whether they are given is compared
PACKAGES = ("megatron-core", "torch", "numpy", "sentencepiece", "tokenizers", "transformer-engine")
VARIABLES = (  # of the environment: another value, another result, or collectives that do not fit together
    "CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "NCCL_ALGO", "NCCL_PROTO",
    "NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN", "NVTE_ALLOW_NONDETERMINISTIC_ALGO", "MKL_CBWR",
)  # fmt: skip
WINDOWS, WIDTH = 32, 1 << 13  # pieces of a file that are hashed, bytes of each


def program_facts(environment: Mapping[str, str]) -> dict[str, str]:
    """Versions, the program's own code, and the environment where it matters."""
    facts = {f"the version of {name}": _version(name) for name in PACKAGES}
    facts["the code of megatron_edit"] = code_digest()
    facts.update({f"the environment variable {name}": environment.get(name, "not set") for name in VARIABLES})
    return facts


def setting_facts(config: Config) -> dict[str, str]:
    """Every setting of a resolved config by its flag, but for those that may differ."""
    facts = {}
    for name, setting in SETTINGS.items():
        if name in OF_ONE_RANK or name in CORPORA:
            continue
        value = value_of(config, name)
        if setting.metavar in PATHS:
            facts[setting.flag] = "not given" if value is None else "given"
        else:  # whether it was derived decides what a change of the batch or of the ranks does to it
            facts[setting.flag] = f"{value}" + (" (derived)" if config.sources.get(name) == "derived" else "")
    return facts


def data_facts(checked: CheckedData) -> dict[str, str]:
    """Tokenizer and corpora, by content."""
    tokenizer = checked.tokenizer
    facts = {
        "the tokenizer": f"{tokenizer.name} of {tokenizer.vocab_size} ids, fingerprint {tokenizer.fingerprint[:16]}, "
        f"begin, end and pad id {tokenizer.bos_id}, {tokenizer.eod_id}, {tokenizer.pad_id}",
        "the rows of the vocabulary": str(checked.vocab_size),
        "the splits that are read": ", ".join(checked.splits),
    }
    for split in checked.splits:
        source = (checked.sources or {}).get(split)
        if source is None:
            continue
        blend = source.blend
        facts[f"the weights of {source.flag}"] = str([str(weight) for weight in blend.weights or ()])
        for number, prefix in enumerate(blend.prefixes, start=1):
            name = f"corpus {number} of {source.flag}"  # the splits of --data-path have the same corpora
            if name not in facts:
                facts[name] = corpus_fact(prefix)
    return facts


def corpus_fact(prefix: str) -> str:
    """Sizes of its two files, and a hash of evenly spaced pieces of both, first and last bytes among them."""
    digest, sizes = hashlib.sha256(), []
    for extension in (".idx", ".bin"):
        path = prefix + extension
        size = os.path.getsize(path)
        sizes.append(f"{path.rpartition('.')[2]} {size} bytes")
        with open(path, "rb") as file:
            for window in range(WINDOWS):
                file.seek(max(0, size - WIDTH) * window // (WINDOWS - 1))
                digest.update(file.read(WIDTH))
    return f"{', '.join(sizes)}, sample {digest.hexdigest()[:16]}"


def code_digest() -> str:
    """Of all Python files of the package: two checkouts of one version need not be the same."""
    root, digest = Path(megatron_edit.__path__[0]), hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes() + b"\0")
    return f"sha256 {digest.hexdigest()[:16]}"


def _version(name: str) -> str:
    if name == "torch":
        return str(torch.__version__)
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
