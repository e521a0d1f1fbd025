"""The configurations in examples/ pass every check on the ranks that they are meant for."""

from pathlib import Path

import pytest

from megatron_edit.config import check, load_config, notes, resolve

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted((ROOT / "examples" / "recipes").glob("*.yaml"))
GPUS_PER_NODE = 8
NODES_PER_REPLICA = {"70b": 8}


def test_there_are_recipes() -> None:
    assert {"350m", "1b", "3b", "7b", "llama3-8b", "70b"} == {path.stem for path in RECIPES}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
@pytest.mark.parametrize("num_replicas", [2, 4])
def test_recipe_fits_its_nodes(path: Path, num_replicas: int, tmp_path: Path) -> None:
    """Without --edit-num-replicas, as examples/slurm/pretrain.sbatch starts it."""
    folder = str(tmp_path / "checkpoints")
    data = ["--data-path", "corpus", "--tokenizer-type", "ByteTokenizer"]
    config = load_config(["--config", str(path), *data, "--save", folder, "--load", folder])
    world_size = GPUS_PER_NODE * NODES_PER_REPLICA.get(path.stem, 1) * num_replicas
    assert check(config, world_size, GPUS_PER_NODE, "cuda") == []
    resolved = resolve(config, world_size, GPUS_PER_NODE, "cuda")
    assert resolved.batch_plan.num_replicas == num_replicas
    assert notes(resolved) == []
