"""A small, fully seeded run directory, written as a runner writes one: for tests of summaries and reports.

Boundary: no engine and no clock. Every number is drawn from `seed`; the shape of a reply (one frame a token,
the tokens of a step microseconds apart) follows what llama.cpp streams, the levels of acceptance by category
follow the order that n-gram drafting shows (code and retrieval high, role-play low).
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from specbench import cell, metrics, trace, validity

CATEGORIES = {
    "coding": 0.75,
    "humanities": 0.30,
    "math": 0.50,
    "multilingual": 0.35,
    "qa": 0.35,
    "rag": 0.70,
    "reasoning": 0.45,
    "roleplay": 0.25,
    "stem": 0.40,
    "summarization": 0.60,
    "writing": 0.30,
}
"""Category to the chance that a drafted token is accepted."""

K = {"none": None, "ngram-simple": 8, "draft-simple": 4}
COVERAGE = {"ngram-simple": 0.5}
BASE_TPOT_S = 0.012
MAX_TOKENS = 64
WORDS = (
    *(
        "the",
        "river",
        "town",
        "keeps",
        "its",
        "old",
        "bridge",
        "because",
        "every",
        "spring",
        "boats",
        "bring",
    ),
    *("grain", "wool", "and", "salt", "while", "people", "at", "market", "talk", "about", "rain", "prices"),
    *("songs", "teachers", "who", "left", "letters", "that", "never", "came", "maps", "drawn", "by", "hand"),
    *("lamps", "in", "winter", "windows", "a", "small", "museum", "of", "clocks", "bread", "still", "warm"),
)


@dataclass(frozen=True)
class EngineSpec:
    """What a made-up engine says of itself, and how it differs from the others."""

    name: str = "llamacpp"
    version: str = "2026.10.11549"
    precision: str | None = "float32, 4-bit weights"
    threads: int | None = 1
    model: str = "smollm2-135m"
    """Hashed to the model's SHA-256: engines with the same word read the same file."""
    slowness: float = 1.0
    """Times the first engine's TPOT."""
    gain: float = 1.0
    """Times the speedup that the run is made with."""
    apart: float = 0.0
    """Share of prompts on which its text, drafting or not, leaves the first engine's."""


LLAMACPP = EngineSpec()
FOUR = (
    LLAMACPP,
    EngineSpec("openvino", "2026.4.1", "bfloat16, 4-bit weights", slowness=1.3, gain=0.95, apart=0.3),
    EngineSpec("transformers", "5.24.0", "float32", 1, "smollm2-135m", 6.0, 1.05, 0.2),
    EngineSpec("vllm", "0.32.0", "bfloat16", None, "smollm2-135m in another format", 3.6, 0.9, 0.5),
)
"""Four engines as a plan over all of them meets them; the figures are made, of the order that they show."""


@dataclass(frozen=True)
class PromptSpec:
    """One prompt of the made-up split."""

    prompt_id: str
    category: str
    turn: int = 0


def default_prompts(per_category: int = 2) -> tuple[PromptSpec, ...]:
    """`per_category` prompts of each of the eleven categories."""
    return tuple(PromptSpec(f"{c}-{i + 1:02d}", c) for c in CATEGORIES for i in range(per_category))


def make_run(
    path: Path,
    *,
    methods: Sequence[str | cell.Method] = ("none", "ngram-simple"),
    blocks: int = 5,
    concurrency: Sequence[int] = (1,),
    speedup: float | Mapping[str, float] = 1.3,
    seed: int = 0,
    prompts: Sequence[PromptSpec] | None = None,
    noise: float = 0.01,
    diverge: float = 0.0,
    fail: float = 0.0,
    busy_blocks: Sequence[int] = (),
    sessions: int = 1,
    speculative: bool = True,
    engines: Sequence[EngineSpec] = (LLAMACPP,),
) -> Path:
    """Write a run and return its directory.

    `speedup` (one figure, or one a method name) is what each arm's TPOT is divided by at the median prompt;
    `noise` is the spread (log) between cells; `diverge` the share of prompts whose speculative text leaves
    the baseline's half-way; `fail` the share of requests that end in HTTP 503; `busy_blocks` carry evidence
    of other work; blocks are dealt to `sessions` in turn; `speculative=False` makes the speculative arms
    draft nothing; every one of `engines` runs all of it. The method "none" is the baseline.
    """
    plain = _Spec(
        tuple(m if isinstance(m, cell.Method) else _method(m) for m in methods),
        tuple(default_prompts() if prompts is None else prompts),
        speedup,
        seed,
        noise,
        diverge,
        fail,
        speculative,
    )
    for spec in (replace(plain, engine=engine) for engine in engines):
        for level in concurrency:
            for block in range(blocks):
                session = f"session-{block % sessions}"
                _write_block(path, spec, level, block, session, block in busy_blocks)
    manifest = {
        "schema_version": cell.SCHEMA_VERSION,
        "name": path.name,
        "plan": {"name": path.name, "seed": seed},
    }
    trace.write_atomic(path / "run.json", orjson.dumps(manifest, option=orjson.OPT_INDENT_2))
    trace.write_index(path)
    return path


@dataclass(frozen=True)
class _Spec:
    methods: tuple[cell.Method, ...]
    prompts: tuple[PromptSpec, ...]
    speedup: float | Mapping[str, float]
    seed: int
    noise: float
    diverge: float
    fail: float
    speculative: bool
    engine: EngineSpec = LLAMACPP

    def speedup_of(self, method: cell.Method) -> float:
        if method.name == "none":
            return 1.0
        every = self.speedup.get(method.name, 1.0) if isinstance(self.speedup, Mapping) else self.speedup
        return every * self.engine.gain


def _method(name: str) -> cell.Method:
    params: dict[str, int | float | str | bool] = {"n": 4} if name.startswith("ngram") else {}
    draft = "smollm2-135m" if name.startswith("draft") else None
    return cell.Method(name=name, k=K.get(name, 4), draft=draft, params=params)


def _write_block(path: Path, spec: _Spec, level: int, block: int, session: str, busy: bool) -> None:
    order = list(spec.methods)
    random.Random(f"{spec.seed}/{block}/order").shuffle(order)
    for position, method in enumerate([*order, *reversed(order)]):
        rows, texts = _requests(spec, method, level, block, position)
        record = _record(path.name, spec, method, level, block, position, session, busy, rows)
        trace.write_cell(path, judged(record, rows, texts), rows, texts)


def judged(
    record: cell.CellRecord, rows: list[dict[str, Any]], texts: list[dict[str, Any]]
) -> cell.CellRecord:
    """The record with metrics and findings, as a runner stores it."""
    table = trace.request_table(rows)
    values, reasons = metrics.compute(metrics.CellView.of(record, table))
    record = record.model_copy(update={"metrics": values, "reasons": reasons})
    return record.model_copy(update={"validity": validity.check_cell(record, table, texts)})


# --- one reply --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Reply:
    """What greedy decoding of one prompt under one method does: the same in every block."""

    tokens: int
    kept: tuple[int, ...]
    """Tokens that each step after prefill emitted."""
    accepted: tuple[int | None, ...]
    """Accepted drafts of each step; None where it drafted nothing."""


def _reply(spec: _Spec, prompt: PromptSpec, method: cell.Method) -> _Reply:
    rng = random.Random(f"{spec.seed}/{prompt.prompt_id}/{prompt.turn}/{method.label}")
    length = random.Random(f"{spec.seed}/{prompt.prompt_id}/{prompt.turn}").randint(36, MAX_TOKENS + 16)
    tokens = min(length, MAX_TOKENS)
    kept: list[int] = []
    accepted: list[int | None] = []
    while sum(kept) < tokens - 1:
        n = _accepted(rng, spec, prompt, method)
        accepted.append(n)
        kept.append(min((n or 0) + 1, tokens - 1 - sum(kept)))
    return _Reply(tokens, tuple(kept), tuple(accepted))


def _accepted(rng: random.Random, spec: _Spec, prompt: PromptSpec, method: cell.Method) -> int | None:
    if method.k is None or not spec.speculative or rng.random() > COVERAGE.get(method.name, 1.0):
        return None
    n = 0
    while n < method.k and rng.random() < _chance(prompt, method, n):
        n += 1
    return n


def _chance(prompt: PromptSpec, method: cell.Method, position: int) -> float:
    if method.pinned is None:
        return CATEGORIES.get(prompt.category, 0.4)
    before = method.pinned[position - 1] if position else 1.0
    return method.pinned[position] / before if position < len(method.pinned) and before else 0.0


# --- one cell ---------------------------------------------------------------------------------------------


def _requests(
    spec: _Spec, method: cell.Method, level: int, block: int, position: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    rng = np.random.default_rng([spec.seed, block, position, level])
    replies = [_reply(spec, prompt, method) for prompt in spec.prompts]
    lengths = np.array([(r.tokens - 1) / len(r.kept) for r in replies])
    gain = spec.speedup_of(method) * lengths / np.median(lengths)
    host = float(rng.normal(0.0, spec.noise))
    free_ns = [0] * level
    rows, texts = [], []
    for index, (prompt, reply) in enumerate(zip(spec.prompts, replies, strict=True)):
        slot = free_ns.index(min(free_ns))
        tpot_s = (
            BASE_TPOT_S
            * spec.engine.slowness
            * (1 + 0.05 * (level - 1))
            / gain[index]
            * np.exp(host + rng.normal(0.0, 0.03))
        )
        row = _row(index, prompt, reply, method, free_ns[slot] + 200_000, tpot_s, rng)
        text = _text(spec, prompt, method, reply.tokens)
        if random.Random(f"{spec.seed}/{block}/{position}/{index}/fail").random() < spec.fail:
            row, text = _failed(row), ""
        free_ns[slot] = row["done_ns"]
        rows.append(row)
        texts.append({"request": index, "prompt_id": prompt.prompt_id, "text": text, "reasoning": ""})
    return rows, texts


def _row(
    index: int, prompt: PromptSpec, reply: _Reply, method: cell.Method, sent: int, tpot_s: float, rng: Any
) -> dict[str, Any]:
    prompt_tokens = 40 + 17 * (index % 9)
    first = sent + int(1e6 * (20 + 0.4 * prompt_tokens + abs(rng.normal(0.0, 2.0))))
    frames, steps = _frames(reply, first, tpot_s, rng)
    counts = _counts(reply, method)
    return {
        "request": index,
        "prompt_id": prompt.prompt_id,
        "category": prompt.category,
        "conversation": index,
        "turn": prompt.turn,
        "attempt": 0,
        "warmup": False,
        "sent_ns": sent,
        "first_output_ns": first,
        "first_content_ns": first,
        "last_output_ns": frames[-1],
        "done_ns": frames[-1] + 300_000,
        "frame_ns": frames,
        "frame_tokens": [1] * len(frames),
        "frame_step": steps,
        "prompt_tokens": prompt_tokens,
        "prompt_tokens_from": "usage",
        "cached_tokens": 0,
        "output_tokens": reply.tokens,
        "output_tokens_from": "usage",
        "first_frame_tokens": 1,
        "first_frame_tokens_from": "reported",
        "server_prefill_ms": (first - sent) / 1e6 - 0.5,
        "server_decode_ms": (frames[-1] - first) / 1e6,
        "finish": "length" if reply.tokens == MAX_TOKENS else "stop",
        "status": "ok",
        "http_status": 200,
        "prompt_sha256": cell.digest([prompt.prompt_id, prompt.turn], 64),
    } | counts


def _frames(reply: _Reply, first: int, tpot_s: float, rng: Any) -> tuple[list[int], list[int]]:
    """Frame times and steps: a step's tokens arrive 15 µs apart, the last of them when the step ends."""
    shares = np.cumsum(np.abs(rng.normal(1.0, 0.05, len(reply.kept))))
    ends = first + (shares / shares[-1] * tpot_s * 1e9 * (reply.tokens - 1)).astype(int)
    frames, steps = [first], [0]
    for step, (end, kept) in enumerate(zip(ends.tolist(), reply.kept, strict=True), start=1):
        frames += [end - 15_000 * (kept - 1 - i) for i in range(kept)]
        steps += [step] * kept
    return frames, steps


def _counts(reply: _Reply, method: cell.Method) -> dict[str, Any]:
    steps = {
        "steps": len(reply.kept),
        "steps_from": "grouped",
        "accepted_emitted": sum(reply.kept) - len(reply.kept),
    }
    if method.k is None:
        return steps
    drafts = [n for n in reply.accepted if n is not None]
    return steps | {
        "steps_with_draft": len(drafts),
        "drafted": method.k * len(drafts),
        "accepted_verified": sum(drafts),
        "accept_hist": [drafts.count(j) for j in range(method.k + 1)],
    }


def _failed(row: dict[str, Any]) -> dict[str, Any]:
    asked = ("request", "prompt_id", "category", "conversation", "turn", "attempt", "warmup", "prompt_sha256")
    empty: dict[str, Any] = {"frame_ns": [], "frame_tokens": [], "frame_step": []}
    ended = {"done_ns": row["sent_ns"] + 4_000_000, "finish": "none", "status": "failed", "http_status": 503}
    why = {"error_kind": "http", "error": "HTTP 503: no slot free"}
    return {name: row[name] for name in (*asked, "sent_ns")} | empty | ended | why


def _text(spec: _Spec, prompt: PromptSpec, method: cell.Method, tokens: int) -> str:
    rng = random.Random(f"{spec.seed}/{prompt.prompt_id}/{prompt.turn}/text")
    words = [rng.choice(WORDS) for _ in range(tokens)]
    differs = random.Random(f"{spec.seed}/{prompt.prompt_id}/differs").random() < spec.diverge
    if method.name != "none" and differs:
        words[tokens // 2 :] = ["otherwise", *words[tokens // 2 + 1 :][::-1]]
    if random.Random(f"{spec.engine.name}/{prompt.prompt_id}/apart").random() < spec.engine.apart:
        words[tokens // 3 :] = [spec.engine.name, *words[tokens // 3 + 1 :]]
    return " ".join(words)


# --- its record -------------------------------------------------------------------------------------------


def _record(
    run: str,
    spec: _Spec,
    method: cell.Method,
    level: int,
    block: int,
    position: int,
    session: str,
    busy: bool,
    rows: list[dict[str, Any]],
) -> cell.CellRecord:
    config = cell.Config(
        engine=cell.EngineAsk(name=spec.engine.name, args={"threads": "cores-1", "slots": max(4, level)}),
        model="smollm2-135m",
        method=method,
        workload=cell.Workload(prompts_per_category=2, max_tokens=MAX_TOKENS),
        concurrency=level,
    )
    facts = _facts(spec, method, level)
    table = _acceptance(rows)
    window_s = max(row["done_ns"] for row in rows) / 1e9
    return cell.CellRecord(
        cell_id=cell.make_cell_id(config, block, position, facts),
        config_id=config.config_id,
        run=run,
        comparison=cell.comparison_id(config),
        block=block,
        position=position,
        baseline=method.name == "none",
        session_id=session,
        wall_time_utc="2026-05-04T10:00:00Z",
        start_ns=1_000_000_000 * (1 + block * 100 + position),
        window_s=window_s,
        seed=spec.seed,
        config=config,
        facts=facts,
        machine=_machine(),
        host=_host(window_s, busy),
        client=_client(rows, window_s),
        acceptance=table,
        **_totals(rows, method),
    )


def _facts(spec: _Spec, method: cell.Method, level: int) -> cell.Facts:
    speculative = method.name != "none" and spec.speculative
    argv = [
        "llama-server",
        "--model",
        "smollm2-135m-q4_1.gguf",
        "--threads",
        "1",
        "--parallel",
        str(max(4, level)),
    ]
    if method.name != "none":
        argv += ["--spec-type", method.name, "--draft-max", str(method.k)]
    return cell.Facts(
        engine=spec.engine.name,
        engine_version=spec.engine.version,
        argv=(*argv, "--port=0"),
        slots=max(4, level),
        context_tokens=4096,
        threads=spec.engine.threads,
        precision=spec.engine.precision,
        model_sha256=cell.digest(spec.engine.model, 64),
        draft_sha256=cell.digest(method.draft, 64) if method.draft else None,
        template_sha256=cell.digest("chatml", 64),
        split_sha256=cell.digest([p.prompt_id for p in spec.prompts], 64),
        speculative=speculative,
    )


def _machine() -> cell.Machine:
    return cell.Machine(
        hostname="bench-1",
        cpu="Example CPU at 2.5 GHz",
        cores=2,
        memory_bytes=8 * 2**30,
        os="Linux 6.12",
        python="3.11.9",
        boot_id="00000000-0000-4000-8000-000000000000",
    )


def _host(window_s: float, busy: bool) -> cell.HostBusy:
    return cell.HostBusy(
        window_s=window_s,
        cpu_pressure_share=0.8 if busy else 0.02,
        steal_share=0.0,
        involuntary_switches_per_s=400.0 if busy else 3.0,
        other_cpu_share=0.5 if busy else 0.01,
    )


def _client(rows: list[dict[str, Any]], window_s: float) -> cell.ClientUse:
    frames = sum(len(row["frame_ns"]) for row in rows)
    return cell.ClientUse(
        frames=frames, cpu_s=frames * 8e-6, ceiling_frames_per_cpu_s=150_000.0, frames_per_s=frames / window_s
    )


def _totals(rows: list[dict[str, Any]], method: cell.Method) -> dict[str, Any]:
    if method.k is None:
        return {}
    names = ("steps_with_draft", "drafted", "accepted_verified")
    return {name: sum(row.get(name) or 0 for row in rows) for name in names}


def _acceptance(rows: list[dict[str, Any]]) -> tuple[cell.Acceptance, ...]:
    """The server's own table: of all drafts, how many had each position accepted."""
    hists = [row["accept_hist"] for row in rows if row.get("accept_hist")]
    if not hists or not np.sum(hists):
        return ()
    source = "llamacpp:metrics"
    total = np.sum(hists, axis=0)
    drafts = int(total.sum())
    reached = total[::-1].cumsum()[::-1]
    return tuple(
        cell.Acceptance(scope="cell", position=j, drafts=drafts, accepted=int(reached[j]), source=source)
        for j in range(1, len(total))
    )
