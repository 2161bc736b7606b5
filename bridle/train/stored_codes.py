"""The codes of a whole data set, computed once and read from disk while an encoder learns to predict them.

Shapes: N samples, T tokens, M codebooks; the table (N, T, M) holds two bytes a code, four where a codebook needs them.

The table is a function of tokenizer, data and precision, and is made anew where one of them has changed. Samples go
through the tokenizer in the phase's order, in batches of a fixed size that are cut before they are shared out, so that
neither the number of processes nor a restart changes a code. It may be deleted at any time and is gone when the phase
is over. A sample that could not be read when the table was made has no codes in it; where one turns up later its batch
is tokenized live.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bridle import distributed
from bridle.errors import CheckpointError
from bridle.files import fingerprint, publish_file, read_json, require_space, temporary_sibling, writing
from bridle.runs.checkpoint import write_json
from bridle.seeding import mix
from bridle.train.parallel import digest

Tokenized = Callable[[], Iterator[tuple[Tensor, Tensor]]]  # of this rank's batches, indices (B,) and codes (B, T, M)
MadeFrom = Mapping[str, str | None]


class CodeTable:
    """Codes by sample; `path` is a memory-mapped .npy file beside a JSON file that says what it was made from."""

    def __init__(self, path: Path, *, shape: tuple[int, int, int], sizes: Sequence[int]) -> None:
        self.path, self.shape = path, shape
        self.dtype: type[np.unsignedinteger[Any]] = np.uint16 if max(sizes) < 2**16 else np.uint32
        self.missing = int(np.iinfo(self.dtype).max)  # no code has this number
        self.codes: NDArray[Any] | None = None

    @property
    def _facts(self) -> Path:
        return self.path.with_suffix(".json")

    def open(
        self,
        tokenized: Tokenized,
        *,
        tokenizer: Mapping[str, Tensor],
        beside: MadeFrom,
        note: Callable[[str], None],
    ) -> None:
        """Read the table of a tokenizer with this state, and of what else it hangs on, or make it anew (collective)."""
        state = mix(*(part for name in sorted(tokenizer) for part in (name, digest(tokenizer[name]))))
        made_from = {"tokenizer": f"{state:016x}", **beside}
        if not distributed.done_once(lambda: self._is_whole(made_from, note)):
            self._make(tokenized, made_from)
        self.codes = np.load(self.path, mmap_mode="r", allow_pickle=False)

    def of(self, index: Tensor) -> Tensor | None:
        """(B,) -> codes (B, T, M) int64; None if any of the samples has none."""
        assert self.codes is not None  # `open` was called
        found = self.codes[index.numpy()].astype(np.int64)
        return None if (found == self.missing).any() else torch.from_numpy(found)

    def _is_whole(self, made_from: MadeFrom, note: Callable[[str], None]) -> bool:
        if not (self.path.is_file() and self._facts.is_file()):
            return False
        try:
            whole = read_json(self._facts) == self._described(made_from)
        except (OSError, CheckpointError):
            whole = False
        if not whole:
            note(f"{self.path}: damaged, or of another tokenizer or other data; the codes are computed again.")
        return whole

    def _described(self, made_from: MadeFrom) -> dict[str, Any]:
        return {**made_from, "shape": list(self.shape), **fingerprint(self.path)}

    def _make(self, tokenized: Tokenized, made_from: MadeFrom) -> None:
        temporary = temporary_sibling(self.path)
        distributed.done_once(lambda: self._allocate(temporary))
        rows = np.load(temporary, mmap_mode="r+", allow_pickle=False)
        for index, codes in tokenized():
            rows[index.numpy()] = codes.numpy()
        rows.flush()
        distributed.barrier()
        distributed.done_once(lambda: self._publish(temporary, made_from))

    def _allocate(self, temporary: Path) -> None:
        with writing(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            for useless in (temporary, self._facts, self.path):  # before space is asked for, some of which they take
                useless.unlink(missing_ok=True)
            size = int(np.prod(self.shape)) * np.dtype(self.dtype).itemsize
            require_space(self.path.parent, size, what="the stored codes (encoder_phase.codes=stored)")
            rows = np.lib.format.open_memmap(temporary, mode="w+", dtype=self.dtype, shape=self.shape)
            rows[:] = self.missing  # writes every page, so that a full disk is noticed now
            rows.flush()

    def _publish(self, temporary: Path, made_from: MadeFrom) -> None:
        publish_file(temporary, self.path)
        write_json(self._facts, self._described(made_from))
