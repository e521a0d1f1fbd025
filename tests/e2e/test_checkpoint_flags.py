"""What is loaded, and with which learning rate: --ckpt-step, --load-fallback, --finetune. B02, B21, B22, B24, B49."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_edit.checkpoint.folders import POINTER
from megatron_edit.convert.megatron import MegatronWeights
from megatron_edit.testing.command import CommandResult
from tests.e2e.runs import differences, files_below, losses, masters, start, syncs, train, training_lines, weights_of

SMALL: dict[str, Any] = {"num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 64, "num_attention_heads": 4,
                         "edit_sync_interval": 3}  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Iterations 4, 8 and 10 of a run of 20 at a constant rate of 1e-3; stopped there."""
    folder = tmp_path_factory.mktemp("saved")
    train(2, **SMALL, train_iters=20, save=str(folder), save_interval=4, exit_interval=10)
    assert {path.name for path in folder.glob("iter_*")} == {f"iter_{n:07d}" for n in (4, 8, 10)}
    return folder


@pytest.fixture
def run(saved: Path, tmp_path: Path) -> Path:
    """A copy that may be damaged."""
    shutil.copytree(saved, tmp_path / "run")
    return tmp_path / "run"


def rates(result: CommandResult) -> list[float]:
    return [float(line["learning rate"]) for line in training_lines(result.stdout).values()]


def rate_line(result: CommandResult) -> str:
    (line,) = re.findall(r"^learning rate: .*$", result.stdout, re.MULTILINE)
    return str(line)


def refused(result: CommandResult) -> str:
    """The message, from one rank, before training."""
    assert result.exit_codes[0] == 2 and set(result.exit_codes) <= {2, -15}, result
    speaking = [rank.stderr for rank in result.ranks if rank.stderr]
    assert len(speaking) == 1 and "Traceback" not in speaking[0], result
    assert losses(result.stdout) == {}
    return speaking[0]


# ---- whose learning rate (B02) ---------------------------------------------------------------------------------------

COSINE = {"lr": 1e-4, "min_lr": 1e-5, "lr_decay_style": "cosine", "lr_warmup_iters": 4}


def cosine(iteration: int, length: int = 20) -> float:
    """Rate of an iteration: linear to 1e-4 over 4, then a cosine to 1e-5."""
    done = iteration - 1
    if done <= 4:
        return 1e-4 * done / 4
    return 1e-5 + (1e-4 - 1e-5) * 0.5 * (1 + math.cos(math.pi * (done - 4) / (length - 4)))


@pytest.mark.parametrize("flag", ["--override-opt_param-scheduler", "--override-opt-param-scheduler", None])
def test_the_flags_schedule_holds(flag: str | None, saved: Path) -> None:
    words = [flag] if flag else []
    result = start(2, *words, **{**SMALL, **COSINE, "train_iters": 20, "load": str(saved), "exit_interval": 13})
    assert rates(result) == pytest.approx([cosine(k) for k in (11, 12, 13)], rel=1e-5)
    line = rate_line(result)
    assert "the flags' schedule" in line and "lr 0.001 -> 0.0001" in line and "constant -> cosine" in line
    assert ("--override-opt_param-scheduler" in line) == bool(flag)


@pytest.mark.parametrize("flag", ["--use-checkpoint-opt_param-scheduler", "--use-checkpoint-opt-param-scheduler"])
def test_the_checkpoints_schedule_holds(flag: str, saved: Path, tmp_path: Path) -> None:
    result = start(2, flag, **{**SMALL, **COSINE, "train_iters": 20, "load": str(saved), "exit_interval": 13,
                               "save": str(tmp_path)})  # fmt: skip
    assert rates(result) == [1e-3] * 3
    assert "the checkpoint's schedule" in rate_line(result) and "lr 0.001 -> 0.0001" in rate_line(result)
    # and it is what this run's own checkpoint holds
    more = start(2, flag, **{**SMALL, **COSINE, "train_iters": 20, "load": str(tmp_path), "exit_interval": 15})
    assert rates(more) == [1e-3] * 2


@pytest.mark.parametrize("flag", ["--finetune", "--no-load-optim"])
def test_weights_alone_begin_the_schedule_anew(flag: str, saved: Path, tmp_path: Path) -> None:
    begin = 0 if flag == "--finetune" else 10
    settings = {**SMALL, **COSINE, "train_iters": 20, "save": str(tmp_path)}
    result = start(2, flag, **settings, load=str(saved), exit_interval=begin + 3)
    lines = training_lines(result.stdout)
    assert list(lines) == [begin + 1, begin + 2, begin + 3]
    length = 20 - begin  # the decay is as long as what the run has left
    assert rates(result) == pytest.approx([cosine(k, length) for k in (1, 2, 3)], rel=1e-5)
    assert "from its first step" in rate_line(result)
    assert [int(line["consumed samples"]) for line in lines.values()] == [8 * k for k in lines]
    assert syncs(result.stdout) == {1: begin + 3}
    more = start(2, **settings, load=str(tmp_path), exit_interval=begin + 5)
    assert rates(more) == pytest.approx([cosine(k, length) for k in (4, 5)], rel=1e-5)


def test_weights_alone_are_the_anchor_in_every_replica(saved: Path, tmp_path: Path) -> None:
    """Stopped between two syncs: the weights of the last one, from a checkpoint and from final/ alike."""
    anchor = weights_of(saved / "iter_0000010", "edit.anchor.")
    settings = {**SMALL, "train_iters": 0, "save": str(tmp_path / "new")}
    train(2, "--finetune", **settings, load=str(saved))
    for replica in (0, 1):
        found = masters(tmp_path / "new" / "iter_0000000", replica)
        assert all(torch.equal(found[name], anchor[name]) for name in anchor)
    assert not any(tensor.any() for tensor in weights_of(tmp_path / "new" / "iter_0000000",
                                                         "replica1.optimizer.state.exp_avg.").values())  # fmt: skip
    train(2, "--finetune", **{**settings, "save": str(tmp_path / "newer"), "edit_num_replicas": 1},
          load=str(tmp_path / "new" / "final"))  # fmt: skip
    final = weights_of(tmp_path / "newer" / "final", "model.")
    assert all(torch.equal(final[name], anchor[name]) for name in anchor)


def test_finetune_takes_final_as_conversion_does(tmp_path: Path) -> None:
    """Of a run that has ended, `final/`, which has the last sync; of one that went on after it, the anchor."""
    run, new = tmp_path / "run", tmp_path / "new"
    train(2, **SMALL, train_iters=4, save=str(run))
    settings = {**SMALL, "train_iters": 0, "load": str(run)}

    def weights(name: str, *words: str) -> dict[str, torch.Tensor]:
        train(2, "--finetune", *words, **settings, save=str(new / name))
        found = weights_of(new / name / "final", "model.")
        converted = MegatronWeights(run, step=int(words[1]) if words else None)
        assert all(torch.equal(found[tensor], converted.read(tensor)) for tensor in converted.shapes)
        return found

    def same(found: dict[str, torch.Tensor], folder: Path, prefix: str) -> bool:
        return all(torch.equal(found[name], value) for name, value in weights_of(folder, prefix).items())

    found = weights("final")
    assert same(found, run / "final", "model.") and not same(found, run / "iter_0000004", "edit.anchor.")
    assert same(weights("asked for", "--ckpt-step", "4"), run / "iter_0000004", "edit.anchor.")
    os.truncate(run / "final" / "__0_0.distcp", 100)
    message = refused(start(2, "--finetune", **settings))
    assert "final/__0_0.distcp has 100 bytes" in message and "--load-fallback would take the checkpoint" in message
    train(2, **SMALL, train_iters=7, exit_interval=5, save=str(run), load=str(run))
    assert same(weights("went on"), run / "iter_0000005", "edit.anchor.")


def test_a_run_that_writes_over_another_says_so(saved: Path, run: Path) -> None:
    """Also with --load: the same command given again begins where it began, over what it had saved."""
    settings = {**SMALL, "edit_num_replicas": 1, "save": str(run), "train_iters": 1}
    elsewhere = ["--load", str(saved), "--ckpt-step", "8"]
    for words in ([], ["--finetune", *elsewhere], [*elsewhere, "--train-iters", "9"]):
        (line,) = re.findall(r"^.* holds a run .*$", train(1, *words, **settings).stdout, re.MULTILINE)
        assert f"*** --save {run} holds a run at iteration 10, and this one starts" in line, words
        assert f"give --load {run}{', without --finetune,' * ('--finetune' in words)} to go on with it" in line
    went_on = train(1, **{**settings, "load": str(run), "train_iters": 11})
    assert "holds a run" not in went_on.stdout


def test_final_weights_cannot_be_resumed(tmp_path: Path) -> None:
    train(1, **{**SMALL, "edit_num_replicas": 1}, train_iters=1, save=str(tmp_path))
    settings = {**SMALL, "edit_num_replicas": 1, "train_iters": 2, "load": str(tmp_path / "final")}
    for words in ([], ["--no-load-optim"]):
        assert "--finetune" in refused(start(1, *words, **settings))


def test_contradictions_are_refused(saved: Path) -> None:
    both = ["--override-opt_param-scheduler", "--use-checkpoint-opt_param-scheduler"]
    assert "contradict each other" in refused(start(1, *both, **{**SMALL, "edit_num_replicas": 1}, load=str(saved)))
    same = {**SMALL, "edit_num_replicas": 1, "load": str(saved), "save": str(saved)}
    assert "would begin anew at every start" in refused(start(1, "--finetune", **same))
    assert "--ckpt-step needs --load" in refused(start(1, **{**SMALL, "edit_num_replicas": 1}, ckpt_step=4))


# ---- another batch ---------------------------------------------------------------------------------------------------


def test_another_batch_leaves_rate_and_length_true(tmp_path: Path) -> None:
    """Twice the batch, or twice the replicas, for the last ten of twenty iterations."""
    settings = {**SMALL, **COSINE, "train_iters": 20, "load": str(tmp_path)}
    train(2, **settings, save=str(tmp_path), exit_interval=10)
    more: list[tuple[int, dict[str, Any]]] = [
        (2, {"global_batch_size": 16}),
        (4, {"edit_num_replicas": 4, "global_batch_size": None, "replica_batch_size": 4}),
    ]
    for ranks, change in more:
        result = train(ranks, **{**settings, **change}, exit_interval=12)
        assert rates(result) == pytest.approx([cosine(k) for k in (11, 12)], rel=1e-5)
        assert rate_line(result).endswith("global batch 8 -> 16; the rate goes on where it was")
        done = "of which 10 iterations and 80 samples are done"
        assert f"length: 20 iterations, 240 samples, 7680 tokens, {done}" in result.stdout


# ---- --no-load-rng ---------------------------------------------------------------------------------------------------


def test_generators_are_restored_unless_told_otherwise(tmp_path: Path) -> None:
    settings = {**SMALL, "train_iters": 8, "hidden_dropout": 0.2, "load": str(tmp_path)}
    train(2, **{**settings, "load": None}, save=str(tmp_path), exit_interval=4)
    with_them, again = (losses(train(2, **settings).stdout) for _ in range(2))
    without = start(2, "--no-load-rng", **settings)
    assert with_them == again != losses(without.stdout)
    assert "--no-load-rng" in without.stdout


# ---- which one (B21) -------------------------------------------------------------------------------------------------


def test_an_asked_iteration_wins_or_is_an_error(saved: Path) -> None:
    result = start(2, **SMALL, train_iters=20, load=str(saved), ckpt_step=4, exit_interval=5)
    assert f"resumed iteration 4 of 20 from {saved}" in result.stdout and "iter_0000004" in result.stdout
    assert list(losses(result.stdout)) == [5]
    assert "iter_0000005" in refused(start(2, **SMALL, train_iters=20, load=str(saved), ckpt_step=5))


def flip(path: Path) -> None:
    """One bit in the middle."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "pointer to nothing": (lambda run: (run / POINTER).write_text("9"), "iter_0000009"),
    "pointer is not a number": (lambda run: (run / POINTER).write_text("latest"), "should hold the number"),
    "shard flipped": (lambda run: flip(run / "iter_0000010" / "__1_0.distcp"), "__1_0.distcp is damaged: SHA-256"),
    "shard cut": (lambda run: os.truncate(run / "iter_0000010" / "__0_0.distcp", 5000), "has 5000 bytes"),
    "index flipped": (lambda run: flip(run / "iter_0000010" / ".metadata"), ".metadata is damaged"),
    "manifest missing": (lambda run: (run / "iter_0000010" / "manifest.json").unlink(), "manifest.json is missing"),
}


@pytest.mark.parametrize(
    "damage",
    [name if name.startswith("shard") else pytest.param(name, marks=pytest.mark.full(reason="more of the same"))
     for name in DAMAGES],
)  # fmt: skip
def test_damage_is_named_and_the_one_before_is_taken_when_allowed(damage: str, run: Path) -> None:
    spoil, named = DAMAGES[damage]
    spoil(run)
    settings = {**SMALL, "train_iters": 20, "load": str(run), "save": str(run)}
    before = files_below(run)
    message = refused(start(2, **settings))
    assert named in message and "--load-fallback" in message
    assert files_below(run) - {".lock"} == before - {".lock"}
    result = start(2, "--load-fallback", **settings, exit_interval=11)
    assert named in result.stdout and "*** falling back to" in result.stdout, result
    assert (run / "iter_0000010.damaged").exists() == (not damage.startswith("pointer"))
    expected = 10 if damage == "pointer is not a number" else 8
    assert f"resumed iteration {expected} of 20" in result.stdout


@pytest.mark.parametrize("words", [[], ["--load-fallback"]], ids=["alone", "with --load-fallback"])
def test_damage_of_the_only_checkpoint_is_no_first_start(words: list[str], run: Path) -> None:
    for iteration in (4, 8):
        shutil.rmtree(run / f"iter_{iteration:07d}")
    flip(run / "iter_0000010" / "__1_0.distcp")
    (run / "iter_0000012.partial").mkdir()
    before = files_below(run) | {".lock"}
    settings = {**SMALL, "train_iters": 20, "load": str(run), "save": str(run), "keep_checkpoints": 1}
    message = refused(start(2, *words, **settings))
    assert "__1_0.distcp is damaged" in message and "this is not a first start" in message
    assert files_below(run) == before


@pytest.mark.parametrize("part", ["folder", "shard"])
def test_what_cannot_be_read_is_no_first_start(part: str, run: Path) -> None:
    """An I/O error on one rank, simulated: of the folder's list on rank 0, of a shard's content on rank 1."""

    def in_rank(rank: int) -> None:
        from megatron_edit.checkpoint import manifest

        iterdir = Path.iterdir

        def failing_list(self: Path) -> Any:
            if self == run:
                raise OSError(5, "Input/output error", str(self))
            return iterdir(self)

        def failing_read(path: Path) -> Any:
            raise OSError(5, "Input/output error", str(path))

        if part == "folder" and rank == 0:
            Path.iterdir = failing_list  # type: ignore[method-assign]
        elif part == "shard" and rank == 1:
            manifest.describe_file = failing_read

    before = files_below(run) | {".lock"}
    settings = {**SMALL, "train_iters": 20, "load": str(run), "save": str(run)}
    message = refused(start(2, **settings, in_rank=in_rank))
    assert "cannot be read: Input/output error" in message and str(run) in message
    assert files_below(run) | {".lock"} == before


def test_rank_0_decides(run: Path, tmp_path: Path) -> None:
    """The pointer says something else to rank 1, as on two machines with a disk each."""

    def in_rank(rank: int) -> None:
        from megatron_edit.checkpoint.folders import CheckpointFolder

        if rank == 1:
            CheckpointFolder.pointer = lambda self: 4  # type: ignore[method-assign]

    result = start(2, **SMALL, train_iters=20, load=str(run), exit_interval=11, in_rank=in_rank)
    assert "resumed iteration 10 of 20" in result.stdout and result.exit_codes == [0, 0]


def test_an_unfinished_newer_folder_is_no_candidate(run: Path) -> None:
    shutil.copytree(run / "iter_0000010", run / "iter_0000012.partial")
    (run / "iter_0000012").mkdir()
    (run / POINTER).unlink()
    result = start(2, **SMALL, train_iters=20, load=str(run), exit_interval=11)
    assert "resumed iteration 10 of 20" in result.stdout and f"there is no {POINTER}" in result.stdout


# ---- other models ----------------------------------------------------------------------------------------------------

OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "width": ({"hidden_size": 64}, "decoder.layers.0.mlp.linear_fc1.weight: expected [128, 64], found [128, 32]"),
    "depth": ({"num_layers": 4}, "decoder.layers.2.mlp.linear_fc1.weight: expected [128, 32], not found"),
    "fewer layers": ({"num_layers": 1}, "decoder.layers.1.mlp.linear_fc1.weight: not expected, found [128, 32]"),
    "heads": ({"num_attention_heads": 8, "kv_channels": 4}, "num_attention_heads: expected 8, found 4"),
    "tied": ({"untie_embeddings_and_output_weights": False}, "output_layer.weight: not expected, found [259, 32]"),
    "vocabulary": ({"tokenizer_type": "NullTokenizer", "vocab_size": 400}, "vocabulary: expected 401, found 259"),
}


@pytest.mark.parametrize(
    "case", [name if name == "width" else pytest.param(name, marks=pytest.mark.full(reason="more")) for name in OTHERS]
)
def test_another_model_is_named(case: str, saved: Path) -> None:
    settings, named = OTHERS[case]
    for words in ([], ["--finetune"]):
        message = refused(start(2, *words, **{**SMALL, "train_iters": 20, **settings}, load=str(saved)))
        assert "does not fit this run's model" in message
        assert named in message or ("more" in message and case in ("width", "depth", "fewer layers")), message


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"edit_warmup_steps": 12}, "a warm-up of 12 steps cannot take it up; 0 steps would work"),
        pytest.param({"edit_method": "baseline"}, "a warm-up without end", marks=pytest.mark.full(reason="the same")),
    ],
)
def test_local_replicas_do_not_go_back_to_synchronous_steps(settings: dict[str, Any], named: str, saved: Path) -> None:
    assert named in refused(start(2, **{**SMALL, **settings}, train_iters=20, load=str(saved)))


# ---- keeping (B24) ---------------------------------------------------------------------------------------------------


def test_a_restart_keeps_what_it_promised(tmp_path: Path) -> None:
    def folders() -> list[str]:
        return sorted(path.name for path in tmp_path.glob("iter_*"))

    settings = {**SMALL, "train_iters": 20, "save": str(tmp_path), "load": str(tmp_path), "keep_checkpoints": 2}
    first = train(2, **settings, save_interval=2, exit_interval=6)
    assert folders() == ["iter_0000004", "iter_0000006"]
    assert first.stdout.count("saved iteration 6 to") == 1, "the planned exit saves once"
    assert "deleted the checkpoints of iterations 2" in first.stdout
    shutil.copytree(tmp_path / "iter_0000006", tmp_path / "iter_0005000")
    before = tmp_path.with_name("before")
    shutil.copytree(tmp_path / "iter_0000006", before)
    train(2, **settings, ckpt_step=4, save_interval=1, exit_interval=6)
    assert folders() == ["iter_0000005", "iter_0000006", "iter_0005000"]
    assert (tmp_path / POINTER).read_text() == "6"
    assert differences(tmp_path / "iter_0000006", before) == []


# ---- saving in the background, compact -------------------------------------------------------------------------------


def test_saving_in_the_background_gives_the_same_bytes(tmp_path: Path) -> None:
    settings = {**SMALL, "train_iters": 9, "save_interval": 2, "hidden_dropout": 0.1}
    for name, background in (("sync", False), ("async", True)):
        result = train(2, **settings, save=str(tmp_path / name), async_save=background)
        assert [int(n) for n in re.findall(r"saved iteration (\d+) to", result.stdout)] == [2, 4, 6, 8, 9]
    for iteration in (2, 4, 6, 8, 9):
        path = f"iter_{iteration:07d}"
        assert differences(tmp_path / "sync" / path, tmp_path / "async" / path) == []


def test_compact_waits_for_a_sync_and_a_stop_does_not(tmp_path: Path) -> None:
    settings = {**SMALL, "train_iters": 20, "save": str(tmp_path), "load": str(tmp_path), "save_scope": "compact"}
    first = train(2, **settings, save_interval=4, exit_interval=10)
    assert re.findall(r"saved iteration (\d+) to", first.stdout) == ["6", "9", "10"]
    assert "iteration 10 lies between two syncs: its checkpoint is a full one" in first.stdout
    scopes = {
        path.name: json.loads((path / "manifest.json").read_text())["content"]["scope"]
        for path in tmp_path.glob("iter_*")
    }
    assert scopes == {"iter_0000006": "compact", "iter_0000009": "compact", "iter_0000010": "full"}
    second = train(2, **{**settings, "save": None}, ckpt_step=9, exit_interval=12)
    assert "resumed iteration 9 of 20" in second.stdout and syncs(second.stdout) == {4: 12}


WIDE = {**SMALL, "hidden_size": 128, "ffn_hidden_size": 512, "edit_sync_interval": 4, "train_iters": 6, "bf16": True}


@pytest.mark.parametrize(
    "settings",
    [{}, {"save_scope": "compact", "edit_sync_interval": 3}, {"edit_method": "streaming", "edit_sync_delay": 2},
     *(pytest.param(more, marks=pytest.mark.full(reason="more methods"))
       for more in ({"edit_method": "co2"}, {"edit_method": "baseline"}, {"edit_comm_dtype": "int8"}))],
    ids=str,
)  # fmt: skip
def test_a_save_has_the_size_that_was_said(settings: dict[str, Any], tmp_path: Path) -> None:
    """Within 4 %, which is what small tensors have around them. A delay: at most, when averages are under way."""
    def size(folder: Path) -> float:
        return sum(path.stat().st_size for path in folder.iterdir()) / 1e6

    result = train(2, **{**WIDE, **settings}, save=str(tmp_path))
    found = re.search(r"^save: about ([\d.]+) MB a checkpoint .* ([\d.]+) MB for final/", result.stdout, re.MULTILINE)
    assert found is not None, result.stdout
    assert size(tmp_path / "iter_0000006") == pytest.approx(float(found[1]), rel=0.04)
    assert size(tmp_path / "final") == pytest.approx(float(found[2]), rel=0.06)


# ---- R 2 -> 4 -> 3 -> 1 ----------------------------------------------------------------------------------------------


def samples_of(file: Path) -> list[int]:
    entries = sorted(map(json.loads, file.read_text().splitlines()), key=lambda e: (e["iteration"], e["replica"]))
    return [sample for entry in entries for sample in entry["samples"]]


def test_replicas_come_and_go_and_no_sample_is_lost(tmp_path: Path) -> None:
    """B49 too: one learning rate for one position, whatever the number of replicas."""
    ids, save = tmp_path / "ids.jsonl", str(tmp_path / "run")
    settings = {**SMALL, **COSINE, "train_iters": 12, "global_batch_size": 12, "micro_batch_size": 1, "save": save,
                "load": save, "log_sample_ids": str(ids)}  # fmt: skip
    found: list[float] = []
    for index, replicas in enumerate((2, 4, 3, 1)):
        result = train(replicas, **settings, edit_num_replicas=replicas, exit_interval=3 * (index + 1))
        found += rates(result)
    straight = train(2, **{**settings, "save": None, "load": None, "log_sample_ids": str(tmp_path / "other.jsonl")})
    assert found == rates(straight)
    assert samples_of(ids) == samples_of(tmp_path / "other.jsonl")
    assert len(set(samples_of(ids))) == 12 * 12


# ---- what a user should be told loudly -------------------------------------------------------------------------------


def test_a_new_run_in_a_used_folder_is_said_loudly(run: Path) -> None:
    result = train(2, **SMALL, train_iters=2, save=str(run))
    assert f"*** --save {run} holds a run at iteration 10, and this one starts anew" in result.stdout


def test_another_order_of_samples_is_said_loudly(run: Path) -> None:
    settings = {**SMALL, "train_iters": 11, "load": str(run)}
    assert "order of samples is another one" not in train(2, **settings).stdout
    assert "*** --seed was 1234, is 7: the order of samples is another one" in train(2, **settings, seed=7).stdout


def test_the_logged_loss_does_not_jump_at_a_resize(tmp_path: Path) -> None:
    """Saved at a sync, so all replicas go on from one anchor: the next global batch has one mean, for any number."""
    train(2, **SMALL, train_iters=6, save=str(tmp_path))
    after = {}
    for replicas in (1, 2, 4):
        result = train(replicas, **SMALL, train_iters=7, load=str(tmp_path), edit_num_replicas=replicas)
        after[replicas] = float(losses(result.stdout)[7])
    assert after[1] == pytest.approx(after[2], rel=1e-5) and after[4] == pytest.approx(after[2], rel=1e-5)
