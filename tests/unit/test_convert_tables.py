"""The tables of the conversion against transformers' own classes; names, transforms and config.json."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_edit.config.schema import ModelConfig
from megatron_edit.convert.architectures import ARCHITECTURES, architecture_for, misfits
from megatron_edit.convert.errors import ConversionError
from megatron_edit.convert.hf_config import read_config, write_config
from megatron_edit.convert.rows import FusedQKV, GateOverUp
from megatron_edit.convert.safetensors_file import Writer, read_header
from megatron_edit.model.rope import rotary_inverse_frequencies
from megatron_edit.tables.parameters import full_parameter_shapes, parameter_count

TINY = ModelConfig(
    num_layers=2, hidden_size=64, ffn_hidden_size=128, num_attention_heads=8, num_query_groups=2, kv_channels=8,
    seq_length=32, max_position_embeddings=128, untie_embeddings_and_output_weights=True,
)  # fmt: skip


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_defaults_are_those_of_transformers(name: str) -> None:
    import transformers

    entry = ARCHITECTURES[name]
    config = getattr(transformers, entry.class_name.replace("ForCausalLM", "Config"))()
    own = {**config.to_dict(), **config.rope_parameters}
    for key, value in entry.defaults.items():
        if value is not None:
            assert own[key] == value, key
        elif key == "head_dim":
            assert getattr(
                config, key, config.hidden_size // config.num_attention_heads
            ) * config.num_attention_heads == (config.hidden_size)
        else:
            assert own["num_key_value_heads"] == own["num_attention_heads"]
    assert own["hidden_act"] == "silu" and config.model_type == name


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_tensor_of_transformers_has_its_place(name: str) -> None:
    """Names and shapes, with everything that the architecture can have switched on."""
    import transformers

    entry = ARCHITECTURES[name]
    switched = dict.fromkeys((one for names in entry.switches.values() for one in names), True)
    model = replace(TINY, **{**switched, **entry.always})
    config_class = getattr(transformers, entry.class_name.replace("ForCausalLM", "Config"))
    config = config_class(**{
        key: value for key, value in write_config(entry, model, 259, "float32", {}).items()
        if key not in ("architectures", "model_type", "torch_dtype")
    })  # fmt: skip
    with torch.device("meta"):
        state = getattr(transformers, entry.class_name)(config).state_dict()
    expected = {key: tuple(tensor.shape) for key, tensor in state.items()}
    shapes = full_parameter_shapes(model, 259)
    found = {}
    for row in entry.rows_of(model, 259):
        found |= dict(zip(row.theirs, row.transform.shapes(shapes[row.ours], model), strict=True))
    assert found == expected


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rotary_base": 500000.0, "kv_channels": 128},
        {"rope_scaling_type": "linear", "rope_scaling_factor": 4.0},
        {"rope_scaling_type": "llama3", "rope_scaling_factor": 8.0, "rotary_base": 500000.0, "kv_channels": 128},
        {"rope_scaling_type": "llama3", "rope_scaling_factor": 32.0, "rotary_base": 500000.0, "kv_channels": 64},
    ],
)  # fmt: skip
def test_rotary_frequencies_are_those_of_transformers(changes: dict[str, object]) -> None:
    """Field report B38. At position 100,000 an error of the last place would already show."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    model = replace(TINY, **changes)  # type: ignore[arg-type]
    config = write_config(ARCHITECTURES["llama"], model, 259, "float32", {})
    theirs = LlamaRotaryEmbedding(LlamaConfig(**{k: v for k, v in config.items() if k != "torch_dtype"})).inv_freq
    assert torch.allclose(rotary_inverse_frequencies(model), theirs, rtol=2e-7, atol=0)


@settings(max_examples=40)
@given(groups=st.integers(1, 4), per_group=st.integers(1, 4), size=st.sampled_from([2, 4, 6]), seed=st.integers(0, 99))
def test_fused_projections_split_into_what_was_joined(groups: int, per_group: int, size: int, seed: int) -> None:
    """Field report B37: group after group, and the order inside is query heads, key, value."""
    model = replace(TINY, num_attention_heads=groups * per_group, num_query_groups=groups, kv_channels=size)
    generator = torch.Generator().manual_seed(seed)
    heads = groups * per_group
    query, key, value = (torch.randn(n * size, 5, generator=generator) for n in (heads, groups, groups))
    whole = FusedQKV().join((query, key, value), model)
    assert all(map(torch.equal, FusedQKV().split(whole, model), (query, key, value)))
    assert FusedQKV().shapes(tuple(whole.shape), model) == (query.shape, key.shape, value.shape)
    for group in range(groups):
        part = whole[group * (per_group + 2) * size : (group + 1) * (per_group + 2) * size]
        rows = per_group * size
        assert torch.equal(part[:rows], query[group * rows : (group + 1) * rows])
        assert torch.equal(part[rows : rows + size], key[group * size : (group + 1) * size])
        assert torch.equal(part[rows + size :], value[group * size : (group + 1) * size])
    gate, up = query, query + 1
    assert all(map(torch.equal, GateOverUp().split(GateOverUp().join((gate, up), model), model), (gate, up)))


@settings(max_examples=60)
@given(data=st.data())
def test_settings_come_back_from_config_json(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Field report B38: every field off its default comes back, in whichever spelling rope is written."""
    entry = ARCHITECTURES[data.draw(st.sampled_from(sorted(ARCHITECTURES)))]
    bias = {name: value for names in entry.switches.values() for value in [data.draw(st.booleans())] for name in names}
    kind = data.draw(st.sampled_from(["none", "linear", "llama3"]))
    scaling = {} if kind == "none" else {"rope_scaling_factor": data.draw(st.sampled_from([2.0, 8.0, 32.0]))}
    if kind == "llama3":
        scaling["rope_scaling_original_max_position_embeddings"] = data.draw(st.sampled_from([16, 8192]))
    model = replace(
        TINY, num_query_groups=data.draw(st.sampled_from([1, 2, 4, 8])),
        kv_channels=data.draw(st.sampled_from([4, 8, 16])),
        ffn_hidden_size=data.draw(st.integers(1, 500)), norm_epsilon=data.draw(st.sampled_from([1e-6, 1e-5, 1e-3])),
        rotary_base=data.draw(st.sampled_from([1e4, 5e5, 1e6])), rope_scaling_type=kind,
        untie_embeddings_and_output_weights=data.draw(st.booleans()),
        attention_dropout=data.draw(st.sampled_from([0.0, 0.1])),
        seq_length=128, init_method_std=0.01, **{**scaling, **bias, **entry.always},
    )  # fmt: skip
    config = write_config(entry, model, 259, "bfloat16", {"bos_token_id": 1})
    if data.draw(st.booleans()):  # as transformers 5 writes it
        rope = config.pop("rope_scaling") or {"rope_type": "default"}
        config["rope_parameters"] = {**rope, "rope_theta": config.pop("rope_theta")}
    folder = tmp_path_factory.mktemp("config")
    (folder / "config.json").write_text(json.dumps(config))
    found = read_config(folder)
    assert found.architecture is entry and found.vocab_size == 259
    assert asdict(found.model) == asdict(model)


# config.json of public models as far as it matters, and the parameters that their cards name
PUBLIC: dict[str, tuple[int, dict[str, object]]] = {
    "Llama-2-7b": (6_738_415_616, {
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 32000, "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5, "pretraining_tp": 1, "rope_scaling": None, "tie_word_embeddings": False,
    }),
    "Llama-3.1-8B": (8_030_261_248, {
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072,
        "rope_theta": 500000.0, "mlp_bias": False, "attention_bias": False, "eos_token_id": [128001, 128008, 128009],
        "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                         "original_max_position_embeddings": 8192, "rope_type": "llama3"},
    }),
    "Llama-3.2-1B": (1_235_814_400, {
        "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": True,
        "rope_theta": 500000.0, "max_position_embeddings": 131072,
        "rope_scaling": {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                         "original_max_position_embeddings": 8192, "rope_type": "llama3"},
    }),
    "Mistral-7B-v0.3": (7_248_023_552, {
        "model_type": "mistral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32768, "max_position_embeddings": 32768,
        "rope_theta": 1000000.0, "sliding_window": None,
    }),
    "Qwen2.5-0.5B": (494_032_768, {
        "model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
        "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True,
        "use_sliding_window": False, "sliding_window": 32768, "max_window_layers": 24, "rope_theta": 1000000.0,
        "max_position_embeddings": 131072, "use_mrope": False,
    }),
    "Qwen3-0.6B": (596_049_920, {
        "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
        "tie_word_embeddings": True, "attention_bias": False, "use_sliding_window": False, "sliding_window": None,
        "rope_theta": 1000000, "rope_scaling": None, "max_position_embeddings": 40960,
    }),
    "SmolLM2-135M": (134_515_008, {
        "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True,
        "rope_theta": 100000, "rope_interleaved": False, "max_position_embeddings": 8192,
    }),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLIC)
def test_public_models_are_understood_and_fit_common_layouts(name: str, tmp_path: Path) -> None:
    parameters, config = PUBLIC[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = read_config(tmp_path)
    assert found.vocab_size is not None
    assert parameter_count(found.model, found.vocab_size) == parameters
    back = write_config(found.architecture, found.model, found.vocab_size, "bfloat16", {})
    for key, value in config.items():
        if key in back and value is not None and key != "sliding_window":
            assert back[key] == value, key


def test_the_architecture_follows_from_the_model() -> None:
    assert architecture_for(TINY, None).model_type == "llama"
    assert architecture_for(TINY, None, "mistral").model_type == "mistral"
    assert architecture_for(replace(TINY, add_qkv_bias=True), None).model_type == "qwen2"
    assert architecture_for(replace(TINY, qk_layernorm=True), None, "llama").model_type == "qwen3"
    both = replace(TINY, add_qkv_bias=True, add_attention_output_bias=True)
    assert architecture_for(both, None).model_type == "llama"
    neither = replace(TINY, add_qkv_bias=True, qk_layernorm=True)
    with pytest.raises(ConversionError, match="add_qkv_bias True with add_attention_output_bias False"):
        architecture_for(neither, None)
    assert misfits(ARCHITECTURES["mistral"], neither) == ["add_qkv_bias True", "qk_layernorm True"]
    with pytest.raises(ConversionError, match=r"no tensor for decoder\.layers\.0\.self_attention\.q_layernorm"):
        ARCHITECTURES["llama"].rows_of(neither, 259)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_files_are_those_of_the_library(dtype: torch.dtype, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = {
        "a": torch.randn(3, 5),
        "empty": torch.zeros(0, 4),
        "number": torch.tensor(2.5),
        "view": torch.randn(4, 6).t(),
    }
    tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    writer = Writer(tmp_path / "ours", {name: (tuple(tensor.shape), dtype) for name, tensor in tensors.items()})
    for name, tensor in tensors.items():
        writer.write(name, tensor)
    writer.close()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "theirs")
    for found in (
        load_file(tmp_path / "ours"),
        {name: entry.read() for name, entry in read_header(tmp_path / "theirs").items()},
    ):
        assert found.keys() == tensors.keys()
        assert all(torch.equal(found[name], tensor) and found[name].dtype == dtype for name, tensor in tensors.items())
