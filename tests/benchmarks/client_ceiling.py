"""Repeat the client's self-test and print each figure with its median: `python -m tests.benchmarks.client_ceiling`.

Absolute speeds depend on machine and neighbours, so this is run by hand and is not a test. The figures wanted
on a 2-core x86-64 virtual machine are 150,000 frames per client CPU-second draining and 60,000 paced.
"""

from __future__ import annotations

import argparse
from statistics import median

from runners.selftest import run_selftest

COLUMNS = (
    "frames_per_cpu_s",
    "frames_per_cpu_s_single",
    "frames_per_cpu_s_paced",
    "reads_per_cpu_s",
    "stamp_error_p50_s",
    "stamp_error_p99_s",
)


def main() -> None:
    """Print one row a run and the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    rows: list[list[float]] = []
    print("".join(f"{name:>24}" for name in COLUMNS))
    for _ in range(parser.parse_args().runs):
        result = run_selftest()
        rows.append([getattr(result, name) for name in COLUMNS])
        _print(rows[-1])
    print("median")
    _print([median(column) for column in zip(*rows, strict=True)])


def _print(row: list[float]) -> None:
    print("".join(f"{value:>24,.0f}" if value > 1 else f"{value * 1e3:>21.3f} ms" for value in row))


if __name__ == "__main__":
    main()
