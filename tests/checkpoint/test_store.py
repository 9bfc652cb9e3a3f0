"""The folder of checkpoints: whole or not there, damage named, retention from what is on the disk."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from rlscale.checkpoint import store as module
from rlscale.checkpoint.store import Damaged, Retention, Store, checksum_of, read_manifest, write_json


def make(store: Store, step: int, metrics: dict[str, float] | None = None, content: str = "hello") -> Path:
    partial = store.begin(step)
    files = {name: write_json(partial / name, [content, step]) for name in ("run.json", "rank_00000.json")}
    store.publish(step, files, {"metrics": metrics or {}})
    return store.path(step)


def flip(path: Path, place: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1 << bit
    path.write_bytes(data)


def test_a_checkpoint_appears_whole(tmp_path: Path) -> None:
    store = Store(tmp_path / "checkpoints")
    partial = store.begin(7)
    write_json(partial / "run.json", 1)
    assert store.steps() == [] and store.complete() == []
    path = make(store, 7)
    assert path.name == "step_000007" and store.steps() == [7]
    manifest = read_manifest(store.path(7))
    manifest.verify()
    assert manifest.json("run.json") == ["hello", 7] and manifest.step == 7
    assert checksum_of(path / "run.json") == manifest.files["run.json"].checksum
    assert make(store, 7, content="anew") == path and read_manifest(store.path(7)).json("run.json") == ["anew", 7]
    assert [p.name for p in store.root.iterdir()] == [path.name]


@pytest.mark.parametrize("name", ["run.json", "rank_00000.json", "manifest.json"])
def test_every_flipped_bit_is_found_and_its_file_named(tmp_path: Path, name: str) -> None:
    store = Store(tmp_path)
    path = make(store, 1)
    whole = (path / name).read_bytes()
    for place in range(len(whole)):
        for bit in (0, 6):
            flip(path / name, place, bit)
            with pytest.raises(Damaged, match=rf"step_000001/{name}"):
                read_manifest(store.path(1)).verify()
            (path / name).write_bytes(whole)
    read_manifest(store.path(1)).verify()


def test_missing_and_truncated_files_are_found_without_reading_them(tmp_path: Path) -> None:
    store = Store(tmp_path)
    path = make(store, 1)
    size = (path / "run.json").stat().st_size
    os.truncate(path / "run.json", size - 1)
    with pytest.raises(Damaged, match=rf"run\.json: has {size - 1} bytes, {size} were written"):
        read_manifest(store.path(1))
    (path / "run.json").unlink()
    with pytest.raises(Damaged, match=r"run\.json: the file is missing"):
        read_manifest(store.path(1))
    (path / "manifest.json").write_text("{")
    with pytest.raises(Damaged, match="cannot be read as a manifest"):
        read_manifest(store.path(1))
    (path / "manifest.json").unlink()
    with pytest.raises(Damaged, match=r"has no manifest\.json"):
        read_manifest(store.path(1))
    make(store, 2)
    assert [manifest.step for manifest in store.complete()] == [2]


def test_a_copy_under_another_step_is_no_checkpoint(tmp_path: Path) -> None:
    path = make(Store(tmp_path), 1)
    shutil.copytree(path, tmp_path / "step_000002")
    with pytest.raises(Damaged, match=r"step_000002: its manifest.json is that of step 1"):
        read_manifest(Store(tmp_path).path(2))
    shutil.copytree(path, tmp_path / "kept")  # any other name will do
    assert read_manifest(tmp_path / "kept").step == 1


def test_another_format_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make(Store(tmp_path), 1)
    monkeypatch.setattr(module, "FORMAT", 2)
    with pytest.raises(ValueError, match="format 1 is of another version"):
        read_manifest(path)


@pytest.mark.parametrize("killed_in", ["write_json", "flush_folder", "rename", "rmtree"])
def test_a_save_that_is_killed_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed_in: str
) -> None:
    store = Store(tmp_path)
    make(store, 1, content="old")
    make(store, 2, content="old")

    class Killed(BaseException):
        pass

    def kill(*_: object, **__: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        target = {"rename": Path, "rmtree": module.shutil}.get(killed_in, module)
        patch.setattr(target, killed_in, kill)
        with pytest.raises(Killed):
            make(store, 3, content="new")
            store.prune(Retention(keep_last=1))
    whole = store.complete()
    assert store.steps() == [manifest.step for manifest in whole]
    assert {1, 2} - set(store.steps()) <= {1}  # 1 may be on its way out
    for manifest in whole:
        manifest.verify()
    store.clean()
    kept = {manifest.step for manifest in whole} | ({3} if killed_in != "write_json" else set())
    assert store.steps() == sorted(kept)  # one that lacked only its name has it now
    assert sorted(p.name for p in tmp_path.iterdir()) == [store.path(step).name for step in store.steps()]
    for step in store.steps():
        read_manifest(store.path(step)).verify()


def test_a_checkpoint_that_is_replaced_is_there_whenever_the_run_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path)
    make(store, 1, content="old")

    class Killed(BaseException):
        pass

    rename = Path.rename

    def kill(self: Path, target: Path) -> Path:
        if self.name.endswith(module.PARTIAL):
            raise Killed
        return rename(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(module.shutil, "rmtree", lambda *_, **__: (_ for _ in ()).throw(OSError("Directory not empty")))
        with pytest.raises(OSError, match="not empty"):
            make(store, 1, content="newer")
    read_manifest(store.path(1)).verify()
    store.clean()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", kill)
        with pytest.raises(Killed):
            make(store, 1, content="new")
    assert store.steps() == []
    store.clean()
    assert [p.name for p in tmp_path.iterdir()] == ["step_000001"]
    read_manifest(store.path(1)).verify()


def test_retention_counts_what_is_on_the_disk(tmp_path: Path) -> None:
    for step in range(1, 8):
        make(Store(tmp_path), step, {"val": [0.0, 3.0, 9.0, 9.0, 1.0, 5.0, 2.0][step - 1]})
    (tmp_path / "step_000007" / "manifest.json").unlink()  # damaged: neither counted nor deleted
    Store(tmp_path).prune(Retention(keep_last=2, keep_every=3, keep_best="val"))
    assert Store(tmp_path).steps() == [3, 4, 5, 6, 7]
    Store(tmp_path).prune(Retention(keep_last=1, keep_best="-val"))
    assert Store(tmp_path).steps() == [5, 6, 7]
    Store(tmp_path).prune(Retention())
    assert Store(tmp_path).steps() == [5, 6, 7]
    aside = Store(tmp_path).set_aside(7)
    assert aside.name == "step_000007.damaged" and Store(tmp_path).steps() == [5, 6]


def test_a_full_disk_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        make(Store(tmp_path), 1)
    assert Store(tmp_path).complete() == []
