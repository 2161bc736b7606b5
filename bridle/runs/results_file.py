"""The results files of a run: reading them, adding to them, and keeping those of other protocols beside."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from bridle import distributed
from bridle.errors import CheckpointError
from bridle.files import publish_file
from bridle.runs.results import AnyRecord, Evaluation, Results, Scores, read_results, write_record


class ResultsFile:
    """A results file that grows: written whole after every change, by rank 0."""

    def __init__(self, path: Path, header: Results) -> None:
        self.path = path
        known = distributed.done_once(lambda: read_results(path).model_dump_json() if path.exists() else None)
        self.value = header if known is None else Results.model_validate_json(known)

    @classmethod
    def of_protocol(cls, path: Path, header: Results) -> ResultsFile:
        """The file with the results of the header's protocol; those of another are kept in a file beside it."""
        distributed.done_once(lambda: _make_way(path, header))
        return cls(path, header)

    @classmethod
    def anew(cls, path: Path, header: Results) -> ResultsFile:
        """Discard the content of the file."""
        if distributed.rank() == 0:
            path.unlink(missing_ok=True)
        return cls(path, header)

    def _write(self, **changes: object) -> None:
        self.value = self.value.model_copy(update=changes)
        if distributed.rank() == 0:
            write_record(self.path, self.value)

    def add(self, *entries: Evaluation) -> None:
        """Entries replace those of the same iteration and step."""
        entries_by_key = {old.key: old for old in (*self.value.evaluations, *entries)}
        self._write(evaluations=tuple(entries_by_key[key] for key in sorted(entries_by_key)))

    def set_baselines(self, baselines: Mapping[str, Scores], key: str | None = None) -> None:
        """`key` names what they depend on, for the runs beside this one."""
        self._write(baselines=dict(baselines), baselines_key=key)

    def add_baseline(self, name: str, scores: Scores) -> None:
        """One more baseline."""
        self._write(baselines={**self.value.baselines, name: scores})

    def baselines_beside(self, key: str | None) -> tuple[str, dict[str, Scores]] | None:
        """Another run in the same folder that has measured them under this key: its name and what it found."""

        def look() -> list[Any] | None:
            for path in sorted(self.path.parent.parent.glob(f"*/{self.path.name}")) if key else []:
                with suppress(CheckpointError):  # somebody else's file, whatever it holds
                    if (found := read_results(path)).baselines_key == key and found.baselines:
                        return [path.parent.name, found.model_dump(mode="json")]
            return None

        found = distributed.done_once(look)
        return None if found is None else (found[0], Results.model_validate_json(json.dumps(found[1])).baselines)


def _make_way(path: Path, header: Results) -> None:
    """Rename so that `path` holds the header's protocol, if that was measured before, or nothing."""
    assert header.protocol is not None
    known = read_results(path).protocol if path.exists() else None
    if known is not None and known != header.protocol:
        publish_file(path, path.with_stem(f"{path.stem}-{known.digits}"))
    own = path.with_stem(f"{path.stem}-{header.protocol.digits}")
    if own.exists() and not path.exists():
        publish_file(own, path)
    if path.exists() and read_results(path).protocol != header.protocol:
        path.unlink()  # the data has changed since, or nobody knows how it was measured


def kept_files(folder: Path, kind: str) -> list[Path]:
    """The files of a kind of results in a run: the last one asked for, then other protocols."""
    return [path for path in (folder / f"{kind}.json", *sorted(folder.glob(f"{kind}-*.json"))) if path.is_file()]


def readable_part(kind: type[AnyRecord], found: object, notes: list[str]) -> AnyRecord | None:
    """A record from JSON that nobody vouches for: parts of the wrong kind are left out and named in `notes`.

    None if nothing is left.
    """
    for _ in range(1000):  # each turn removes something
        try:
            return kind.model_validate_json(json.dumps(found))
        except ValidationError as error:
            wrong = error.errors()[-1]  # the last first, so that positions in lists stay what they are
            path = wrong["loc"][:-1] if wrong["type"] == "missing" else wrong["loc"]
            if not path:
                return None
            notes.append(f"{'.'.join(map(str, wrong['loc']))}: {wrong['msg']}")
            _remove(found, path)
    return None


def _remove(found: Any, path: Sequence[int | str]) -> None:
    """Delete the deepest part that `path` leads to: an error's path also names types, which lead nowhere."""
    parent, last = found, path[0]
    for key in path:
        try:
            parent, last, found = found, key, found[key]
        except (KeyError, IndexError, TypeError):
            break
    del parent[last]
