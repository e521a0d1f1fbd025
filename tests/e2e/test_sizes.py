"""Field reports B08 and B17: batch arithmetic over a table of sizes, and models that keep all their layers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron_edit.train.main import main
from tests.e2e.runs import TINY, arguments, train, training_lines, weights_of
from tests.unit.test_config_checks import INVALID, VALID, Sizes, size_flags

LARGE_ENOUGH = {"num_attention_heads": 8, "num_query_groups": 8, "num_layers": 4}  # for 8 tensor parallel ranks


def dry_start(sizes: Sizes, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of rank 0 with --dry-run."""
    flags = size_flags(sizes.tp, sizes.pp, sizes.replicas, sizes.micro, sizes.batch).split()
    environment = {"RANK": "0", "WORLD_SIZE": str(sizes.world), "LOCAL_WORLD_SIZE": str(min(sizes.world, 8))}
    code = main([*flags, *arguments(LARGE_ENOUGH), "--device", "cpu", "--dry-run"], environment)
    return code, *capsys.readouterr()


@pytest.mark.parametrize("sizes", VALID, ids=str)
def test_sizes_that_fit(sizes: Sizes, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = dry_start(sizes, capsys)
    assert (code, err) == (0, "")
    shards = sizes.world // (sizes.tp * sizes.pp * sizes.replicas)
    assert (
        f"batch: global {sizes.batch} = {sizes.replicas} replicas x {shards} shards x {sizes.micro} micro batch x "
        f"{sizes.microbatches} microbatches" in out
    )


@pytest.mark.parametrize("sizes", INVALID, ids=str)
def test_sizes_that_do_not_fit(sizes: Sizes, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = dry_start(sizes, capsys)
    assert (code, out) == (2, "")
    numbers = set(map(int, re.findall(r"(?<![\w.])\d+(?![\w.])", err)))
    assert numbers >= {*sizes.named, *sizes.fix.values()}, err


@pytest.mark.parametrize("sizes", [VALID[1], VALID[2], VALID[4], VALID[6]], ids=str)
def test_one_iteration_uses_one_global_batch(sizes: Sizes) -> None:
    result = train(
        sizes.world, train_iters=1, edit_num_replicas=sizes.replicas, micro_batch_size=sizes.micro,
        global_batch_size=sizes.batch, tensor_model_parallel_size=sizes.tp, pipeline_model_parallel_size=sizes.pp,
    )  # fmt: skip
    (line,) = training_lines(result.stdout).values()
    assert (line["global batch size"], line["consumed samples"]) == (str(sizes.batch), str(sizes.batch))


@pytest.mark.parametrize("given", ["global_batch_size", "replica_batch_size"])
def test_another_number_of_ranks(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The given size stays: the other one, or the number of microbatches, follows."""
    batches = []
    for replicas in (1, 2, 4):
        flags = arguments({**TINY, "edit_num_replicas": replicas, "global_batch_size": None, given: 8})
        assert main([*flags, "--dry-run"], {"RANK": "0", "WORLD_SIZE": str(replicas)}) == 0
        (found,) = re.findall(r"batch: global (\d+) = .* x (\d+) microbatches; replica batch (\d+)",
                              capsys.readouterr().out)  # fmt: skip
        batches.append(tuple(map(int, found)))
    if given == "global_batch_size":
        assert batches == [(8, 4, 8), (8, 2, 4), (8, 1, 2)]
    else:
        assert batches == [(8, 4, 8), (16, 4, 8), (32, 4, 8)]


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_every_layer_is_trained_and_exported(tied: bool, tmp_path: Path) -> None:
    """The printed number of parameters is that of the exported weights, over two stages."""
    settings = {"pipeline_model_parallel_size": 2, "edit_num_replicas": 1, "train_iters": 1, "num_layers": 6}
    result = train(2, **settings, untie_embeddings_and_output_weights=not tied, save=str(tmp_path / "run"))
    weights = weights_of(tmp_path / "run" / "final", "model.")
    layers = {int(match[1]) for name in weights if (match := re.search(r"layers\.(\d+)\.", name))}
    assert layers == set(range(6))
    counted = sum(tensor.numel() for tensor in weights.values())
    assert f"parameters: {counted:,}, counted over the ranks of replica 0" in result.stdout
