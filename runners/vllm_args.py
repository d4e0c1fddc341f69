"""`engine.args` of vLLM: what a plan may set of its server, with the limits and defaults that a measurement needs.

Boundary: words in, options and environment out. Drafting is `flags/vllm.toml`'s.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from runners import adapters
from runners.adapters import Scalar
from specbench import host
from specbench.errors import Unsupported

CONTEXT_TOKENS = 4096
KV_GIB = 2
"""Memory for the KV cache on a CPU: vLLM's default is half of the machine's, whatever else runs there."""
MOST = 2**31 - 1
DTYPES = ("auto", "bfloat16", "float16", "float32")
FLAGS: Mapping[str, tuple[str, type, float, float]] = {
    "slots": ("--max-num-seqs", int, 1, MOST),
    "context": ("--max-model-len", int, 1, MOST),
    "batched_tokens": ("--max-num-batched-tokens", int, 1, MOST),
    "tensor_parallel": ("--tensor-parallel-size", int, 1, 1024),
    "data_parallel": ("--data-parallel-size", int, 1, 1024),
    "gpu_memory": ("--gpu-memory-utilization", float, 0.01, 1),
}
"""Names that are one option of the server, with the least and the most."""
OTHERS = ("dtype", "prefix_caching", "eager", "port")
CPU_ONLY, GPU_ONLY = ("threads", "kv_gib"), ("gpu_memory",)
RANKS = ("tensor_parallel", "data_parallel")


@dataclass(frozen=True)
class Asked:
    """What `engine.args` resolve to."""

    argv: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)
    slots: int | None = None
    context: int = CONTEXT_TOKENS
    threads: int | None = None
    dtype: str = "bfloat16"
    port: int | None = None

    @classmethod
    def of(cls, args: Mapping[str, Scalar], concurrency: int, on_cpu: bool) -> Asked:
        """Check and resolve. Raises Unsupported that names the argument."""
        _check_names(args, on_cpu)
        given = {"context": CONTEXT_TOKENS} | dict(args)
        slots = int(_number("slots", args["slots"], int, 1, MOST)) if "slots" in args else None
        if slots is not None and slots < concurrency:
            raise Unsupported("engine.args.slots", f"{slots} slots cannot serve concurrency {concurrency}")
        dtype = _choice("dtype", args.get("dtype", "bfloat16"), DTYPES)
        argv = [word for name in FLAGS if name in given for word in _flag(name, given[name])]
        argv += ["--dtype", dtype, _switch("prefix-caching", args.get("prefix_caching", False))]
        argv += ["--enforce-eager"] if _truth("eager", args.get("eager", False)) else []
        port = int(_number("port", args["port"], int, 1024, 65535)) if "port" in args else None
        threads = adapters.threads(args, host.cores()) if on_cpu else None
        env = _cpu_env(threads, args) if threads is not None else {}
        return cls(tuple(argv), env, slots, int(given["context"]), threads, dtype, port)


def _check_names(args: Mapping[str, Scalar], on_cpu: bool) -> None:
    known = (*FLAGS, *OTHERS, *CPU_ONLY)
    for name in args:
        if name not in known:
            raise Unsupported(f"engine.args.{name}", f"vllm does not take it; allowed: {', '.join(known)}")
        if name in (GPU_ONLY if on_cpu else CPU_ONLY):
            kind = "CPUs" if on_cpu else "GPUs"
            raise Unsupported(
                f"engine.args.{name}", f"has no meaning for vLLM's build for {kind}; leave it out"
            )


def _flag(name: str, value: Scalar) -> tuple[str, str]:
    flag, kind, least, most = FLAGS[name]
    return flag, f"{_number(name, value, kind, least, most):.15g}"


def _number(name: str, value: Scalar, kind: type, least: float, most: float) -> float:
    whole = kind is int
    right = isinstance(value, int | float) and not isinstance(value, bool | str)
    if not right or (whole and not isinstance(value, int)) or not least <= float(value) <= most:
        what = "a whole number" if whole else "a number"
        raise Unsupported(
            f"engine.args.{name}", f"must be {what} from {least:g} to {most:.10g}, not {value!r}"
        )
    return float(value)


def _choice(name: str, value: Scalar, choices: tuple[str, ...]) -> str:
    if value not in choices:
        raise Unsupported(f"engine.args.{name}", f"must be one of {', '.join(choices)}, not {value!r}")
    return str(value)


def _truth(name: str, value: Scalar) -> bool:
    if not isinstance(value, bool):
        raise Unsupported(f"engine.args.{name}", f"must be true or false, not {value!r}")
    return value


def _switch(flag: str, value: Scalar) -> str:
    return f"--enable-{flag}" if _truth(flag.replace("-", "_"), value) else f"--no-enable-{flag}"


def _cpu_env(threads: int, args: Mapping[str, Scalar]) -> dict[str, str]:
    """Compute threads bound to the first CPUs that may be used: a bare count is not something vLLM takes.

    It wants a list for each rank, and takes the rank's memory from beside those cores; cores are not divided here.
    """
    for name in RANKS:
        if _number(name, args.get(name, 1), int, 1, MOST) > 1:
            why = "vLLM's CPU build needs cores of its own for each rank, which are not divided here; leave it out"
            raise Unsupported(f"engine.args.{name}", why)
    usable = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(threads)
    bound = ",".join(map(str, list(usable)[:threads]))
    kv_gib = _number("kv_gib", args.get("kv_gib", KV_GIB), int, 1, MOST)
    return {"VLLM_CPU_KVCACHE_SPACE": f"{kv_gib:g}", "VLLM_CPU_OMP_THREADS_BIND": bound}
