"""Nothing that bridle reads can make it run code, write outside, or take the machine down."""

from __future__ import annotations

import ast
import hashlib
import io
import json
import pickle
import struct
import tarfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save

import bridle
from bridle.config import load_config
from bridle.config.strict_yaml import read_document
from bridle.data.arrays.decode import read_array
from bridle.data.build import open_data
from bridle.errors import CheckpointError, ConfigError, DataError
from bridle.runs.checkpoint import load, publish

PACKAGE = Path(bridle.__file__).parent
FORBIDDEN_CALLS = {
    *("eval", "exec", "compile", "__import__", "os.system", "os.popen", "os.startfile", "builtins.eval"),
    *("pickle.load", "pickle.loads", "pickle.Unpickler", "marshal.load", "marshal.loads", "shelve.open", "dill.load"),
    *("joblib.load", "yaml.load", "yaml.unsafe_load", "yaml.full_load", "torch.hub.load", "torch.jit.load"),
    *("shutil.unpack_archive", "numpy.load_pickle"),
}
FORBIDDEN_METHODS = {"extractall", "extract", "__reduce__", "__reduce_ex__", "recv"}  # the last one unpickles
FORBIDDEN_IMPORTS = {
    "pickle",
    "cPickle",
    "dill",
    "marshal",
    "shelve",
    "requests",
    "urllib.request",
    "http.client",
    "ftplib",
}
ALLOWED = {
    ("data/loading/worker_process.py", "pickle"),  # what is sent to a worker; nothing that comes back is unpickled
    ("data/loading/worker_process.py", "connection.recv"),  # in the worker: what its parent sent
    ("export/convert.py", "pickle"),  # for the name of an error; what it opens, it opens with weights_only
}


def offences(source: str, file: str = "x.py") -> list[str]:
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            found += [
                f"{file}:{node.lineno} imports {name}"
                for name in names
                if name in FORBIDDEN_IMPORTS and (file, name) not in ALLOWED
            ]
        if isinstance(node, ast.FunctionDef) and node.name in FORBIDDEN_METHODS:
            found.append(f"{file}:{node.lineno} defines {node.name}")
        if isinstance(node, ast.Call):
            found += [f"{file}:{node.lineno} {what}" for what in call_offences(node, file)]
    return found


def call_offences(node: ast.Call, file: str) -> list[str]:
    name = ast.unparse(node.func)
    given = {word.arg: ast.unparse(word.value) for word in node.keywords}
    found = []
    if name in FORBIDDEN_CALLS or name.startswith("runpy."):
        found.append(f"calls {name}")
    if name.rpartition(".")[2] in FORBIDDEN_METHODS and (file, name) not in ALLOWED:
        found.append(f"calls {name}")
    if name.endswith("torch.load") and given.get("weights_only") != "True":
        found.append("torch.load without weights_only=True")
    if given.get("shell", "False") != "False":
        found.append("shell=True")
    if given.get("allow_pickle", "False") != "False":
        found.append("allow_pickle=True")
    return found


def test_the_source_holds_nothing_that_runs_what_it_reads() -> None:
    found = [
        offence
        for path in sorted(PACKAGE.rglob("*.py"))
        for offence in offences(path.read_text(), str(path.relative_to(PACKAGE)))
    ]
    assert found == []


@pytest.mark.parametrize(
    "line",
    [
        *("import pickle", "from urllib.request import urlopen", "eval('1')", "exec(text)", "os.system('ls')"),
        *(
            "torch.load(path)",
            "torch.load(path, weights_only=False)",
            "subprocess.run(x, shell=True)",
            "yaml.load(text)",
        ),
        *(
            "np.load(path, allow_pickle=True)",
            "archive.extractall()",
            "connection.recv()",
            "runpy.run_path(x)",
            "def __reduce__(self): pass",
        ),
    ],
)
def test_the_scan_sees_what_is_forbidden(line: str) -> None:
    assert offences(line) != []
    assert offences("torch.load(path, weights_only=True); np.load(path)") == []


class Bomb:
    """Unpickling it leaves a mark."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.write_text, (self.mark, "executed")


def hostile_safetensors(header: dict[str, Any] | bytes, body: bytes = b"", *, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + body


FLOAT = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
HOSTILE = {
    "huge header length": hostile_safetensors({"w": FLOAT}, bytes(8), length=2**63),
    "header longer than the file": hostile_safetensors({"w": FLOAT}, bytes(8), length=10_000),
    "header of a gigabyte": hostile_safetensors({"w": FLOAT}, bytes(8), length=2**30),
    "overlapping tensors": hostile_safetensors({"w": FLOAT, "v": FLOAT}, bytes(8)),
    "offsets beyond the end": hostile_safetensors({"w": {**FLOAT, "data_offsets": [0, 80]}}, bytes(8)),
    "offsets the wrong way round": hostile_safetensors({"w": {**FLOAT, "data_offsets": [8, 0]}}, bytes(8)),
    "a shape that overflows": hostile_safetensors({"w": {**FLOAT, "shape": [2**40, 2**40]}}, bytes(8)),
    "a negative shape": hostile_safetensors({"w": {**FLOAT, "shape": [-2]}}, bytes(8)),
    "an unknown type": hostile_safetensors({"w": {**FLOAT, "dtype": "EVIL"}}, bytes(8)),
    "a hole before the data": hostile_safetensors({"w": {**FLOAT, "data_offsets": [8, 16]}}, bytes(16)),
    "no JSON": hostile_safetensors(b"not json at all", bytes(8)),
    "deep JSON": hostile_safetensors(b"[" * 100_000, bytes(8)),
    "empty": b"",
}


def checkpoint_with(root: Path, content: bytes) -> Path:
    """A checkpoint whose manifest is right about a hostile file, as whoever made it could arrange."""
    folder = publish(root, "p0000-iter1-encoder-00000001", {"model": {"w": torch.ones(2)}}, {}, keep=1)
    (folder / "model.safetensors").write_bytes(content)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"]["model.safetensors"] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_tensor_file_is_refused_even_with_a_matching_manifest(tmp_path: Path, what: str) -> None:
    began = time.monotonic()
    with pytest.raises(CheckpointError, match="damaged"):
        load(checkpoint_with(tmp_path, HOSTILE[what]))
    assert time.monotonic() - began < 5


def test_a_pickle_in_place_of_tensors_is_refused_and_not_executed(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    plain, saved = pickle.dumps(Bomb(mark)), io.BytesIO()
    torch.save(Bomb(mark), saved)
    for content in (plain, saved.getvalue()):
        with pytest.raises(CheckpointError, match="damaged"):
            load(checkpoint_with(tmp_path, content))
    assert not mark.exists()


def test_a_good_file_passes_the_same_way(tmp_path: Path) -> None:
    found = load(checkpoint_with(tmp_path, save({"w": torch.arange(2.0)})))
    assert found.tensors["model"]["w"].tolist() == [0.0, 1.0]


@pytest.mark.parametrize(
    "content", ["[" * 200_000, '{"format": 1, "files": {"../../x": {}}}', '{"format": 1, "files": 3}', "null"]
)
def test_a_hostile_manifest_is_refused(tmp_path: Path, content: str) -> None:
    folder = checkpoint_with(tmp_path, save({"w": torch.ones(1)}))
    (folder / "manifest.json").write_text(content)
    with pytest.raises(CheckpointError):
        load(folder)


BILLION = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "\n".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [{','.join(['*' + chr(97 + i)] * 9)}]" for i in range(9)
)


@pytest.mark.parametrize(
    "text",
    [
        "name: !!python/object/apply:os.system ['touch /tmp/mark']",
        "name: !!python/name:os.system",
        "name: !<tag:yaml.org,2002:python/object/new:os.system> [x]",
        "name: !include /etc/passwd",
        BILLION,
        "a: " + "[" * 5_000 + "]" * 5_000,
        "a:\n" + "".join(" " * i + "b:\n" for i in range(1, 400)),
        "a: " + "x" * 1_000_001,
        "? [a, b]\n: 1",
        "a: 1\na: 2",
        "\x00\x01",
        "%YAML 9.9\n---\na: 1",
    ],
)
def test_a_hostile_config_is_one_error(text: str) -> None:
    began = time.monotonic()
    with pytest.raises(ConfigError):
        read_document(text, "x.yaml")
    assert time.monotonic() - began < 5


def test_a_config_cannot_name_code_or_commands(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text("extends: image\nencoder: {_target_: os.system}\n")
    with pytest.raises(ConfigError, match="unknown key"):
        load_config(str(tmp_path / "x.yaml"))


def test_an_archive_cannot_lead_outside(tmp_path: Path) -> None:
    root, secret = tmp_path / "data", tmp_path / "secret.png"
    root.mkdir()
    picture = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (8, 8, 3)).astype(np.uint8)).save(picture, "PNG")
    secret.write_bytes(picture.getvalue())
    with tarfile.open(root / "train-0.tar", "w") as archive:

        def add(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> None:
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, link
            member.size = len(picture.getvalue()) if kind == tarfile.REGTYPE else 0
            archive.addfile(member, io.BytesIO(picture.getvalue()))

        for i in range(4):
            add(f"good{i}.png")
        add("../outside.png")
        add(f"{tmp_path}/absolute.png")
        add("link.png", tarfile.SYMTYPE, str(secret))
        add("hard.png", tarfile.LNKTYPE, "../secret.png")
        add("device.png", tarfile.CHRTYPE)
        add("pipe.png", tarfile.FIFOTYPE)
    before = sorted(path for path in tmp_path.rglob("*") if path.suffix in (".png", ".tar"))
    splits = open_data(load_config("image", [f"data.root={root}", "geometry.input=[8, 8]", "geometry.patch=[4, 4]"]))
    assert [Path(splits.train.describe(i)).name for i in range(len(splits.train))] == [f"good{i}.png" for i in range(4)]
    assert sorted(path for path in tmp_path.rglob("*") if path.suffix in (".png", ".tar")) == before


def test_a_pickled_array_is_refused_and_not_executed(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.array([Bomb(tmp_path / "mark")], dtype=object), allow_pickle=True)
    with pytest.raises(DataError, match="cannot be read"):
        read_array(tmp_path / "x.npy")
    assert not (tmp_path / "mark").exists()
