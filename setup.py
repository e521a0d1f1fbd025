"""Metadata of the package. Tool settings are in pyproject.toml, the versions tested in constraints*.txt."""

from pathlib import Path

from setuptools import find_packages, setup

TENSORBOARD = "tensorboard>=2.16"
DATA = ["pyarrow>=15", "zstandard>=0.22"]

EXTRAS = {
    # Hugging Face tokenizers and conversion of weights
    "hf": ["transformers>=4.45", "tokenizers>=0.20", "safetensors>=0.4"],
    # preprocessing of .parquet and .zst files
    "data": DATA,
    # benchmark tasks on exported weights
    "eval": ["lm-eval>=0.4.9", "accelerate>=1.0"],  # accelerate: lm-eval's own runner, which a test compares with
    # --tensorboard-dir
    "tensorboard": [TENSORBOARD],
    # --wandb-project
    "wandb": ["wandb>=0.18"],
    # replica groups that come and go
    "elastic": ["torchft>=0.2"],
    # --transformer-impl transformer_engine (CUDA and a compiler). Not the bare package: without its part
    # for torch, megatron-core cannot be imported.
    "te": ["transformer-engine[pytorch]>=2.4"],
    "test": ["pytest>=8", "hypothesis>=6.100", TENSORBOARD, *DATA],
    "dev": ["ruff>=0.6", "mypy>=1.11", "import-linter>=2.17", "pre-commit>=3.7", "types-PyYAML"],
}

setup(
    name="megatron_edit",
    version="0.1.0",
    description="EDiT: pre-training of Llamas by replicas that meet only now and then, on megatron-core",
    long_description=(Path(__file__).parent / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    packages=find_packages(include=["megatron_edit", "megatron_edit.*"]),
    package_data={"megatron_edit": ["py.typed"]},
    python_requires=">=3.11,<3.13",
    install_requires=[
        "torch>=2.8",
        "megatron-core>=0.16.1,<0.20",  # its inside is used: platform/megatron_core.py. From 0.17 on: Python 3.12
        "einops>=0.7",  # megatron-core imports einops, psutil and (from 0.18 on) triton without declaring them
        "psutil>=5.9",
        "triton>=3.2; python_version >= '3.12' and sys_platform == 'linux'",  # a CPU build of torch brings none
        "sentencepiece>=0.2",
        "numpy>=1.26",
        "pyyaml>=6",
        "rich>=13",
    ],
    extras_require=EXTRAS,
)
