"""From raw reads to decoded records: HTTP/1.1 framing, server-sent events, JSON, and when each was complete.

Boundary: knows nothing of what the records mean (`frames` does) and raises for nothing a server sends.
HTTP: RFC 9112 by httptools. Server-sent events: WHATWG HTML section 9.2; only LF, CR and CRLF end a line, so
bytes are never cut at U+0085 or U+2028, as text functions would.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import itemgetter
from typing import Any

import httptools
import numpy as np
import orjson

from runners.spill import Read

# --- HTTP -------------------------------------------------------------------------------------------------


class Message:
    """An HTTP reply as httptools reports it: body parts, and how many of them each read completed."""

    def __init__(self) -> None:
        self.status: int | None = None
        self.headers: dict[bytes, bytes] = {}
        self.parts: list[bytes] = []
        self.parts_by_read: list[int] = []
        self.broken: str | None = None
        self.on_body = self.parts.append

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.lower()] = value

    def times(self, reads: Sequence[Read], ends: list[int]) -> list[int]:
        """For each end offset in the body, the time of the read that brought the byte before it."""
        length_after_part = np.zeros(len(self.parts) + 1, np.int64)
        np.cumsum(np.fromiter(map(len, self.parts), np.int64, len(self.parts)), out=length_after_part[1:])
        length_after_read = length_after_part[np.array(self.parts_by_read, np.int64)]
        stamps = np.fromiter(map(itemgetter(0), reads), np.int64, len(reads))
        times: list[int] = stamps[np.searchsorted(length_after_read, np.array(ends, np.int64))].tolist()
        return times


def read_message(reads: Sequence[Read]) -> Message:
    message = Message()
    parser = httptools.HttpResponseParser(message)
    feed, parts, counts = parser.feed_data, message.parts, message.parts_by_read
    try:
        for _, data in reads:
            feed(data)
            counts.append(len(parts))
    except httptools.HttpParserError as error:
        message.broken = f"not an HTTP/1.1 reply: {error}"
        counts.extend([len(parts)] * (len(reads) - len(counts)))
    if reads:
        message.status = parser.get_status_code() or None
    return message


def _is_sse(message: Message, body: bytes) -> bool:
    kind = message.headers.get(b"content-type", b"").lower()
    return b"event-stream" in kind or body.lstrip().startswith((b"data:", b"event:"))


# --- server-sent events -----------------------------------------------------------------------------------


@dataclass(slots=True)
class Events:
    """Decoded records, the offset in the body at which each was complete, and what else was seen."""

    records: list[Any] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    done: bool = False
    done_end: int | None = None
    bad: bytes | None = None
    """The first event that was not JSON."""
    error_at: int | None = None
    """Index of a record that came under `event: error`."""


def read_events(message: Message, body: bytes) -> Events:
    """Split and decode a body: plain `data: …` events in one pass, other streams line by line, else as JSON."""
    if not _is_sse(message, body):
        return _whole_body(body)
    return _plain_events(body) or _careful_events(body)


def _plain_events(body: bytes) -> Events | None:
    """The usual stream, nothing but `data: <JSON>` and blank lines; None where there is more to it.

    One decode for all records. A comment, another field, CRLF or a cut event leaves bytes that are not
    JSON in some piece, so it cannot pass unnoticed.
    """
    if not (body.startswith(b"data: ") and body.endswith(b"\n\n")):
        return None
    pieces = body[6:-2].split(b"\n\ndata: ")
    ends = list(accumulate([len(piece) + 8 for piece in pieces]))
    done = pieces[-1] == b"[DONE]"
    if done:
        pieces.pop()
    try:
        records = orjson.loads(b"[%s]" % b",".join(pieces))
    except orjson.JSONDecodeError:
        return None
    if len(records) != len(pieces):
        return None
    return Events(records, ends[: len(records)], done, ends[-1] if done else None)


_LINE_END = re.compile(rb"\r\n|\n|\r")


def _careful_events(body: bytes) -> Events:
    """Any legal stream: comments, `event:`, `id:`, `retry:`, every line end, data over several lines."""
    events = Events()
    data: list[bytes] = []
    kind, start = b"", 0
    for match in _LINE_END.finditer(body):
        line, start = body[start : match.start()], match.end()
        if not line:
            _dispatch(events, data, kind, match.end())
            data, kind = [], b""
            continue
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if name == b"data":
            data.append(value)
        elif name == b"event":
            kind = value
    if body[start:].startswith(b"data:"):  # a last line without its end
        data.append(body[start + 5 :].removeprefix(b" "))
    _dispatch(events, data, kind, len(body))
    return events


def _dispatch(events: Events, data: list[bytes], kind: bytes, end: int) -> None:
    payload = b"\n".join(data).strip()
    if not payload:
        return
    if payload == b"[DONE]":
        events.done, events.done_end = True, end
        return
    try:
        record = orjson.loads(payload)
    except orjson.JSONDecodeError:
        if kind != b"error":
            events.bad = events.bad or payload
            return
        record = {"error": {"message": payload.decode(errors="replace")}}
    if kind == b"error" and events.error_at is None:
        events.error_at = len(events.records)
    events.records.append(record)
    events.ends.append(end)


def _whole_body(body: bytes) -> Events:
    """A reply that is no event stream: one JSON document."""
    try:
        return Events([orjson.loads(body)], [len(body)])
    except orjson.JSONDecodeError:
        return Events(bad=body)
