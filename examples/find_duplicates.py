"""Find near-duplicates in a folder: pictures whose features point the same way.

    python examples/find_duplicates.py

The folder is made here: 300 digits, and 20 of them again, a little darker and stored as JPEG. With your own model and
folder only the lines of `closest_pairs` are needed.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
from PIL import Image

import bridle
from bridle.data.embedded.sets import digits


def main() -> float:
    """The share of the closest pairs that are planted copies."""
    with tempfile.TemporaryDirectory() as folder:
        planted = write_pictures(Path(folder))
        pairs = closest_pairs(bridle.load("digits-tiny"), sorted(Path(folder).iterdir()), count=len(planted))
        found = [tuple(sorted((one.stem, other.stem))) in planted for one, other, _ in pairs]
        for (one, other, score), right in zip(pairs[:8], found[:8], strict=True):
            print(f"{score:.4f}  {one.name}  {other.name}  {'a planted copy' if right else ''}")
    share = sum(found) / len(planted)
    print(f"{sum(found)} of the {len(planted)} closest pairs are the {len(planted)} planted copies")
    return share


def closest_pairs(model: bridle.Model, paths: list[Path], *, count: int) -> list[tuple[Path, Path, float]]:
    """The pairs of files with the highest cosine of features, the mean of all files taken off."""
    # Every token counts, not their mean: copies agree everywhere, and other pictures of the same digit do not.
    z = np.stack([found.z.reshape(-1) for found in model.encode_files(paths)])  # (N, T·D)
    z -= z.mean(0)
    z /= np.linalg.norm(z, axis=1, keepdims=True)
    likeness = np.triu(z @ z.T, k=1)  # every pair once
    best = np.argsort(-likeness, axis=None)[:count]
    rows, columns = np.unravel_index(best, likeness.shape)
    return [(paths[a], paths[b], float(likeness[a, b])) for a, b in zip(rows, columns, strict=True)]


def write_pictures(folder: Path) -> set[tuple[str, str]]:
    """300 digits and 20 copies; returns which pictures belong together."""
    pictures = digits().test.x[:300, 0].numpy()  # (300, 16, 16) in 0 … 1
    planted = set()
    for n, picture in enumerate(pictures):
        save(folder / f"{n:03}.png", picture)
        if n % 15 == 0:
            save(folder / f"{n:03}-copy.jpg", 0.97 * picture)
            planted.add((f"{n:03}", f"{n:03}-copy"))
    return planted


def save(path: Path, picture: np.ndarray) -> None:
    Image.fromarray((255 * picture + 0.5).astype(np.uint8)).save(path)


if __name__ == "__main__":
    main()
