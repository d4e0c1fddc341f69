"""runners.run.Sessions: which servers are kept from one run to the next, and that kept ones forget the last run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from runners.llama_cpp import LlamaCppSession
from runners.loopback import LoopbackSession
from runners.openai import AttachedSession
from runners.run import Runner
from runners.server import Health, free_port, serve
from runners.tensorrt_llm import TrtllmSession
from runners.vllm import NOTHING_CACHED, VllmSession
from specbench import trace
from specbench.cell import Facts
from specbench.plan import check_plan

RUNS = 8
"""Two arms, each twice in each of two blocks."""


def plan(restart: str = "never", **more: Any) -> dict[str, Any]:
    return {
        "name": "sessions",
        "model": "script",
        "workload": {"categories": ["qa"], "prompts_per_category": 1, "max_tokens": 4, "history": "own"},
        "repeat": {"blocks": 2, "restart": restart},
        "engine": [{"name": "loopback"}],
        "method": [{"name": "none", "baseline": True}, {"name": "ngram-simple", "k": 2}],
    } | more


def run(raw: dict[str, Any], run_dir: Path) -> tuple[int, list[str]]:
    """Servers started, and what was said."""
    said: list[str] = []
    Runner(check_plan(raw, "test"), run_dir, say=said.append).run()
    assert len(trace.cell_dirs(run_dir)) == RUNS
    return len(list((run_dir / "logs").glob("*.log"))), said


class Resets:
    """What the loopback server's reset answers, one by one (True once there is no more), and what it answered."""

    def __init__(self) -> None:
        self.coming: list[bool] = []
        self.given: list[bool] = []

    def __call__(self) -> bool:
        self.given.append(self.coming.pop(0) if self.coming else True)
        return self.given[-1]


@pytest.fixture
def resets(monkeypatch: pytest.MonkeyPatch) -> Resets:
    found = Resets()
    monkeypatch.setattr(LoopbackSession, "reset", lambda session: found())
    return found


@pytest.mark.parametrize(("restart", "starts"), [("never", 2), ("block", 4), ("run", 8)])
def test_a_kept_server_is_reset_before_each_further_run(
    resets: Resets, tmp_path: Path, restart: str, starts: int
) -> None:
    assert run(plan(restart), tmp_path / "run") == (starts, [])
    assert resets.given == [True] * (RUNS - starts)


def test_a_server_that_cannot_forget_is_started_afresh(resets: Resets, tmp_path: Path) -> None:
    resets.coming += [False, True, False]
    starts, said = run(plan(), tmp_path / "run")
    assert starts == 2 + 2
    assert resets.given == [False, True, False, True, True, True]
    assert said == ["loopback cannot forget what a run left, so it is started afresh for each run."]


def test_a_server_that_someone_else_started_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its adapter would answer False, which must not be taken for a wish to be restarted."""
    monkeypatch.setattr(AttachedSession, "reset", lambda session: pytest.fail("it was reset"))
    port = free_port()
    argv = [sys.executable, "-m", "runners.replicas.sglang", "--model-path", "m", f"--port={port}"]
    with serve(argv, {}, tmp_path / "log", health=Health(f"http://127.0.0.1:{port}")) as server:
        more = {
            "model": "m",
            "engine": [{"name": "openai", "url": server.address}],
            "method": [{"name": "none", "baseline": True}],
        }
        raw = plan(**more)
        Runner(check_plan(raw, "test"), tmp_path / "run").run()
        assert len(trace.cell_dirs(tmp_path / "run")) == RUNS / 2
        assert server.poll() is None


# --- what each adapter's reset is worth -------------------------------------------------------------------

WHERE = "http://127.0.0.1:9"
"""Nobody is asked."""


@pytest.mark.parametrize("session", [LlamaCppSession, TrtllmSession])
@pytest.mark.parametrize("learns", [False, True])
def test_where_nothing_is_cached_only_a_learned_draft_is_left(session: Any, learns: bool) -> None:
    assert session(Facts(engine="x"), WHERE, learns=learns).reset() is not learns


@pytest.mark.parametrize(
    ("status", "content", "forgets"),
    [
        (200, b'{"success":true}', True),
        (200, b"", True),  # before it said how it went
        (200, b'{"success":false}', False),  # a request still runs
        (404, b'{"detail":"Not Found"}', False),  # no development mode
    ],
)
def test_vllms_cached_prompts_are_reset_as_far_as_it_says(
    monkeypatch: pytest.MonkeyPatch, status: int, content: bytes, forgets: bool
) -> None:
    asked: list[str] = []

    def post(session: VllmSession, path: str) -> httpx.Response:
        asked.append(path)
        return httpx.Response(status, content=content)

    monkeypatch.setattr(VllmSession, "post", post)
    caching = Facts(engine="vllm", argv=("python", "--enable-prefix-caching"))
    assert VllmSession(caching, WHERE).reset() is forgets
    assert asked == ["/reset_prefix_cache"]
    learning = caching.model_copy(update={"extra": {"drafter_learns": True}})
    assert VllmSession(learning, WHERE).reset() is False
    plain = Facts(engine="vllm", argv=("python", NOTHING_CACHED))
    assert VllmSession(plain, WHERE).reset() is True
    assert asked == ["/reset_prefix_cache"], "nothing is cached, so nothing need be asked"
