"""How a replica starts: its script and the trouble it is to make, from the environment; then it serves.

`SPECBENCH_REPLICA` holds JSON: `script` has fields of `loopback_script.Script` over those that the command line
gives. `start` says by the number of a start, from 1 and counted in the file `count`, what happens in it: a word of
`LAST_WORDS`, `killed`, `slow` or `port`, or the faults of its requests as in a script (`{"3": {"5": "die"}}`).

Boundary: processes and logs; what is served is the dialect's.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import orjson

from runners.loopback_script import Script
from runners.loopback_server import Server, run

VARIABLE = "SPECBENCH_REPLICA"

LAST_WORDS = {
    "die": "RuntimeError: the weights of this model cannot be read",
    "memory": "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB.",
    "model": "OSError: no-such-model is not a local folder and is not a valid model identifier",
}
"""What a start that fails writes last, by its trouble."""
SLOW_S = 1.5


def script_of(given: Mapping[str, Any], faults: Mapping[str, str]) -> Script:
    """The script of a command line, with the environment's over it and the faults of this start."""
    whole = {**given, **_asked().get("script", {})}
    whole["faults"] = {**whole.get("faults", {}), **faults}
    return Script.from_json(orjson.dumps(whole).decode())


def serve(make: Callable[[Script], Server], given: Mapping[str, Any], port: int) -> None:
    """Make the trouble that this start is to make, or serve until the end of the process."""
    trouble = begin()
    taken = socket.create_server(("127.0.0.1", port)) if trouble == "port" else None
    try:
        run(make(script_of(given, trouble if isinstance(trouble, dict) else {})), port)
    except OSError as error:
        sys.exit(f"OSError: {error.strerror}")
    finally:
        if taken is not None:
            taken.close()


def begin() -> str | dict[str, str] | None:
    """Load, as far as this start comes; what else it is to be troubled by is returned."""
    trouble = _trouble()
    print("loading weights", file=sys.stderr, flush=True)
    if isinstance(trouble, str) and trouble in LAST_WORDS:
        sys.exit(LAST_WORDS[trouble])
    if trouble == "killed":  # as the kernel does where the host's memory runs out
        print("loading weights: 7 of 9 shards", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    if trouble == "slow":
        time.sleep(SLOW_S)
    return trouble


def _asked() -> dict[str, Any]:
    """What the environment asks for; empty where it asks for nothing."""
    value: dict[str, Any] = orjson.loads(os.environ.get(VARIABLE) or "{}")
    return value


def _trouble() -> str | dict[str, str] | None:
    """The trouble of this start, which is counted."""
    given = _asked()
    if "count" not in given:
        return None
    count = Path(given["count"])
    with count.open("ab") as file:
        file.write(b".")
    trouble: str | dict[str, str] | None = given.get("start", {}).get(str(count.stat().st_size))
    return trouble
