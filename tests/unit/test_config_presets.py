"""Presets give the public parameter counts; the formula is the sum over the tensors of a Llama."""

from __future__ import annotations

import pytest

from megatron_edit.config import check
from megatron_edit.config.flags import load_config
from megatron_edit.config.presets import PRESETS
from megatron_edit.config.resolved import resolved_model
from megatron_edit.config.settings import SETTINGS
from megatron_edit.tables.parameters import parameter_count

# Meta's published counts, vocabulary 32,000 and 128,256; the others follow from the rows' shapes
COUNTS = {
    "llama2-7b": (32000, 6_738_415_616),
    "llama3-8b": (128256, 8_030_261_248),
    "7b": (32000, 6_738_415_616),
}
NOMINAL = {"350m": 350e6, "1b": 1.3e9, "3b": 2.8e9}


def parameters(size: str, vocab_size: int) -> int:
    return parameter_count(resolved_model(load_config(["--model-size", size]).model), vocab_size)


@pytest.mark.parametrize(("size", "expected"), COUNTS.items())
def test_public_counts(size: str, expected: tuple[int, int]) -> None:
    assert parameters(size, expected[0]) == expected[1]


@pytest.mark.parametrize(("size", "expected"), NOMINAL.items())
def test_sizes_are_what_they_are_called(size: str, expected: float) -> None:
    assert parameters(size, 32000) == pytest.approx(expected, rel=0.06)


def test_presets_are_the_choices_of_the_flag_and_set_only_the_model() -> None:
    assert tuple(PRESETS) == SETTINGS["model_size"].choices
    for preset in PRESETS.values():
        assert all(SETTINGS[name].section == "model" for name in preset)


@pytest.mark.parametrize("size", PRESETS)
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (4, 2)])
def test_presets_can_be_split(size: str, tp: int, pp: int) -> None:
    flags = f"--model-size {size} --mock-data --train-iters 9 --global-batch-size 8 --edit-num-replicas 1"
    sizes = f"--tensor-model-parallel-size {tp} --pipeline-model-parallel-size {pp}"
    assert check(load_config(f"{flags} {sizes}".split()), tp * pp, tp * pp, "cpu") == []


def test_count_of_a_small_model_by_hand() -> None:
    flags = "--num-layers 1 --hidden-size 4 --ffn-hidden-size 6 --num-attention-heads 2 --num-query-groups 1"
    model = resolved_model(load_config([*flags.split(), "--add-qkv-bias"]).model)
    # q 4x4, k and v 4x2 each, biases 4 + 2 + 2, output 4x4, gate/up/down 3x4x6, 2 norms, last norm, tied 10x4
    assert parameter_count(model, 10) == 16 + 8 + 8 + 8 + 16 + 72 + 8 + 4 + 40
