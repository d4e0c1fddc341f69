"""ByteCross's dense decode steps of Llama-3.1-8B against the ledger, with nothing fitted to them.

Two settings: compiled (torch 2.4 in captured graphs, split-K attention, batch 1, 2K to 128K tokens) and eager (batch 1
to 64 at about 160 tokens), where the cache is also copied in every step, which no roofline knows.

Boundary: measured against predicted; constants come from kernels (`fit`).
"""

from __future__ import annotations

import pandas as pd

from models_roofline.families import load_model
from models_roofline.hardware import find_device
from models_roofline.ledger import forward
from models_roofline.profile import profile_for
from models_roofline.published import read_table
from models_roofline.timing import Launch, step_time

MODEL = "llama-3.1-8b"
DEVICES = {"A100-SXM4-80GB": "A100-SXM4-80GB", "RTX A6000": "RTX-A6000", "H100 NVL": "H100-NVL-94GB"}


def compiled_steps() -> pd.DataFrame:
    """Dense steps in captured graphs: gpu, batch, context, measured_ms, predicted_ms, low_ms, high_ms, error."""
    sweep = read_table("bytecross_sweep_subset_ms")
    sweep = sweep[sweep["mode"] == "dense"].rename(columns={"ms_per_token": "measured_ms"})
    paths = read_table("bytecross_attention_paths_a100_ms")
    paths = paths[paths.dense_attention_kernel == "split_k"].rename(columns={"dense_ms": "measured_ms"})
    rows = pd.concat([paths, sweep], ignore_index=True).rename(columns={"context_tokens": "context"})
    return _against(rows.assign(batch=1), "graph")


def eager_steps() -> pd.DataFrame:
    """Dense steps launched one by one, at the mean context of the 64 generated tokens; the same columns."""
    rows = read_table("bytecross_dense_batch_ms").rename(columns={"ms_per_step": "measured_ms"})
    return _against(rows.assign(context=rows.prompt_tokens + rows.generated_tokens // 2), "eager")


def _against(rows: pd.DataFrame, launch: Launch) -> pd.DataFrame:
    found = pd.concat([_predicted(str(gpu), part, launch) for gpu, part in rows.groupby("gpu")])
    columns = ["gpu", "batch", "context", "measured_ms", "predicted_ms", "low_ms", "high_ms", "error"]
    return found[columns].reset_index(drop=True)


def _predicted(gpu: str, rows: pd.DataFrame, launch: Launch) -> pd.DataFrame:
    profile = profile_for(find_device(DEVICES[gpu]))
    batch, context = rows.batch.to_numpy(float), rows.context.to_numpy(float)
    step = step_time(forward(load_model(MODEL), batch=batch, context=context), profile, launch=launch)
    return rows.assign(
        predicted_ms=step.total_s * 1e3,
        low_ms=step.low_s * 1e3,
        high_ms=step.high_s * 1e3,
        error=step.total_s * 1e3 / rows.measured_ms.to_numpy(float) - 1,
    )
