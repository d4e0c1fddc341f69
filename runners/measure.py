"""One cell: warm up, drive the window, parse, count, judge validity, and hand back the records to store.

Boundary: the session is already running and nothing is written here. Parsing happens after the window.
"""

from __future__ import annotations

import asyncio
import gc
import hashlib
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import orjson

from runners.base import Counts, Engine, Launch, Raw, RequestCounts, Session, Stream
from runners.client import run_async
from runners.drivers import parser, sender
from runners.load import Conversation, Player, Sent, closed_loop, known_messages
from specbench import bandwidth, host, metrics, telemetry, trace, validity
from specbench.cell import CellRecord, ClientUse, Facts, HostBusy, Machine
from specbench.plan import Arm

if TYPE_CHECKING:
    from runners.tokens import Tokenizer


@dataclass(frozen=True)
class Job:
    """One cell that is to be run."""

    run: str
    cell_id: str
    comparison: str
    block: int
    position: int
    arm: Arm
    launch: Launch
    seed: int


@dataclass(frozen=True)
class Surroundings:
    """What is the same for every cell of a session."""

    session_id: str
    machine: Machine
    ceiling_frames_per_cpu_s: float | None
    history_sha256: str | None = None
    timeout_s: float = 600.0
    tokenizer: Tokenizer | None = None
    """Makes the prompts' token ids where the plan sends ids; None where engines get messages."""


@dataclass(frozen=True)
class Measured:
    """A finished cell, ready for `specbench.trace.write_cell`."""

    record: CellRecord
    requests: list[dict[str, Any]]
    texts: list[dict[str, Any]]
    telemetry: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class _Window:
    """What driving left behind, before anything is parsed."""

    start_ns: int
    wall_time_utc: str
    sent: list[Sent]
    before: Raw
    after: Raw
    host: HostBusy
    client_cpu_s: float
    window_s: float
    seen: telemetry.Seen


def measure(
    job: Job,
    engine: Engine,
    session: Session,
    played: Sequence[Conversation],
    warm: Sequence[Conversation],
    around: Surroundings,
) -> Measured:
    """Run one cell against a running session and return its records."""
    if around.tokenizer:
        _tokenise(around.tokenizer, (*warm, *played))
    window = run_async(_drive(job, engine, session, played, warm, around))
    cpu_start = time.process_time()
    parse = parser(engine)
    streams = [parse(sent.exchange) for sent in window.sent]
    parse_cpu_s = time.process_time() - cpu_start
    measured = [i for i, sent in enumerate(window.sent) if not sent.request.warmup]
    counts = engine.counts([streams[i] for i in measured], window.before, window.after)
    # An adapter numbers the streams it was given; the trace names requests.
    numbers = [window.sent[i].request.request for i in measured]
    table = tuple(
        row if row.request is None else row.model_copy(update={"request": numbers[row.request]})
        for row in counts.table
    )
    counts = replace(counts, table=table)
    per_stream = dict(zip(measured, counts.requests, strict=True))
    rows = [
        _row(sent, streams[i], per_stream.get(i, RequestCounts()), window.start_ns)
        for i, sent in enumerate(window.sent)
    ]
    texts = [
        {
            "request": s.request.request,
            "prompt_id": s.request.prompt_id,
            "text": t.text,
            "reasoning": t.reasoning,
        }
        for s, t in zip(window.sent, streams, strict=True)
    ]
    frame_count = sum(len(streams[i].frame_ns) for i in measured)
    client = ClientUse(
        frames=frame_count,
        cpu_s=window.client_cpu_s + parse_cpu_s,
        ceiling_frames_per_cpu_s=around.ceiling_frames_per_cpu_s,
        frames_per_s=frame_count / window.window_s if window.window_s > 0 else None,
    )
    facts = session.facts.model_copy(update={"history_sha256": around.history_sha256})
    facts = _with_tokenizer(facts, around.tokenizer) if around.tokenizer else facts
    record = _record(job, facts, window, client, counts, around)
    prompts = [turn for conversation in played for turn in conversation.prompt.turns]
    ids = {
        s.request.request: len(s.request.prompt_ids) for s in window.sent if s.request.prompt_ids is not None
    }
    return Measured(_judged(record, rows, texts, counts, prompts, ids), rows, texts, window.seen.rows)


def _tokenise(tokenizer: Tokenizer, conversations: Iterable[Conversation]) -> None:
    """Make the ids that can be known before the window, so that it holds no tokenising: they are remembered."""
    for conversation in conversations:
        for messages in known_messages(conversation):
            tokenizer.encode_chat(messages)


def _with_tokenizer(facts: Facts, tokenizer: Tokenizer) -> Facts:
    """The facts with the template and the tokenizer that made the prompts, which are ours and not the engine's."""
    return facts.model_copy(
        update={
            "template_sha256": tokenizer.template_sha256,
            "tokenizer_sha256": tokenizer.sha256,
            "extra": facts.extra | {"template_kwargs": tokenizer.template_kwargs},
        }
    )


async def _drive(
    job: Job,
    engine: Engine,
    session: Session,
    played: Sequence[Conversation],
    warm: Sequence[Conversation],
    around: Surroundings,
) -> _Window:
    config = job.arm.config
    start_ns, wall = time.monotonic_ns(), datetime.now(UTC).isoformat(timespec="milliseconds")
    async with sender(engine, session, connections=config.concurrency, timeout_s=around.timeout_s) as client:
        encode = around.tokenizer.encode_chat if around.tokenizer else None
        player = Player(client, engine, config, session.facts, encode)
        await closed_loop(warm, config.concurrency, player.play)
        before = await asyncio.to_thread(session.counters)
        busy, meters = host.Busy(), telemetry.Sampler(session.pids, job.launch.env)
        # A container's processes are its daemon's, so an engine in one could not be told from other work.
        known = session.pids if config.engine.command is None else ()
        # A collection in the middle of the window would look like a slow frame.
        gc.collect()
        gc.disable()
        busy.start(known)
        meters.start()
        cpu_start, opened = time.process_time(), time.monotonic()
        try:
            await closed_loop(played, config.concurrency, player.play)
            window_s, cpu_s = time.monotonic() - opened, time.process_time() - cpu_start
        finally:
            gc.enable()
            seen = meters.stop(start_ns)
        evidence = busy.stop(known)
        after = await asyncio.to_thread(session.counters)
    return _Window(start_ns, wall, player.sent, before, after, evidence, cpu_s - seen.cpu_s, window_s, seen)


def _record(
    job: Job, facts: Facts, window: _Window, client: ClientUse, counts: Counts, around: Surroundings
) -> CellRecord:
    config = job.arm.config
    return CellRecord(
        cell_id=job.cell_id,
        config_id=config.config_id,
        run=job.run,
        comparison=job.comparison,
        block=job.block,
        position=job.position,
        baseline=job.arm.baseline,
        session_id=around.session_id,
        wall_time_utc=window.wall_time_utc,
        start_ns=window.start_ns,
        window_s=window.window_s,
        seed=job.seed,
        config=config,
        facts=facts,
        machine=around.machine,
        host=window.host,
        client=client,
        counters_before=dict(window.before),
        counters_after=dict(window.after),
        acceptance=counts.table,
        steps_with_draft=counts.steps_with_draft,
        drafted=counts.drafted,
        accepted_verified=counts.accepted_verified,
        telemetry=_telemetry(facts, around.machine) | window.seen.figures,
        reasons=window.seen.reasons,
    )


def _telemetry(facts: Facts, machine: Machine) -> dict[str, float | None]:
    """Bytes of the weights and the machine's roof for reading them; nothing where a GPU may hold them."""
    weights = facts.extra.get("weight_bytes")
    if not isinstance(weights, int) or machine.gpus:
        return {}
    roof = bandwidth.read_bytes_per_s(weights, machine.cores)
    return {"weight_bytes": float(weights), "memory_bytes_per_s": roof}


def _judged(
    record: CellRecord,
    rows: list[dict[str, Any]],
    texts: list[dict[str, Any]],
    counts: Counts,
    prompts: list[str],
    ids: dict[int, int],
) -> CellRecord:
    """The record with its metrics and what there is to say about their validity."""
    table = trace.request_table(rows)
    values, reasons = metrics.compute(metrics.CellView.of(record, table))
    record = record.model_copy(update={"metrics": values, "reasons": record.reasons | reasons})
    notes = validity.check_cell(
        record, table, texts, counter_reset=counts.counter_reset, prompts=prompts, prompt_ids=ids
    )
    return record.model_copy(update={"validity": notes})


_FROM_STREAM = [
    "first_output_ns",
    "first_content_ns",
    "last_output_ns",
    "done_ns",
    "prompt_tokens",
    "prompt_tokens_from",
    "cached_tokens",
    "output_tokens",
    "output_tokens_from",
    "first_frame_tokens",
    "first_frame_tokens_from",
    "reasoning_tokens",
    "finish",
    "status",
    "http_status",
    "error_kind",
    "error",
    "frame_tokens",
]
_FROM_COUNTS = [
    "steps",
    "steps_from",
    "steps_with_draft",
    "drafted",
    "accepted_verified",
    "accepted_emitted",
    "server_queue_ms",
    "server_prefill_ms",
    "server_decode_ms",
]


def _row(sent: Sent, stream: Stream, counts: RequestCounts, start_ns: int) -> dict[str, Any]:
    """One row of `specbench.trace.REQUEST_SCHEMA`, times relative to the cell's start."""
    request, exchange = sent.request, sent.exchange
    row = {name: getattr(stream, name) for name in _FROM_STREAM} | {
        name: getattr(counts, name) for name in _FROM_COUNTS
    }
    times = ("first_output_ns", "first_content_ns", "last_output_ns", "done_ns")
    row |= {name: row[name] - start_ns for name in times if row[name] is not None}
    messages = orjson.dumps([dict(message) for message in request.messages])
    return row | {
        "request": request.request,
        "prompt_id": request.prompt_id,
        "category": request.category,
        "conversation": request.conversation,
        "turn": request.turn,
        "attempt": 0,
        "warmup": request.warmup,
        "scheduled_ns": exchange.scheduled_ns - start_ns if exchange.scheduled_ns is not None else None,
        "sent_ns": exchange.sent_ns - start_ns,
        "frame_ns": [t - start_ns for t in stream.frame_ns],
        "frame_step": list(counts.frame_step or stream.frame_step),
        "accept_hist": list(counts.accept_hist) if counts.accept_hist is not None else None,
        "prompt_sha256": hashlib.sha256(messages).hexdigest(),
        "output_sha256": _output_hash(stream),
    }


def _output_hash(stream: Stream) -> str | None:
    if stream.status == "failed":
        return None
    return hashlib.sha256(f"{stream.reasoning}\0{stream.text}".encode("utf-8", "surrogatepass")).hexdigest()
