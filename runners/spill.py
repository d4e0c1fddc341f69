"""Where the reads of finished replies wait for parsing: in memory up to a cap, then in a temporary file.

Replies in flight are always held in memory, so the cap bounds what a long cell piles up, not one reply. The
bytes are this process's own, so `marshal` is safe and quick here.
"""

from __future__ import annotations

import marshal
import os
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from typing import overload

Read = tuple[int, bytes]
"""CLOCK_MONOTONIC nanoseconds of a socket read, and its bytes."""


class Spill:
    """Counts the bytes of finished replies; beyond the cap they go to an unnamed temporary file."""

    def __init__(self, cap_bytes: int) -> None:
        self._left = cap_bytes
        self._file: _SpillFile | None = None

    def keep(self, reads: Sequence[Read]) -> Sequence[Read]:
        """The reads as they are, or in the file once the cap is reached."""
        size = sum(len(data) for _, data in reads)
        if size <= self._left:
            self._left -= size
            return reads
        self._file = self._file or _SpillFile()
        return self._file.append(reads)


class _SpillFile:
    """The temporary file; closed, and so gone, with the last reply that lies in it."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(prefix="specbench-reads-")  # noqa: SIM115
        weakref.finalize(self, self._file.close)

    def append(self, reads: Sequence[Read]) -> SpilledReads:
        packed = marshal.dumps(list(reads))
        offset = self._file.seek(0, os.SEEK_END)
        self._file.write(packed)
        return SpilledReads(self, offset, len(packed), len(reads))

    def load(self, offset: int, size: int) -> list[Read]:
        self._file.seek(offset)
        reads: list[Read] = marshal.loads(self._file.read(size))
        return reads


class SpilledReads(Sequence[Read]):
    """The reads of one reply in a temporary file; loaded on each use."""

    def __init__(self, file: _SpillFile, offset: int, size: int, count: int) -> None:
        self._file, self._offset, self._size, self._count = file, offset, size, count

    def load(self) -> list[Read]:
        """The reads, from the file."""
        return self._file.load(self._offset, self._size)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Read]:
        return iter(self.load())

    @overload
    def __getitem__(self, index: int) -> Read: ...
    @overload
    def __getitem__(self, index: slice) -> list[Read]: ...
    def __getitem__(self, index: int | slice) -> Read | list[Read]:
        return self.load()[index]
