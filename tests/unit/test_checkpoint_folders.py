"""Which folder is a checkpoint, which is loaded, which is deleted; locks and what a killed run leaves. B21, B24."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_edit.checkpoint.errors import CheckpointError
from megatron_edit.checkpoint.folders import POINTER, CheckpointFolder, check_load
from megatron_edit.checkpoint.manifest import FORMAT_VERSION, MANIFEST, Manifest, content_problem, describe_file


def make(folder: CheckpointFolder, *iterations: int, keep: int = 0) -> None:
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
def folder(tmp_path: Path) -> CheckpointFolder:
    return CheckpointFolder(tmp_path / "run")


def chosen(folder: CheckpointFolder, step: int | None = None, fallback: bool = False) -> list[int]:
    return [candidate.manifest.iteration for candidate, _ in folder.to_load(step, fallback)]


# ---- choosing --------------------------------------------------------------------------------------------------------


def test_the_pointer_decides(folder: CheckpointFolder) -> None:
    make(folder, 2, 4, 6)
    assert chosen(folder) == [6]
    folder.point_to(4)
    assert chosen(folder) == [4]
    assert chosen(folder, fallback=True) == [4, 2]  # never a later one, which belongs to another past


@pytest.mark.parametrize("text", ["6\n", " 6 ", "0006"])
def test_a_pointer_with_white_space_is_read(text: str, folder: CheckpointFolder) -> None:
    make(folder, 2, 6)
    (folder.directory / POINTER).write_text(text)
    assert chosen(folder) == [6]


@pytest.mark.parametrize("text", ["", "latest", "6 4", "-6", "6.0", "\x00\xff", "²"])
def test_a_pointer_with_something_else_is_named(text: str, folder: CheckpointFolder) -> None:
    make(folder, 2, 6)
    (folder.directory / POINTER).write_text(text)
    with pytest.raises(CheckpointError, match=r"should hold the number of an iteration.*--load-fallback would take.*6"):
        chosen(folder)
    assert chosen(folder, fallback=True) == [6, 2]


def test_without_a_pointer_the_newest_complete_one_is_taken_and_said(folder: CheckpointFolder) -> None:
    make(folder, 2, 6)
    (folder.directory / POINTER).unlink()
    ((candidate, remark), *_) = folder.to_load(None, False)
    assert candidate.manifest.iteration == 6 and POINTER in remark


def test_an_empty_folder_has_nothing(folder: CheckpointFolder) -> None:
    assert chosen(folder) == []
    folder.directory.mkdir()
    assert chosen(folder) == []


def test_an_asked_iteration_wins_or_is_an_error(folder: CheckpointFolder) -> None:
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
def test_an_incomplete_checkpoint_is_named_and_never_chosen(damage: str, folder: CheckpointFolder) -> None:
    make(folder, 2, 4)
    spoil, message = DAMAGES[damage]
    spoil(folder.path(4))
    with pytest.raises(CheckpointError) as caught:
        chosen(folder)
    assert message in str(caught.value) and "--load-fallback would take iteration 2" in str(caught.value)
    assert folder.complete_iterations() == [2]
    assert chosen(folder, fallback=True) == [2]


def test_a_flipped_bit_is_found_by_reading(folder: CheckpointFolder) -> None:
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


def test_the_newest_are_kept(folder: CheckpointFolder) -> None:
    make(folder, 2, 4, 6, 8, keep=2)
    assert folder.complete_iterations() == [6, 8]


def test_zero_keeps_all(folder: CheckpointFolder) -> None:
    make(folder, 2, 4, 6, keep=0)
    assert folder.complete_iterations() == [2, 4, 6]


def test_a_restart_from_an_older_one(folder: CheckpointFolder) -> None:
    """Saved 2, 4, 6, gone on from 4: 5 is safe, 6 is another past until it is saved again; 5000 is not ours."""
    make(folder, 5000)
    make(folder, 2, 4, 6, keep=2)
    assert folder.complete_iterations() == [4, 6, 5000]
    make(folder, 5, keep=2)
    assert folder.complete_iterations() == [4, 5, 6, 5000] and chosen(folder) == [5]
    make(folder, 6, keep=2)
    assert folder.complete_iterations() == [5, 6, 5000] and chosen(folder) == [6]


def test_a_checkpoint_of_the_same_iteration_is_replaced(folder: CheckpointFolder) -> None:
    make(folder, 2)
    name = folder.path(2).name
    aside = folder.begin(name)
    (aside / "data").write_bytes(b"new")
    folder.commit(name, Manifest({"iteration": 2, "scope": "full"}, {"data": describe_file(aside / "data")}))
    assert (folder.path(2) / "data").read_bytes() == b"new"
    assert sorted(path.name for path in folder.directory.iterdir()) == ["iter_0000002", POINTER]


def test_incomplete_ones_do_not_count_as_kept(folder: CheckpointFolder) -> None:
    make(folder, 2, 4, 6)
    os.truncate(folder.path(4) / "data", 1)
    assert folder.delete_old(6, 2) == []
    assert folder.complete_iterations() == [2, 6]


# ---- locks and leftovers ---------------------------------------------------------------------------------------------

HOLDER = """
import sys, time
from megatron_edit.checkpoint.folders import CheckpointFolder
folder = CheckpointFolder(sys.argv[1])
folder.acquire()
print("locked", flush=True)
time.sleep(60)
"""


def test_a_second_run_is_kept_out_until_the_first_is_gone(folder: CheckpointFolder) -> None:
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


def test_what_a_killed_run_leaves_is_removed(folder: CheckpointFolder) -> None:
    make(folder, 2, 4)
    (folder.begin(folder.path(6).name) / "data").write_bytes(b"half")
    folder.begin("final")
    folder.path(4).rename(folder.directory / "iter_0000004.replaced")  # killed between two renames
    make(folder, 2)
    folder.acquire()
    folder.release()
    names = {path.name for path in folder.directory.iterdir()}
    assert names == {"iter_0000002", "iter_0000004", POINTER, ".lock"}
    assert folder.complete_iterations() == [2, 4]
