"""runners.in_process: counts of engines in a worker, held against what the engines themselves said in captures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson
import pytest

from runners import in_process
from runners.base import RequestCounts, Stream
from runners.client import Exchange
from runners.worker import parse
from specbench.cell import EngineAsk
from specbench.errors import SpecbenchError, Unsupported

CAPTURES = Path(__file__).parent / "data" / "captures"


def reply(steps: Sequence[tuple[int, int | None]], **done: Any) -> Stream:
    """A reply whose steps emitted and were drafted as many tokens as each pair says."""
    lines: list[dict[str, Any]] = [
        {"id": 0, "at": 10 + n, "step": [5] * emitted, "accepted": emitted - 1, "drafted": drafted}
        for n, (emitted, drafted) in enumerate(steps)
    ]
    lines.append({"id": 0, "at": 99, "done": {"finish": "length", "prompt_tokens": 4, "text": "x"} | done})
    return parse(Exchange(None, 1, [(100, orjson.dumps(line)) for line in lines], 100, "complete"))


def counted(*streams: Stream) -> tuple[RequestCounts, ...]:
    return in_process.counts(streams, {}, {}, "test").requests


def identity_holds(found: RequestCounts) -> bool:
    """AL_all − 1 = coverage × (AL_drafted − 1), in whole numbers: both sides are accepted over steps."""
    assert found.steps
    emitted = found.steps + (found.accepted_emitted or 0)
    return emitted - found.steps == found.accepted_verified


# --- transformers: what each put() held, and what was proposed and accepted -------------------------------


def captured(name: str) -> tuple[list[tuple[int, int | None]], list[int]]:
    """(emitted, drafted) of every pass, and the accepted counts that the engine's own hook saw, if it has one."""
    said = orjson.loads((CAPTURES / "transformers" / "streamer.json").read_bytes())[name]
    puts = [len(event[3]) for event in said["events"][1:] if event[1] == "Tensor"]
    drafted = [number for kind, number in said["hooks"] if kind == "prop"] or [0] * len(puts)
    return list(zip(puts, drafted, strict=True)), [n for kind, n in said["hooks"] if kind == "acc"]


STREAMED = {
    # steps, with draft, drafted, accepted, histogram: the first pass is prefill's, its draft in no count
    "plain": (10, 0, 0, 0, None),
    "prompt_lookup": (3, 2, 7, 7, (0, 0, 1, 0, 0, 1)),
    "assistant_default": (1, 1, 9, 8, (0,) * 8 + (1,)),
    "assistant_k4_const": (2, 2, 5, 4, (1, 0, 0, 0, 1)),
    "assistant_k4_const_max8": (1, 1, 2, 2, (0, 0, 1)),
    "early_exit_28": (6, 6, 13, 4, (4, 1, 0, 1)),
}


@pytest.mark.parametrize("name", STREAMED)
def test_counts_of_streamer_calls(name: str) -> None:
    steps, accepted = captured(name)
    (found,) = counted(reply(steps))
    got = (found.steps, found.steps_with_draft, found.drafted, found.accepted_verified, found.accept_hist)
    assert got == STREAMED[name]
    assert found.accepted_emitted == found.accepted_verified
    assert identity_holds(found)
    # What a pass accepted is what it emitted less one: the engine's hook agrees, pass by pass.
    assert accepted in ([], [emitted - 1 for emitted, _ in steps])


# --- OpenVINO: tokens of each step ------------------------------------------------------------------------


def test_openvino_counts_against_the_engines_own() -> None:
    said = orjson.loads((CAPTURES / "openvino" / "counts.json").read_bytes())
    for name in ("draft_max1", "draft_max2", "draft_max5", "draft_max6", "draft_max7", "draft_max12"):
        batch, most = said[name]["batch"], said[name]["n"]
        before = [sum(batch[:place]) for place in range(len(batch))]
        drafted = [0] + [max(0, min(3, most - emitted - 1)) for emitted in before[1:]]
        (found,) = counted(reply(list(zip(batch, drafted, strict=True))))
        assert found.steps == len(batch) - 1
        assert found.accepted_verified == sum(size - 1 for size in batch)
        # The engine's totals lack the last step, which is why they are not used.
        assert sum(drafted[:-1]) == said[name]["draft"]
        assert said[name]["acc"] == sum(size - 1 for size in batch[:-1]) or name == "draft_max5"


def test_openvino_tokens_of_each_request_in_a_batch() -> None:
    said = orjson.loads((CAPTURES / "openvino" / "counts.json").read_bytes())
    reads = [[(tokens, None) for (tokens,) in request] for request in said["cb_pl"]["reads"]]
    found = counted(*(reply(steps) for steps in reads))
    assert [request.steps for request in found] == [8, 15, 17]
    assert [request.accepted_emitted for request in found] == [1, 0, 6]
    # A prompt lookup does not say what it drafted: unknown, not 0.
    assert [(r.drafted, r.steps_with_draft, r.accept_hist) for r in found] == [(None, None, None)] * 3
    assert all(identity_holds(request) for request in found)


# --- both -------------------------------------------------------------------------------------------------


def test_the_table_has_a_row_for_each_position() -> None:
    steps = [(1, 0), (4, 3), (1, 3), (2, 3), (1, 0)]
    found = in_process.counts([reply([(1, 0)]), reply(steps)], {}, {}, "openvino steps")
    rows = [(row.request, row.position, row.drafts, row.accepted, row.source) for row in found.table]
    assert rows == [(1, p, 3, n, "openvino steps") for p, n in ((1, 2), (2, 1), (3, 1))]
    assert found.requests[1].frame_step == (0, 1, 2, 3, 4)
    # One token is prefill's alone: no step, and nothing is divided by it.
    assert (found.requests[0].steps, found.requests[0].accepted_emitted) == (0, 0)


def test_what_failed_has_no_counts() -> None:
    lost = parse(Exchange(None, 1, [(2, b'{"id":0,"at":2,"step":[1,2]}')], 3, "closed", "gone"))
    assert counted(lost) == (RequestCounts(),)


def test_a_worker_that_was_restarted_shows() -> None:
    before, after = {"worker_tokens_total": 9.0}, {"worker_tokens_total": 3.0}
    assert in_process.counts([], before, after, "test").counter_reset
    assert not in_process.counts([], after, before, "test").counter_reset


def test_prefill_time_is_the_engines() -> None:
    assert counted(reply([(1, 0)], prefill_ms=36.5))[0].server_prefill_ms == 36.5


def test_a_folder_has_one_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "model"
    folder.mkdir()
    with pytest.raises(SpecbenchError, match=r"method\.draft: .*holds no model"):
        in_process.model_at(str(folder), "method.draft")
    (folder / "config.json").write_text("{}")
    first = in_process.model_at(str(folder), "model")
    assert (first.path, first.sha256) == (folder, in_process.model_at(str(folder), "model").sha256)
    (folder / "README.md").write_text("words change nothing")
    assert in_process.model_at(str(folder), "model").sha256 == first.sha256
    (folder / "model.safetensors").write_bytes(b"1")
    assert in_process.model_at(str(folder), "model").sha256 != first.sha256
    with pytest.raises(SpecbenchError, match=r"^method\.draft: .*neither a known name nor a file"):
        in_process.model_at(str(tmp_path / "none"), "method.draft")


@pytest.mark.parametrize("value", ["all", 0, True, 2.5, 10**9])
def test_threads_out_of_range(value: Any) -> None:
    with pytest.raises(Unsupported, match=r"engine\.args\.threads"):
        in_process.threads(EngineAsk(name="openvino", args={"threads": value}))
