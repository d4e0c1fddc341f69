"""Recorded replies as exchanges: the sample streams and the captures of real engines, with their read times."""

from __future__ import annotations

import ast
import base64
import json
from pathlib import Path
from typing import Any

from runners.base import Stream
from runners.client import Eof, Exchange

DATA = Path(__file__).parent / "data"
CASES: dict[str, dict[str, Any]] = {
    case["id"]: case for case in json.loads((DATA / "sse" / "cases.json").read_text())["cases"]
}
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


def chunk(data: bytes) -> bytes:
    """One HTTP chunk."""
    return b"%x\r\n%s\r\n" % (len(data), data)


def exchange(*reads: tuple[float, bytes], head: bytes = HEAD, eof: Eof = "complete") -> Exchange:
    """A reply from (seconds after sending, body bytes) pairs, sent at 1 s on the clock."""
    raw = [(_ns(0), head), *((_ns(t), chunk(data)) for t, data in reads)]
    if eof == "complete":
        raw.append((raw[-1][0], END))
    return Exchange(None, _ns(0), raw, raw[-1][0], eof)


def _ns(seconds: float) -> int:
    return 1_000_000_000 + round(seconds * 1e9)


def since_sent(ns: int | None) -> float | None:
    """Seconds after sending."""
    return None if ns is None else (ns - _ns(0)) / 1e9


def case(name: str) -> Exchange:
    """A sample stream of data/sse/cases.json."""
    what = CASES[name]
    fields = "".join(f"{key}: {value}\r\n" for key, value in what["headers"].items())
    head = f"HTTP/1.1 {what['status']} -\r\n{fields}transfer-encoding: chunked\r\n\r\n".encode()
    reads = [(read["t_s"], base64.b64decode(read["b64"])) for read in what["reads"]]
    return exchange(*reads, head=head, eof="reset" if what["eof"] == "reset" else "complete")


def capture(name: str) -> Exchange:
    """A capture with its HTTP chunks and socket reads put back as they were on the wire."""
    path = DATA / "captures" / name
    body, head = path.read_bytes(), path.with_name(path.name + ".hdr").read_bytes().strip()
    first, *lines = path.with_name(path.name + ".reads").read_text().splitlines()
    wire = head.replace(b"\r\n", b"\n").replace(b"\n", b"\r\n") + b"\r\n\r\n"
    if b"chunked" in head.lower():
        at = 0
        for size in ast.literal_eval(first.partition("sizes ")[2]):
            wire, at = wire + chunk(body[at : at + size]), at + size
        wire += END
    else:
        wire += body
    reads, at = [], 0
    for line in lines:
        ms, size = line.split()
        reads.append((_ns(float(ms) / 1e3), wire[at : at + int(size)]))
        at += int(size)
    assert at == len(wire), f"{name}: the reads hold {at} bytes, the reply {len(wire)}"
    return Exchange(None, _ns(0), reads, reads[-1][0], "complete")


def tpot_s(stream: Stream) -> float | None:
    """Time per output token as docs define it: None where there is no interval or nothing came after it."""
    if stream.status != "ok" or stream.first_output_ns is None or stream.last_output_ns is None:
        return None
    known = [count for count in stream.frame_tokens[1:] if count is not None]
    if None not in stream.frame_tokens:
        after_first = sum(known)
    elif stream.output_tokens is not None:
        after_first = stream.output_tokens - (stream.first_frame_tokens or 1)
    else:
        return None
    span_s = (stream.last_output_ns - stream.first_output_ns) / 1e9
    return span_s / after_first if after_first > 0 and span_s > 0 else None
