"""One file decoded from end to end by the check of its modality: what is in it, and what is wrong with it."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from bridle.data.inspect.findings import UNUSABLE, CheckOptions, Facts
from bridle.data.loading.watchdog import reason
from bridle.data.modality import Modality
from bridle.data.shards.tar_member import Location, TarMember
from bridle.errors import DataError, quoted

MESSAGES = 4096  # characters of a decoder's complaints that are kept


def inspect_file(path: Location, modality: Modality, options: CheckOptions) -> Facts:
    """Decode a file and say what was found; nothing is raised."""
    facts = Facts(modality.kind)
    try:
        if (path.size if isinstance(path, TarMember) else path.stat().st_size) == 0:
            return facts.found("empty", "0 bytes")
    except OSError as error:
        return facts.found("missing" if isinstance(error, FileNotFoundError) else "undecodable", reason(error))
    if modality.check_file is None:
        return facts
    with decoder_messages() as messages:
        try:
            facts = modality.check_file(path, options)
        except DataError as error:
            why = str(error).removeprefix(f"{quoted(path)} ").rstrip(".")
            facts = facts.found("truncated" if why.endswith("is truncated") else "undecodable", why)
        except Exception as error:  # decoders meet damaged files with errors of every type
            facts = facts.found("undecodable", reason(error))
    if facts.seconds and facts.seconds < options.shortest:
        facts = facts.found("too short", f"{facts.seconds:.3g} s")
    if messages and not any(finding.name in (*UNUSABLE, "cut short") for finding in facts.findings):
        facts = facts.found("decoder warning", messages[0])
    return facts


@contextmanager
def decoder_messages() -> Iterator[list[str]]:
    """Lines that decoders print to the error stream inside the block: C libraries have no other way to complain.

    The whole process writes there, so that nothing else may print meanwhile.
    """
    lines: list[str] = []
    sys.stderr.flush()
    has_av = find_spec("av") is not None  # pictures are checked without it
    if has_av:
        import av

        av.logging.restore_default_callback()
        av.logging.set_libav_level(av.logging.ERROR)
    stream = os.dup(2)
    with tempfile.TemporaryFile() as kept:
        os.dup2(kept.fileno(), 2)
        try:
            yield lines
        finally:
            sys.stderr.flush()
            os.dup2(stream, 2)
            os.close(stream)
            if has_av:
                av.logging.set_level(None)
            kept.seek(0)
            for line in kept.read(MESSAGES).decode("utf-8", "replace").splitlines():
                lines.append(quoted(re.sub(r" @ 0x[0-9a-f]+", "", line)).strip("'\""))
