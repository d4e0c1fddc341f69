"""runners.loopback and its server: what it says, drafts, counts and breaks, over real sockets and processes."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import orjson
import pytest

from runners.base import Request, Stream, Where
from runners.client import Client
from runners.counters import parse as parse_counters
from runners.counters import spec_delta
from runners.frames import coalesced, parse
from runners.loopback import LoopbackEngine, command, script_for
from runners.loopback_script import Reply, Script, steps_of
from runners.server import serve
from specbench.cell import Config, EngineAsk, Method, Sampling, Workload
from specbench.errors import Unsupported
from tests.replay import tpot_s

PATH = "/v1/chat/completions"


def ask(prompt: str = "say something", tokens: int = 20, **fields: Any) -> bytes:
    return orjson.dumps({"messages": [{"role": "user", "content": prompt}], "max_tokens": tokens} | fields)


def replies(
    tmp_path: Path, script: dict[str, Any], *asks: bytes
) -> tuple[list[Stream], dict[str, float], Any]:
    """Start a server, send the requests one after another; returns streams, counters and write stamps."""
    argv, env = command(script)
    with serve(argv, env, tmp_path / "log") as server:

        async def work() -> list[Stream]:
            async with Client(server.address, connections=1, idle_timeout_s=5) as client:
                return [parse(await client.post(PATH, body)) for body in asks]

        streams = asyncio.run(work())
        pages = [urllib.request.urlopen(f"{server.address}/{page}") for page in ("metrics", "stamps")]
        metrics, stamps = [page.read() for page in pages]
        for page in pages:
            page.close()
    return streams, parse_counters(metrics.decode()), orjson.loads(stamps)


def config(method: Method, **args: Any) -> Config:
    engine = EngineAsk(name="loopback", args=args)
    return Config(engine=engine, model="none", method=method, workload=Workload(), sampling=Sampling())


# --- the script -------------------------------------------------------------------------------------------


def test_text_depends_on_prompt_and_seed_but_not_on_drafting() -> None:
    def text(prompt: str = "a", **script: Any) -> list[int]:
        return Reply(Script(**script), orjson.loads(ask(prompt)), 0).tokens

    assert text() == text(k=4, accept=(0.5,))
    assert text() != text("b")
    assert text() != text(seed=1)


def test_steps_add_up_and_drafts_are_cut_to_what_is_wanted() -> None:
    for seed, count in itertools.product(range(20), (1, 2, 5, 64)):
        steps = steps_of(Script(seed=seed, k=4, accept=(0.9,)), "p", count)
        assert sum(step.tokens for step in steps) == count
        assert all(step.tokens == step.accepted + 1 and step.accepted <= step.drafted <= 4 for step in steps)


@pytest.mark.parametrize(("accept", "tokens"), [((1.0,), 5), ((0.0,), 1)])
def test_certain_acceptance_gives_k_plus_one_or_one_token_a_step(
    accept: tuple[float, ...], tokens: int
) -> None:
    """E[tokens] is γ + 1 at α = 1 and 1 at α = 0 (Leviathan et al. 2023, equation 1)."""
    steps = steps_of(Script(k=4, accept=accept), "p", 101)[1:]
    assert {step.tokens for step in steps[:20]} == {tokens}


def test_acceptance_at_each_position_is_what_the_script_says() -> None:
    """20,000 drafts: the standard error is 0.003, so 0.02 is beyond six of them."""
    steps = [s for s in steps_of(Script(k=3, accept=(0.8, 0.7, 0.5)), "p", 60_000) if s.drafted == 3]
    marginal = [sum(s.accepted >= j for s in steps) / len(steps) for j in (1, 2, 3)]
    assert marginal == pytest.approx([0.8, 0.56, 0.28], abs=0.02)


def test_unknown_script_key_is_an_error() -> None:
    with pytest.raises(ValueError, match="'speed'"):
        Script.from_json('{"speed": 1}')


# --- the server -------------------------------------------------------------------------------------------

SPECULATIVE = {"k": 3, "accept": [0.8, 0.7, 0.6], "step_ms": 4, "seed": 3}


def test_frames_of_tokens_carry_llama_cpp_timings(tmp_path: Path) -> None:
    (stream,), counters, _ = replies(tmp_path, SPECULATIVE, ask(timings_per_token=True))
    assert (stream.status, stream.finish, stream.output_tokens) == ("ok", "length", 20)
    assert stream.frame_tokens == [1] * 20
    assert len(stream.text.split()) == 20
    last = stream.tail["timings"]
    assert last["draft_n"] == counters["llamacpp:spec_decode_num_draft_tokens_total"]
    assert last["draft_n_accepted"] == counters["llamacpp:spec_decode_num_accepted_tokens_total"] > 0


def test_frames_of_steps_carry_vllm_ids_usage_and_metrics(tmp_path: Path) -> None:
    script = SPECULATIVE | {"frames": "step", "style": "vllm"}
    fields = {"return_token_ids": True, "stream_options": {"continuous_usage_stats": True}}
    streams, counters, _ = replies(tmp_path, script, ask(**fields), ask(return_token_ids=True))
    said = streams[0].tail["metrics"]["speculative_decoding"]
    assert [n - 1 for n in streams[0].frame_tokens[1:] if n is not None][: said["num_spec_steps"]] == said[
        "per_step_accepted"
    ]
    assert streams[0].frame_tokens == streams[1].frame_tokens
    delta = spec_delta({}, counters, "vllm:")
    assert delta is not None
    assert delta.accepted == 2 * said["num_accepted_draft_tokens"]


def test_greedy_arms_say_the_same_text(tmp_path: Path) -> None:
    arms = [replies(tmp_path, script, ask())[0][0].text for script in ({"seed": 3}, SPECULATIVE)]
    assert arms[0] == arms[1]


def test_client_stamps_come_after_the_servers_writes(tmp_path: Path) -> None:
    """Both read CLOCK_MONOTONIC: the client's time minus the server's is small and never negative."""
    (stream,), _, stamps = replies(tmp_path, {"step_ms": 2, "stamps": True}, ask(user="me"))
    late = [seen - wrote for (_, wrote), seen in zip(stamps["me"], stream.frame_ns, strict=True)]
    assert min(late) >= 0
    due = [due for due, _ in stamps["me"]]
    assert [b - a for a, b in itertools.pairwise(due)] == pytest.approx([2_000_000] * 19, abs=2)


FAULTS: dict[str, tuple[str, str | None]] = {
    "reset": ("failed", "incomplete_read"),
    "close": ("failed", "incomplete_read"),
    "truncated": ("failed", "truncated"),
    "error": ("failed", "in_band"),
    "429": ("failed", "throttled"),
    "503": ("failed", "http"),
    "coalesced": ("ok", None),
    "buffered": ("not_streamed", None),
    "empty": ("empty", None),
    "usage_missing": ("ok", None),
}


def test_each_fault_hits_the_request_it_names_and_no_other(tmp_path: Path) -> None:
    faults = {str(2 * i): name for i, name in enumerate(FAULTS)}
    streams, _, _ = replies(tmp_path, {"step_ms": 3, "faults": faults}, *[ask()] * (2 * len(FAULTS)))
    assert {name: (s.status, s.error_kind) for name, s in zip(FAULTS, streams[::2], strict=True)} == FAULTS
    assert {stream.status for stream in streams[1::2]} == {"ok"}
    by_name = dict(zip(FAULTS, streams[::2], strict=True))
    assert by_name["429"].retry_after_s == 3.0
    assert coalesced(by_name["coalesced"]) > 0.5
    assert (by_name["usage_missing"].output_tokens, by_name["empty"].output_tokens) == (None, 0)
    assert by_name["reset"].text


def test_server_that_hangs_is_ended_by_the_clients_timeout(tmp_path: Path) -> None:
    argv, env = command({"faults": {"0": "hang"}})

    async def work(address: str) -> Stream:
        async with Client(address, connections=1, idle_timeout_s=0.2) as client:
            return parse(await client.post(PATH, ask()))

    with serve(argv, env, tmp_path / "log") as server:
        assert asyncio.run(work(server.address)).error_kind == "timeout"


def alive(pid: int) -> bool:
    """Whether a process still runs; a zombie does not."""
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
@pytest.mark.parametrize("how", ["stdin closed", "parent killed"])
def test_server_dies_with_its_parent(how: str) -> None:
    argv, env = command({})
    starter = (
        "import subprocess, sys; child = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE, "
        "stdout=subprocess.PIPE); print(child.stdout.readline().decode(), flush=True); sys.stdin.read()"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", starter, *argv] if how == "parent killed" else argv,
        env=os.environ | env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert parent.stdin is not None
    assert parent.stdout is not None
    with parent:
        pid = orjson.loads(parent.stdout.readline())["pid"]
        assert alive(pid)
        if how == "parent killed":
            parent.send_signal(signal.SIGKILL)
        else:
            parent.stdin.close()
        deadline = time.monotonic() + 10
        while alive(pid) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not alive(pid)


# --- the adapter ------------------------------------------------------------------------------------------


def request(prompt: str, tokens: int = 40) -> Request:
    return Request(0, "p", None, 0, 0, ({"role": "user", "content": prompt},), tokens)


def measured(tmp_path: Path, method: Method, **args: Any) -> tuple[list[Stream], Any]:
    """Four requests through the adapter as a runner would send them; streams and counts."""
    engine = LoopbackEngine()
    launch = engine.launch(config(method, **args), str(engine.probe(Where()).version))
    with engine.start(launch, tmp_path / "log") as session:
        before = session.counters()

        async def work() -> list[Stream]:
            async with Client(session.address, connections=4) as client:
                bodies = [engine.body(request(f"prompt {i}")) for i in range(4)]
                exchanges = await asyncio.gather(*(client.post(engine.path, body) for body in bodies))
                return [parse(exchange) for exchange in exchanges]

        streams = asyncio.run(work())
        return streams, engine.counts(streams, before, session.counters())


@pytest.mark.parametrize("method", [Method(name="ngram-simple"), Method(name="draft-simple", k=3)])
def test_counts_hold_the_identity_of_acceptance(tmp_path: Path, method: Method) -> None:
    """AL_all − 1 = coverage × (AL_drafted − 1), request by request and against the server's totals."""
    streams, counts = measured(tmp_path, method, step_ms=1.0)
    assert {stream.status for stream in streams} == {"ok"}
    for stream, row in zip(streams, counts.requests, strict=True):
        al_all = (stream.output_tokens - 1) / row.steps
        al_drafted = 1 + row.accepted_verified / row.steps_with_draft
        assert al_all - 1 == pytest.approx(row.steps_with_draft / row.steps * (al_drafted - 1))
        assert al_all > 1
    assert counts.drafted == sum(row.drafted for row in counts.requests)
    assert counts.steps_with_draft == sum(row.steps_with_draft for row in counts.requests)


def test_baseline_drafts_nothing(tmp_path: Path) -> None:
    streams, counts = measured(tmp_path, Method(name="none"), step_ms=1.0)
    assert [row.steps for row in counts.requests] == [39] * 4
    assert not counts.drafted
    assert all(tpot_s(stream) for stream in streams)


def test_pinned_acceptance_becomes_conditional() -> None:
    script = script_for(config(Method(name="draft-simple", pinned=(0.8, 0.6, 0.3))))
    assert script["accept"] == pytest.approx([0.8, 0.75, 0.5])
    assert (script["k"], script["coverage"]) == (3, 1.0)


def test_launch_says_what_will_run() -> None:
    launch = LoopbackEngine().launch(
        config(Method(name="draft-simple", k=2), step_ms=7.5, faults="3=reset"), "1"
    )
    script = Script.from_json(launch.argv[-1])
    assert (script.k, script.step_ms, script.faults) == (2, 7.5, {"3": "reset"})
    assert (launch.facts.engine, launch.facts.speculative, launch.learns) == ("loopback", True, False)


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        (config(Method(name="eagle3")), "method.name"),
        (config(Method(name="none", k=2)), "method.k"),
        (config(Method(name="none", pinned=(0.5,))), "method.k"),
        (config(Method(name="draft-simple", params={"n": 3})), "method.n"),
        (config(Method(name="none"), threads=4), "engine.args.threads"),
    ],
)
def test_what_no_script_can_do_is_unsupported(asked: Config, field: str) -> None:
    with pytest.raises(Unsupported) as refused:
        LoopbackEngine().launch(asked, "1")
    assert refused.value.field == field


def test_url_is_unsupported() -> None:
    asked = config(Method(name="none"))
    engine = asked.engine.model_copy(update={"url": "http://127.0.0.1:1"})
    with pytest.raises(Unsupported, match=r"engine\.url"):
        LoopbackEngine().launch(asked.model_copy(update={"engine": engine}), "1")
