"""What bridle wrote and somebody changed is refused in a line; what a killed process left is removed by the next."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from safetensors.numpy import save_file
from soak.fuzz import SPECIMENS, good_files, lay_out

from bridle.data.listing import table_on_disk
from bridle.data.listing.manifest import parse_manifest
from bridle.errors import DataError
from bridle.files import host_name


def changed(file: str, change: Callable[[Any], object]) -> Callable[[Path], None]:
    """What is in a JSON file, changed."""

    def go(folder: Path) -> None:
        value = json.loads((folder / file).read_text())
        change(value)
        (folder / file).write_text(json.dumps(value))

    return go


def half_a_header(pattern: str) -> Callable[[Path], None]:
    """A numpy array whose description is cut in its middle, so that a bracket stays open."""

    def go(folder: Path) -> None:
        (path,) = folder.glob(pattern)
        content = path.read_bytes()
        at = content.index(b"(")
        path.write_bytes(content[:8] + (at - 9).to_bytes(2, "little") + content[10 : at + 1])

    return go


def no_positions(folder: Path) -> None:
    path = folder / "codes.safetensors"
    with safe_open(path, framework="numpy") as file:
        arrays = {name: file.get_tensor(name) for name in file.keys() if name != "positions"}  # noqa: SIM118
        metadata = file.metadata()
    save_file(arrays, path, metadata)


def one_number(folder: Path) -> None:
    path = folder / "sequences" / "sequences.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps({**row, "input_ids": 7}) + "\n" for row in rows))


@pytest.mark.parametrize(
    ("kind", "harm"),
    [
        ("sequences", half_a_header("sequences/blocks.npy")),
        ("sequences", one_number),
        ("sequences", changed("sequences/vocabulary.json", lambda value: value.update(files=2**70))),
        ("sequences", changed("sequences/vocabulary.json", lambda value: value.pop("files"))),
        ("search index", half_a_header("index/generation-*/vectors.npy")),
        ("search index", changed("index/index.json", lambda value: value.pop("features"))),
        ("search index", changed("index/index.json", lambda value: value.pop("run"))),
        ("codes safetensors", no_positions),
        ("codes folder", changed("codes/index.json", lambda value: value["header"].update(format=None))),
        ("codes folder", changed("codes/index.json", lambda value: value.update(files=2**70))),
    ],
)
def test_what_was_changed_is_refused_in_a_line(tmp_path: Path, kind: str, harm: Callable[[Path], None]) -> None:
    lay_out(tmp_path, good_files(kind))
    SPECIMENS[kind].read(tmp_path)
    harm(tmp_path)
    with pytest.raises(DataError) as error:
        SPECIMENS[kind].read(tmp_path)
    assert "\n" not in str(error.value)
    assert str(tmp_path) in str(error.value)


def test_what_a_killed_process_was_building_is_removed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "list.csv").write_text("path\na.wav\nb.wav\n")
    place = tmp_path / ".list.csv.index"

    listing = parse_manifest(tmp_path / "list.csv", tmp_path)
    child = os.fork()
    if child == 0:
        monkeypatch.setattr(table_on_disk, "fingerprint", lambda file: os.kill(os.getpid(), signal.SIGKILL))
        table_on_disk.store_index(place, listing, key="k", root=tmp_path)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    left = tmp_path / f"..list.csv.index.{host_name()}.{child}.tmp"
    others = [
        left.with_name(f"..list.csv.index.{host_name()}.{os.getppid()}.tmp"),  # its maker lives
        left.with_name(f"..list.csv.index.elsewhere.{child}.tmp"),  # who knows
        left.with_name(f"..other.csv.index.{host_name()}.{child}.tmp"),
    ]
    for other in others:
        other.mkdir()
    assert left.is_dir()
    table_on_disk.store_index(place, listing, key="k", root=tmp_path)
    assert left.is_dir()  # young: in a container beside, its number may be a living process's
    for path in (left, *others):
        os.utime(path, (0, 0))
    assert len(table_on_disk.store_index(place, listing, key="k", root=tmp_path).train.paths) == 2
    assert sorted(tmp_path.iterdir()) == sorted([tmp_path / "list.csv", place, *others])
