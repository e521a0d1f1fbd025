"""Settings drawn at random either train or are refused with reasons; nothing in between."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import Corpora
from tests.e2e.runs import evaluations, start, syncs, training_lines

DRAWS = 300
IN_EVERY_RUN = 10


GRIDS = [(tp, pp, dp) for tp in (1, 2, 4) for pp in (1, 2, 4) for dp in (1, 2, 3, 4) if tp * pp * dp <= 4]


def draw(seed: int, corpus: str) -> tuple[int, dict[str, Any]]:
    """World size and settings; about a third of them cannot work."""
    chance = random.Random(seed)
    pick = chance.choice

    def mostly(works: list[Any], others: list[Any]) -> Any:
        return pick(works) if chance.random() < 0.95 else pick(others)

    tp, pp, dp = pick(GRIDS)
    layers = mostly([4, 8], [3])
    settings: dict[str, Any] = {
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "num_layers_per_virtual_pipeline_stage": mostly([None] if layers // pp < 2 or pp == 1 else [None, 1], [1, 2]),
        "edit_num_replicas": mostly([n for n in (1, dp, dp) if dp % n == 0], [None, 2, 3, 4]),
        "num_layers": layers,
        "num_query_groups": pick([1, 2, 4, 8]),
        "untie_embeddings_and_output_weights": pick([True, False]),
        "add_qkv_bias": pick([True, False]),
        "add_attention_output_bias": pick([True, False]),
        "qk_layernorm": pick([True, False]),
        "sequence_parallel": pick([True, False]),
        "micro_batch_size": mostly([1, 2], [3]),
        pick(["global_batch_size", "replica_batch_size"]): mostly([24], [4, 8, 12]),
        "train_iters": pick([0, 1, 5, 6]),
        "edit_method": pick(["edit", "edit", "edit", "baseline"]),
        "edit_sync_interval": pick([1, 2, 3, 50]),
        "edit_warmup_steps": pick([0, 0, 1, 3, 50]),
        "edit_sync_placement": pick(["forward", "step"]),
        "edit_prefetch_depth": pick([1, 2, 9]),
        "edit_weighting": pick(["softmax", "mean"]),
        "bf16": pick([True, False, False]),
        "hidden_dropout": pick([0, 0.1]),
        "eval_interval": pick([None, 1, 2]),
        "eval_iters": pick([0, 1, 3]),
        "log_interval": pick([1, 2, 7]),
        "num_workers": pick([0, 1, 3]),
        "distributed_timeout_seconds": 60,
    }
    if "replica_batch_size" in settings:
        settings["global_batch_size"] = None
    if recompute := pick([None, None, "full", "selective"]):
        settings["recompute_granularity"] = recompute
        if recompute == "full":
            settings |= {"recompute_method": pick(["uniform", "block"]), "recompute_num_layers": mostly([1], [2])}
    if pick([True, False]):
        settings |= {"mock_data": None, "data_path": [corpus], "split": pick(["80,20", "9,1", "80,10,10"]),
                     "tokenizer_type": "ByteTokenizer", "eod_mask_loss": pick([True, False])}  # fmt: skip
    return mostly([tp * pp * dp], [1, 2, 3, 4]), settings


@pytest.mark.parametrize(
    "seed",
    [
        seed if seed < IN_EVERY_RUN else pytest.param(seed, marks=pytest.mark.full(reason="more draws"))
        for seed in range(DRAWS)
    ],
)
def test_it_trains_or_says_why_not(seed: int, corpora: Corpora, tmp_path: Path) -> None:
    world_size, settings = draw(seed, corpora.documents_200)
    result = start(world_size, **settings, save=str(tmp_path / "run"), local_world_size=1)
    shown = f"{world_size} ranks, {settings}: {result}"
    if result.exit_codes[0] == 2:
        assert all(code in (2, -15) for code in result.exit_codes), shown
        assert all(line.startswith("error: ") for line in result.stderr.splitlines()), shown
        assert not (tmp_path / "run").exists(), shown
        return
    assert result.exit_codes == [0] * world_size and result.stderr == "", shown
    lines, iterations = training_lines(result.stdout), settings["train_iters"]
    step = settings["log_interval"]
    assert set(lines) == {*range(step, iterations + 1, step), *([iterations] if iterations else [])}, shown
    assert all(0 < float(fields["lm loss"]) < 8 for fields in lines.values()), shown
    if settings["edit_method"] == "edit":
        warmup, interval = settings["edit_warmup_steps"], settings["edit_sync_interval"]
        planned = list(range(warmup + interval, iterations + 1, interval))
        if iterations > max([warmup, *planned]):
            planned.append(iterations)  # the last one, between two
        assert list(syncs(result.stdout).values()) == planned, shown
    assert all(loss > 0 for loss in evaluations(result.stdout).values()), shown
    assert (tmp_path / "run" / "final" / "metadata.json").exists(), shown
