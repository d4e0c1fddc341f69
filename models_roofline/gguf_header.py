"""Reads the header of a GGUF file: its metadata, and name, shape, type and stored bytes of every tensor.

The layout is that of GGUF versions 2 and 3 (docs/gguf.md of github.com/ggml-org/ggml), little-endian; block sizes
of the number types are the `gguf` package's. Its own reader is not used: it makes an array of every token of the
vocabulary (1.7 s for 49,000 of them), and it wants the tensor data to be there. Here lists of strings and long
lists are stepped over unless they are asked for, and a file that ends after its header is enough.

Boundary: bytes in, records out. What a tensor is for is `gguf_file`'s business.
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cache
from math import prod
from pathlib import Path

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from models_roofline.errors import RooflineError
from models_roofline.formats import Format

Value = str | int | float | bool | tuple[int | float | bool, ...]
"""A metadata value; lists of strings and lists longer than `_LONGEST_LIST` are left out."""

List = tuple[str, ...] | tuple[int | float | bool, ...]
"""A list that was asked for by its key."""

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""`struct` codes by GGUF value type."""
_STRING, _ARRAY = 8, 9

_LONGEST_LIST = 4096
"""Kept of a list: more than any model has layers, less than any has tokens."""
_MOST_ENTRIES = 65_536
_MOST_TENSORS = 1_048_576
_MOST_ITEMS = 2**24
_LONGEST_STRING = 2**28
_LARGEST_DIMENSION = 2**40
"""Past these a header is damaged: nothing real is near them, and reading on would take for ever."""
_MOST_DIMENSIONS = 4

_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


@dataclass(frozen=True)
class Tensor:
    """A stored tensor. `shape` is in GGUF's order: inputs of a matrix first, then outputs, then experts."""

    name: str
    shape: tuple[int, ...]
    format: Format

    @property
    def rows(self) -> int:
        """Outputs of a matrix; 1 of a vector."""
        return prod(self.shape[1:])

    @property
    def params(self) -> int:
        return prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.format.matrix_bytes(self.rows, self.shape[0])


@dataclass(frozen=True)
class Header:
    """Metadata and tensors of a model; of all its parts together, where the file is split."""

    file: str
    metadata: dict[str, Value]
    tensors: dict[str, Tensor]
    lists: dict[str, List] = field(default_factory=dict)
    """The lists asked for, of any length; absent where the file has none under that key."""


@cache
def gguf_format(name: str) -> Format:
    """The number format of a GGUF type such as Q4_K or F16, of any case.

    All are weight-only, so quantised weights are multiplied in bf16. Raises RooflineError for an unknown type.
    """
    try:
        block, size = GGML_QUANT_SIZES[GGMLQuantizationType[name.upper()]]
    except KeyError:
        known = ", ".join(kind.name for kind in GGMLQuantizationType)
        raise RooflineError(f"{name!r} is not a GGUF number type; known: {known}.") from None
    compute = {"F32": "fp32", "F64": "fp32", "F16": "fp16"}.get(name.upper(), "bf16")
    return Format(name.upper(), block, 8 * size, compute)


def read_header(path: Path, lists: Collection[str] = ()) -> Header:
    """The header of a GGUF file. Of a split model any part may be named; all must lie beside it.

    `lists` are the keys of lists to read as well, such as `tokenizer.ggml.tokens` (a second for 250,000 tokens).
    Raises RooflineError where the file is missing, no GGUF, of a version or byte order not read here, or damaged.
    """
    header = _read_one(path, lists)
    parts = header.metadata.get("split.count", 1)
    if not isinstance(parts, int) or parts <= 1:
        return header
    return _join(header, [_read_one(part, lists) for part in _part_paths(path, parts)])


def _part_paths(path: Path, parts: int) -> list[Path]:
    match = _PART.fullmatch(path.name)
    if match is None or int(match[3]) != parts:
        raise RooflineError(
            f"{path.name}: is one of {parts} parts, and its name does not end in -00001-of-{parts:05d}.gguf;"
            " give the parts their names back."
        )
    paths = [path.with_name(f"{match[1]}-{i:05d}-of-{match[3]}.gguf") for i in range(1, parts + 1)]
    for part in paths:
        if not part.is_file():
            raise RooflineError(f"{path.name}: its part {part.name} is not beside it; download all {parts}.")
    return paths


def _join(asked: Header, parts: list[Header]) -> Header:
    tensors = {name: tensor for part in parts for name, tensor in part.tensors.items()}
    expected = asked.metadata.get("split.tensors.count", len(tensors))
    if len(tensors) != expected:
        raise RooflineError(
            f"{asked.file}: its parts hold {len(tensors)} tensors together and should hold {expected};"
            " they are not parts of one model."
        )
    return Header(parts[0].file, parts[0].metadata, tensors, parts[0].lists)


def _read_one(path: Path, lists: Collection[str] = ()) -> Header:
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise RooflineError(f"{path}: is no file that can be mapped; save the header to one.")
    try:
        with path.open("rb") as file:
            if path.stat().st_size < 4 or file.read(4) != b"GGUF":
                raise RooflineError(f"{path.name}: does not begin with GGUF; this is no GGUF file.")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _parse(_Cursor(data, path.name, lists))
    except OSError as error:
        raise RooflineError(f"{path}: cannot be read ({error.strerror}).") from None


def _parse(cursor: _Cursor) -> Header:
    _check_version(cursor)
    tensors = cursor.count(_MOST_TENSORS, "tensors")
    entries = cursor.count(_MOST_ENTRIES, "metadata entries")
    metadata: dict[str, Value] = {}
    for _ in range(entries):
        key = cursor.string()
        value = cursor.value(cursor.number("I"), key)
        if value is not None:
            metadata[key] = value
    infos = [_tensor(cursor) for _ in range(tensors)]
    table = {tensor.name: tensor for tensor in infos}
    if len(table) != len(infos):
        raise cursor.damaged("two tensors have one name")
    return Header(cursor.file, metadata, table, cursor.lists)


def _check_version(cursor: _Cursor) -> None:
    version = cursor.number("I")
    if version & 0xFFFF == 0:
        raise RooflineError(
            f"{cursor.file}: is big-endian GGUF; convert the model for a little-endian machine."
        )
    if version not in (2, 3):
        raise RooflineError(
            f"{cursor.file}: is GGUF version {version}; versions 2 and 3 are read, so convert the model again."
        )


def _tensor(cursor: _Cursor) -> Tensor:
    name = cursor.string()
    dimensions = cursor.count(_MOST_DIMENSIONS, f"dimensions of {name}", "I")
    shape = tuple(cursor.number("Q") for _ in range(dimensions))
    kind = cursor.number("I")
    cursor.number("Q")  # where its data lies
    try:
        fmt = gguf_format(GGMLQuantizationType(kind).name)
    except ValueError:
        raise RooflineError(
            f"{cursor.file}: {name} has number type {kind}, which this version of the gguf package does not know;"
            " update it with pip install -U gguf, or convert the model again."
        ) from None
    if not shape or not all(0 < size <= _LARGEST_DIMENSION for size in shape) or shape[0] % fmt.block:
        raise cursor.damaged(f"{name} cannot have shape {list(shape)} in {fmt.name}")
    return Tensor(name, shape, fmt)


class _Cursor:
    """A place in the bytes of a header, past its magic, that never reads beyond their end."""

    def __init__(self, data: mmap.mmap, file: str, wanted: Collection[str] = ()) -> None:
        self._data = data
        self._at = 4
        self._wanted = wanted
        self.file = file
        self.lists: dict[str, List] = {}

    def damaged(self, what: str) -> RooflineError:
        return RooflineError(f"{self.file}: its header is damaged ({what}); download the file again.")

    def _step(self, size: int) -> int:
        """Moves over `size` bytes and says where they began."""
        start = self._at
        if size > len(self._data) - start:
            raise RooflineError(
                f"{self.file}: ends inside its header, at byte {len(self._data):,}; the download is not complete."
            )
        self._at = start + size
        return start

    def _scalar(self, code: str) -> int | float | bool:
        value: int | float | bool = struct.unpack_from(
            f"<{code}", self._data, self._step(struct.calcsize(f"<{code}"))
        )[0]
        return value

    def number(self, code: str) -> int:
        """An integer with that `struct` code."""
        return int(self._scalar(code))

    def count(self, most: int, what: str, code: str = "Q") -> int:
        """A number of things to come, refused where it cannot be one."""
        count = self.number(code)
        if count > most:
            raise self.damaged(f"it announces {count:,} {what}")
        return count

    def string(self) -> str:
        size = self.count(_LONGEST_STRING, "bytes of a string")
        start = self._step(size)
        return self._data[start : start + size].decode("utf-8", "replace")

    def value(self, kind: int, key: str) -> Value | None:
        """The value of a metadata entry; None where it is a list that nobody asks for."""
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._list(self.number("I"), key)
        return self._scalar(self._code(kind, key))

    def _code(self, kind: int, key: str) -> str:
        if kind not in _SCALARS:
            raise self.damaged(f"{key} has value type {kind}")
        return _SCALARS[kind]

    def _list(self, kind: int, key: str) -> Value | None:
        count = self.count(_MOST_ITEMS, f"items in {key}")
        if kind == _STRING:
            if key in self._wanted:
                self.lists[key] = tuple(self.string() for _ in range(count))
            else:
                self._skip_strings(count)
            return None
        code = self._code(kind, key)
        start = self._step(count * struct.calcsize(f"<{code}"))
        if key not in self._wanted and count > _LONGEST_LIST:
            return None
        values = struct.unpack_from(f"<{count}{code}", self._data, start)
        if key in self._wanted:
            self.lists[key] = values
        return values if count <= _LONGEST_LIST else None

    def _skip_strings(self, count: int) -> None:
        # A vocabulary is 99 % of a header, so this loop does nothing but add.
        data, at, last = self._data, self._at, len(self._data) - 8
        length = struct.Struct("<Q").unpack_from
        for _ in range(count):
            if at > last:
                break
            at += 8 + length(data, at)[0]
        else:
            if at <= last + 8:
                self._at = at
                return
        self._step(len(data) + 1)
