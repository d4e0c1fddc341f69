"""Multi-turn prompts: which earlier answers a later turn carries, by the hash of the messages that were sent."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import orjson

from runners.run import Runner
from specbench import trace
from specbench.plan import check_plan
from workloads import load_split

PROMPTS = {prompt.id: prompt for prompt in load_split("qualitative").prompts}


def measured(out: Path, history: str) -> trace.Run:
    raw = {
        "name": "history",
        "model": "script",
        "workload": {"categories": ["qa"], "prompts_per_category": 4, "max_tokens": 8, "history": history},
        "repeat": {"blocks": 1},
        "engine": [{"name": "loopback", "args": {"step_ms": 1, "prefill_ms": 1}}],
        "method": [{"name": "none", "baseline": True}, {"name": "ngram-simple", "k": 4}],
    }
    Runner(check_plan(raw, "test"), out).run()
    return trace.load(out)


def expected_sha256(prompt_id: str, turn: int, replies: list[str]) -> str:
    """Of the messages of one turn: the user's turns so far with the answers between them."""
    messages: list[dict[str, str]] = []
    for number, text in enumerate(PROMPTS[prompt_id].turns[: turn + 1]):
        messages.append({"role": "user", "content": text})
        if number < turn:
            messages.append({"role": "assistant", "content": replies[number]})
    return hashlib.sha256(orjson.dumps(messages)).hexdigest()


def later_turns(run: trace.Run) -> Any:
    rows = run.requests[~run.requests["warmup"] & (run.requests["turn"] > 0)]
    assert len(rows), "the selection holds a prompt with several turns"
    return rows


def test_frozen_history_replays_the_baselines_transcript_to_every_arm(tmp_path: Path) -> None:
    run = measured(tmp_path / "frozen", "frozen")
    replies = orjson.loads((run.path / "history.json").read_bytes())
    assert set(replies) == set(later_turns(run)["prompt_id"])
    for row in later_turns(run).itertuples():
        assert row.prompt_sha256 == expected_sha256(row.prompt_id, row.turn, replies[row.prompt_id])
    assert len({record.facts.history_sha256 for record in run.records}) == 1
    assert run.records[0].facts.history_sha256


def test_own_history_carries_what_the_arm_itself_answered(tmp_path: Path) -> None:
    run = measured(tmp_path / "own", "own")
    assert not (run.path / "history.json").exists()
    for cell_id, rows in later_turns(run).groupby("cell_id"):
        texts = {text["request"]: text["text"] for text in run.texts(str(cell_id))}
        for row in rows.itertuples():
            answers = [texts[row.request - row.turn + number] for number in range(row.turn)]
            assert all(answers)
            assert row.prompt_sha256 == expected_sha256(row.prompt_id, row.turn, answers)


def test_a_stored_transcript_is_used_again(tmp_path: Path) -> None:
    """On resume the same text is replayed, whatever the baseline would answer now."""
    run = measured(tmp_path / "run", "frozen")
    kept = orjson.loads((run.path / "history.json").read_bytes())
    name = next(iter(kept))
    kept[name][0] = "another answer"
    (run.path / "history.json").write_bytes(orjson.dumps(kept))
    plan = check_plan(run.manifest["plan"], "run.json")
    more = plan.model_copy(update={"repeat": plan.repeat.model_copy(update={"blocks": 2})})
    Runner(more, run.path).run(resume=True)
    rows = later_turns(trace.load(run.path))
    second = rows[(rows["block"] == 1) & (rows["prompt_id"] == name) & (rows["turn"] == 1)]
    assert set(second["prompt_sha256"]) == {expected_sha256(name, 1, ["another answer"])}
