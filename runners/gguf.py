"""What the header of a GGUF file says of its model, as far as a run must know it before it starts.

The format (GGUF version 2 and later) stores each metadata key as its length and its bytes, so a key is found by
looking for them; values are not read. Boundary: a path in, an answer out; None where the file is no GGUF.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

__all__ = ["has_chat_template", "weight_bytes"]

_HEADER_BYTES = 24
"""Magic, version and two counts; a shorter file has no key."""
_MOST_METADATA = 64 * 2**20
"""Metadata comes first; the vocabulary and merges of 256,000 tokens take some 15 MB of it."""


def has_chat_template(path: Path) -> bool | None:
    """Whether the model says how a chat is written. llama.cpp takes ChatML where it does not, and says nothing."""
    key = b"tokenizer.chat_template"
    return _contains(path, struct.pack("<Q", len(key)) + key)


def weight_bytes(path: Path) -> int | None:
    """Bytes that a step reads of the weights: the file's size; None for experts, of which a step reads some."""
    return path.stat().st_size if _contains(path, b".expert_count") is False else None


def _contains(path: Path, what: bytes) -> bool | None:
    with path.open("rb") as file:
        if file.read(_HEADER_BYTES)[:4] != b"GGUF" or path.stat().st_size < _HEADER_BYTES:
            return None
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return data.find(what, 0, _MOST_METADATA) >= 0
