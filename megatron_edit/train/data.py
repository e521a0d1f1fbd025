"""What this rank reads: datasets, training batches, evaluation batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron_edit.config.batch_schedule import BatchSchedule
from megatron_edit.config.resolved import ResolvedConfig
from megatron_edit.data.blend import is_validation
from megatron_edit.data.checked import CheckedData, document_ends
from megatron_edit.data.datasets import SplitDatasets, build_mock_split, build_split
from megatron_edit.data.loader import Microbatch, MicrobatchLoader, RankPlace, ReserveLoader, evaluation_batches
from megatron_edit.data.open_files import OpenFiles
from megatron_edit.data.reserves import SamplePool
from megatron_edit.parallel.mesh import Mesh


class RunData:
    """Datasets of the run and what this rank reads of them."""

    def __init__(self, config: ResolvedConfig, checked: CheckedData, mesh: Mesh) -> None:
        self._config = config
        self._pin_memory = mesh.platform.name == "cuda"
        interleaved = config.parallel.num_layers_per_virtual_pipeline_stage is not None
        self._microbatch_multiple = mesh.layout.pp if interleaved else 1
        self._place = RankPlace(
            num_replicas=mesh.num_replicas,
            replica=mesh.replica,
            shard_size=mesh.layout.dp,
            shard_rank=mesh.place.dp,
            micro_batch_size=config.training.micro_batch_size,
        )
        self._files = OpenFiles()
        self._splits = {name: self._build(name, checked) for name in checked.splits}

    @property
    def evaluation_splits(self) -> list[str]:
        """Splits to evaluate on."""
        return [name for name in self._splits if name != "train"]

    @property
    def validation_splits(self) -> list[str]:
        """Those of them that are evaluated in the course of the training."""
        return [name for name in self._splits if is_validation(name)]

    def loader(self, consumed_samples: int, batch: BatchSchedule) -> MicrobatchLoader:
        """This rank's training batches after `consumed_samples` of all replicas."""
        train = self._splits["train"]
        return MicrobatchLoader(
            train.datasets,
            train.training_order(self._config.training.seed),
            consumed_samples=consumed_samples,
            place=self._place,
            batch=batch,
            num_workers=self._config.data.num_workers,
            pin_memory=self._pin_memory,
        )

    def reserve_loader(self) -> ReserveLoader:
        """This rank's training batches out of reserves, for replicas that take unequal numbers of steps."""
        train = self._splits["train"]
        return ReserveLoader(
            train.datasets,
            train.training_order(self._config.training.seed),
            place=self._place,
            num_workers=self._config.data.num_workers,
            pin_memory=self._pin_memory,
        )

    def pool(self, consumed_samples: int, state: dict[str, Any] | None) -> SamplePool:
        """The samples that were not used: those of a saved `state`, or all after `consumed_samples`."""
        order = self._splits["train"].training_order(self._config.training.seed)
        epoch_size = order.unique_prefix() if order.weights is None else None
        if state is None:
            return SamplePool(epoch_size, consumed_samples)
        return SamplePool(epoch_size, state["frontier"], state["ranges"])

    def evaluation(self, split: str) -> Iterator[list[Microbatch]]:
        """This rank's share of the same first samples of `split` at every call."""
        datasets = self._splits[split]
        return evaluation_batches(
            datasets.datasets,
            datasets.evaluation_order(),
            eval_iters=self._config.evaluation.eval_iters,
            place=self._place,
            global_batch_size=self._evaluation_batch_size,
            microbatch_multiple=self._microbatch_multiple,
            pin_memory=self._pin_memory,
        )

    @property
    def _evaluation_batch_size(self) -> int:
        """The same through the whole run: of a batch that grows the last."""
        return self._config.training.global_batch_size

    def _build(self, name: str, checked: CheckedData) -> SplitDatasets:
        seq_length = self._config.model.seq_length
        if checked.sources is None:
            return build_mock_split(
                name,
                seq_length=seq_length,
                vocab_size=checked.tokenizer.vocab_size,
                seed=self._config.training.seed,
            )
        source = checked.sources[name]
        assert source is not None
        return build_split(
            source,
            seq_length=seq_length,
            tokenizer=checked.tokenizer,
            document_ends=document_ends(self._config.data),
            files=self._files,
        )
