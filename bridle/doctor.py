"""Facts about this machine and installation, as lines for a bug report."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Iterator
from pathlib import Path

from bridle.errors import ConfigError
from bridle.files import free_bytes
from bridle.machine import make_bf16_safe

PACKAGES = ("torch", "numpy", "safetensors", "pydantic", "pillow", "soundfile", "soxr", "av", "scikit-learn")
EXTRAS = ("tensorboard", "faiss-cpu", "vector-quantize-pytorch")


def examine() -> Iterator[tuple[str, str]]:
    """(what, finding) pairs, cheap ones first."""
    yield "bridle", importlib.metadata.version("bridle")
    yield "python", f"{platform.python_version()} on {platform.platform()}"
    yield "packages", ", ".join(f"{name} {_version(name)}" for name in PACKAGES)
    yield "extras", ", ".join(f"{name} {_version(name)}" for name in EXTRAS)
    yield "bf16 (CPU)", _bf16()
    import torch

    yield "devices", _devices()
    yield "threads", f"torch {torch.get_num_threads()}, cores {os.cpu_count()}"
    yield "codecs", _codecs()
    yield "disk", f"{free_bytes(Path()) / 1e9:.1f} GB free in the current folder"


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _bf16() -> str:
    try:
        return make_bf16_safe()
    except ConfigError as error:
        return str(error)


def _devices() -> str:
    import torch

    found = [f"cuda:{i} {torch.cuda.get_device_name(i)}" for i in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        found.append("mps")
    return ", ".join([*found, f"cpu ({torch.backends.cpu.get_cpu_capability()})"])


def _codecs() -> str:
    import av
    import soundfile
    from PIL import features

    images = [name for name in ("jpg", "zlib", "webp") if features.check(name)]
    wanted = [name for name in ("h264", "vp9", "mpeg4", "gif") if name in av.codecs_available]
    sounds = [name for name in ("WAV", "FLAC", "OGG", "MP3") if name in soundfile.available_formats()]
    return f"images {'/'.join(images)}; sound {'/'.join(sounds)}; video {'/'.join(wanted)}"
