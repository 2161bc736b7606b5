"""What a check of one file can find."""

from __future__ import annotations

from typing import NamedTuple

UNUSABLE = ("missing", "undecodable", "empty", "truncated", "not finite")  # pretraining would leave such a file out
DOUBTFUL = ("decoder warning", "cut short", "silent", "clipped", "blank", "too short", "wrong rate")


class CheckOptions(NamedTuple):
    """What is asked of every file."""

    shortest: float = 0.1  # seconds below which a file is too short
    frames: int = 300  # of a video that are decoded


class Finding(NamedTuple):
    """Something wrong with a file."""

    name: str  # one of UNUSABLE or DOUBTFUL
    detail: str


class Facts(NamedTuple):
    """What one file holds."""

    kind: str  # of its modality
    findings: tuple[Finding, ...] = ()
    seconds: float | None = None
    rate: int | None = None  # samples per second and channel
    size: str | None = None  # such as 640×480, or "12 channels"
    shape: tuple[int, ...] | None = None  # channels, then samples, height × width, or frames × height × width
    sounding: float | None = None  # seconds of a sound without the digital silence at its ends

    def found(self, name: str, detail: str) -> Facts:
        """The same with one finding more."""
        return self._replace(findings=(*self.findings, Finding(name, detail)))
