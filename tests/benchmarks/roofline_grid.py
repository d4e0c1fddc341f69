"""Cells a second of the analytic model over open grids of a million cells, on one core.

`python -m tests.benchmarks.roofline_grid` prints the ledger with its step time, and whole predictions of a method.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from models_roofline import (
    Acceptance,
    Settings,
    find_device,
    forward,
    load_model,
    predict,
    profile_for,
    step_time,
)

BATCH, CONTEXT, K, KEEP = np.ix_(
    np.arange(1, 51), np.linspace(1, 131_000, 50), np.arange(0, 20), np.linspace(0.05, 1, 20)
)
H100 = find_device("H100-SXM5-80GB")


def main() -> None:
    """One row a case."""
    print(f"{'model':14} {'what':24} {'keep axis':16} {'cells':>9} {'seconds':>8} {'cells/s':>12}")
    for name in ("llama-3.1-8b", "gpt-oss-20b", "deepseek-v3"):
        for axis in ("keep_projection", "keep_kv"):
            _time(name, "step", axis, lambda name=name, axis=axis: _step(name, axis))
    for method in ("ngram", "eagle3", "sparse-kv-self"):
        for axis in ("keep_projection", "keep_kv"):
            _time("llama-3.1-8b", f"predict {method}", axis, lambda m=method, axis=axis: _predict(m, axis))


def _step(name: str, axis: str) -> int:
    ops = forward(load_model(name), batch=BATCH, context=CONTEXT, tokens=K + 1, **{axis: KEEP})
    return step_time(ops, profile_for(H100)).total_s.size


def _predict(method: str, axis: str) -> int:
    found = predict(
        load_model("llama-3.1-8b"), H100, method=method, batch=BATCH, context=CONTEXT, k=K,
        acceptance=Acceptance.from_rate(0.8), settings=Settings(check_memory=False), **{axis: KEEP},
    )  # fmt: skip
    return found.tpot_s.size


def _time(model: str, what: str, axis: str, run: Callable[[], int]) -> None:
    start = time.perf_counter()
    cells = run()
    spent = time.perf_counter() - start
    print(f"{model:14} {what:24} {axis:16} {cells:9} {spent:8.3f} {cells / spent:12.3g}")


if __name__ == "__main__":
    main()
