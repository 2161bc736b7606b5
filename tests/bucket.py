"""s3:// for tests without a network: s3://bucket/NAME is the file bucket/NAME in the working folder."""

from __future__ import annotations

import os
from pathlib import Path

import fsspec
from fsspec.implementations.local import LocalFileSystem


class Bucket(LocalFileSystem):
    """A local folder that is not known to be one."""

    protocol = ("s3",)

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(LocalFileSystem._strip_protocol(os.path.abspath(str(path).removeprefix("s3://"))))


def open_bucket() -> None:
    """Let s3:// mean this, and keep copies in the working folder."""
    fsspec.register_implementation("s3", Bucket, clobber=True)
    os.environ["BRIDLE_CACHE"] = str(Path.cwd() / "cache")


def stay_local() -> None:
    """The bucket, and trackers that write into the current folder only."""
    open_bucket()
    os.environ |= {"WANDB_MODE": "offline", "MLFLOW_ALLOW_FILE_STORE": "true"}
    os.environ["MLFLOW_TRACKING_URI"] = (Path.cwd() / "mlruns").as_uri()
