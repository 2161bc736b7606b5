"""Tokenize a folder and keep the codes: what they cost in bits, and what each stage adds.

    python examples/tokenize_folder.py

The same from the command line, with resume and any number of files:
    bridle tokenize digits-tiny pictures --out codes.npz
"""

from __future__ import annotations

import math
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image

import bridle
from bridle.data.embedded.sets import digits


def main() -> list[float]:
    """For 1 to M stages, the share of the spread of q that they leave to the stages after them."""
    model = bridle.load("digits-tiny")
    sizes = model.config.quantizer.sizes
    with tempfile.TemporaryDirectory() as folder:
        for n, picture in enumerate(digits().test.x[:100, 0].numpy()):
            Image.fromarray((255 * picture + 0.5).astype(np.uint8)).save(Path(folder) / f"{n:03}.png")
        found = list(model.tokenize_files(sorted(Path(folder).iterdir())))
    codes = np.stack([one.codes for one in found])  # (100, T, M)
    files, tokens, stages = codes.shape
    bits = tokens * sum(math.log2(size) for size in sizes)
    print(f"{files} files of {tokens} tokens, {stages} codes each: {bits:.0f} bits a file; 256 grey pixels have 2048")
    print(f"first file, first tokens: {codes[0, :4].tolist()}")

    whole = model.decode_codes(codes)  # (100, T, Dq)
    spread = (whole - whole.mean((0, 1))).square().sum(-1).mean()
    left = []
    for m in range(1, stages + 1):
        away = (whole - model.decode_codes(codes, stages=m)).square().sum(-1).mean()
        left.append(float(away / spread))
        print(f"{m} of {stages} stages leave {100 * left[-1]:5.1f} % of the spread of q")
    return left


if __name__ == "__main__":
    main()
