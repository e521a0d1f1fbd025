"""What a run writes beside checkpoints, what --print-config and --dry-run say. B58, the sample ids of rules on data."""

from __future__ import annotations

import itertools
import json
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from megatron_edit.config.settings import SETTINGS
from megatron_edit.data.order import SampleOrder
from megatron_edit.train.main import main
from tests.e2e.conftest import Corpora
from tests.e2e.runs import TINY, arguments, evaluations, files_below, losses, start, syncs, train, training_lines

# ---- metrics.jsonl ---------------------------------------------------------------------------------------------------


def records(file: Path, kind: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert all(line["kind"] in ("train", "sync", "eval") for line in lines)
    return [line for line in lines if line["kind"] == kind]


def test_the_metrics_file_says_what_the_log_says(tmp_path: Path) -> None:
    result = train(2, save=str(tmp_path), eval_interval=6, eval_iters=1, log_interval=2)
    file = tmp_path / "metrics.jsonl"
    lines = training_lines(result.stdout)
    found = {record["iteration"]: record for record in records(file, "train")}
    assert list(found) == list(lines) == [2, 4, 6, 8, 10, 12]
    for iteration, record in found.items():
        fields = lines[iteration]
        assert f"{record['lm_loss']:.6E}" == fields["lm loss"]
        assert [f"{x:.6E}" for x in record["replica_losses"]] == [fields[f"lm loss replica {r}"] for r in (0, 1)]
        assert f"{record['grad_norm']:.3f}" == fields["grad norm"]
        assert f"{record['learning_rate']:.6E}" == fields["learning rate"]
        assert str(record["consumed_samples"]) == fields["consumed samples"]
    assert {record["sync"]: record["iteration"] for record in records(file, "sync")} == syncs(result.stdout)
    shown = {record["iteration"]: round(record["lm_loss"], 5) for record in records(file, "eval")}
    assert shown == {k: round(v, 5) for k, v in evaluations(result.stdout).items()} and len(shown) == 2


def test_no_file_unless_asked_for(tmp_path: Path) -> None:
    train(2, directory=tmp_path, train_iters=2)
    assert files_below(tmp_path) == set()


def test_a_place_of_its_own(tmp_path: Path) -> None:
    train(2, directory=tmp_path, train_iters=2, metrics_file="logs/deep/m.jsonl", save="run")
    assert len(records(tmp_path / "logs" / "deep" / "m.jsonl", "train")) == 2
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


# ---- pipelines, trackers, restarts (B58) -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("world_size", "layout"),
    [(2, {"pipeline_model_parallel_size": 2, "edit_num_replicas": 1}), (4, {"pipeline_model_parallel_size": 2})],
    ids=["PP2", "R2xPP2"],
)
def test_each_iteration_once_in_every_file_after_a_restart(
    world_size: int, layout: dict[str, Any], tmp_path: Path
) -> None:
    """PP2: the loss is on the last stage, the files are the first rank's. Restart at 3 of 6."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    save, board = str(tmp_path / "run"), str(tmp_path / "board")
    settings = {"train_iters": 6, "save": save, "load": save, "tensorboard_dir": board, **layout}
    first = train(world_size, **settings, exit_interval=3)
    time.sleep(1.1)  # TensorBoard orders its files by the second in their names
    second = train(world_size, **settings)
    log = {**losses(first.stdout), **losses(second.stdout)}
    assert list(log) == [1, 2, 3, 4, 5, 6] and all(0 < float(loss) < 10 for loss in log.values())
    written = records(tmp_path / "run" / "metrics.jsonl", "train")
    assert {record["iteration"]: f"{record['lm_loss']:.6E}" for record in written} == log and len(written) == 6
    events = EventAccumulator(board)
    events.Reload()
    for tag in ("lm loss", "learning-rate", "grad-norm", "consumed-samples"):
        assert [event.step for event in events.Scalars(tag)] == [1, 2, 3, 4, 5, 6], tag
    assert [event.value for event in events.Scalars("lm loss")] == pytest.approx([float(x) for x in log.values()])
    assert [event.value for event in events.Scalars("consumed-samples")] == [8, 16, 24, 32, 40, 48]


def test_steps_that_the_checkpoint_lacks_are_dropped(tmp_path: Path) -> None:
    """Saved at 4, went on to 7 and was killed; taken up at 4: 5 to 7 stand once, as the second start had them."""
    from tests.e2e.test_resume import killed_after

    save = str(tmp_path / "run")
    settings = {"train_iters": 9, "save": save, "load": save, "save_interval": 4}
    start(2, **settings, in_rank=killed_after(7))
    train(2, **settings)
    file = tmp_path / "run" / "metrics.jsonl"
    assert [record["iteration"] for record in records(file, "train")] == list(range(1, 10))
    dropped = file.with_name("metrics.jsonl.dropped")
    lines = dropped.read_text().splitlines() if dropped.exists() else []  # killed before the numbers had arrived
    assert {json.loads(line)["iteration"] for line in lines} <= {5, 6, 7}


def test_a_tracker_that_is_not_installed_is_named() -> None:
    if find_spec("wandb") is not None:
        pytest.skip("wandb is installed")
    result = start(2, wandb_project="tiny")
    assert result.exit_codes[0] == 2
    assert re.fullmatch(r"error: .*--wandb-project tiny.*wandb.*pip install.*\n", result.stderr), result


# ---- throughput ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [2, 4])
def test_throughput_is_that_of_one_device(world_size: int) -> None:
    """Two replicas of one or two ranks: 4 samples of 32 tokens a replica and iteration."""
    result = train(world_size, log_interval=6, log_throughput=True)
    for fields in training_lines(result.stdout).values():
        seconds = float(fields["elapsed time per iteration (ms)"]) / 1000
        tokens = 4 * 32 / seconds / (world_size // 2)
        # the printed time is the mean over the replicas, the rate is too: they differ where replicas do
        assert float(fields["tokens per second per GPU"]) == pytest.approx(tokens, rel=0.3)
        assert "throughput per GPU (TFLOP/s/GPU)" in fields
    quiet = train(world_size, train_iters=1)
    assert "throughput" not in quiet.stdout and "tokens per second" not in quiet.stdout


# ---- sample ids ------------------------------------------------------------------------------------------------------

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "R2": (2, {}),
    "R3": (3, {"edit_num_replicas": 3, "micro_batch_size": 1, "global_batch_size": 6}),
    "R2xS2": (4, {}),
    "R2xTP2": (4, {"tensor_model_parallel_size": 2}),
    "R2xPP2": (4, {"pipeline_model_parallel_size": 2}),
    "baseline": (2, {"edit_method": "baseline"}),
}


@pytest.mark.parametrize(
    "layout",
    [
        name if name in ("R2", "R3", "R2xTP2") else pytest.param(name, marks=pytest.mark.full(reason="more layouts"))
        for name in LAYOUTS
    ],
)
def test_sample_ids_are_those_of_one_order(layout: str, corpora: Corpora, tmp_path: Path) -> None:
    """Over two epochs and a restart: replicas disjoint, each sample once an epoch, one order for all layouts."""
    world_size, settings = LAYOUTS[layout]
    ids = tmp_path / "ids.jsonl"
    data = {"mock_data": None, "data_path": [corpora.documents_200], "split": "1", "tokenizer_type": "ByteTokenizer",
            "seq_length": 128, "log_sample_ids": str(ids), "load": str(tmp_path), "save": str(tmp_path)}  # fmt: skip
    settings = {**data, **settings}
    first = train(world_size, **settings, train_iters=40, exit_interval=13)
    (size,) = map(int, re.findall(r"^train: (\d+) samples", first.stdout, re.MULTILINE))
    train(world_size, **settings, train_iters=40)
    replicas, batch = settings.get("edit_num_replicas", 2), settings.get("global_batch_size", 8)
    entries = [json.loads(line) for line in ids.read_text().splitlines()]
    assert [(entry["iteration"], entry["replica"]) for entry in entries] == list(
        itertools.product(range(1, 41), range(replicas))
    )
    order: list[int] = []
    for iteration in range(1, 41):
        shares = {entry["replica"]: entry["samples"] for entry in entries if entry["iteration"] == iteration}
        assert sorted(shares) == list(range(replicas))
        assert all(len(share) == batch // replicas for share in shares.values())
        order += [sample for replica in sorted(shares) for sample in shares[replica]]
    assert 2 * size <= len(order), "fewer than two epochs"
    epochs = [order[:size], order[size : 2 * size]]
    assert all(sorted(epoch) == list(range(size)) for epoch in epochs)
    assert epochs[0] != epochs[1] != sorted(epochs[1])
    assert order == SampleOrder([size], seed=1234).sample_ids(np.arange(len(order))).tolist()


# ---- --print-config, --dry-run, --help -------------------------------------------------------------------------------


def printed(flags: list[str], environment: dict[str, str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """Values by name of --print-config, commented (derived) ones too."""
    assert main([*flags, "--print-config"], environment) == 0
    out, err = capsys.readouterr()
    assert err == ""
    rows = re.findall(r"^  (?:# )?(\w+): (.*?)  # (.+)$", out, re.MULTILINE)
    values = {name: (yaml.safe_load(value), source) for name, value, source in rows}
    assert len(values) == len(rows) > 80
    values["text"] = (out, "")
    return values


@pytest.mark.parametrize(
    "extra",
    [
        "",
        "--model-size 350m --bf16 --lr 3e-4 --train-data-path a b --valid-data-path 0.25 c 0.75 d",
        "--no-exit-signal-handler --edit-sync-interval 0 --lr-decay-style WSD --lr-wsd-decay-iters 3 --no-eval-at-end",
        "--replica-batch-size 4 --train-samples 96 --adam-eps 1e-8 --seed 0 --log-sample-ids true --save 1e5",
        "--edit-pseudo-grad-clip 0 --edit-outer-lr 1 --tokenizer-model null --wandb-project yes",
    ],
)
def test_print_config_reads_back_as_the_same_settings(
    extra: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given = dict(TINY)
    words = extra.split()
    if "--train-data-path" in words:
        given.update(mock_data=None, tokenizer_type="ByteTokenizer")
    if "--replica-batch-size" in words:
        given.update(global_batch_size=None, train_iters=None)
    environment = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    once = printed([*arguments(given), *words], environment, capsys)
    (tmp_path / "run.yaml").write_text(once["text"][0])
    again = printed(["--config", "run.yaml"], environment, capsys)
    differing = {name for name in once if once[name][0] != again[name][0]}
    assert differing == {"text"}  # the sources differ
    derived = {name for name, (_, source) in once.items() if source == "derived"}
    assert derived and derived == {name for name, (_, source) in again.items() if source == "derived"}
    given_again = {source for name, (value, source) in again.items() if value is not None and name not in derived}
    assert given_again == {"run.yaml", ""}  # "": the text


def test_a_printed_config_trains_the_same(tmp_path: Path) -> None:
    settings = {"train_iters": 4, "lr": 3e-3, "clip_grad": 0.5, "edit_outer_lr": 0.9}
    expected = losses(train(2, **settings).stdout)
    yaml_text = start(2, "--print-config", **settings).stdout
    (tmp_path / "run.yaml").write_text(yaml_text)
    nothing = dict.fromkeys(TINY)
    assert losses(train(2, **nothing, config=str(tmp_path / "run.yaml")).stdout) == expected


def test_a_dry_run_trains_nothing_and_writes_nothing(tmp_path: Path) -> None:
    places = {"save": "run", "tensorboard_dir": "board", "metrics_file": "m.jsonl", "log_sample_ids": "ids.jsonl"}
    result = train(4, "--dry-run", directory=tmp_path, edit_warmup_steps=4, **places)
    assert files_below(tmp_path) == set()
    assert training_lines(result.stdout) == {} and all(rank.stdout == "" for rank in result.ranks[1:])
    assert result.stderr == ""
    for line in (
        "mesh: 4 ranks = sync 2 x dp 2 x pp 1 x cp 1 x tp 1",
        "replicas: 2 of 2 ranks each: ranks 0-1, 2-3",
        "batch: global 8 = 2 replicas x 2 shards x 2 micro batch x 1 microbatches; replica batch 4",
        "length: 12 iterations, 96 samples, 3072 tokens",
        "sync: edit, 4 synchronous iterations, then every 4: 2 syncs planned",
    ):
        assert line in result.stdout.splitlines(), result.stdout


def test_help_names_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help", "--zebra"], {"RANK": "0"}) == 0
    out = capsys.readouterr().out
    assert all(f"  {setting.flag}" in out for setting in SETTINGS.values())
    assert main(["--help"], {"RANK": "1"}) == 0 and capsys.readouterr().out == ""


def without_reader() -> int:
    reads, writes = os.pipe()
    os.close(reads)
    return writes


def closed_terminal() -> int:
    keyboard, screen = os.openpty()
    os.close(keyboard)
    return screen


def full_disk() -> int:
    return os.open("/dev/full", os.O_WRONLY)


@pytest.mark.parametrize("flags", [["--help"], ["--print-config", "--mock-data", "--train-iters", "1"]])
def test_a_reader_that_leaves_before_the_end_is_not_an_error(flags: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """`--help | head` and its like."""
    monkeypatch.setattr(sys, "stderr", sys.stderr)  # `main` puts its own there
    with os.fdopen(without_reader(), "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        batch = [] if "--help" in flags else ["--device", "cpu", "--global-batch-size", "1"]
        assert main([*flags, *batch], {}, owns_process=True) == 0


def test_a_run_needs_no_standard_output_and_error(tmp_path: Path) -> None:
    """`>&- 2>&-`, a service without a terminal: Python has None in their place."""

    def lose(rank: int) -> None:
        sys.stdout = sys.stderr = None  # type: ignore[assignment]

    assert start(2, in_rank=lose, save=tmp_path, train_iters=4).exit_codes == [0, 0]
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text().strip() == "4"


@pytest.mark.parametrize("opened", [without_reader, closed_terminal, full_disk])
@pytest.mark.parametrize("descriptors", [[1], [1, 2]], ids=["stdout", "both"])
def test_a_run_outlives_the_reader_of_its_log(
    opened: Callable[[], int], descriptors: list[int], tmp_path: Path
) -> None:
    """A `tee` that is killed, an ssh session that ends, a log file on a full disk: it trains to its end and saves."""

    def lose(rank: int) -> None:
        if rank == 0:
            for descriptor in descriptors:
                os.dup2(opened(), descriptor)

    result = start(2, in_rank=lose, save=tmp_path, train_iters=4)
    assert result.exit_codes == [0, 0], result.stderr
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text().strip() == "4"
    assert [record["iteration"] for record in records(tmp_path / "metrics.jsonl", "train")] == [1, 2, 3, 4]
    if descriptors == [1]:
        (line,) = [line for line in result.stderr.splitlines() if "standard output" in line]
        assert line.endswith("the run goes on without what it would say there"), line


def test_megatron_flags_without_an_effect_are_named_once_in_one_line() -> None:
    result = train(2, "--use-mcore-models", "--swiglu", "--normalization", "RMSNorm", train_iters=1)
    (line,) = [line for line in result.stdout.splitlines() if "--swiglu" in line]
    assert "--use-mcore-models" in line and "--normalization RMSNorm" in line


def test_a_progress_bar_leaves_the_log_lines_as_they_are() -> None:
    plain, rich = (train(2, train_iters=6, progress=kind).stdout for kind in ("plain", "rich"))
    escape = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r")
    text = escape.sub("\n", rich)
    assert losses("\n".join(line.rstrip() for line in text.splitlines())) == losses(plain)


def test_nothing_speaks_but_rank_0(tmp_path: Path) -> None:
    result = train(4, tensor_model_parallel_size=2, save=str(tmp_path), eval_interval=4, eval_iters=1)
    assert [(rank.stdout, rank.stderr) for rank in result.ranks[1:]] == [("", "")] * 3
    assert result.stderr == "" and not Counter(result.stdout.splitlines())["Traceback"]
