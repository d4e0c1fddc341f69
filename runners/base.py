"""What the runner and an engine adapter say to each other: plain records and one small protocol.

Boundary: no engine, no network and no file here. An adapter is launch, body and counts; sending, timing
and parsing are the runner's (`client`, `frames`, `load`), the same for every engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from specbench.cell import Acceptance, Config, Facts

Raw = Mapping[str, float]
"""Counters as read: a metric name with its labels, `name{label="value"}`, to its value."""


@dataclass(frozen=True)
class Where:
    """Where to look for an engine: this interpreter, another one, or a running server."""

    python: str | None = None
    url: str | None = None
    command: str | None = None
    """A command that the engine's own is appended to, such as a container's `docker run … IMAGE`."""


@dataclass(frozen=True)
class Availability:
    """What a probe found. `why_not` and `install` are sentences for the user when `ok` is False."""

    ok: bool
    version: str | None = None
    methods: tuple[str, ...] = ()
    why_not: str | None = None
    install: str | None = None


@dataclass(frozen=True)
class Launch:
    """How to start one engine for one config, resolved but not started."""

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, Path] = field(default_factory=dict)
    """Model files by role (`model`, `draft`)."""
    facts: Facts = field(default_factory=lambda: Facts(engine="?"))
    learns: bool = False
    """The drafter remembers earlier requests, so every run needs a fresh server."""


@dataclass(frozen=True)
class Request:
    """One request before it is sent. `messages` are chat messages, oldest first."""

    request: int
    prompt_id: str
    category: str | None
    conversation: int
    turn: int
    messages: tuple[Mapping[str, str], ...]
    max_tokens: int
    prompt_ids: tuple[int, ...] | None = None
    """The prompt as token ids, template applied, where the plan has them made outside the engine."""
    model: str = ""
    """The model name that the server expects in a request."""
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    ignore_eos: bool = False
    warmup: bool = False


@dataclass(slots=True)
class Stream:
    """One reply, parsed. Times are absolute monotonic nanoseconds; None is unknown, never 0.

    A *frame* is a stream record that carries output, stamped with the socket read that completed it.
    `frame_tokens[i]` is the number of tokens in frame i where the server says so; `marks[i]` is that
    frame's engine-specific side information (llama.cpp's `timings`), if it had any.
    """

    status: Literal["ok", "empty", "not_streamed", "failed"] = "failed"
    finish: Literal["stop", "length", "stop_string", "tool", "none"] = "none"
    http_status: int | None = None
    error_kind: str | None = None
    error: str | None = None
    retry_after_s: float | None = None
    frame_ns: list[int] = field(default_factory=list)
    frame_tokens: list[int | None] = field(default_factory=list)
    frame_step: list[int | None] = field(default_factory=list)
    marks: list[dict[str, Any] | None] = field(default_factory=list)
    first_output_ns: int | None = None
    first_content_ns: int | None = None
    last_output_ns: int | None = None
    done_ns: int | None = None
    prompt_tokens: int | None = None
    prompt_tokens_from: str | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    output_tokens_from: str = "unknown"
    first_frame_tokens: int | None = None
    first_frame_tokens_from: str | None = None
    reasoning_tokens: int | None = None
    text: str = ""
    reasoning: str = ""
    tail: dict[str, Any] = field(default_factory=dict)
    """The last object seen under each of `usage`, `timings`, `metrics`, `sglext`; `choice` and `id` at the end."""


@dataclass(frozen=True)
class RequestCounts:
    """Raw speculation counts of one request; any field may be None (the engine does not say)."""

    steps: int | None = None
    steps_from: Literal["engine", "grouped", "derived"] | None = None
    steps_with_draft: int | None = None
    drafted: int | None = None
    accepted_verified: int | None = None
    accepted_emitted: int | None = None
    accept_hist: tuple[int, ...] | None = None
    """Entry j is the number of drafts of which exactly j tokens were accepted."""
    frame_step: tuple[int | None, ...] | None = None
    server_queue_ms: float | None = None
    server_prefill_ms: float | None = None
    server_decode_ms: float | None = None


@dataclass(frozen=True)
class Counts:
    """Raw acceptance of one cell: a row per stream given, the acceptance table, and the server's totals."""

    requests: tuple[RequestCounts, ...] = ()
    table: tuple[Acceptance, ...] = ()
    steps_with_draft: int | None = None
    drafted: int | None = None
    accepted_verified: int | None = None
    counter_reset: bool = False


class Session(Protocol):
    """A running server (or worker), ready for requests."""

    @property
    def facts(self) -> Facts:
        """What the config resolved to, with what the server says of itself."""

    @property
    def address(self) -> str:
        """Base URL, such as `http://127.0.0.1:8080`."""

    @property
    def pids(self) -> tuple[int, ...]:
        """The engine's processes on this host; empty where it is remote."""

    def counters(self) -> Raw:
        """Read the server's counters now."""

    def reset(self) -> bool:
        """Forget what earlier requests left (prefix cache, learned drafts). False: restart instead."""


class Engine(Protocol):
    """An adapter: how to find, launch, feed and read one engine."""

    name: str
    driver: Literal["sse", "worker"]
    path: str
    """Where requests go, such as `/v1/chat/completions`."""
    ids_path: str | None
    """Where requests go whose prompt is token ids, such as `/v1/completions`; None: it takes no ids."""

    def probe(self, where: Where) -> Availability:
        """What is usable here, and why not; quick, never raises."""

    def launch(self, config: Config, version: str) -> Launch:
        """Resolve a config to a command. Raises `specbench.errors.Unsupported(field, why)`."""

    def start(self, launch: Launch, log: Path) -> AbstractContextManager[Session]:
        """Start the engine (or attach to its URL) and stop it on leaving; it also dies with this process."""

    def body(self, request: Request) -> bytes:
        """The request as the engine's JSON body."""

    def counts(self, streams: Sequence[Stream], before: Raw, after: Raw) -> Counts:
        """Raw counts of a cell from its parsed replies and the counters around its window."""
