"""Bad input: exit code 2 in seconds, before anything is built; one clear message on one rank; nothing left on disk."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_edit.testing.command import CommandResult
from tests.e2e.conftest import Corpora
from tests.e2e.runs import files_below, start

BUILT = 99  # exit code of a run that would have begun to build


def stop_at_the_build(rank: int) -> None:
    import megatron_edit.train.main as entry

    entry._train = lambda *_: BUILT  # type: ignore[assignment]


def stop_at_the_build_as_nobody(rank: int) -> None:
    """Permissions mean nothing to root, which test runners in containers often are."""
    import encodings.idna  # noqa: F401  for host names; the interpreter's own files may be root's alone

    stop_at_the_build(rank)
    if os.geteuid() == 0:
        os.seteuid(65534)


def refuse(
    world_size: int, folder: Path, *extra: str, in_rank: Callable[[int], None] = stop_at_the_build, **settings: Any
) -> list[str]:
    """Starts the command in `folder`, where it must be refused as it should be; returns the lines of the message."""
    before = files_below(folder)
    result = start(world_size, *extra, directory=folder, in_rank=in_rank, timeout_s=30, **settings)
    return check_refused(result, before, folder)


def check_refused(result: CommandResult, before: set[str], folder: Path) -> list[str]:
    assert result.ranks[0].exit_code == 2, result
    assert all(rank.exit_code in (2, -15) for rank in result.ranks), result  # -15: ended by the launcher
    assert result.seconds < 10, result
    assert all(rank.stdout == "" for rank in result.ranks), result
    assert all(rank.stderr == "" for rank in result.ranks[1:]), f"more than one rank speaks: {result}"
    lines = result.ranks[0].stderr.splitlines()
    at = next((i for i, line in enumerate(lines) if line.startswith("the same without the refused flags")), None)
    lines, advice = lines[:at], lines[at:] if at is not None else []
    assert not advice or "pretrain_llama.py" in advice[1], result
    assert lines and all(line.startswith("error: ") for line in lines), result
    assert len(set(lines)) == len(lines), f"said twice: {result}"
    assert files_below(folder) == before, result
    return [line.removeprefix("error: ") for line in lines]


def one(lines: list[str], *named: object) -> str:
    """The one line; it must hold all of `named`, numbers as whole numbers."""
    assert len(lines) == 1, lines
    for word in named:
        pattern = rf"(?<![\w.-]){re.escape(str(word))}(?![\w-])"
        assert re.search(pattern, lines[0]), f"{word!r} is missing in: {lines[0]}"
    return lines[0]


# ---- sizes -----------------------------------------------------------------------------------------------------------

SIZES: dict[str, tuple[int, dict[str, Any], tuple[object, ...]]] = {
    "global batch": (2, {"micro_batch_size": 4, "global_batch_size": 10}, ("--global-batch-size", 10, 4, 2, 8, 16)),
    "replica batch": (
        4,
        {"global_batch_size": None, "replica_batch_size": 6},
        ("--replica-batch-size", 6, "--micro-batch-size", 2, 4, 8),
    ),
    "layers over stages": (
        2,
        {"num_layers": 5, "pipeline_model_parallel_size": 2, "edit_num_replicas": 1},
        ("--num-layers", 5, "--pipeline-model-parallel-size", 2, 4, 6),
    ),
    "layers over chunks": (
        2,
        {
            "num_layers": 8,
            "num_layers_per_virtual_pipeline_stage": 3,
            "pipeline_model_parallel_size": 2,
            "edit_num_replicas": 1,
        },
        ("--num-layers-per-virtual-pipeline-stage", 3, 4, 8, 2),
    ),
    "microbatches over stages": (
        2,
        {
            "num_layers_per_virtual_pipeline_stage": 1,
            "pipeline_model_parallel_size": 2,
            "edit_num_replicas": 1,
            "global_batch_size": 6,
        },
        ("--global-batch-size", 6, "--pipeline-model-parallel-size", 2, 3, 8),
    ),
    "heads over tensor ranks": (
        3,
        {"tensor_model_parallel_size": 3, "edit_num_replicas": 1, "ffn_hidden_size": 126},
        ("--num-attention-heads", 8, "--tensor-model-parallel-size", 3, 2),
    ),
    "groups over tensor ranks": (
        2,
        {"tensor_model_parallel_size": 2, "edit_num_replicas": 1, "num_attention_heads": 6, "num_query_groups": 3,
         "kv_channels": 8},
        ("--num-query-groups", 3, "--tensor-model-parallel-size", 2, 1),
    ),
    "hidden size over heads": (2, {"hidden_size": 65}, ("--hidden-size", 65, "--num-attention-heads", 8, 64, 72)),
    "heads over groups": (2, {"num_query_groups": 3}, ("--num-attention-heads", 8, "--num-query-groups", 3, 2, 4)),
    "sequence over tensor ranks": (
        2,
        {"seq_length": 33, "sequence_parallel": True, "tensor_model_parallel_size": 2, "edit_num_replicas": 1},
        ("--seq-length", 33, 2, 32, 34),
    ),
    "ranks over the model": (
        3,
        {"tensor_model_parallel_size": 2, "edit_num_replicas": 1},
        (3, "--tensor-model-parallel-size", 2, 4),
    ),
    "replicas over data parallel ranks": (4, {"edit_num_replicas": 3}, ("--edit-num-replicas", 3, 4, "1, 2, 4")),
    "two replicas on one rank": (1, {}, ("--edit-num-replicas", 2, 1, "start 2 ranks")),
    "samples below one batch": (2, {"train_iters": None, "train_samples": 7}, ("--train-samples", 7, 8)),
    "recompute over layers": (
        2,
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 3},
        ("--recompute-num-layers", 3, 4, "1, 2, 4"),
    ),
}


@pytest.mark.parametrize("case", SIZES)
def test_sizes_that_do_not_divide(case: str, tmp_path: Path) -> None:
    world_size, settings, named = SIZES[case]
    one(refuse(world_size, tmp_path, **settings), *named)


def test_context_parallel_on_a_cpu_and_across_replicas(tmp_path: Path) -> None:
    lines = refuse(2, tmp_path, context_parallel_size=2)
    across = [line for line in lines if "would span replicas" in line]
    one(across, "--edit-num-replicas", 2, "--context-parallel-size", 1)
    on_cpu = [line for line in lines if "needs a GPU" in line]
    one(on_cpu, "--context-parallel-size", 2, 1)
    assert len(lines) == 2


# ---- flags and files of settings -------------------------------------------------------------------------------------

FLAGS: dict[str, tuple[dict[str, Any], tuple[str, ...], tuple[object, ...]]] = {
    "unknown flag": ({}, ("--train-iter", "5"), ("--train-iter", "--train-iters")),
    "unknown flag, nothing near": ({}, ("--zebra",), ("--zebra", "is not a flag of this program")),
    "switch with a value": ({}, ("--bf16", "yes"), ("--bf16", "--no-bf16")),
    "flag without a value": ({}, ("--lr",), ("--lr",)),
    "two values": ({}, ("--lr", "1", "2"), ("--lr", "takes one value")),
    "word before any flag": ({"device": None}, (), ()),  # see below: the word is put first
    "no integer": ({"train_iters": "ten"}, (), ("--train-iters", "ten")),
    "not finite": ({"lr": "nan"}, (), ("--lr", "nan")),
    "too small": ({"seq_length": 0}, (), ("--seq-length", 0, 1)),
    "too large": ({"seed": 2**32}, (), ("--seed", 2**32)),
    "negative": ({"log_interval": -2}, (), ("--log-interval", 1)),
    "no choice": ({"lr_decay_style": "cosin"}, (), ("--lr-decay-style", "cosine")),
    "empty text": ({"save": ""}, (), ("--save", "empty")),
    "iterations and samples": ({"train_samples": 80}, (), ("--train-iters", 12, "--train-samples", 80)),
    "neither": ({"train_iters": None}, (), ("--train-iters", "--train-samples")),
    "two batch sizes": ({"replica_batch_size": 4}, (), ("--global-batch-size", 8, "--replica-batch-size", 4)),
    "mock and files": ({"data_path": ["a"]}, (), ("--mock-data", "--data-path")),
    "fp16 on a cpu": ({"fp16": True}, (), ("--fp16", "GPU")),
    "two warm-ups": (
        {"lr_warmup_iters": 2, "lr_warmup_samples": 8},
        (),
        ("--lr-warmup-iters", 2, "--lr-warmup-samples", 8),
    ),
    "warm-up beyond the decay": ({"lr_warmup_iters": 12}, (), ("--lr-warmup-iters/-samples/-fraction", 12)),
    "floor above the peak": ({"min_lr": 1}, (), ("--min-lr", 1, "--lr", 0.001)),
    "recompute without its size": ({"recompute_granularity": "full"}, (), ("--recompute-method",)),
    "interval without a folder": ({"save_interval": 4}, (), ("--save-interval", 4, "--save")),
    "evaluation without a share": (
        {"mock_data": None, "data_path": ["a"], "tokenizer_type": "ByteTokenizer", "split": "1", "eval_interval": 2},
        (),
        ("--eval-interval", 2, "--split"),
    ),
    "experts": ({}, ("--num-experts", "8"), ("--num-experts", "mixture of experts")),
    "routing of experts": (
        {},
        ("--moe-router-topk", "2", "--num-experts", "4"),
        ("--moe-router-topk", "--num-experts", "mixture of experts"),
    ),
    "batch that grows": (
        {}, ("--rampup-batch-size", "3", "5", "80"), ("--rampup-batch-size 3 5 80", 4, "--rampup-batch-size 4 4 80")
    ),
    "unequal stages": ({}, ("--decoder-last-pipeline-num-layers", "1"), ("--decoder-last-pipeline-num-layers",)),
    # the synchronisation method; all of its contradictions are in tests/unit/test_config_checks.py
    "a-edit by iterations": (
        {"edit_method": "a-edit", "edit_sync_interval": None},
        (),
        ("--train-iters", 12, "a-edit", "--train-samples", 96),
    ),
    "two triggers": (
        {"edit_method": "a-edit", "train_iters": None, "train_samples": 96},
        (),
        ("--edit-sync-interval", 4, "--edit-sync-time", 600),
    ),
    "a clock for steps": ({"edit_sync_time": 5}, (), ("--edit-sync-time", "a-edit")),
    "delay longer than the interval": (
        {"edit_method": "streaming", "edit_sync_delay": 5},
        (),
        ("--edit-sync-delay", 5, "--edit-sync-interval", 4),
    ),
    "unknown dtype": ({"edit_comm_dtype": "int2"}, (), ("--edit-comm-dtype", "int2", "int8")),
    "unknown method": ({"edit_method": "edti"}, (), ("--edit-method", "edti", "a-edit")),
    "offload without room": (
        {"edit_cpu_offload": True, "num_layers": 200, "hidden_size": 16384, "ffn_hidden_size": 65536},
        (),
        ("--edit-cpu-offload", "GB"),
    ),
    "no data": ({"mock_data": None, "tokenizer_type": "ByteTokenizer"}, (), ("--data-path", "--mock-data")),
    "no tokenizer": ({"mock_data": None, "data_path": ["a"]}, (), ("--tokenizer-type", "ByteTokenizer")),
}
del FLAGS["word before any flag"]


@pytest.mark.parametrize("case", FLAGS)
def test_flags_that_cannot_be(case: str, tmp_path: Path) -> None:
    settings, extra, named = FLAGS[case]
    one(refuse(2, tmp_path, *extra, **settings), *named)


def test_a_word_before_any_flag(tmp_path: Path) -> None:
    from megatron_edit.testing.command import run_command
    from tests.e2e.runs import TINY, arguments

    result = run_command(["run", *arguments(TINY)], 2, directory=tmp_path, in_rank=stop_at_the_build)
    one(check_refused(result, set(), tmp_path), "'run'")


@pytest.mark.parametrize("split", ["-1,1,0", "90,abc5,5", "0,0,0", "1,1,1,1", "nan", "99,,1", "0,1", "inf,1"])
def test_shares_that_are_none(split: str, corpora: Corpora, tmp_path: Path) -> None:
    one(refuse_data(tmp_path, corpora.documents_200, split=split), "--split", split)


@pytest.mark.parametrize("blend", ["0.5", "0.5 a b", "-1 a 2 b", "0 a", "nan a", "1 2"])
def test_blends_that_are_none(blend: str, tmp_path: Path) -> None:
    one(refuse_data(tmp_path, *blend.split()), "--data-path", blend)


def test_all_problems_are_told_at_once(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("train_iter: 5\nlr: fast\n")
    lines = refuse(
        4, tmp_path, "--zebra", config="run.yaml", edit_num_replicas=3, hidden_size=65, num_layers=0, lr=None,
        tensor_model_parallel_size=1, load="nowhere", save="run.yaml",
    )  # fmt: skip
    wanted = ["--zebra", "train_iter ", "--lr", "--num-layers 0", "--edit-num-replicas 3", "--hidden-size 65",
              "--load nowhere", "--save run.yaml"]  # fmt: skip
    for flag in wanted[2:3] + wanted[:2] + wanted[4:]:
        assert sum(flag in line for line in lines) == 1, (flag, lines)
    assert any(line.startswith("--num-layers") for line in lines), lines
    assert len(lines) == len(wanted), lines


CONFIGS: dict[str, tuple[str, tuple[object, ...]]] = {
    "unknown key": ("sync_interval: 4\n", ("sync_interval", "edit_sync_interval")),
    "unknown key in a section": ("edit:\n  edit_sync_intervall: 4\n", ("edit_sync_intervall", "edit_sync_interval")),
    "key in the wrong section": ("model:\n  lr: 0.1\n", ("lr", "model", "optimizer")),
    "key twice": ("lr: 0.1\nlr: 0.2\n", ("lr", "twice")),
    "no mapping": ("- lr\n- 0.1\n", ("list",)),
    "no yaml": ("lr: [0.1\n", ("YAML",)),
    "wrong type": ("train_samples: [1, 2]\n", ("train_samples", "--train-samples")),
    "flag only": ("dry_run: true\n", ("dry_run", "--dry-run")),
    "not utf-8": ("\udcff\udcfe", ("cannot be read",)),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_settings_files_that_cannot_be(case: str, tmp_path: Path) -> None:
    text, named = CONFIGS[case]
    (tmp_path / "run.yaml").write_bytes(text.encode(errors="surrogateescape"))
    one(refuse(2, tmp_path, config="run.yaml"), "--config", "run.yaml", *named)


@pytest.mark.parametrize("kind", ["missing", "folder", "no permission"])
def test_settings_files_that_cannot_be_read(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    if kind == "folder":
        path.mkdir()
    if kind == "no permission":
        path.write_text("lr: 0.1\n")
        path.chmod(0)
    in_rank = stop_at_the_build_as_nobody if kind == "no permission" else stop_at_the_build
    one(refuse(2, tmp_path, in_rank=in_rank, config="run.yaml"), "--config", "run.yaml", "cannot be read")


# ---- data ------------------------------------------------------------------------------------------------------------


def refuse_data(folder: Path, *data_path: str, **settings: Any) -> list[str]:
    given = {"mock_data": None, "data_path": data_path, "tokenizer_type": "ByteTokenizer", "split": "1"}
    return refuse(2, folder, **{**given, **settings})


@pytest.fixture
def copied(corpora: Corpora, tmp_path: Path) -> Path:
    """Prefix of a copy of the corpus that a test may damage."""
    (tmp_path / "data").mkdir()
    for suffix in (".bin", ".idx", ".manifest.json"):
        shutil.copy(corpora.documents_200 + suffix, tmp_path / "data" / f"corpus{suffix}")
    return tmp_path / "data" / "corpus"


def test_no_such_files(tmp_path: Path) -> None:
    one(refuse_data(tmp_path, "data/corpus"), "data/corpus.idx")


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
@pytest.mark.parametrize("damage", ["missing", "empty", "cut", "folder", "text"])
def test_damaged_files(damage: str, suffix: str, copied: Path, tmp_path: Path) -> None:
    path = Path(f"{copied}{suffix}")
    content = path.read_bytes()
    path.unlink()
    if damage == "folder":
        path.mkdir()
    if damage in ("empty", "cut", "text"):
        text = b"This is not an index. " * (len(content) // 22 + 1)
        path.write_bytes({"empty": b"", "cut": content[:-1], "text": text[: len(content)]}[damage])
    one(refuse_data(tmp_path, "data/corpus"), f"data/corpus{suffix}")


@pytest.mark.parametrize("damage", ["cut", "other corpus", "list"])
def test_damaged_manifest(damage: str, copied: Path, corpora: Corpora, tmp_path: Path) -> None:
    path = Path(f"{copied}.manifest.json")
    content = path.read_text()
    other = Path(corpora.one_short + ".manifest.json").read_text()
    path.write_text({"cut": content[:-20], "other corpus": other, "list": "[]"}[damage])
    one(refuse_data(tmp_path, "data/corpus"), "data/corpus.manifest.json")


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_prefix_with_its_extension(suffix: str, copied: Path, tmp_path: Path) -> None:
    line = one(refuse_data(tmp_path, f"data/corpus{suffix}"), f"data/corpus{suffix}")
    assert re.search(r"data/corpus(?!\.)", line), f"the message does not say which prefix would work: {line}"


def test_corpus_shorter_than_one_sequence(corpora: Corpora, tmp_path: Path) -> None:
    one(refuse_data(tmp_path, corpora.one_short), "--seq-length", 32, 33, 11, "train")


def test_validation_shorter_than_one_sequence(corpora: Corpora, tmp_path: Path) -> None:
    settings = {"data_path": None, "train_data_path": [corpora.documents_200], "valid_data_path": [corpora.one_short]}
    one(refuse_data(tmp_path, "", **settings, split=None, eval_interval=2, eval_iters=1), "valid", "--seq-length", 33)


def test_test_corpus_that_was_asked_for_and_is_missing(corpora: Corpora, tmp_path: Path) -> None:
    settings = {"data_path": None, "train_data_path": [corpora.documents_200], "test_data_path": ["/nowhere/test"]}
    one(refuse_data(tmp_path, "", **settings, split=None, eval_iters=1), "/nowhere/test")


def test_tokenizer_of_another_corpus(corpora: Corpora, tmp_path: Path) -> None:
    lines = refuse_data(tmp_path, corpora.documents_200, tokenizer_type="NullTokenizer", vocab_size=258)
    one(lines, "ByteTokenizer", "NullTokenizer", 259, "--tokenizer-type")


def test_token_ids_beyond_the_vocabulary(copied: Path, tmp_path: Path) -> None:
    Path(f"{copied}.manifest.json").unlink()
    one(refuse_data(tmp_path, "data/corpus", tokenizer_type="NullTokenizer", vocab_size=100), 100, "--tokenizer-type")


@pytest.mark.parametrize("kind", ["missing", "empty", "text", "folder", "not given"])
@pytest.mark.parametrize("tokenizer", ["SentencePieceTokenizer", "HuggingFaceTokenizer"])
def test_tokenizer_files_that_cannot_be(tokenizer: str, kind: str, corpora: Corpora, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer"
    if kind == "folder":
        path.mkdir()
    if kind in ("empty", "text"):
        path.write_text("" if kind == "empty" else "This is not a tokenizer.")
    given = None if kind == "not given" else "tokenizer"
    lines = refuse_data(tmp_path, corpora.documents_200, tokenizer_type=tokenizer, tokenizer_model=given)
    one(lines, "--tokenizer-model", *([] if given is None else ["tokenizer"]))


# ---- folders ---------------------------------------------------------------------------------------------------------

LONG = "x" * 300


def without_launcher(rank: int) -> None:
    stop_at_the_build(rank)
    os.environ["WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"] = "2"
    del os.environ["RANK"]


def test_ranks_that_nobody_started(tmp_path: Path) -> None:
    """As after a --dry-run for 2 ranks without torchrun, with --dry-run left off."""
    (line,) = refuse(1, tmp_path, in_rank=without_launcher)
    assert "WORLD_SIZE is 2 but RANK is not set" in line and "torchrun --nproc-per-node 2" in line
    assert start(1, "--dry-run", directory=tmp_path, in_rank=without_launcher).exit_codes == [0]


@pytest.mark.parametrize("name", ["save", "tensorboard_dir", "metrics_file", "log_sample_ids"])
@pytest.mark.parametrize("place", ["below a file", "no permission", "no file system", "name too long"])
def test_places_that_cannot_be_written(place: str, name: str, tmp_path: Path) -> None:
    (tmp_path / "a_file").touch()
    (tmp_path / "closed").mkdir(mode=0o555)
    path = {"below a file": "a_file/out/x", "no file system": "/proc/out/x", "name too long": f"{LONG}/x",
            "no permission": "closed/out/x"}[place]  # fmt: skip
    in_rank = stop_at_the_build_as_nobody if place == "no permission" else stop_at_the_build
    one(refuse(2, tmp_path, in_rank=in_rank, **{name: path}), "--" + name.replace("_", "-"))


@pytest.mark.parametrize("name", ["metrics_file", "log_sample_ids"])
def test_file_names_that_are_too_long(name: str, tmp_path: Path) -> None:
    one(refuse(2, tmp_path, **{name: LONG}), "--" + name.replace("_", "-"), LONG)


@pytest.mark.parametrize("name", ["load", "config", "tokenizer_model", "data_path"])
def test_places_that_cannot_be_read(name: str, corpora: Corpora, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"tokenizer_model": LONG, "tokenizer_type": "SentencePieceTokenizer"}
    settings = settings if name == "tokenizer_model" else {name: [LONG] if name == "data_path" else LONG}
    named = f"{LONG}.idx" if name == "data_path" else "--" + name.replace("_", "-")
    one(refuse_data(tmp_path, corpora.documents_200, **settings), named)


@pytest.mark.parametrize("name", ["save", "tensorboard_dir"])
def test_files_where_folders_should_be(name: str, tmp_path: Path) -> None:
    (tmp_path / "out").touch()
    one(refuse(2, tmp_path, **{name: "out"}), "--" + name.replace("_", "-"), "out")


@pytest.mark.parametrize("name", ["metrics_file", "log_sample_ids"])
def test_folders_where_files_should_be(name: str, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    one(refuse(2, tmp_path, **{name: "out"}), "--" + name.replace("_", "-"), "out")


@pytest.mark.parametrize("kind", ["missing", "empty", "file", "other files"])
def test_nothing_to_load(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "old"
    if kind == "file":
        path.touch()
    elif kind != "missing":
        path.mkdir()
        if kind == "other files":
            (path / "model.safetensors").touch()
    one(refuse(2, tmp_path, load="old", save="new"), "--load", "old")
