"""Runs llama.cpp's own HTTP server inside this process and says where it listens.

It is started by path with the interpreter that has `xllamacpp`, so it imports nothing but that and the
standard library, and everything it does is in its arguments. One JSON line on stdout says that it is ready;
whatever the native code prints goes to stderr. It ends when its stdin closes.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

NGRAM_MAPS = ("ngram_simple", "ngram_map_k", "ngram_map_k4v")
"""The speculation types that share one parameter record: match length, draft length, hits needed."""


def parser() -> argparse.ArgumentParser:
    """The options. Drafting options left out keep the engine's own defaults."""
    options = argparse.ArgumentParser(prog="llama_cpp_child", allow_abbrev=False)
    options.add_argument("--model", required=True)
    options.add_argument("--slots", type=int, default=1)
    options.add_argument("--context", type=int, default=4096, help="tokens per slot")
    options.add_argument("--threads", type=int, default=1)
    options.add_argument("--spec-type", default="none")
    options.add_argument("--draft-model")
    options.add_argument("--draft-n-max", type=int)
    options.add_argument("--draft-n-min", type=int)
    options.add_argument("--draft-p-min", type=float)
    options.add_argument("--ngram-size-n", type=int)
    options.add_argument("--ngram-size-m", type=int)
    options.add_argument("--ngram-min-hits", type=int)
    options.add_argument("--ngram-mod-n-match", type=int)
    options.add_argument("--ngram-mod-n-min", type=int)
    options.add_argument("--ngram-mod-n-max", type=int)
    options.add_argument("--lookup-cache-static")
    options.add_argument("--lookup-cache-dynamic")
    options.add_argument("--synth-rates", help="marginal acceptance to produce, comma separated")
    options.add_argument("--synth-len", type=float, help="mean tokens per step to produce")
    options.add_argument("--verbosity", type=int, default=2, help="1 errors, 2 warnings, 3 information")
    return options


def _give(record: Any, **values: object) -> None:
    """Set the fields that were asked for; None leaves the engine's default."""
    for name, value in values.items():
        if value is not None:
            setattr(record, name, value)


def _set_speculation(spec: Any, asked: argparse.Namespace, types: Any) -> None:
    wanted = asked.spec_type.replace("-", "_")
    spec.types = [getattr(types, f"COMMON_SPECULATIVE_TYPE_{wanted.upper()}")]
    draft = spec.draft
    _give(draft, n_max=asked.draft_n_max, n_min=asked.draft_n_min, p_min=asked.draft_p_min)
    _give(draft.mparams, path=asked.draft_model)
    draft.cpuparams.n_threads = draft.cpuparams_batch.n_threads = asked.threads
    if wanted in NGRAM_MAPS:
        sizes = {"size_n": asked.ngram_size_n, "size_m": asked.ngram_size_m, "min_hits": asked.ngram_min_hits}
        _give(getattr(spec, wanted), **sizes)
    mod = {"n_match": asked.ngram_mod_n_match, "n_min": asked.ngram_mod_n_min, "n_max": asked.ngram_mod_n_max}
    _give(spec.ngram_mod, **mod)
    caches = {
        "lookup_cache_static": asked.lookup_cache_static,
        "lookup_cache_dynamic": asked.lookup_cache_dynamic,
    }
    _give(spec.ngram_cache, **caches)
    rates = [float(rate) for rate in asked.synth_rates.split(",")] if asked.synth_rates else None
    _give(spec, synth_rates=rates, synth_len=asked.synth_len)


def server_params(asked: argparse.Namespace, engine: Any) -> Any:
    """The engine's parameter record: loopback, a free port, no prompt kept from one request to the next."""
    params = engine.CommonParams()
    params.model.path = asked.model
    params.hostnames = ["127.0.0.1"]
    params.port = 0
    params.n_parallel = asked.slots
    params.n_ctx = asked.context * asked.slots  # the server divides it over its slots
    params.kv_unified = False
    params.fit_params = False  # it would change the context that was asked for
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = asked.threads
    params.cache_prompt = False
    params.cache_ram_mib = 0
    params.cache_idle_slots = False
    params.endpoint_metrics = params.endpoint_slots = True
    params.ui = False
    params.verbosity = asked.verbosity
    _set_speculation(params.speculative, asked, engine.common_speculative_type)
    return params


def main(argv: Sequence[str] | None = None) -> None:
    """Serve until stdin closes."""
    asked = parser().parse_args(argv)
    ready = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # native code that prints must not break the one line that is read from stdout
    import xllamacpp

    server = xllamacpp.Server(server_params(asked, xllamacpp))
    line = {"address": server.listening_address, "version": importlib.metadata.version("xllamacpp")}
    print(json.dumps(line), file=ready, flush=True)
    sys.stdin.buffer.read()
    os._exit(0)  # a clean stop would first wait for requests still running


if __name__ == "__main__":
    main()
