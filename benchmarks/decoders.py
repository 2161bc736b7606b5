"""Decoding beside other libraries: python benchmarks/decoders.py [--repeats 30]

CPU milliseconds of one JPEG of 500 × 375 pixels, to RGB in memory, also with Pillow's reduced decoding for a crop of
224; one thread, interleaved, medians. What is not installed is left out.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from importlib import import_module
from io import BytesIO
from statistics import median

import numpy as np
from bench.timing import describe_machine, markdown_table
from PIL import Image, ImageFilter


def picture() -> bytes:
    """A smooth random picture with some noise, quality 90."""
    random = np.random.default_rng(0)
    noise = Image.fromarray(random.integers(0, 256, (375, 500, 3), dtype=np.uint8))
    blurred = np.asarray(noise.filter(ImageFilter.GaussianBlur(6)), dtype=np.float64)
    stretched = 128 + (blurred - blurred.mean()) * 12 + random.normal(0, 4, blurred.shape)
    out = BytesIO()
    Image.fromarray(stretched.clip(0, 255).astype(np.uint8)).save(out, "JPEG", quality=90)
    return out.getvalue()


def with_pillow(data: bytes, reduced: int | None = None) -> np.ndarray:
    with Image.open(BytesIO(data)) as image:
        if reduced:
            image.draft(None, (reduced, reduced))
        return np.asarray(image.convert("RGB"))


def decoders(data: bytes) -> dict[str, Callable[[], np.ndarray]]:
    """Each library's way to an array (H, W, 3)."""
    found: dict[str, Callable[[], np.ndarray]] = {
        "Pillow, as bridle": lambda: with_pillow(data),
        "Pillow, reduced to 224 at least": lambda: with_pillow(data, 224),
    }
    for name, make in (
        ("simplejpeg", lambda m: lambda: m.decode_jpeg(data)),
        ("simplejpeg, fast settings", lambda m: lambda: m.decode_jpeg(data, fastdct=True, fastupsample=True)),
        ("cv2", lambda m: lambda: m.imdecode(np.frombuffer(data, np.uint8), 1)),
    ):
        try:
            found[name] = make(import_module(name.split(",")[0]))
        except ImportError:
            continue
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=30)
    data = picture()
    calls = decoders(data)
    spent: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(parser.parse_args().repeats):
        for name, call in calls.items():
            begin = time.process_time()
            call()
            spent[name].append(time.process_time() - begin)
    own = median(spent["Pillow, as bridle"])
    rows = [[name, f"{1000 * median(all_):.2f}", f"{own / median(all_):.2f}"] for name, all_ in spent.items()]
    print(f"one JPEG, {len(data):,} bytes\n\n" + markdown_table(["library", "CPU ms", "speed of bridle's"], rows))
    print(describe_machine(["pillow", "simplejpeg", "opencv-python-headless"]))


if __name__ == "__main__":
    main()
