"""Converted weights compute what transformers computes, on every layout; and go back bit for bit."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megatron_edit.platform import get_platform

get_platform("cpu").initialize()

from megatron_edit.checkpoint.blocks import blocks_of  # noqa: E402
from megatron_edit.convert.hugging_face import HuggingFaceWeights, write_hugging_face  # noqa: E402
from megatron_edit.convert.megatron import MegatronWeights, write_megatron  # noqa: E402
from megatron_edit.convert.open import open_weights  # noqa: E402
from megatron_edit.inference.model import InferenceModel  # noqa: E402
from megatron_edit.inference.sampling import Sampling  # noqa: E402
from megatron_edit.model.sharding import tensor_parallel_join, tensor_parallel_slice  # noqa: E402
from megatron_edit.tables.parameters import full_parameter_shapes  # noqa: E402
from megatron_edit.parallel.layout import Layout  # noqa: E402
from megatron_edit.parallel.mesh import build_mesh  # noqa: E402
from megatron_edit.testing.ranks import run_ranks  # noqa: E402
from tests.reference.hugging_face import NEW_TOKENS, PROMPTS, make_models, run_python, tiny  # noqa: E402

TOLERANCE = 1e-5
LAYOUTS = [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (1, 4)]  # tensor, pipeline parallel size
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "original_max_position_embeddings": 16}  # fmt: skip
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}


def model(kind: str, dtype: str = "float32", **changes: Any) -> dict[str, Any]:
    return {"class": kind, "dtype": dtype, "config": tiny(**changes)}


GROUPED_QUERIES = {f"groups-{groups}": model("Llama", num_key_value_heads=groups) for groups in (8, 4, 2, 1)}
ONE_FIELD = {
    "base": {"rope_theta": 500000.0},
    "eps-1e-6": {"rms_norm_eps": 1e-6},
    "eps-1e-5": {"rms_norm_eps": 1e-5},
    "head-dim": {"head_dim": 16},
    "attention-bias": {"attention_bias": True},
    "tied": {"tie_word_embeddings": True},
    "ffn": {"intermediate_size": 96},
    "positions": {"max_position_embeddings": 77},
}
ALL_FIELDS = {
    "rope_parameters": LLAMA3, "rms_norm_eps": 1e-3, "head_dim": 16, "attention_bias": True,
    "tie_word_embeddings": True, "intermediate_size": 96, "max_position_embeddings": 77,
}  # fmt: skip
FIELDS = {f"field-{name}": model("Llama", **changes) for name, changes in ONE_FIELD.items()}
FIELDS["all-fields"] = {**model("Llama", **ALL_FIELDS), "greedy": True}
OTHERS = {
    "qwen2": model("Qwen2", tie_word_embeddings=True, num_key_value_heads=4),
    "qwen3": model("Qwen3", num_key_value_heads=1, head_dim=16),
    "qwen3-bias": {**model("Qwen3", attention_bias=True, head_dim=4, tie_word_embeddings=True), "greedy": True},
    "mistral": model("Mistral", sliding_window=None, rope_parameters=LINEAR, vocab_size=301),
}
STORED = {
    "bfloat16": model("Llama", "bfloat16", attention_bias=True),
    "float16": {**model("Qwen3", "float16", head_dim=16), "max_shard_size": "40KB"},
}


def random_model(seed: int) -> dict[str, Any]:
    """A draw over all that is converted."""
    draw = random.Random(seed)
    heads = draw.choice([4, 8, 12])
    kind = draw.choice(["Llama", "Mistral", "Qwen2", "Qwen3"])
    changes: dict[str, Any] = {
        "num_attention_heads": heads,
        "num_key_value_heads": draw.choice([n for n in (1, 2, 4, heads) if heads % n == 0]),
        "hidden_size": draw.choice([heads * 8, heads * 16]),
        "intermediate_size": draw.choice([96, 128, 172]),
        "vocab_size": draw.choice([131, 256, 259, 512]),
        "tie_word_embeddings": draw.random() < 0.5,
        "rms_norm_eps": draw.choice([1e-6, 1e-5, 1e-3]),
        "rope_parameters": draw.choice([LLAMA3, LINEAR, {"rope_type": "default", "rope_theta": 1e6}]),
    }
    if kind != "Qwen2":
        changes["head_dim"] = draw.choice([8, 16, 20])
    if kind in ("Llama", "Qwen3"):
        changes["attention_bias"] = draw.random() < 0.5
    if kind == "Mistral":
        changes["sliding_window"] = None
    return model(kind, draw.choice(["float32", "float32", "bfloat16", "float16"]), **changes)


RANDOM = {f"random-{seed}": random_model(seed) for seed in range(8)}
MODELS = {**GROUPED_QUERIES, **FIELDS, **OTHERS, **STORED, **RANDOM}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every model as transformers saves it, NAME.logits beside it, and converted, in NAME.megatron."""
    made = tmp_path_factory.mktemp("models")
    make_models(made, MODELS)
    for name in MODELS:
        write_megatron(HuggingFaceWeights(made / name), made / f"{name}.megatron")
    return made


def largest_differences(
    rank: int, world_size: int, folder: Path, suffix: str, names: list[str], tp: int, pp: int
) -> dict[str, float]:
    mesh = build_mesh(Layout(tp=tp, pp=pp), get_platform("cpu"), timeout_seconds=60)
    found = {}
    for name in names:
        expected = load_file(folder / f"{name}.logits")
        ours = InferenceModel(open_weights(folder / (name + suffix)), mesh, torch.float32)
        logits = ours.logits(expected["tokens"])
        assert logits.shape == expected["logits"].shape
        found[name] = (logits - expected["logits"]).abs().max().item()
    return found


def assert_equal_logits(folder: Path, tp: int, pp: int, names: list[str], suffix: str = ".megatron") -> None:
    for rank in run_ranks(largest_differences, tp * pp, folder, suffix, names, tp, pp, timeout_s=240):
        wrong = {name: difference for name, difference in rank.items() if not difference <= TOLERANCE}
        assert not wrong and rank.keys() == set(names), wrong


@pytest.mark.parametrize(("tp", "pp"), LAYOUTS)
def test_logits_are_those_of_transformers_on_every_layout(folder: Path, tp: int, pp: int) -> None:
    """Field reports B37 (GQA), B38 (all fields, at 64 positions where 16 were the original length) and B42 (TP 4 with
    2 and 1 groups): every model on every layout of up to four ranks."""
    assert_equal_logits(folder, tp, pp, list(MODELS))


def test_a_hugging_face_folder_is_run_without_converting_it(folder: Path) -> None:
    assert_equal_logits(folder, 2, 1, ["all-fields", "qwen2", "qwen3-bias", "float16"], suffix="")


@pytest.mark.full("16 ranks on a few cores")
def test_logits_on_sixteen_ranks(folder: Path) -> None:
    assert_equal_logits(folder, 4, 4, ["all-fields", "qwen2", "qwen3", "mistral"])


@pytest.mark.full("40 models of which each runs on six layouts")
def test_more_random_models(tmp_path: Path) -> None:
    models = {f"random-{seed}": random_model(seed) for seed in range(100, 140)}
    make_models(tmp_path, models)
    for name in models:
        write_megatron(HuggingFaceWeights(tmp_path / name), tmp_path / f"{name}.megatron")
    for tp, pp in LAYOUTS:
        assert_equal_logits(tmp_path, tp, pp, list(models))


def test_the_round_trip_is_bit_equal_in_the_stored_dtype(folder: Path, tmp_path: Path) -> None:
    for name, wanted in MODELS.items():
        source = {}
        for path in (folder / name).glob("*.safetensors"):
            source |= load_file(path)
        write_hugging_face(MegatronWeights(folder / f"{name}.megatron"), tmp_path / name, max_shard_bytes=60_000)
        back = {}
        files = sorted((tmp_path / name).glob("*.safetensors"))
        assert len(files) > 1
        for path in files:
            back |= load_file(path)
        assert back.keys() == source.keys(), name
        for key, tensor in source.items():
            assert tensor.dtype == back[key].dtype == getattr(torch, wanted["dtype"])
            assert torch.equal(tensor, back[key]), (name, key)


def test_transformers_reads_what_is_exported_and_finds_the_same_config(folder: Path, tmp_path: Path) -> None:
    """Field report B38: exported config equals the source in all fields. Also: the same logits, bit for bit."""
    for name in MODELS:
        write_hugging_face(MegatronWeights(folder / f"{name}.megatron"), tmp_path / name, max_shard_bytes=200_000)
    script = """
import sys, torch
from pathlib import Path
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM
ours, theirs = map(Path, sys.argv[1:])
for folder in sorted(ours.iterdir()):
    one, other = (AutoConfig.from_pretrained(path).to_dict() for path in (folder, theirs / folder.name))
    for key in ("transformers_version", "_name_or_path", "id2label", "label2id"):
        one.pop(key, None), other.pop(key, None)
    head = one.pop("head_dim", None), other.pop("head_dim", None)
    assert head[0] == (head[1] or one["hidden_size"] // one["num_attention_heads"]), (folder.name, head)
    assert one == other, (folder.name, one, other)
    saved = load_file(theirs / (folder.name + ".logits"))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        assert torch.equal(model(saved["tokens"], use_cache=False).logits, saved["logits"]), folder.name
    print(folder.name)
"""
    assert set(run_python("-c", script, str(tmp_path), str(folder)).split()) == set(MODELS)


@pytest.mark.parametrize(("tp", "pp"), [(2, 4), (4, 2), (4, 4), (8, 1), (8, 2)])
def test_larger_layouts_hold_the_same_values_in_one_process(folder: Path, tp: int, pp: int) -> None:
    """What each rank of a layout of more than four ranks takes: as inference slices it, and as training reads it."""
    for name in ("all-fields", "qwen3", "groups-8", "groups-1"):
        weights = MegatronWeights(folder / f"{name}.megatron")
        shapes = full_parameter_shapes(weights.model, weights.vocab_size)
        for key, shape in shapes.items():
            whole = weights.read(key)
            shards = [tensor_parallel_slice(whole, key, weights.model, rank, tp) for rank in range(tp)]
            assert torch.equal(tensor_parallel_join(shards, key, weights.vocab_size), whole)
            for rank, shard in enumerate(shards):
                read = torch.zeros_like(shard).view(-1)
                for block in blocks_of(key, shape, tuple(shard.shape), rank, 0, shard.numel()):
                    place = tuple(slice(at, at + size) for at, size in zip(block.offset, block.shape, strict=True))
                    count = int(torch.Size(block.shape).numel())
                    read[block.start : block.start + count] = whole[place].reshape(-1)
                assert torch.equal(read.view_as(shard), shard), (key, rank)


# ---- generation ------------------------------------------------------------------------------------------------------


def generated(
    rank: int, world_size: int, path: Path, prompts: list[list[int]], sampling: Sampling, tp: int, pp: int
) -> list[list[int]]:
    mesh = build_mesh(Layout(tp=tp, pp=pp), get_platform("cpu"), timeout_seconds=60)
    ours = InferenceModel(open_weights(path), mesh, torch.float32)
    together = ours.generate(prompts, NEW_TOKENS, sampling)
    if world_size == 1:  # whatever else is in the batch
        for i, prompt in enumerate(prompts):
            assert ours.generate([prompt], NEW_TOKENS, sampling, first_sequence=i) == [together[i]]
    if sampling.temperature == 0:  # the cache changes nothing
        for prompt, new in zip(prompts, together, strict=True):
            logits = ours.logits(torch.tensor([prompt + new]))[0]
            assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == new
    return together


@pytest.mark.parametrize(
    ("name", "tp", "pp"),
    [("all-fields", 1, 1), ("all-fields", 2, 2), pytest.param("qwen3-bias", 4, 1, marks=pytest.mark.full("one layout more"))],
)
def test_greedy_text_is_that_of_transformers(folder: Path, name: str, tp: int, pp: int) -> None:
    expected = json.loads((folder / f"{name}.greedy").read_text())
    assert len(expected) == len(PROMPTS)
    for found in run_ranks(generated, tp * pp, folder / f"{name}.megatron", PROMPTS, Sampling(), tp, pp):
        assert found == expected


def test_sampled_text_follows_from_the_seed_alone(folder: Path) -> None:
    path = folder / "qwen2.megatron"
    warm = Sampling(temperature=0.8, top_k=50, top_p=0.95, seed=7)
    one = run_ranks(generated, 1, path, PROMPTS, warm, 1, 1)[0]
    assert all(found == one for found in run_ranks(generated, 2, path, PROMPTS, warm, 2, 1))
    other = Sampling(temperature=0.8, top_k=50, top_p=0.95, seed=8)
    assert run_ranks(generated, 1, path, PROMPTS, other, 1, 1)[0] != one
    coldest = Sampling(temperature=5.0, top_k=1)
    assert run_ranks(generated, 1, path, PROMPTS, coldest, 1, 1) == run_ranks(
        generated, 1, path, PROMPTS, Sampling(), 1, 1
    )
