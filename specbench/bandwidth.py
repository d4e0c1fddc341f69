"""How fast this machine's cores read memory: the roof that a decode step on the CPU cannot pass.

A step of batch 1 reads the weights once (the memory roof of Williams et al. 2009, "Roofline"), so weights per
second beyond this rate mean wrong token counts or another model. Boundary: measures and returns a figure; the
comparison is a validity check's, with its slack.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import numpy as np
import psutil

MOST_BYTES = 2**30
"""Beyond this no cache of a CPU helps, so more would measure the same."""
TRIES = 8
"""The best counts: other work only slows a read."""


@lru_cache(maxsize=8)
def read_bytes_per_s(size: int, threads: int) -> float | None:
    """Best rate at which `threads` read `size` bytes, so caches help as they would help weights of that size.

    None where the memory for it is not free. Takes some 10 ms per 100 MB and try, once a process.
    """
    size = min(size, MOST_BYTES)
    if size < threads * 8 or size > psutil.virtual_memory().available // 4:
        return None
    parts = np.array_split(np.ones(size // 8, dtype=np.int64), threads)
    with ThreadPoolExecutor(threads) as pool:
        return max(_rate(parts, pool) for _ in range(TRIES))


def _rate(parts: list[np.ndarray], pool: ThreadPoolExecutor) -> float:
    start = time.perf_counter()
    list(pool.map(np.max, parts))
    return sum(part.nbytes for part in parts) / (time.perf_counter() - start)
