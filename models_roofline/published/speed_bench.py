"""SPEED-Bench's step times (arXiv 2604.09557, Table 10) against the ledger, with nothing fitted to them.

What the paper gives: Llama-3.3-70B, batch 16, three drafts, mean decode step without and with speculation. What it
does not give in the parts that could be read, and what is assumed here: the device (B200 is named for the main
table), tensor parallelism (4, the harness's default), bf16 weights, the vanilla drafter (Llama-3.2-1B), and the
context of a mean step (the input and half of the 2,400 tokens that outputs have on average there).
"""

from __future__ import annotations

from io import StringIO

import numpy as np
import pandas as pd

from models_roofline.acceptance import Acceptance
from models_roofline.families import load_model
from models_roofline.hardware import find_device
from models_roofline.methods import DraftOptions
from models_roofline.published import read_table
from models_roofline.speedup import Settings, predict

DEVICE, TARGET, DRAFTER = "B200-HGX", "llama-3.1-70b", "llama-3.2-1b"
BATCH, K, TP, HALF_OUTPUT = 16, 3, 4, 1200


def ratios(tp: int = TP) -> pd.DataFrame:
    """The 12 rows with t_sd/t_ar as printed, as predicted, and the error of the prediction."""
    table = read_table("speed_bench_table10")
    table["ratio_measured"] = table.t_sd_ms / table.t_ar_ms
    for drafter, rows in table.groupby("drafter"):
        found = predict(
            load_model(TARGET),
            find_device(DEVICE),
            method="eagle3" if drafter == "EAGLE3" else "draft-model",
            k=K,
            batch=BATCH,
            context=rows.isl_tokens.to_numpy(float) + HALF_OUTPUT,
            acceptance=Acceptance.from_rate(0.5),  # the ratio does not depend on it
            draft=DraftOptions(model=None if drafter == "EAGLE3" else load_model(DRAFTER)),
            settings=Settings(tp=tp),
        )
        table.loc[rows.index, "ar_ms"] = found.t_step_s * 1e3
        table.loc[rows.index, "sd_ms"] = found.t_round_s * 1e3
    table["ratio_predicted"] = table.sd_ms / table.ar_ms
    table["error"] = table.ratio_predicted / table.ratio_measured - 1
    return table


def markdown() -> str:
    """The table of docs/prediction.md and its summary."""
    table, out = ratios(), StringIO()
    print(
        "| drafter | entropy | input | t_sd/t_ar printed | predicted | error | t_ar ms printed | predicted |",
        file=out,
    )
    print("|---|---|---|---|---|---|---|---|", file=out)
    for row in table.itertuples():
        print(
            f"| {row.drafter} | {row.entropy} | {row.isl_tokens} | {row.ratio_measured:.2f} | {row.ratio_predicted:.2f} "
            f"| {row.error:+.0%} | {row.t_ar_ms} | {row.ar_ms:.1f} |",
            file=out,
        )
    for name, rows in table.groupby("drafter"):
        print(
            f"\n{name}: mean absolute error {np.abs(rows.error).mean():.0%}, worst {_worst(rows):+.0%}.",
            file=out,
        )
    other = {tp: np.abs(ratios(tp).error).mean() for tp in (2, 4, 8)}
    print("\nMean absolute error by assumed tensor parallelism: ", end="", file=out)
    print(", ".join(f"{tp}: {error:.0%}" for tp, error in other.items()) + ".", file=out)
    return out.getvalue()


def _worst(rows: pd.DataFrame) -> float:
    return float(max(rows.error, key=abs))
