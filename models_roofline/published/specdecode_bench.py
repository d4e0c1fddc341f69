"""SpecDecode-Bench's step costs (arXiv 2601.11580) against the ledger, with nothing fitted to them.

Its authors fitted linear costs to vLLM with Llama-3.1-8B on one H100: seconds of a target step by cached tokens and
by tokens in the step, and of drafting with an EAGLE head. The coefficients are theirs; the step times of both models
are compared over batches and draft lengths.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from models_roofline.acceptance import Acceptance
from models_roofline.families import load_model
from models_roofline.hardware import find_device
from models_roofline.speedup import Settings, predict

KV_S, TOKEN_S, STEP_S = 3.92645679e-08, 2.10103129e-05, 5.88590713e-03
"""Target: seconds a cached token, a token in the step, and a step."""
DRAFT_KV_S, DRAFT_TOKEN_S, DRAFT_S = 2.37768493e-09, 8.41429603e-07, 2.13526175e-03
"""EAGLE head, all drafts of a round."""
ROUND_S = 1.20683946e-03
"""What a round takes beyond its parts."""
CONTEXT = 1000
BATCHES, DRAFTS = (1, 8, 32, 128), (0, 1, 3, 5)


def steps() -> pd.DataFrame:
    """Step and round times of both models, in ms, by batch and k."""
    batch, k = np.array(BATCHES)[:, None], np.array(DRAFTS)[None]
    found = predict(
        load_model("llama-3.1-8b"), find_device("H100-SXM5-80GB"), method="eagle", k=k, batch=batch, context=CONTEXT,
        acceptance=Acceptance.from_rate(0.5), settings=Settings(overhead_s=ROUND_S),
    )  # fmt: skip
    verify = KV_S * batch * CONTEXT + TOKEN_S * batch * (k + 1) + STEP_S
    draft = DRAFT_KV_S * batch * CONTEXT + DRAFT_TOKEN_S * batch * k + DRAFT_S
    rounds = np.where(k > 0, verify + draft + ROUND_S, verify)
    columns = {
        "batch": batch, "k": k, "verify_theirs_ms": verify * 1e3, "verify_ms": found.t_verify_s * 1e3,
        "round_theirs_ms": rounds * 1e3, "round_ms": found.t_round_s * 1e3,
    }  # fmt: skip
    return pd.DataFrame({name: np.broadcast_to(v, verify.shape).ravel() for name, v in columns.items()})


def markdown() -> str:
    """The table of docs/prediction.md and its summary."""
    table = steps()
    table["error"] = table.verify_ms / table.verify_theirs_ms - 1
    lines = [
        "| batch | k | verify ms, theirs | ledger | error | round ms, theirs | ledger + 1.2 |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row.batch} | {row.k} | {row.verify_theirs_ms:.2f} | {row.verify_ms:.2f} | {row.error:+.0%} "
        f"| {row.round_theirs_ms:.2f} | {row.round_ms:.2f} |"
        for row in table.itertuples()
    ]
    worst = max(table.error, key=abs)
    said = f"Verification: mean absolute error {np.abs(table.error).mean():.0%}, worst {worst:+.0%}."
    return "\n".join([*lines, "", said])
