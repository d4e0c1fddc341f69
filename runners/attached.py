"""An HTTP server of an engine, as its adapters ask it: pages, and a sentence where nothing answers.

Boundary: GET, one POST, and what is served; which pages there are is the adapter's business. Off the hot path, so an
ordinary client library asks, and it goes straight to the server: a proxy of the environment would be another machine.
Where the server runs already nothing is started, and of the method only the name is looked up.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import orjson

from runners import adapters, flags
from runners.base import Availability, Launch
from runners.server import KEEPER_S, ServerProcess, last_line
from specbench.cell import Config, Facts
from specbench.errors import EngineFailed, SpecbenchError, Unsupported
from specbench.vocabulary import own_word

TIMEOUT_S = 30.0
MOST_BYTES = 64 * 2**20
"""No page of an engine is nearly as long."""
_OF_TRANSFER = ("content-encoding", "content-length", "transfer-encoding")
"""Headers about the way of a page, which has ended once it is read."""
FAULTS = (httpx.HTTPError, httpx.InvalidURL, UnicodeError)
"""What asking can raise; the last for a name that no host can have."""


_ERROR = re.compile(r"\b\w*(Error|Exception)\b:|out of memory|already in use|\bKilled\b", re.IGNORECASE)


def last_error(log: Path) -> str:
    """The last line of a Python server's log that names an error; else the last line."""
    lines = log.read_text(errors="replace").splitlines()[-400:]
    errors = [line.strip() for line in lines if _ERROR.search(line)]
    return errors[-1] if errors else last_line(log)


# --- a server that was there before -----------------------------------------------------------------------


def attach(config: Config, version: str, **more: Any) -> Launch:
    """A launch that starts nothing: the server at the URL has its own settings. `more` joins the extra facts."""
    asked, method = config.engine, config.method
    if asked.args:
        raise Unsupported("engine.args", "a running server has its own settings; leave args out")
    row = flags.row_for(asked.name, method, None)
    name = own_word(method.name, flags.methods_of(asked.name, None))
    extra = {"method": name, "drafter_learns": row.learns} | more
    facts = Facts(engine=asked.name, engine_version=version, url=asked.url, extra=extra)
    return Launch(argv=(), facts=facts, learns=row.learns)


def available(engine: str, version: str) -> Availability:
    """A server that is the engine. Its version may be one that cannot be read, so every method is offered."""
    return Availability(ok=True, version=version, methods=flags.methods_of(engine, None))


def not_available(address: str, title: str, because: str) -> Availability:
    """Nothing answers at the URL, or another server than the engine's does."""
    if ask(address, "/health") is None:
        why, how = f"engine.url: nothing answers at {address}", "Start the server, or mend engine.url."
    else:
        why = f"engine.url: the server at {address} is not {title} ({because})"
        how = "Use the engine `openai` for other servers."
    return Availability(ok=False, why_not=why, install=how)


# --- pages ------------------------------------------------------------------------------------------------


def base(url: str) -> str:
    """The address without the `/v1` that many paste along."""
    return url.rstrip("/").removesuffix("/v1")


def ask(address: str, path: str, timeout_s: float = TIMEOUT_S) -> httpx.Response | None:
    """A page, whatever its status; None where nothing answers."""
    try:
        return _page("GET", address + path, timeout_s)
    except FAULTS:
        return None


def _page(method: str, url: str, timeout_s: float) -> httpx.Response:
    """A page read to its end. The library limits each read only: one that never ends is given up here."""
    end, body = time.monotonic() + timeout_s, bytearray()
    with httpx.stream(method, url, timeout=timeout_s, trust_env=False) as reply:
        for part in reply.iter_bytes():
            body += part
            if len(body) > MOST_BYTES or time.monotonic() > end:
                raise httpx.ReadError("it sends a page that does not end")
    said = [(name, value) for name, value in reply.headers.multi_items() if name not in _OF_TRANSFER]
    return httpx.Response(reply.status_code, headers=said, content=bytes(body))


def page(address: str, path: str, timeout_s: float = TIMEOUT_S) -> Any:
    """A page as JSON; None where there is none such."""
    return _json(ask(address, path, timeout_s))


def version(address: str, timeout_s: float = TIMEOUT_S) -> str | None:
    """What `/version` says (vLLM and TensorRT-LLM have it); None where it says nothing."""
    said = page(address, "/version", timeout_s)
    found = said.get("version") if isinstance(said, dict) else None
    return found if isinstance(found, str) else None


def _json(reply: httpx.Response | None) -> Any:
    try:
        return orjson.loads(reply.content) if reply is not None and reply.status_code == 200 else None
    except orjson.JSONDecodeError:
        return None


def served(address: str) -> list[dict[str, Any]]:
    """The models that a server lists; empty where it has no list. Raises SpecbenchError where nothing answers."""
    try:
        reply = _page("GET", f"{address}/v1/models", TIMEOUT_S)
    except FAULTS as error:
        why = str(error) or type(error).__name__
        raise _nobody(address, why) from None
    if reply.status_code == 404:
        return []
    models = (_json(reply) or {}).get("data") if isinstance(_json(reply), dict) else None
    if not isinstance(models, list):
        raise _nobody(address, f"it sends no list of models, HTTP {reply.status_code}")
    return [model for model in models if isinstance(model, dict)]


def _nobody(address: str, why: str) -> SpecbenchError:
    return SpecbenchError(
        f"engine.url: no OpenAI-style server answers at {address} ({why}); start it, or mend the address."
    )


def names(models: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    """The names that requests may carry."""
    return tuple(model["id"] for model in models if isinstance(model.get("id"), str))


def request_name(address: str, model: str, offered: Sequence[str], asked: bool) -> str | None:
    """The name that requests must carry: the plan's where the server has it, else its only one.

    `asked` says whether the plan's model is meant as a name of the server's. Raises SpecbenchError for one that it
    does not have.
    """
    if model in offered or not offered:
        return model if model in offered else None
    if asked or len(offered) > 1:
        raise SpecbenchError(
            f"model: the server at {address} serves {', '.join(offered)}, not {model}; name one of those."
        )
    return offered[0]


# --- a session --------------------------------------------------------------------------------------------


@dataclass
class HttpSession:
    """A server ready for requests: our child, or one that was there before."""

    facts: Facts
    address: str
    child: ServerProcess | None = None
    log: Path | None = None
    why: Callable[[Path], str] = last_line

    @property
    def pids(self) -> tuple[int, ...]:
        """Our child; a server that was there before may be on another machine."""
        return (self.child.pid,) if self.child else ()

    def get(self, path: str) -> httpx.Response:
        """A page, whatever its status. Raises EngineFailed where nothing answers any more."""
        return self._asked("GET", path)

    def post(self, path: str) -> httpx.Response:
        """Ask for something to be done. Raises EngineFailed where nothing answers any more."""
        return self._asked("POST", path)

    def json(self, path: str) -> Any:
        """A page as JSON; None where the server has none such."""
        return _json(self.get(path))

    def text(self, path: str) -> str | None:
        """A page as text; None where the server has none such."""
        reply = self.get(path)
        return reply.text if reply.status_code == 200 else None

    def check_speculation(self, speculative: bool | None) -> None:
        """Raises SpecbenchError where the server drafts and should not, or should and does not; of ours, EngineFailed."""
        who = self.facts.engine if self.child else f"the server at {self.address}"
        why = adapters.other_than_asked(str(self.facts.extra["method"]), speculative, who)
        if why is None:
            return
        if self.child is None or self.log is None:
            raise SpecbenchError(f"{why}; name the method that it was started with, or another engine.url.")
        raise EngineFailed(f"{why}; its last words: {self.why(self.log)}; the whole log is {self.log}.")

    def _asked(self, method: str, path: str) -> httpx.Response:
        try:
            return _page(method, self.address + path, TIMEOUT_S)
        except FAULTS as error:
            raise EngineFailed(self._last_words(str(error) or type(error).__name__)) from None

    def _last_words(self, error: str) -> str:
        if self.child is None or self.log is None:
            return f"engine.url: the server at {self.address} stopped answering ({error})."
        code = self.child.poll(KEEPER_S)
        state = "stopped answering" if code is None else f"ended with status {code}"
        words = self.why(self.log)
        return f"{self.facts.engine} {state}; its last words: {words}; the whole log is {self.log}."
