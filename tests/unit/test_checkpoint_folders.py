"""Which folder is a checkpoint, which is loaded, which is deleted; locks and what a killed run leaves. B21, B24."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_edit.checkpoint.errors import CheckpointError
from megatron_edit.checkpoint.folders import POINTER, check_load
from megatron_edit.checkpoint.manifest import FORMAT_VERSION, MANIFEST, Manifest, content_problem, describe_file
from megatron_edit.checkpoint.save_folder import SaveFolder


def make(folder: SaveFolder, *iterations: int, keep: int = 0) -> None:
    """Checkpoints with one file each, saved in this order."""
    for iteration in iterations:
        name = folder.path(iteration).name
        aside = folder.begin(name)
        (aside / "data").write_bytes(f"state {iteration}".encode())
        content = {"iteration": iteration, "scope": "full"}
        folder.commit(name, Manifest(content, {"data": describe_file(aside / "data")}))
        folder.point_to(iteration)
        folder.delete_old(iteration, keep)


@pytest.fixture
def folder(tmp_path: Path) -> SaveFolder:
    return SaveFolder(tmp_path / "run")


def chosen(folder: SaveFolder, step: int | None = None, fallback: bool = False) -> list[int]:
    return [candidate.manifest.iteration for candidate, _ in folder.to_load(step, fallback)]


# ---- choosing --------------------------------------------------------------------------------------------------------


def test_the_pointer_decides(folder: SaveFolder) -> None:
    make(folder, 2, 4, 6)
    assert chosen(folder) == [6]
    folder.point_to(4)
    assert chosen(folder) == [4]
    assert chosen(folder, fallback=True) == [4, 2]  # never a later one, which belongs to another past


@pytest.mark.parametrize("text", ["6\n", " 6 ", "0006"])
def test_a_pointer_with_white_space_is_read(text: str, folder: SaveFolder) -> None:
    make(folder, 2, 6)
    (folder.directory / POINTER).write_text(text)
    assert chosen(folder) == [6]


@pytest.mark.parametrize("text", ["", "latest", "6 4", "-6", "6.0", "\x00\xff", "²"])
def test_a_pointer_with_something_else_is_named(text: str, folder: SaveFolder) -> None:
    make(folder, 2, 6)
    (folder.directory / POINTER).write_text(text)
    with pytest.raises(CheckpointError, match=r"should hold the number of an iteration.*--load-fallback would take.*6"):
        chosen(folder)
    assert chosen(folder, fallback=True) == [6, 2]


def test_without_a_pointer_the_newest_complete_one_is_taken_and_said(folder: SaveFolder) -> None:
    make(folder, 2, 6)
    (folder.directory / POINTER).unlink()
    ((candidate, remark), *_) = folder.to_load(None, False)
    assert candidate.manifest.iteration == 6 and POINTER in remark


def test_an_empty_folder_has_nothing(folder: SaveFolder) -> None:
    assert chosen(folder) == []
    folder.directory.mkdir()
    assert chosen(folder) == []


def test_an_asked_iteration_wins_or_is_an_error(folder: SaveFolder) -> None:
    make(folder, 5, 10)
    assert chosen(folder, step=5) == [5]
    with pytest.raises(CheckpointError, match=r"there is no checkpoint .*iter_0000007"):
        chosen(folder, step=7, fallback=True)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "folder gone": (lambda path: path.rename(path.with_name("elsewhere")), "there is no checkpoint"),
    "no manifest": (lambda path: (path / MANIFEST).unlink(), "manifest.json is missing"),
    "manifest cut": (lambda path: os.truncate(path / MANIFEST, 40), "is damaged"),
    "manifest of something else": (lambda path: (path / MANIFEST).write_text("[]"), "is damaged"),
    "manifest changed": (
        lambda path: (path / MANIFEST).write_text((path / MANIFEST).read_text().replace('"full"', '"fall"')),
        "its checksum does not fit",
    ),
    "newer program": (
        lambda path: (path / MANIFEST).write_text(json.dumps({"format_version": FORMAT_VERSION + 1})),
        f"has format {FORMAT_VERSION + 1}, this program reads up to {FORMAT_VERSION}",
    ),
    "file gone": (lambda path: (path / "data").unlink(), "data cannot be read: No such file"),
    "file cut": (lambda path: os.truncate(path / "data", 3), "has 3 bytes, expected 7"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_an_incomplete_checkpoint_is_named_and_never_chosen(damage: str, folder: SaveFolder) -> None:
    make(folder, 2, 4)
    spoil, message = DAMAGES[damage]
    spoil(folder.path(4))
    with pytest.raises(CheckpointError) as caught:
        chosen(folder)
    assert message in str(caught.value) and "--load-fallback would take iteration 2" in str(caught.value)
    assert folder.complete_iterations() == [2]
    assert chosen(folder, fallback=True) == [2]


def test_a_flipped_bit_is_found_by_reading(folder: SaveFolder) -> None:
    make(folder, 2)
    data = folder.path(2) / "data"
    entry = folder.candidate(2).manifest.files["data"]
    assert content_problem(folder.path(2), "data", entry) is None
    data.write_bytes(bytes([data.read_bytes()[0] ^ 1]) + data.read_bytes()[1:])
    assert "SHA-256" in (content_problem(folder.path(2), "data", entry) or "")


def test_what_holds_no_checkpoint_is_refused_before_the_start(tmp_path: Path) -> None:
    for name, files in {"empty": [], "hugging face": ["config.json", "model.safetensors"]}.items():
        (tmp_path / name).mkdir()
        for file in files:
            (tmp_path / name / file).write_text("{}")
        with pytest.raises(CheckpointError, match=POINTER):
            check_load(str(tmp_path / name), None)
        check_load(str(tmp_path / name), f"{tmp_path / name}/.")  # first start
    with pytest.raises(CheckpointError, match="not a folder"):
        check_load(str(tmp_path / "nowhere"), str(tmp_path / "empty"))


# ---- keeping and deleting --------------------------------------------------------------------------------------------


def test_the_newest_are_kept(folder: SaveFolder) -> None:
    make(folder, 2, 4, 6, 8, keep=2)
    assert folder.complete_iterations() == [6, 8]


def test_zero_keeps_all(folder: SaveFolder) -> None:
    make(folder, 2, 4, 6, keep=0)
    assert folder.complete_iterations() == [2, 4, 6]


def test_a_restart_from_an_older_one(folder: SaveFolder) -> None:
    """Saved 2, 4, 6, gone on from 4: 5 is safe, 6 is another past until it is saved again; 5000 is not ours."""
    make(folder, 5000)
    make(folder, 2, 4, 6, keep=2)
    assert folder.complete_iterations() == [4, 6, 5000]
    make(folder, 5, keep=2)
    assert folder.complete_iterations() == [4, 5, 6, 5000] and chosen(folder) == [5]
    make(folder, 6, keep=2)
    assert folder.complete_iterations() == [5, 6, 5000] and chosen(folder) == [6]


def test_a_checkpoint_of_the_same_iteration_is_replaced(folder: SaveFolder) -> None:
    make(folder, 2)
    name = folder.path(2).name
    aside = folder.begin(name)
    (aside / "data").write_bytes(b"new")
    folder.commit(name, Manifest({"iteration": 2, "scope": "full"}, {"data": describe_file(aside / "data")}))
    assert (folder.path(2) / "data").read_bytes() == b"new"
    assert sorted(path.name for path in folder.directory.iterdir()) == ["iter_0000002", POINTER]


def test_incomplete_ones_do_not_count_as_kept(folder: SaveFolder) -> None:
    make(folder, 2, 4, 6)
    os.truncate(folder.path(4) / "data", 1)
    assert folder.delete_old(6, 2) == []
    assert folder.complete_iterations() == [2, 6]


# ---- locks and leftovers ---------------------------------------------------------------------------------------------

HOLDER = """
import sys, time
from megatron_edit.checkpoint.save_folder import SaveFolder
folder = SaveFolder(sys.argv[1])
folder.acquire()
print("locked", flush=True)
time.sleep(60)
"""


def test_a_second_run_is_kept_out_until_the_first_is_gone(folder: SaveFolder) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(folder.directory)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "locked\n"
        with pytest.raises(CheckpointError, match=f"another run saves there .process {holder.pid} on "):
            folder.acquire()
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    assert folder.acquire() is None
    folder.release()


def test_what_a_killed_run_leaves_is_removed(folder: SaveFolder) -> None:
    """But not before it is settled what is loaded."""
    make(folder, 2, 4)
    (folder.begin(folder.path(6).name) / "data").write_bytes(b"half")
    folder.begin("final")
    folder.path(4).rename(folder.directory / "iter_0000004.replaced")  # killed between two renames
    make(folder, 2)
    folder.acquire()
    assert (folder.directory / "iter_0000006.partial" / "data").exists()
    assert folder.complete_iterations() == [2, 4]
    folder.clean_up()
    folder.release()
    assert names(folder) == {"iter_0000002", "iter_0000004", POINTER, ".lock"}


def test_a_whole_checkpoint_whose_last_rename_was_not_reached_is_kept(folder: SaveFolder) -> None:
    """Killed in its first save, after the manifest: nothing is missing but the name."""
    make(folder, 2)
    (folder.directory / POINTER).unlink()
    folder.path(2).rename(folder.directory / "iter_0000002.partial")
    assert not folder.is_unused()
    folder.acquire()
    folder.clean_up()
    assert chosen(folder) == [2]
    folder.release()


# ---- a first start, or all that is left ------------------------------------------------------------------------------


def names(folder: SaveFolder) -> set[str]:
    return {path.name for path in folder.directory.iterdir()}


def contents(folder: SaveFolder) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.directory.rglob("*") if path.is_file()}


@pytest.mark.parametrize("left", [[], [".lock", "metrics.jsonl"], ["iter_0000002.partial/data", "final.partial/data"]])
def test_a_first_start(left: list[str], folder: SaveFolder) -> None:
    """Nothing is there that ever was a checkpoint: a run that was killed in its first save starts again by itself."""
    for name in left:
        (folder.directory / name).parent.mkdir(parents=True, exist_ok=True)
        (folder.directory / name).write_bytes(b"half")
    for fallback in (False, True):
        assert chosen(folder, fallback=fallback) == [] and folder.is_unused()


LEFT: dict[str, Callable[[SaveFolder], object]] = {
    "folder gone": lambda folder: folder.path(2).rename(folder.directory / "elsewhere"),
    "pointer of another": lambda folder: (folder.directory / POINTER).write_text("latest"),
    "pointer gone": lambda folder: (folder.directory / POINTER).unlink(),
    "partial with a manifest": lambda folder: (
        folder.path(2).rename(folder.directory / "iter_0000002.partial"),
        (folder.directory / POINTER).unlink(),
    ),
    "another name": lambda folder: (
        folder.path(2).rename(folder.directory / "iter_2.bak"),
        (folder.directory / POINTER).unlink(),
    ),
    "final alone": lambda folder: (
        folder.path(2).rename(folder.directory / "final"),
        (folder.directory / POINTER).unlink(),
    ),
}


@pytest.mark.parametrize("fallback", [False, True])
@pytest.mark.parametrize("case", [*DAMAGES, *LEFT])
def test_the_only_checkpoint_damaged_is_an_error_and_all_is_kept(
    case: str, fallback: bool, folder: SaveFolder
) -> None:
    make(folder, 2)
    if case in DAMAGES:
        DAMAGES[case][0](folder.path(2))
    else:
        if case != "folder gone" and case != "final alone":
            os.truncate(folder.path(2) / "data", 3)
        LEFT[case](folder)
    before = contents(folder)
    folder.acquire()
    with pytest.raises(CheckpointError) as caught:
        chosen(folder, fallback=fallback)
    folder.release()
    message = str(caught.value)
    assert "this is not a first start" in message and "what would help: put back a copy" in message
    assert "--load-fallback" not in message, "it would not help"
    if case in DAMAGES:
        assert DAMAGES[case][1] in message
    assert ("--finetune --load" in message) == (case == "final alone")
    (folder.directory / ".lock").unlink()
    assert contents(folder) == before


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), PermissionError(13, "Permission denied")])
@pytest.mark.parametrize("part", ["the folder", POINTER, "iter_0000002", MANIFEST, "data"])
def test_what_cannot_be_read_is_no_first_start(
    part: str, error: OSError, folder: SaveFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Simulated, as root may read everything: of any call that looks at the part."""
    make(folder, 2)
    unreadable = folder.directory / "" if part == "the folder" else folder.directory / part
    if part in (MANIFEST, "data"):
        unreadable = folder.path(2) / part

    def refusing(original: Callable[..., object]) -> Callable[..., object]:
        def refuse(self: object, *arguments: object, **named: object) -> object:
            if str(self) == str(unreadable):
                raise error
            return original(self, *arguments, **named)

        return refuse

    for owner, name in ((Path, "read_text"), (Path, "iterdir"), (Path, "stat"), (os, "listdir")):
        if not (part == "the folder" and name == "stat"):
            monkeypatch.setattr(owner, name, refusing(getattr(owner, name)))
    for fallback in (False, True):
        if part == POINTER and fallback:  # the newest complete one is still there to go on from, with a loud line
            assert chosen(folder, fallback=True) == [2]
            continue
        with pytest.raises(CheckpointError, match=rf"{unreadable}.*cannot be read: {error.strerror}"):
            chosen(folder, fallback=fallback)
    if part == "the folder":
        with pytest.raises(CheckpointError, match=rf"--load {unreadable} cannot be read: {error.strerror}"):
            check_load(str(folder.directory), None)


def test_after_a_fallback_the_damaged_one_is_not_written_over(folder: SaveFolder) -> None:
    make(folder, 2, 4, 6)
    os.truncate(folder.path(4) / "data", 3)
    (folder.path(6) / "data").write_bytes(b"flipped")  # found by its checksum only
    assert folder.set_aside_after(2) == ["iter_0000004.damaged", "iter_0000006.damaged"]
    make(folder, 4, 6, keep=1)
    assert names(folder) == {"iter_0000004.damaged", "iter_0000006", "iter_0000006.damaged", POINTER}
    os.truncate(folder.path(6) / "data", 1)
    make(folder, 6)
    assert (folder.directory / "iter_0000006.damaged-2" / "data").read_bytes() == b"s" and chosen(folder) == [6]


def test_the_lock_is_taken_anew_when_the_folder_is_removed(folder: SaveFolder) -> None:
    folder.acquire()
    make(folder, 2)
    assert folder.renew() == ""
    shutil.rmtree(folder.directory)
    assert "was removed or moved away while the run went on, with the checkpoints in it" in folder.renew()
    make(folder, 4)
    with pytest.raises(CheckpointError, match="another run saves there"):
        SaveFolder(folder.directory).acquire()
    (folder.directory / ".lock").unlink()
    other = SaveFolder(folder.directory)
    other.acquire()
    with pytest.raises(CheckpointError, match="another run saves there"):
        folder.renew()
    other.release()


def test_nothing_is_saved_into_a_checkpoint(folder: SaveFolder) -> None:
    """It would be deleted with it: --save RUN/iter_N and RUN/final, or a folder below them."""
    make(folder, 2)
    for below in ("", "run"):
        with pytest.raises(CheckpointError, match=f"in the checkpoint .*iter_0000002: .* {folder.directory} would"):
            SaveFolder(folder.path(2) / below).acquire()
    assert not (folder.path(2) / "run").exists()
    SaveFolder(folder.directory / "run").acquire()  # beside the checkpoints it stays
