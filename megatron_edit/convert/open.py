"""Opens weights by what a folder holds."""

from __future__ import annotations

from pathlib import Path

from megatron_edit.convert.errors import ConversionError
from megatron_edit.convert.hf_config import CONFIG
from megatron_edit.convert.weights import Weights


def open_weights(path: Path, *, step: int | None = None, replica: int | None = None) -> Weights:
    """Of a Hugging Face folder or of a checkpoint of this program; raises ConversionError or CheckpointError."""
    if (path / CONFIG).exists():
        from megatron_edit.convert.hugging_face import HuggingFaceWeights

        if step is not None or replica is not None:
            raise ConversionError(f"{path} is a Hugging Face folder: it has no iterations and no replicas")
        return HuggingFaceWeights(path)
    from megatron_edit.convert.megatron import MegatronWeights  # megatron-core's import takes seconds

    return MegatronWeights(path, step=step, replica=replica)
