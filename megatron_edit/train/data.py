"""The data of a run: tokenizer and files, checked before any process group; then datasets, loader, evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_edit.config.schema import Config
from megatron_edit.data.blend import SplitSource, resolve_sources
from megatron_edit.data.check import check_data_files
from megatron_edit.data.datasets import SplitDatasets, build_mock_split, build_split
from megatron_edit.data.errors import DataError
from megatron_edit.data.loader import Microbatch, MicrobatchLoader, RankPlace, evaluation_batches
from megatron_edit.data.tokenizers import Tokenizer, build_tokenizer
from megatron_edit.parallel.mesh import Mesh


@dataclass(frozen=True)
class CheckedData:
    """What was found in seconds, without torch.distributed. `sources` is None with --mock-data."""

    tokenizer: Tokenizer
    sources: dict[str, SplitSource | None] | None
    splits: tuple[str, ...]  # those that will be read: "train", "valid", "test"
    notes: list[str]


def check_data(config: Config) -> CheckedData:
    """Opens tokenizer and files. Raises DataError with all problems: missing, damaged, too short, not fitting."""
    data, evaluation = config.data, config.evaluation
    assert data.tokenizer_type is not None, "the checks ask for it"
    tokenizer = build_tokenizer(data.tokenizer_type, data.tokenizer_model, data.vocab_size)
    evaluates = evaluation.eval_iters > 0 and (evaluation.eval_interval is not None or evaluation.eval_at_end)
    if data.mock_data:
        splits = ("train", "valid") if evaluates else ("train",)
        return CheckedData(tokenizer, None, splits, ["training on generated sequences (--mock-data)"])
    sources = resolve_sources(
        data_path=data.data_path,
        split=data.split,
        train_data_path=data.train_data_path,
        valid_data_path=data.valid_data_path,
        test_data_path=data.test_data_path,
    )
    wanted = ["train"]
    if evaluates and (evaluation.eval_interval is not None or sources["valid"] is not None):
        wanted.append("valid")

    def check(splits: list[str]) -> list[str]:
        return check_data_files(
            sources,
            seq_length=config.model.seq_length,
            tokenizer=tokenizer,
            wanted=splits,
            eod_mask_loss=data.eod_mask_loss,
        )

    notes = check(wanted)
    if evaluates and sources["test"] is not None:
        try:
            notes += check(["test"])
            wanted.append("test")
        except DataError as error:  # nobody asked for it: --split has a third share by default
            notes.append(f"no last test: {error}")
    return CheckedData(tokenizer, sources, tuple(wanted), notes)


class RunData:
    """Datasets of the run and what this rank reads of them."""

    def __init__(self, config: Config, checked: CheckedData, mesh: Mesh) -> None:
        self._config = config
        self._pin_memory = mesh.platform.name == "cuda"
        self._place = RankPlace(
            num_replicas=mesh.num_replicas,
            replica=mesh.replica,
            shard_size=mesh.layout.dp,
            shard_rank=mesh.place.dp,
            micro_batch_size=config.training.micro_batch_size,
        )
        self._splits = {name: self._build(name, checked) for name in checked.splits}

    @property
    def evaluation_splits(self) -> list[str]:
        """Splits to evaluate on."""
        return [name for name in self._splits if name != "train"]

    def loader(self, consumed_samples: int) -> MicrobatchLoader:
        """This rank's training batches after `consumed_samples` of all replicas."""
        train = self._splits["train"]
        return MicrobatchLoader(
            train.datasets,
            train.training_order(self._config.training.seed),
            consumed_samples=consumed_samples,
            place=self._place,
            global_batch_size=self._global_batch_size,
            num_workers=self._config.data.num_workers,
            pin_memory=self._pin_memory,
        )

    def evaluation(self, split: str) -> Iterator[list[Microbatch]]:
        """This rank's share of the same first samples of `split` at every call."""
        datasets = self._splits[split]
        return evaluation_batches(
            datasets.datasets,
            datasets.evaluation_order(),
            eval_iters=self._config.evaluation.eval_iters,
            place=self._place,
            global_batch_size=self._global_batch_size,
            pin_memory=self._pin_memory,
        )

    @property
    def _global_batch_size(self) -> int:
        size = self._config.training.global_batch_size
        assert size is not None
        return size

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
            eod_mask_loss=self._config.data.eod_mask_loss,
        )
