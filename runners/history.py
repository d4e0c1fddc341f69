"""The frozen history of multi-turn prompts: the baseline's own answers, asked for once and replayed to all arms.

With each arm's own answers the later turns would differ between arms, and a ratio would compare different
prompts. The transcript is stored beside the cells, so a resumed run replays the same one.
"""

from __future__ import annotations

from pathlib import Path

import orjson

from runners.base import Engine, Launch, Stream
from runners.client import TOTAL_TIMEOUT_S, run_async
from runners.drivers import parser, sender
from runners.load import Conversation, Encode, Player, closed_loop, conversations
from specbench.cell import Config
from specbench.errors import InvalidMeasurement, SpecbenchError
from specbench.trace import write_atomic
from workloads import Split


def frozen_history(
    run_dir: Path,
    config: Config,
    engine: Engine,
    launch: Launch,
    split: Split,
    encode: Encode | None = None,
) -> dict[str, tuple[str, ...]]:
    """Answers to every turn but the last, by prompt id; read from `history.json` or produced and stored there."""
    path = run_dir / "history.json"
    if not path.exists():
        replies = run_async(
            _ask(run_dir, config.model_copy(update={"concurrency": 1}), engine, launch, split, encode)
        )
        write_atomic(path, orjson.dumps(replies, option=orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS))
    return _read(path, split)


def _read(path: Path, split: Split) -> dict[str, tuple[str, ...]]:
    """The stored transcript. Raises SpecbenchError where it lacks a turn, since a cell would then replay another."""
    try:
        kept = {prompt_id: tuple(texts) for prompt_id, texts in orjson.loads(path.read_bytes()).items()}
        whole = all(len(kept[p.id]) == len(p.turns) - 1 for p in split.prompts if len(p.turns) > 1)
    except (ValueError, AttributeError, KeyError, TypeError):
        whole = False
    if not whole:
        raise SpecbenchError(
            f"{path}: damaged, so the finished cells cannot be gone on with; restore it, or give --out another place."
        )
    return kept


async def _ask(
    run_dir: Path, config: Config, engine: Engine, launch: Launch, split: Split, encode: Encode | None
) -> dict[str, list[str]]:
    asked = [c for c in conversations(split.prompts, None, "history") if len(c.prompt.turns) > 1]
    logs = run_dir / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    with engine.start(launch, logs / "history.log") as session:
        async with sender(engine, session, connections=1, timeout_s=TOTAL_TIMEOUT_S) as client:
            player = Player(client, engine, config, session.facts, encode)
            await closed_loop(asked, 1, player.play)
    parse = parser(engine)
    by_number = {sent.request.request: parse(sent.exchange) for sent in player.sent}
    return {
        c.prompt.id: [_text(by_number, c, turn) for turn in range(len(c.prompt.turns) - 1)] for c in asked
    }


def _text(by_number: dict[int, Stream], conversation: Conversation, turn: int) -> str:
    stream = by_number.get(conversation.first_request + turn)
    if stream is None or stream.status == "failed":
        why = stream.error if stream is not None else "an earlier turn failed"
        raise InvalidMeasurement(
            f"history: the baseline gave no answer to turn {turn + 1} of prompt {conversation.prompt.id} ({why}); "
            'nothing was measured. Look at logs/history.log, or set workload.history = "own".'
        )
    return stream.text
