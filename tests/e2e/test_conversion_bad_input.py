"""What cannot be converted is named, with exit code 2, or 1 for the disk; and nothing half-written is left."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_edit.checkpoint.manifest import MANIFEST, Manifest, read_manifest
from megatron_edit.convert.command import main as convert
from megatron_edit.convert.hugging_face import HuggingFaceWeights
from megatron_edit.convert.megatron import MegatronWeights, write_megatron
from tests.e2e.runs import train
from tests.reference.hf_folder import edit_config, write_folder
from tests.reference.hugging_face import run_python

INDEX = "model.safetensors.index.json"


def refused(capsys: pytest.CaptureFixture[str], tmp_path: Path, *words: Any, code: int = 2) -> str:
    """The message of a conversion that must fail and leave the folder as it was."""
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert convert([str(word) for word in words]) == code
    message = capsys.readouterr().err
    assert message.startswith("error: ") and "Traceback" not in message
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}.keys() == before.keys()
    return message


def change_index(folder: Path, change: Callable[[dict[str, str]], Any]) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Of the second file, and the index with it."""
    path = folder / "model-00002-of-00003.safetensors"
    tensors = load_file(path)
    names = set(tensors)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
    change_index(folder, lambda places: [places.pop(name) for name in names - tensors.keys()])
    change_index(folder, lambda places: places.update(dict.fromkeys(tensors, path.name)))


QUERY, OUTPUT = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.o_proj.weight"
SECOND = "model-00002-of-00003.safetensors"
ROPE = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}

FOLDERS: dict[str, tuple[Callable[[Path], Any], tuple[str, ...]]] = {
    "missing shard": (lambda f: (f / SECOND).unlink(), (SECOND, "missing")),
    "shard cut short": (lambda f: (f / SECOND).write_bytes((f / SECOND).read_bytes()[:-100]), (SECOND, "the file has")),
    "shard is empty": (lambda f: (f / SECOND).write_bytes(b""), (SECOND, "damaged")),
    "index with a name too many": (
        lambda f: change_index(f, lambda places: places.update({"model.layers.9.x": SECOND})),
        ("model.layers.9.x", SECOND, "does not hold it"),
    ),
    "file with a name too many": (
        lambda f: change_index(f, lambda places: places.pop(OUTPUT)), (OUTPUT, "is not in " + INDEX),
    ),
    "index with numbers": (
        lambda f: change_index(f, lambda places: places.update(dict.fromkeys(places, 3))), (INDEX, "cannot be read"),
    ),
    "damaged index": (lambda f: (f / INDEX).write_text("{"), (INDEX,)),
    "tensor too many": (
        lambda f: change_tensors(f, lambda t: t.update({"model.layers.4.mlp.x": torch.ones(3)})),
        ("model.layers.4.mlp.x [3]", "not expected"),
    ),
    "tensor missing": (
        lambda f: change_tensors(f, lambda t: t.pop(next(name for name in t if "mlp" in name))), ("mlp", "is missing"),
    ),
    "wrong shape": (
        lambda f: change_tensors(f, lambda t: t.update({OUTPUT: torch.ones(64, 63)})), (OUTPUT, "[64, 63]", "[64, 64]"),
    ),
    "integers": (
        lambda f: change_tensors(f, lambda t: t.update({OUTPUT: torch.ones(64, 64, dtype=torch.int8)})),
        (OUTPUT, "I8", "BF16"),
    ),
    "parts of two dtypes": (
        lambda f: change_tensors(f, lambda t: t.update({QUERY: torch.ones(64, 64).bfloat16()})),
        (QUERY, "BF16", "one dtype"),
    ),
    "tied, with another head": (
        lambda f: edit_config(f, tie_word_embeddings=True), ("tie_word_embeddings", "lm_head.weight", "differ"),
    ),
    "no weights": (lambda f: [path.unlink() for path in f.glob("model*")], ("model.safetensors", INDEX)),
    "no config": (lambda f: (f / "config.json").unlink(), ("config.json",)),
    "damaged config": (lambda f: (f / "config.json").write_text("[1]"), ("config.json", "mapping")),
    "unknown architecture": (
        lambda f: edit_config(f, model_type="gpt_oss", architectures=["GptOssForCausalLM"]),
        ("GptOssForCausalLM", "LlamaForCausalLM", "Qwen3ForCausalLM"),
    ),
    "no language model": (
        lambda f: edit_config(f, architectures=["LlamaForSequenceClassification"]), ("LlamaForSequenceClassification",),
    ),
    "unknown rope type": (lambda f: edit_config(f, rope_scaling=ROPE), ("yarn", "default, linear, llama3")),
    "old rope type": (lambda f: edit_config(f, rope_scaling={"type": "dynamic", "factor": 2.0}), ("dynamic",)),
    "rope without its factor": (lambda f: edit_config(f, rope_scaling={"rope_type": "linear"}), ("linear", "factor")),
    "rope in two spellings that differ": (
        lambda f: edit_config(f, rope_theta=None, rope_parameters={"rope_theta": 10000.0},
                              rope_scaling={"rope_type": "linear", "factor": 2.0}),
        ("rope_parameters and rope_scaling", "rope_scaling_type none and linear", "remove one"),
    ),
    "rope_theta in two places": (
        lambda f: edit_config(f, rope_parameters={"rope_theta": 5e5}),
        ("500000.0 and rope_theta 10000.0", "remove one"),
    ),
    "rope factor below 1": (
        lambda f: edit_config(f, rope_scaling={"type": "linear", "factor": 0.5}), ("rope_scaling.factor", "at least 1"),
    ),
    "rope factor as text": (
        lambda f: edit_config(f, rope_scaling={"type": "linear", "factor": "8"}), ("rope_scaling.factor", "not '8'"),
    ),
    "rope factor NaN": (
        lambda f: edit_config(f, rope_scaling={"type": "linear", "factor": float("nan")}), ("factor", "finite"),
    ),
    "rope as text": (lambda f: edit_config(f, rope_scaling="linear"), ("rope_scaling 'linear'", "mapping such as")),
    "rope frequencies the wrong way round": (
        lambda f: edit_config(f, rope_scaling={
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 1.0,
            "original_max_position_embeddings": 16,
        }), ("low_freq_factor 4.0", "below high_freq_factor 1.0"),
    ),
    "an adapter on top": (
        lambda f: (f / "adapter_config.json").write_text("{}"), ("adapter_config.json", "merge"),
    ),
    "weights of torch alone": (
        lambda f: [path.rename(f / f"pytorch_{path.stem}.bin") for path in f.glob("model*")],
        ("model.safetensors", "pytorch_model*.bin are not read"),
    ),
    "rope per layer type": (
        lambda f: edit_config(f, rope_parameters={"full_attention": {"rope_type": "default"}}), ("full_attention",),
    ),
    "wrong dtype name": (lambda f: edit_config(f, torch_dtype="float23"), ("float23", "bfloat16")),
    "bias of the MLP": (lambda f: edit_config(f, mlp_bias=True), ("mlp_bias True",)),
    "activation": (lambda f: edit_config(f, hidden_act="gelu"), ("hidden_act 'gelu'", "silu")),
    "quantized": (lambda f: edit_config(f, quantization_config={"bits": 4}), ("quantization_config",)),
    "sliding window": (
        lambda f: edit_config(f, model_type="mistral", architectures=["MistralForCausalLM"], sliding_window=16,
                              attention_bias=None),
        ("sliding_window 16", "64", "--max-position-embeddings 16"),
    ),
    "some layers slide": (
        lambda f: edit_config(f, layer_types=["full_attention", "sliding_attention"] * 2), ("sliding_attention",),
    ),
    "no number": (lambda f: edit_config(f, hidden_size="64"), ("hidden_size must be an integer, not '64'",)),
    "left out": (lambda f: edit_config(f, intermediate_size=None), ("intermediate_size", "missing")),
    "heads and groups": (lambda f: edit_config(f, num_key_value_heads=3), ("8", "num_key_value_heads 3")),
    "vocabulary": (lambda f: edit_config(f, vocab_size=300), ("259 rows", "vocab_size 300")),
}  # fmt: skip


@pytest.mark.parametrize("case", FOLDERS)
def test_hugging_face_folders(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damage, named = FOLDERS[case]
    write_folder(tmp_path / "hf", shards=3)
    damage(tmp_path / "hf")
    message = refused(capsys, tmp_path, "hf-to-megatron", "--input", tmp_path / "hf", "--output", tmp_path / "out")
    assert all(name in message for name in named), message


def test_a_window_that_is_never_reached_is_converted(tmp_path: Path) -> None:
    write_folder(tmp_path / "hf", architecture="mistral")
    edit_config(tmp_path / "hf", sliding_window=16)
    words = ["hf-to-megatron", "--input", str(tmp_path / "hf"), "--output", str(tmp_path / "out"), "--quiet"]
    assert convert([*words, "--max-position-embeddings", "16"]) == 0
    assert read_manifest(tmp_path / "out").content["model"]["max_position_embeddings"] == 16


def test_weights_that_stand_twice_are_those_that_transformers_takes(tmp_path: Path) -> None:
    """A single file beside an index, whose shards hold other weights or are gone; files of torch beside both."""
    hf = tmp_path / "hf"
    write_folder(hf, shards=3)
    tensors = {name: tensor for path in hf.glob("*.safetensors") for name, tensor in load_file(path).items()}
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, hf / "model.safetensors", {"format": "pt"})
    (hf / "pytorch_model.bin").write_text("x")
    for out in ("one", "two"):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            words = ["hf-to-megatron", "--input", str(hf), "--output", str(tmp_path / out), "--quiet"]
            assert convert(words) == 0
        assert "model.safetensors is read, as transformers does" in printed.getvalue()
        script = """
import sys, torch
from transformers import AutoModelForCausalLM
print(AutoModelForCausalLM.from_pretrained(sys.argv[1]).model.norm.weight.double().sum().item())
"""
        if out == "one":
            expected = float(run_python("-c", script, str(hf)).split()[-1])
        ours = MegatronWeights(tmp_path / out).read("decoder.final_layernorm.weight")
        assert ours.double().sum().item() == pytest.approx(expected, rel=1e-6)
        (hf / SECOND).unlink(missing_ok=True)


def test_flags(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hf, out = tmp_path / "hf", tmp_path / "out"
    write_folder(hf)
    words = ("hf-to-megatron", "--input", hf, "--output", out)
    assert "float23" in refused(capsys, tmp_path, *words, "--dtype", "float23")
    message = refused(capsys, tmp_path, *words, "--tensor-model-parallel-size", 3)
    assert "--tensor-model-parallel-size 3" in message and "sizes would work: 1, 2" in message
    assert "--num-layers 4" in refused(capsys, tmp_path, *words, "--pipeline-model-parallel-size", 3)
    assert "not a folder" in refused(capsys, tmp_path, "megatron-to-hf", "--input", tmp_path / "no", "--output", out)
    message = refused(capsys, tmp_path, "megatron-to-hf", "--input", hf, "--output", out)
    assert "holds no checkpoint" in message
    assert "replace the input" in refused(capsys, tmp_path, *words[:3], "--output", hf, "--overwrite")
    with pytest.raises(SystemExit) as unknown:
        convert(["hf-to-megatron", "--inptu", "x"])
    assert unknown.value.code == 2


def test_existing_output_is_kept_unless_told_otherwise(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hf, out = tmp_path / "hf", tmp_path / "out"
    write_folder(hf)
    out.mkdir()
    (out / "precious").write_text("x")
    words = ["hf-to-megatron", "--input", str(hf), "--output", str(out)]
    message = refused(capsys, tmp_path, *words)
    assert "--overwrite" in message and (out / "precious").exists()
    assert convert([*words, "--overwrite", "--quiet"]) == 0
    assert (out / MANIFEST).exists() and not (out / "precious").exists()
    assert {path.name for path in tmp_path.iterdir()} == {"hf", "out"}


def test_a_full_disk_is_exit_code_one_and_leaves_nothing(tmp_path: Path) -> None:
    """The process may write files of 100 kB at most; what stood in --output before is still there."""
    write_folder(tmp_path / "hf")
    write_megatron(HuggingFaceWeights(tmp_path / "hf"), tmp_path / "megatron")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old").write_text("x")
    script = """
import resource, signal, sys
from megatron_edit.convert.command import main
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
for direction, source in (("hf-to-megatron", "hf"), ("megatron-to-hf", "megatron")):
    code = main([direction, "--input", f"{sys.argv[1]}/{source}", "--output", f"{sys.argv[1]}/out", "--overwrite",
                 "--quiet"])
    print("exit code", code)
"""
    before = set(tmp_path.rglob("*"))
    printed = run_python("-c", script, str(tmp_path))
    assert [line for line in printed.splitlines() if "exit code" in line] == ["exit code 1"] * 2
    assert set(tmp_path.rglob("*")) == before


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("trained") / "run"
    train(1, edit_num_replicas=1, train_iters=2, save=run, edit_sync_interval=1, save_scope="compact")
    return run


def test_checkpoints(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, out = tmp_path / "run", tmp_path / "out"

    def message(*flags: Any) -> str:
        return refused(capsys, tmp_path, "megatron-to-hf", "--input", run, "--output", out, *flags)

    shutil.copytree(trained, run)
    assert "iter_0000007" in message("--ckpt-step", 7)
    assert "compact" in message("--replica", 0)
    assert "--architecture bert is unknown" in message("--architecture", "bert")
    assert "qwen3" in message("--architecture", "qwen3") and "qk_layernorm" in message("--architecture", "qwen3")
    assert "--tokenizer-model" in message("--tokenizer-model", tmp_path / "nothing.json")
    assert "no single replica" in refused(
        capsys, tmp_path, "megatron-to-hf", "--input", run / "final", "--output", out, "--replica", 0
    )
    data = next((run / "final").glob("*.distcp"))
    original = data.read_bytes()
    data.write_bytes(original[:-10])
    assert data.name in message()
    data.write_bytes(original[:1000] + bytes([original[1000] ^ 1]) + original[1001:])
    assert "damaged" in message() and "SHA-256" in message()
    data.write_bytes(original)
    manifest = read_manifest(run / "final")
    model = {**manifest.content["model"], "num_layers": 5}
    content = {**manifest.content, "model": model}
    (run / "final" / MANIFEST).write_text(Manifest(content, manifest.files).to_json())
    assert "decoder.layers.4.input_layernorm.weight [64] is missing" in message()
    content["model"] = {**manifest.content["model"], "num_layers": 3}
    (run / "final" / MANIFEST).write_text(Manifest(content, manifest.files).to_json())
    assert "decoder.layers.3.input_layernorm.weight [64] is not expected" in message()
    content["model"] = {**manifest.content["model"], "qk_norm_kind": "new"}
    (run / "final" / MANIFEST).write_text(Manifest(content, manifest.files).to_json())
    assert "qk_norm_kind" in message()


def test_a_value_that_the_dtype_cannot_hold(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_folder(tmp_path / "hf")
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    weights[OUTPUT][3, 4] = 1e6
    save_file(weights, tmp_path / "hf" / "model.safetensors")
    words = ("hf-to-megatron", "--input", tmp_path / "hf", "--output", tmp_path / "out", "--quiet")
    message = refused(capsys, tmp_path, *words, "--dtype", "float16")
    assert "layers.0.self_attention.linear_proj.weight" in message and "1e+06" in message
    assert convert([*map(str, words), "--dtype", "bf16"]) == 0
