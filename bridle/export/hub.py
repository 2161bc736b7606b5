"""Where a model is found by name, and how it is put on the Hugging Face hub.

A name is, in this order: a folder (a run or an exported model); a model that comes with the package; `owner/name` on
the hub. Only the last one opens a connection, and only where no folder can be meant.
"""

from __future__ import annotations

import os
import re
import shutil
from importlib import resources
from pathlib import Path
from typing import Any

from bridle.errors import CheckpointError, UsageError, first_line, quoted
from bridle.export.folder import CARD, LOADED
from bridle.files import replacing_folder
from bridle.runs.checkpoint import MANIFEST
from bridle.runs.folder import RunFolder

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w.-]+)?")
DETOKENIZERS = "detokenizer/*"
INSTALL = 'pip install "bridle[hub]"'


def released_names() -> list[str]:
    """Models that come with the package."""
    with resources.as_file(resources.files("bridle") / "released") as folder:
        return sorted(path.name for path in folder.iterdir() if (path / "config.json").is_file())


def find_model(name: str | Path) -> Path:
    """The folder of a run, an exported model, a released model or a model on the hub.

    Of a model by name it is models/NAME if commands have put results there (a detokenizer, say).
    """
    if Path(name).exists():
        return Path(name)
    source, copy = find_source(name), copy_of(name)
    return copy if is_same_model(copy, source) else source


def find_source(name: str | Path) -> Path:
    """The folder of a model by name in the package, or in the cache of the hub, which it is downloaded to."""
    path, text = Path(name), os.fspath(name)
    if text in released_names():
        with resources.as_file(resources.files("bridle") / "released" / text) as folder:
            return folder
    if not HUB_ID.fullmatch(text) or path.parent.is_dir():  # `runs/mistyped` beside other runs is not an id
        raise UsageError(
            f"{quoted(text)}: no such folder; give a run directory, an exported folder, the id owner/name of a model "
            f"on the hub, or one of {', '.join(released_names())}."
        )
    return download(text)


def folder_to_work_in(name: str | Path) -> Path:
    """A folder that results may be written into: a run or an exported model itself, or a copy of a model by name.

    The copy is models/NAME in the current folder; what the package or the cache of the hub holds is never written to.
    """
    if Path(name).exists():
        return Path(name)
    source, copy = find_source(name), copy_of(name)
    if not copy.exists():
        try:
            with replacing_folder(copy, unique=True, keep=True) as temporary:
                for file in (*LOADED, CARD):
                    if (source / file).is_file():
                        shutil.copyfile(source / file, temporary / file)
                if RunFolder(source).detokenizers().is_dir():
                    shutil.copytree(RunFolder(source).detokenizers(), RunFolder(temporary).detokenizers())
        except OSError as error:
            raise CheckpointError(
                f"{quoted(copy)}, the copy of {quoted(name)} that results go to, could not be written "
                f"({error.strerror or error}); free some space, or run the command in another folder."
            ) from error
    if not is_same_model(copy, source):
        raise UsageError(
            f"{quoted(copy)} holds something else than {quoted(name)}; give a folder, such as that of "
            f"`bridle export {quoted(name)} --out FOLDER`."
        )
    return copy


def copy_of(name: str | Path) -> Path:
    """Where results of a model by name go."""
    return Path("models") / os.fspath(name).replace("/", "--")


def is_same_model(copy: Path, source: Path) -> bool:
    """Do both folders hold the same model?"""
    manifest = copy / MANIFEST
    return manifest.is_file() and manifest.read_bytes() == (source / MANIFEST).read_bytes()


def download(repo_id: str) -> Path:
    """The files of a model on the hub, from the local cache where they are there; `owner/name@revision` is allowed."""
    hub = require_hub(f"{quoted(repo_id)} is no folder here (check the path), so it can only be a model on the hub")
    name, _, revision = repo_id.partition("@")
    try:
        return Path(
            hub.snapshot_download(name, revision=revision or None, allow_patterns=[*LOADED, CARD, DETOKENIZERS])
        )
    except Exception as error:  # a missing model, no connection, HF_HUB_OFFLINE: each has its own class
        raise CheckpointError(
            f"{quoted(repo_id)} is not a folder and could not be had from the hub ({type(error).__name__}: "
            f"{quoted(first_line(error))}); check the name, your connection and HF_HUB_OFFLINE."
        ) from error


def push(folder: Path, repo_id: str, *, private: bool = False) -> str:
    """Upload an exported folder as the model `repo_id`; the address of the upload."""
    if not HUB_ID.fullmatch(repo_id) or "@" in repo_id:
        raise UsageError(f"{quoted(repo_id)} is not an id of the hub; give owner/name.")
    hub = require_hub("models are put on the hub with huggingface_hub")
    try:
        api = hub.HfApi()
        api.create_repo(repo_id, repo_type="model", private=private, exist_ok=True)
        message = "Upload a model exported by bridle"
        uploaded = api.upload_folder(
            repo_id=repo_id, repo_type="model", folder_path=str(folder), commit_message=message
        )
        return str(uploaded)
    except Exception as error:
        raise CheckpointError(
            f"{quoted(repo_id)} could not be uploaded ({type(error).__name__}: {quoted(first_line(error))}); log in "
            "with `hf auth login`, check the name and your connection. The folder itself is whole."
        ) from error


def require_hub(why: str) -> Any:
    """huggingface_hub, or what to install."""
    try:
        import huggingface_hub
    except ImportError:
        raise UsageError(f"{why}, which needs huggingface_hub; install it with {INSTALL}") from None
    return huggingface_hub
