"""Write six small labelled sets, with other conditions in the test part of each.

    python benchmarks/sets OUT [--only icons,charts] [--share 0.1]

speech   20 words by espeak-ng (a Debian package); test voices are not heard in training
sensors  8 activities, 6 channels; the test sensor is tilted more
textures 12 patterns; other scales and orientations in the test part
icons    16 symbols at drawn places; other sizes, turns and backgrounds in the test part
shapes   10 motions; other shapes, speeds and backgrounds in the test part
charts   12 kinds of plots by matplotlib; other style sheets in the test part

A set that is there is left alone. The same command writes the same pixels and numbers with the same libraries.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import charts
import icons
import sensors
import shapes
import speech
import textures

SETS = {module.__name__: module.write for module in (speech, sensors, textures, icons, shapes, charts)}


def write_set(name: str, out: Path, share: float = 1.0) -> Path:
    """Write one set, unless it is there, and return its folder."""
    if not (folder := out / name).exists():
        unfinished = out / f".{name}-{os.getpid()}"
        SETS[name](unfinished, share)
        unfinished.rename(folder)
    return folder


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", default=",".join(SETS), help="names, with commas")
    parser.add_argument("--share", type=float, default=1.0, help="of the items; 0.1 for a trial")
    args = parser.parse_args()
    for chosen in args.only.split(","):
        print(write_set(chosen, args.out, args.share))
