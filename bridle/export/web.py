"""An exported model as a static web page: drop a file, see its token map and codes, computed by onnxruntime-web.

    index.html                                       the page (report/web.html, web.js) with the model's settings in it
    encoder.onnx, tokenizer.onnx, frontend.onnx      the graphs of `onnx`; the last one only where inputs are computed
    ort.wasm.min.js, ort-wasm-simd-threaded.*        onnxruntime-web, copied from an npm package

The page reads files as `bridle tokenize` does and asks for nothing outside its folder.
"""

from __future__ import annotations

import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from bridle.data.modality import modality_of
from bridle.errors import UsageError, quoted
from bridle.export.trained import Trained
from bridle.report.page import render_page
from bridle.report.sample_pictures import code_colors

PAGE = "index.html"
RUNTIME = ("ort.wasm.min.js", "ort-wasm-simd-threaded.mjs", "ort-wasm-simd-threaded.wasm")
PACKAGE = "onnxruntime-web"
INSTALL = "npm install onnxruntime-web"


def find_runtime(given: Path | None) -> dict[str, bytes]:
    """The files of onnxruntime-web in a folder or `npm pack` archive, else in node_modules of this folder or above."""
    if given is not None and given.is_file():
        return _from_archive(given)
    here = Path.cwd()
    roots = [folder / "node_modules" / PACKAGE for folder in (here, *here.parents)] if given is None else [given]
    for root in roots:
        for folder in (root / "dist", root, root / "node_modules" / PACKAGE / "dist"):
            if all((folder / name).is_file() for name in RUNTIME):
                return {name: (folder / name).read_bytes() for name in RUNTIME}
    if given is None:
        raise UsageError(
            f"--web needs the npm package {PACKAGE}, and no node_modules/{PACKAGE} is here; run `{INSTALL}`, or give "
            f"--runtime a folder or the archive that `npm pack {PACKAGE}` writes."
        )
    raise _incomplete(given)


def _from_archive(path: Path) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    try:
        with tarfile.open(path) as archive:
            for name in RUNTIME:
                member = archive.extractfile(f"package/dist/{name}")
                found |= {name: member.read()} if member is not None else {}
    except (KeyError, tarfile.TarError, EOFError):
        raise _incomplete(path) from None
    return found


def _incomplete(path: Path) -> UsageError:
    return UsageError(
        f"--runtime {quoted(path)} does not hold {', '.join(RUNTIME)}; it should be the package {PACKAGE} (1.19 or "
        f"later) of `{INSTALL}` or of `npm pack {PACKAGE}`."
    )


def page_input(trained: Trained) -> dict[str, Any]:
    """How the page makes inputs of files, by kind; UsageError for models that have no page."""
    config, modality = trained.config, modality_of(trained.config)
    geometry = config.geometry.build()
    if trained.own_tokenizer is None:
        raise UsageError("--web shows codes, and this model has no tokenizer.")
    if modality.open_front_end is not None:
        front = modality.open_front_end(config)
        window, two = front.samples(1), front.samples(2)
        silence = float(front(torch.zeros(1, window)).min())
        sizes = {"window": window, "shift": two - window, "samples": front.samples(geometry.input[0])}
        return {"kind": "sound", "rate": front.sample_rate, "silence": silence, **sizes}
    if modality.is_unit_range and geometry.rank == 2 and modality.open_reader is not None:
        changed = modality.open_picture_front_end
        return {"kind": "picture", "size": geometry.input if changed is None else changed(config).size}
    if geometry.rank == 1 and ".npy" in modality.extensions:
        return {"kind": "array"}
    raise UsageError(f"--web: pages exist for pictures, recordings and signals; this model reads {modality.items}.")


def write_page(
    folder: Path,
    *,
    trained: Trained,
    shown: Mapping[str, Any],
    inputs: Mapping[str, tuple[str, ...]],
    runtime: Mapping[str, bytes],
) -> dict[str, Any]:
    """Write the page and its runtime beside the graphs, whose inputs are given by name; returns no further graphs."""
    geometry, tokenizer = trained.config.geometry.build(), trained.own_tokenizer
    assert tokenizer is not None  # page_input asks for it
    settings = {
        **shown,
        "graphs": inputs,
        "channels": geometry.channels,
        "input": geometry.input,
        "patch": geometry.patch,
        "colors": [code_colors(vectors).tolist() for vectors in tokenizer.quantizer.code_vectors()],
    }
    page = render_page("web.html", {"title": trained.config.name, "model": settings})
    (folder / PAGE).write_text(page, encoding="utf-8")
    for name, content in runtime.items():
        (folder / name).write_bytes(content)
    return {}
