"""`final/`: weights only, the anchor after the last sync. For export, generation and the last evaluation."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from megatron_edit.checkpoint.store import CheckpointStore
from megatron_edit.model.names import canonical_name
from megatron_edit.train.replica import Replica


def save_final(store: CheckpointStore, replica: Replica, *, iteration: int, vocab_size: int) -> None:
    """Writes `final/`: one file per tensor and pipeline parallel rank of replica 0, canonical names inside.

    Each tensor is this tensor parallel rank's shard in the model's dtype, the vocabulary padded as in training;
    `metadata.json` holds the model's settings and the degrees. Does not depend on which replica writes: all hold the
    same anchor. Collective over the world.
    """
    place = replica.mesh.place
    files: dict[str, Any] = {}
    with replica.engine.anchor_weights():
        if place.sync == place.dp == place.cp == 0:
            weights = {
                canonical_name(chunk, name): parameter.detach().to("cpu", copy=True)  # not a view of the buffer
                for chunk in replica.chunks
                for name, parameter in chunk.named_parameters()
            }
            files[f"weights_tp_{place.tp:02d}_pp_{place.pp:03d}.pt"] = weights
        layout = replica.mesh.layout
        store.write_folder(
            store.directory / "final",
            files,
            {
                "iteration": iteration,
                "vocab_size": vocab_size,
                "tensor_model_parallel_size": layout.tp,
                "pipeline_model_parallel_size": layout.pp,
                "model": asdict(replica.config.model),
            },
        )
