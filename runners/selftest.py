"""What this client can time on this machine, measured against the loopback server in a process of its own.

Three loads. *Draining*: 64 streams of one-token chunks, written in bursts as fast as the sockets take them, so
that the client always has a backlog: the most frames one core can keep and parse. *Single*: the same with one
write a chunk, which nearly always costs the client a read and a wake-up. *Paced*: 128 streams of 50 frames a
second in random phase, which is what a real engine does to a client; a run is compared with this one. All count
the whole of the client's CPU: connecting, sending, reading, and parsing until the per-frame lists exist. The
unit is frames per client CPU-second, so a busy host moves it little; the seconds on the clock would.

The stamp error is the client's time of a frame minus the server's time of its write, on one clock.
Boundary: measures and remembers; judging a run against the ceiling is `specbench.validity`'s.
"""

from __future__ import annotations

import asyncio
import gc
import platform
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from runners import frames
from runners.base import Stream
from runners.client import Client, Exchange, run_async
from runners.loopback import command
from runners.server import serve
from specbench import host
from specbench.errors import SpecbenchError
from specbench.models import cache_dir
from specbench.trace import write_atomic

PATH = "/v1/chat/completions"
DRAIN_STREAMS, DRAIN_TOKENS, DRAIN_BURST = 64, 256, 8
PACED_STREAMS, PACED_FRAMES_PER_S = 128, 50


@dataclass(frozen=True)
class SelfTest:
    """What the client reached. Rates are per second of client CPU time, parsing included; times in seconds."""

    frames_per_cpu_s: float
    frames_per_cpu_s_single: float
    frames_per_cpu_s_paced: float
    reads_per_cpu_s: float
    """Of the single load, where a read brings about one frame."""
    frames_per_read: float
    """Of the draining load."""
    stamp_error_p50_s: float
    stamp_error_p99_s: float
    server_lateness_p99_s: float
    frames: int
    frames_paced: int
    duration_s: float
    python: str
    uvloop: str | None
    cores: int


@dataclass(frozen=True)
class _Load:
    """One load as the client saw it."""

    frames: int
    reads: int
    cpu_s: float
    streams: list[Stream]
    """Kept only for stamps: a load that starts on a full heap pays for page faults that are not its own."""
    stamps: dict[str, list[tuple[int, int]]]


def run_selftest(quick: bool = False) -> SelfTest:
    """Measure this machine's client; about 9 s, or 1 s with `quick`.

    Raises SpecbenchError where the loopback server cannot be started or a reply was wrong.
    """
    started = time.monotonic()
    seconds, rounds = (0.5, 2) if quick else (5.0, 10)
    instant = {"style": "vllm", "step_ms": 0, "prefill_ms": 0}
    _load(instant, DRAIN_STREAMS, 1, DRAIN_TOKENS)  # the first load pays for imports and a cold heap
    drained = _load(instant | {"burst": DRAIN_BURST}, DRAIN_STREAMS, rounds, DRAIN_TOKENS)
    single = _load(instant, DRAIN_STREAMS, rounds // 2, DRAIN_TOKENS)
    step_ms = 1e3 / PACED_FRAMES_PER_S
    script = {"style": "vllm", "step_ms": step_ms, "prefill_ms": 50, "stamps": True}
    paced = _load(script, PACED_STREAMS, 1, int(seconds * PACED_FRAMES_PER_S))
    error_s, lateness_s = _stamp_errors(paced)
    return SelfTest(
        frames_per_cpu_s=drained.frames / drained.cpu_s,
        frames_per_cpu_s_single=single.frames / single.cpu_s,
        frames_per_cpu_s_paced=paced.frames / paced.cpu_s,
        reads_per_cpu_s=single.reads / single.cpu_s,
        frames_per_read=drained.frames / drained.reads,
        stamp_error_p50_s=float(np.quantile(error_s, 0.5)),
        stamp_error_p99_s=float(np.quantile(error_s, 0.99)),
        server_lateness_p99_s=float(np.quantile(lateness_s, 0.99)),
        frames=drained.frames,
        frames_paced=paced.frames,
        duration_s=time.monotonic() - started,
        python=platform.python_version(),
        uvloop=_uvloop_version(),
        cores=host.cores(),
    )


def _load(script: dict[str, Any], streams: int, rounds: int, tokens: int) -> _Load:
    """Drive one server with `streams` requests in flight, `rounds` times, and parse every reply."""
    argv, env = command(script)
    with (
        tempfile.TemporaryDirectory(prefix="specbench-selftest-") as folder,
        serve(argv, env, Path(folder) / "server.log") as server,
    ):
        parsed, reads, cpu_s = _timed(server.address, streams, rounds, tokens)
        stamps = _get_stamps(server.address) if script.get("stamps") else {}
    wrong = [stream for stream in parsed if stream.output_tokens != tokens or stream.status == "failed"]
    if wrong:
        raise SpecbenchError(
            f"selftest: {len(wrong)} of {len(parsed)} replies were wrong ({wrong[0].error})."
        )
    frame_count = sum(len(stream.frame_ns) for stream in parsed)
    return _Load(frame_count, reads, cpu_s, parsed if stamps else [], stamps)


def _timed(address: str, streams: int, rounds: int, tokens: int) -> tuple[list[Stream], int, float]:
    """Replies, socket reads and client CPU seconds of one load."""
    gc.collect()
    gc.disable()  # as in a measured window
    before = time.process_time()
    try:
        exchanges = run_async(_drive(address, streams, rounds, tokens))
    finally:
        gc.enable()
    parsed = [frames.parse(exchange) for exchange in exchanges]
    cpu_s = time.process_time() - before
    return parsed, sum(len(exchange.reads) for exchange in exchanges), cpu_s


async def _drive(address: str, streams: int, rounds: int, tokens: int) -> list[Exchange]:
    """The exchanges, stream by stream."""
    kept: list[list[Exchange]] = [[] for _ in range(streams)]

    async def worker(number: int, client: Client) -> None:
        ask: dict[str, Any] = {"max_tokens": tokens, "messages": [{"role": "user", "content": "go"}]}
        if rounds == 1:
            ask["user"] = str(number)  # finds the server's stamps again
        for _ in range(rounds):
            kept[number].append(await client.post(PATH, orjson.dumps(ask)))

    async with Client(address, connections=streams) as client, asyncio.TaskGroup() as group:
        for number in range(streams):
            group.create_task(worker(number, client))
    return [exchange for exchanges in kept for exchange in exchanges]


def _uvloop_version() -> str | None:
    try:
        return metadata.version("uvloop")
    except metadata.PackageNotFoundError:
        return None


# --- stamps -----------------------------------------------------------------------------------------------


def _get_stamps(address: str) -> dict[str, list[tuple[int, int]]]:
    with urllib.request.urlopen(f"{address}/stamps", timeout=30) as reply:
        stamps: dict[str, list[tuple[int, int]]] = orjson.loads(reply.read())
    return stamps


def _stamp_errors(load: _Load) -> tuple[Sequence[float], Sequence[float]]:
    """Seconds from the server's write to the client's stamp, and from due to written, of every frame."""
    errors: list[float] = []
    lateness: list[float] = []
    for number, stream in enumerate(load.streams):
        for (due_ns, wrote_ns), seen_ns in zip(load.stamps[str(number)], stream.frame_ns, strict=True):
            errors.append((seen_ns - wrote_ns) / 1e9)
            lateness.append((wrote_ns - due_ns) / 1e9)
    return errors, lateness


# --- the remembered ceiling -------------------------------------------------------------------------------


def cached_ceiling() -> float | None:
    """Paced frames per client CPU-second, found since this boot with this Python; None where never."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        kept = orjson.loads(_cache_path().read_bytes())
        if kept["key"] == _cache_key():
            return float(kept["selftest"]["frames_per_cpu_s_paced"])
    return None


def ceiling(quick: bool = True) -> float | None:
    """The remembered ceiling, else one measured now (about a second); None where that is impossible."""
    found = cached_ceiling()
    if found is None:
        with suppress(SpecbenchError, OSError):
            result = run_selftest(quick)
            remember(result)
            found = result.frames_per_cpu_s_paced
    return found


def remember(result: SelfTest) -> None:
    """Keep a result for `cached_ceiling`; a cache that cannot be written is no error."""
    with suppress(OSError):
        write_atomic(_cache_path(), orjson.dumps({"key": _cache_key(), "selftest": asdict(result)}))


def _cache_path() -> Path:
    return cache_dir() / "ceiling.json"


def _cache_key() -> str:
    return f"{host.boot_id() or platform.node()} {platform.python_version()} {sys.executable}"
