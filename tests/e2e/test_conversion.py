"""In and out: from Hugging Face weights to training, and from training to a folder that transformers uses alone."""

from __future__ import annotations

import contextlib
import io
import json
import math
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_edit.convert.assets import generation_config
from megatron_edit.convert.command import main as convert
from megatron_edit.convert.megatron import MegatronWeights
from megatron_edit.inference.evaluate import main as evaluate
from megatron_edit.inference.generate import main as generate
from megatron_edit.inference.perplexity import corpus_tokens
from megatron_edit.inference.verify import main as verify
from megatron_edit.testing.ranks import run_ranks
from tests.e2e.conftest import Corpora
from tests.e2e.runs import evaluations, losses, masters, train, weights_of
from tests.reference.hf_folder import write_folder
from tests.reference.hugging_face import run_python


def converted(direction: str, source: Path, target: Path, *flags: Any) -> str:
    """Runs the tool, which must succeed; what it has printed."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = convert([direction, "--input", str(source), "--output", str(target), *map(str, flags)])
    assert code == 0, printed.getvalue()
    return printed.getvalue()


def tool(main: Callable[[Sequence[str]], int], *words: Any, ranks: int = 1) -> list[str]:
    """What a tool of inference prints on each rank; it must succeed."""
    found = run_ranks(_run_tool, ranks, main, [str(word) for word in words], timeout_s=240)
    assert [code for code, _ in found] == [0] * ranks, found
    return [text for _, text in found]


def _run_tool(rank: int, world_size: int, main: Callable[[Sequence[str]], int], words: list[str]) -> tuple[int, str]:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        code = main([*words, "--device", "cpu"])
    return code, printed.getvalue()


TRANSFORMERS = """
import json, sys, torch
from pathlib import Path
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
folder, windows, prompt = Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text()), sys.argv[3]
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
tokenizer = AutoTokenizer.from_pretrained(folder)
tokens = torch.tensor(windows)
ids = torch.tensor([tokenizer(prompt)["input_ids"]])
with torch.no_grad():
    logits = model(tokens[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(logits.double().flatten(0, 1), tokens[:, 1:].flatten()).item()
    new = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False)[0]
save_file({"logits": logits.contiguous()}, sys.argv[4])
print(json.dumps({"rows": model.get_input_embeddings().weight.shape[0], "vocab": model.config.vocab_size, "loss": loss,
                  "ids": ids[0].tolist(), "new": new[ids.shape[1]:].tolist(), "text": tokenizer.decode(ids[0])}))
"""


def in_transformers(folder: Path, windows: Any, prompt: str, scratch: Path) -> dict[str, Any]:
    """Loss and logits on the windows [B, S + 1] and the greedy continuation, from nothing but the folder."""
    (scratch / "windows.json").write_text(json.dumps(windows.tolist()))
    words = ("-c", TRANSFORMERS, str(folder), str(scratch / "windows.json"), prompt, str(scratch / "logits"))
    found: dict[str, Any] = json.loads(run_python(*words).splitlines()[-1])
    return found


def test_a_trained_model_is_the_same_in_transformers(tmp_path: Path, corpora: Corpora) -> None:
    """Field report B40, and: 50 steps, exported, the same validation loss and the same greedy text. The vocabulary of
    259 is padded to 384 here."""
    run, prompt = tmp_path / "run", "the anchor of"
    log = train(
        2, mock_data=False, data_path=[corpora.documents_200], split="80,20", tokenizer_type="ByteTokenizer",
        train_iters=50, save=run, eval_iters=4, log_interval=10, lr=3e-3, max_position_embeddings=64,
    ).stdout  # fmt: skip
    converted("megatron-to-hf", run, tmp_path / "hf")
    tokens = corpus_tokens(corpora.documents_200, "80,20", "valid")
    windows = torch.from_numpy(tokens[: 4 * 8 * 32 + 1].astype("int64")).unfold(0, 33, 32)  # eval_iters x batch
    found = in_transformers(tmp_path / "hf", windows, prompt, tmp_path)
    assert found["rows"] == found["vocab"] == 259
    assert found["ids"] == list(prompt.encode()) and found["text"] == prompt
    loss = evaluations(log)[50]
    assert loss < 3.5  # it has learnt something
    assert found["loss"] == pytest.approx(loss, abs=1e-5)

    (printed,) = tool(
        evaluate, "--load", run, "--data-path", corpora.documents_200, "--split", "80,20", "--max-tokens",
        len(windows) * 32, "--output", tmp_path / "out.json",
    )  # fmt: skip
    (numbers,) = json.loads((tmp_path / "out.json").read_text())["perplexity"]
    assert numbers["tokens"] == len(windows) * 32 and f"{numbers['loss']:.6f}" in printed
    assert numbers["seq_length"] == 32 and "tokens in windows of 32 (--seq-length)" in printed
    assert numbers["loss"] == pytest.approx(loss, abs=1e-5)
    assert numbers["perplexity"] == pytest.approx(math.exp(loss), rel=1e-4)

    for source, ranks, layout in (
        (run, 1, ()),
        (tmp_path / "hf", 1, ()),
        (run, 4, ("--tensor-model-parallel-size", 2, "--pipeline-model-parallel-size", 2)),
    ):
        output = tmp_path / "text.jsonl"
        tool(
            generate, "--load", source, "--prompt", prompt, "--max-new-tokens", 16, "--output", output, *layout,
            ranks=ranks,
        )  # fmt: skip
        (record,) = map(json.loads, output.read_text().splitlines())
        assert record["ids"] == found["new"] and record["prompt_ids"] == found["ids"]

    for flags, ids in (((), [256, *b"of"]), (("--no-parse-special-tokens",), list(b"<bos>of"))):
        words = ("--load", tmp_path / "hf", "--prompt", "<bos>of", "--max-new-tokens", 1, "--output", output)
        tool(generate, *words, *flags)
        (record,) = map(json.loads, output.read_text().splitlines())
        assert record["prompt_ids"] == ids

    (printed,) = tool(verify, "--load", run, "--hf", tmp_path / "hf", "--text", "a replica and its anchor")
    assert "equal, with --tolerance 1e-05" in printed


def test_large_hidden_states_are_no_difference_and_a_wrong_weight_is(tmp_path: Path) -> None:
    """As in SmolLM2: one channel of 1e3 and more after a layer. Rounding alone then moves the logits by far more than
    1e-5 of the largest, in transformers too, from one way to compute the attention to another."""
    from megatron_edit.convert.tokenizer_json import write_byte_tokenizer

    write_folder(tmp_path / "hf", max_position_embeddings=512)
    write_byte_tokenizer(tmp_path / "hf")
    file = tmp_path / "hf" / "model.safetensors"
    weights = load_file(file)
    weights["model.layers.1.mlp.down_proj.weight"][7] *= 2000
    weights["model.norm.weight"] *= 30
    save_file(weights, file, metadata={"format": "pt"})
    converted("hf-to-megatron", tmp_path / "hf", tmp_path / "same")
    (printed,) = tool(verify, "--load", tmp_path / "same", "--hf", tmp_path / "hf", "--per-layer")
    relative, spread = (float(word) for word in re.findall(r"most [^,]+, (\S+) of the.* itself by (\S+) ", printed)[0])
    assert relative > 1e-5 and spread > 1e-3 and "equal, with" in printed, printed
    assert re.search(r"layer 3: \d\.\de-0\d of the largest value 14\d\d", printed)
    shutil.copytree(tmp_path / "hf", tmp_path / "other")
    weights["model.layers.0.mlp.up_proj.weight"][5, 5] += 0.001
    save_file(weights, tmp_path / "other" / "model.safetensors", metadata={"format": "pt"})
    words = ["--load", str(tmp_path / "other"), "--hf", str(tmp_path / "hf")]
    ((code, printed),) = run_ranks(_run_tool, 1, verify, words, timeout_s=240)
    assert code == 1 and "different, with" in printed and "layer 0:" in printed, printed


@pytest.mark.parametrize("untied", [True, False])
def test_the_padding_of_tensor_parallel_does_not_leak(tmp_path: Path, untied: bool) -> None:
    """Trained with 512 rows on two ranks; exported with 259; taken up again elsewhere."""
    run, hf = tmp_path / "run", tmp_path / "hf"
    settings = {"tensor_model_parallel_size": 2, "edit_num_replicas": 1, "untie_embeddings_and_output_weights": untied}
    train(2, train_iters=3, save=run, **settings)
    converted("megatron-to-hf", run, hf)
    weights = load_file(hf / "model.safetensors")
    assert weights["model.embed_tokens.weight"].shape[0] == json.loads((hf / "config.json").read_text())["vocab_size"]
    assert weights["model.embed_tokens.weight"].shape[0] == 259 and ("lm_head.weight" in weights) == untied
    assert (hf / "tokenizer.json").exists()
    converted("hf-to-megatron", hf, tmp_path / "again", "--tensor-model-parallel-size", 2)
    ours, theirs = weights_of(run / "final", "model."), weights_of(tmp_path / "again", "model.")
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    log = train(2, *config_of(tmp_path / "again"), load=tmp_path / "again", finetune=True, train_iters=1, **of_file())
    assert 1 in losses(log.stdout)


def config_of(converted_folder: Path) -> tuple[str, str]:
    return "--config", str(converted_folder / "model.yaml")


def of_file() -> dict[str, Any]:
    """Leaves to the file of settings what it sets."""
    names = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups",
             "untie_embeddings_and_output_weights", "mock_data")  # fmt: skip
    return {**dict.fromkeys(names), "edit_num_replicas": 1, "mock_data": True}


@pytest.mark.parametrize(
    ("groups", "layouts"),
    [
        (2, {4: {"tensor_model_parallel_size": 4},
             2: {"pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 1}}),
        (1, {2: {"tensor_model_parallel_size": 2, "sequence_parallel": True}}),
    ],
)  # fmt: skip
def test_converted_weights_train_alike_on_every_layout(
    tmp_path: Path, groups: int, layouts: dict[int, dict[str, Any]]
) -> None:
    """Field report B42: import, 3 iterations, export; 2 groups on 4 tensor parallel ranks, 1 on 2, and a virtual
    pipeline, against one rank. All that is optional in the model is there."""
    write_folder(
        tmp_path / "hf", architecture="qwen3", num_query_groups=groups, kv_channels=16, qk_layernorm=True,
        add_qkv_bias=True, add_attention_output_bias=True, rope_scaling_type="linear", rope_scaling_factor=2.0,
        norm_epsilon=1e-6, rotary_base=500000.0,
    )  # fmt: skip
    converted("hf-to-megatron", tmp_path / "hf", tmp_path / "start")
    expected: tuple[dict[int, str], dict[str, torch.Tensor]] | None = None
    for ranks, layout in {1: {}, **layouts}.items():
        run, back = tmp_path / f"run-{ranks}", tmp_path / f"hf-{ranks}"
        log = train(
            ranks, *config_of(tmp_path / "start"), load=tmp_path / "start", finetune=True, train_iters=3, save=run,
            tokenizer_type="ByteTokenizer", **{**of_file(), **layout},
        ).stdout  # fmt: skip
        converted("megatron-to-hf", run, back, "--architecture", "qwen3")
        found = losses(log), load_file(back / "model.safetensors")
        if expected is None:
            expected = found
        for iteration, loss in expected[0].items():
            assert float(found[0][iteration]) == pytest.approx(float(loss), abs=2e-5)
        for name, tensor in expected[1].items():
            assert torch.allclose(found[1][name], tensor, rtol=0, atol=2e-4), name  # 3 steps of Adam
    source = load_file(tmp_path / "hf" / "model.safetensors")
    assert expected is not None and source.keys() == expected[1].keys()


def test_the_anchor_is_exported_or_one_replica(tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(2, train_iters=6, save=run, save_interval=6, exit_interval=6, edit_sync_interval=4)
    checkpoint = run / "iter_0000006"
    anchor = weights_of(checkpoint, "edit.anchor.")
    assert (run / "final").exists()
    name, theirs = "decoder.layers.2.mlp.linear_fc2.weight", "model.layers.2.mlp.down_proj.weight"
    for flags, expected in (
        (("--ckpt-step", 6), anchor[name]),
        (("--ckpt-step", 6, "--replica", 0), masters(checkpoint, 0)[name]),
        (("--replica", 1), masters(checkpoint, 1)[name]),
        ((), weights_of(run / "final", "model.")[name]),
    ):
        converted("megatron-to-hf", run, tmp_path / "hf", *flags, "--overwrite")
        assert torch.equal(load_file(tmp_path / "hf" / "model.safetensors")[theirs], expected)
    assert not torch.equal(masters(checkpoint, 0)[name], masters(checkpoint, 1)[name])
    assert MegatronWeights(run, replica=1).origin["weights"] == "replica 1"


def test_tokenizer_files_travel_both_ways_and_are_used(tmp_path: Path, corpora: Corpora) -> None:
    """A vocabulary with rows that no token uses, as Qwen's: 300 rows, 259 ids."""
    from megatron_edit.convert.tokenizer_json import write_byte_tokenizer

    write_folder(tmp_path / "hf", vocab_size=300)
    write_byte_tokenizer(tmp_path / "hf")
    (tmp_path / "hf" / "generation_config.json").write_text('{"temperature": 0.5}')
    printed = converted("hf-to-megatron", tmp_path / "hf", tmp_path / "start")
    assert "--finetune" in printed and "vocab_size: 300" in printed and "note" not in printed
    run = train(
        1, *config_of(tmp_path / "start"), load=tmp_path / "start", finetune=True, train_iters=1, save=tmp_path / "run",
        **of_file(),
    )  # fmt: skip
    assert "started from the weights" in run.stdout
    assert "when it was saved" not in run.stdout  # the converted model had no samples, so no seq_length
    generation = generation_config(MegatronWeights(tmp_path / "run"))  # its end ids end a generated text
    assert generation is not None and json.loads(generation.read_text()) == {"temperature": 0.5}
    for source in ("start", "run"):
        converted("megatron-to-hf", tmp_path / source, tmp_path / f"{source}-hf")
        for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
            original, copy = tmp_path / "hf" / name, tmp_path / f"{source}-hf" / name
            assert original.read_bytes() == copy.read_bytes()
        assert load_file(tmp_path / f"{source}-hf" / "model.safetensors")["lm_head.weight"].shape[0] == 300


def test_conversion_leaves_torch_as_it_is_and_needs_no_gpu(tmp_path: Path) -> None:
    write_folder(tmp_path / "hf", dtype=torch.bfloat16, shards=2)
    script = """
import sys, torch
before = {name: getattr(torch, name) for name in ("empty", "zeros", "tensor", "arange")}
cuda = dict(vars(torch.cuda))
methods = dict(vars(torch.Tensor))
from megatron_edit.convert.command import main
root = sys.argv[1]
assert main(["hf-to-megatron", "--input", root + "/hf", "--output", root + "/m", "--quiet"]) == 0
assert main(["megatron-to-hf", "--input", root + "/m", "--output", root + "/back", "--quiet"]) == 0
assert all(getattr(torch, name) is value for name, value in before.items())
assert all(vars(torch.cuda)[name] is value for name, value in cuda.items())
assert all(vars(torch.Tensor)[name] is value for name, value in methods.items())
assert not torch.cuda.is_available() or not torch.cuda.is_initialized()
"""
    run_python("-c", script, str(tmp_path))
    assert (tmp_path / "back" / "model.safetensors").exists()


def test_what_the_tools_of_inference_cannot_do_is_named(tmp_path: Path) -> None:
    from megatron_edit.convert.tokenizer_json import write_byte_tokenizer

    write_folder(tmp_path / "hf")
    here = ("--load", tmp_path / "hf")

    def message(main: Callable[[Sequence[str]], int], *words: Any) -> str:
        ((code, printed),) = run_ranks(_run_tool, 1, main, [str(word) for word in words])
        assert code == 2 and "Traceback" not in printed, printed
        return printed

    assert "--tokenizer-type" in message(generate, *here, "--prompt", "x")
    write_byte_tokenizer(tmp_path / "hf")
    assert "no --prompt" in message(generate, *here)
    assert "has no tokens" in message(generate, *here, "--prompt", "", "--no-add-bos")
    assert "54 new ones would work" in message(generate, *here, "--prompt", "0123456789")  # 64 positions, 64 new
    assert "--top-p 2.0" in message(generate, *here, "--prompt", "x", "--max-new-tokens", 5, "--top-p", 2)
    assert "torchrun --nproc-per-node 4" in message(generate, *here, "--prompt", "x", "--tensor-model-parallel-size", 4)
    assert "no iterations" in message(generate, *here, "--prompt", "x", "--ckpt-step", 4)
    assert "not a folder" in message(generate, "--load", tmp_path / "no", "--prompt", "x")
    assert "--dtype float23" in message(generate, *here, "--prompt", "x", "--dtype", "float23")
    assert "nothing to evaluate" in message(evaluate, *here)
    assert "64 positions" in message(evaluate, *here, "--text-file", __file__, "--seq-length", 65)
    assert "no.txt" in message(evaluate, *here, "--text-file", tmp_path / "no.txt")
    assert "transformers cannot run" in message(verify, *here, "--hf", tmp_path / "no")
