"""What the engines that run in a worker have in common: finding them, their models, requests and counts.

Their tokens are known by id and step, so nothing is assumed here: a step is one record of the worker, the first of a
reply is prefill's. In assisted generation of transformers the first pass already verifies a draft; it is prefill all
the same, and its draft is in no count, or accepted tokens and steps would not be of the same passes.

Boundary: no engine. Settings of methods are `flags`'; the process and its pipes are `worker`'s.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson

from runners import adapters
from runners.base import Availability, Counts, Launch, Raw, Request, RequestCounts, Stream, Where
from runners.counters import went_back
from runners.counts import histogram_of, request_rows
from runners.environments import interpreter_for
from runners.worker import WorkerSession, start_worker
from specbench.cell import Config, EngineAsk, Facts
from specbench.errors import EngineFailed, SpecbenchError, Unsupported
from specbench.models import ModelFile, resolve, sha256_of

_WEIGHTS = (".safetensors", ".bin", ".json", ".xml", ".model", ".txt", ".jinja")
MOST_THREADS = 4096


# --- finding and starting ---------------------------------------------------------------------------------


def probe(engine: str, where: Where, distributions: Sequence[str]) -> Availability:
    """The engine's version in the interpreter that would run it."""
    if where.url is not None:
        why = f"engine.url: {engine} runs inside a process of ours and is never attached to"
        return Availability(ok=False, why_not=why, install="Leave engine.url out.")
    return adapters.installed(engine, where, distributions)


def refuse_url(config: Config) -> None:
    """Raises Unsupported where a URL is given."""
    if config.engine.url is not None:
        raise Unsupported("engine.url", f"{config.engine.name} runs inside a process of ours; leave url out")


def interpreter(ask: EngineAsk) -> tuple[str, ...]:
    """The start of the worker's command."""
    return interpreter_for(ask.name, ask.python, ask.command)


def model_at(name: str, field: str) -> ModelFile:
    """A model file as everywhere, or a folder with weights and tokenizer. `field` is named where there is none."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        return ModelFile(folder.resolve(), folder_sha256(folder, field), name)
    try:
        return resolve(name)
    except SpecbenchError as error:
        raise SpecbenchError(str(error).replace("model:", f"{field}:", 1)) from None


def folder_sha256(folder: Path, field: str) -> str:
    """One hash for the files of a model's folder, by name."""
    files = sorted(path for path in folder.iterdir() if path.suffix in _WEIGHTS and path.is_file())
    if not files:
        raise SpecbenchError(f"{field}: {folder} holds no model; name a folder with weights and a tokenizer.")
    whole = "".join(f"{path.name} {sha256_of(path)}\n" for path in files)
    return hashlib.sha256(whole.encode()).hexdigest()


def threads(ask: EngineAsk) -> int:
    """`engine.args.threads`: the engines themselves say how many of them a machine has."""
    return adapters.threads(ask.args, MOST_THREADS)


def check_args(ask: EngineAsk, allowed: Mapping[str, Sequence[Any] | None]) -> None:
    """Refuse an argument by name, or by its value where the values are known."""
    for name, value in ask.args.items():
        if name not in allowed:
            raise Unsupported(
                f"engine.args.{name}", f"{ask.name} does not take it; allowed: {', '.join(allowed)}"
            )
        choices = allowed[name]
        if choices is not None and value not in choices:
            raise Unsupported(
                f"engine.args.{name}", f"must be {' or '.join(map(str, choices))}, not {value!r}"
            )


@contextmanager
def started(launch: Launch, log: Path) -> Iterator[WorkerSession]:
    """The worker of a launch; its facts then also hold what the engine says. Speculation must be what was asked for."""
    with start_worker(launch.argv, launch.env, log, launch.facts) as session:
        said = dict(session.ready.get("facts") or {})
        extra = launch.facts.extra | dict(said.pop("extra", {}))
        known = {name: value for name, value in said.items() if value is not None}
        session.facts = launch.facts.model_copy(update=known | {"extra": extra})
        _check_speculation(session.facts, log)
        yield session


def _check_speculation(facts: Facts, log: Path) -> None:
    if why := adapters.other_than_asked(str(facts.extra["method"]), facts.speculative, facts.engine):
        raise EngineFailed(f"{why}; see {log}.")


# --- requests and counts ----------------------------------------------------------------------------------


def body(request: Request) -> bytes:
    """The request as the workers read it: ids where the prompt has them, else messages."""
    prompt: dict[str, Any] = (
        {"messages": [dict(message) for message in request.messages]}
        if request.prompt_ids is None
        else {"ids": list(request.prompt_ids)}
    )
    return orjson.dumps(
        prompt
        | {
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "seed": request.seed,
            "ignore_eos": request.ignore_eos,
        }
    )


def counts(streams: Sequence[Stream], before: Raw, after: Raw, source: str) -> Counts:
    """Counts of a cell: a row per stream given, from its own steps. The worker's totals only show a restart."""
    requests = tuple(_request(stream) for stream in streams)
    reset = went_back(before, after, "worker_tokens_total")
    return Counts(requests, tuple(request_rows(requests, source)), counter_reset=reset)


def _request(stream: Stream) -> RequestCounts:
    """Drafts are known where every step says how many tokens were drafted for it."""
    done = stream.tail.get("worker") or {}
    if stream.status == "failed" or not stream.marks:
        return RequestCounts()
    after = [mark or {} for mark in stream.marks[1:]]
    emitted = [len(mark["step"]) for mark in after]
    found = RequestCounts(
        steps=len(after),
        steps_from="engine",
        accepted_emitted=sum(emitted) - len(after),
        accepted_verified=sum(mark.get("accepted", 0) for mark in after),
        frame_step=tuple(range(len(stream.marks))),
        server_prefill_ms=done.get("prefill_ms"),
    )
    drafted = [mark["drafted"] for mark in after if mark.get("drafted") is not None]
    if len(drafted) < len(after):
        return found
    drafts = [mark["accepted"] for mark in after if mark["drafted"]]
    return replace(
        found, steps_with_draft=len(drafts), drafted=sum(drafted), accept_hist=histogram_of(drafts)
    )
