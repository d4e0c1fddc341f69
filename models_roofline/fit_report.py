"""docs/constants.md as text: formulas, constants, held-out errors, exclusions, and whole steps nobody fitted.

Boundary: layout; every number comes from `fit`, the published tables or the shipped profiles.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import pandas as pd

from models_roofline.arrays import Floats
from models_roofline.fit import FREE, Fit, default_kernels, travelled
from models_roofline.profile import Constant, Kernel
from models_roofline.published import EXCLUSIONS, excluded, read_table
from models_roofline.published.bytecross import compiled_steps, eager_steps

HEAD = """# Constants of the step-time model

Written by `python -m models_roofline.fit > docs/constants.md`; `--write` also rewrites `models_roofline/data/profiles/`.

    gemm       t = c0 + pn_p(bytes / (eb BW), 2 m' n k / (ef F))      m' = m rounded up to 64 rows, above 64 to 128
    attention  t = c0 + max(pn_p(c1 B h_kv/8, KV bytes / (e BW)), FLOPs / (ef F)) + c2 log2(1 + n/128)
    experts    t = c0 + pn_p(bytes / (eb BW), FLOPs / (ef F))
    pn_p(a, b) = (a^p + b^p)^(1/p);  p = 1 is the sum

`bytes` are weights, inputs and outputs (`models_roofline/ledger.py`); of experts N(m) distinct ones, and inputs and
outputs of every routed row. BW and F are the dense peaks of the device catalogue, B sequences, n cached tokens. Errors
are |predicted / measured − 1|, median / 90th percentile, in per cent. *Held out*: one shape (gemm), one batch
(attention) or one model (experts) at a time. *Other devices*: constants are the medians of the other devices. Ranges
in brackets are over the held-out refits. A share of 1.000 is its bound: more would mean above the datasheet's peak.

Timings: NVIDIA aiconfigurator @095f58a (Apache-2.0), vLLM kernels; A100 rows are vLLM 0.14, the others 0.24; fp8 rows
of gemm include quantising the activations. The tables hold one query token a sequence: nothing tests attention while
drafts are verified, its compute bound, recurrent state, or communication; those constants are assumptions and say so
in the profiles.
"""


def page(fits: Sequence[Fit]) -> str:
    """The whole page."""
    parts = [
        HEAD,
        *(_kind(kind, fits) for kind in FREE),
        _defaults(fits),
        _exclusions(),
        _compiled(),
        _eager(),
        TAIL,
    ]
    return "\n".join(parts).rstrip()


TAIL = """## How to read an interval

`low_s` and `high_s` of a step take every term lower or higher by its held-out 90th percentile, as if all kernels erred
the same way at once. That is wide for a step of many kernels, whose errors partly cancel, and it says nothing about
what the model leaves out (sampling, scheduling, a host that is late).

Two choices were made by looking at the errors, so the held-out ones are a little flattered: the loss (soft L1 at 6 %;
from 4 to 8 % the marks hold as well) and the eighth in the rule that leaves cache reads out which sit in L2. How much
hangs on that rule, held-out attention with only the rows above the memory's peak left out: H100 bf16 6.7 / 14.6, fp8
4.3 / 12.4, L40S bf16 7.0 / 26.6, fp8 4.4 / 16.8.
"""


def _kind(kind: str, fits: Sequence[Fit]) -> str:
    own = [each for each in fits if each.set.kind == kind]
    header = [
        "device",
        "format",
        "rows",
        *map(_heading, FREE[own[0].set.kind]),
        "fit",
        "held out",
        "other devices",
    ]
    lines = [
        [
            each.set.device,
            each.set.variant,
            str(len(each.set.seconds)),
            *(_range(name, each.kernel.constants[name]) for name in FREE[each.set.kind]),
            _errors(each.error),
            _errors(each.held_out),
            _errors(travelled(each, fits)),
        ]
        for each in own
    ]
    return f"## {kind}\n\n{_table(header, lines)}\n"


def _defaults(fits: Sequence[Fit]) -> str:
    kernels = default_kernels(fits)
    lines = [
        [kind, variant, _constants(kernel), f"{100 * kernel.error_median:.0f} / {100 * kernel.error_p90:.0f}"]
        for kind, variants in kernels.items()
        for variant, kernel in variants.items()
    ]
    words = """A device of a fitted one's architecture (sm80, sm90, sm89) takes its constants. Others take medians over the fitted
devices, with ranges over all their refits. The error of both is pooled over all sets of a kind, each predicted from the
other devices. Times do not travel as well as shares: a device of your own is worth a profile. Tiles of 64 and 128 rows
belong to the fitted kernels: other devices, and weights that are widened on the way (int4, GGUF types), are priced
without (m' = m up to 64 rows, then multiples of 16), the latter with an error of 50 % that is a guess. CPUs take defaults
that were not fitted (`data/profiles/cpu.json`)."""
    return (
        f"## Devices without a fit\n\n{words}\n\n{_table(['kind', 'format', 'constants', 'error'], lines)}\n"
    )


def _constants(kernel: Kernel) -> str:
    names = [name for name in kernel.constants if name not in ("small_tile", "tile")]
    return ", ".join(f"{_heading(name)} {_range(name, kernel.constants[name])}" for name in names)


def _exclusions() -> str:
    lines = [
        [f"`{name}`", str(len(read_table(name))), str(hit), exclusion.reason]
        for name in EXCLUSIONS
        for exclusion, hit in excluded(name)
    ]
    words = """Skewed expert rows (`power_law_1.2`) are scored with the distinct experts of the generator that made them, never
with N(t): they draw counts, not random routing."""
    return f"## Rows that are not truth\n\n{words}\n\n{_table(['table', 'rows', 'left out', 'why'], lines)}\n"


def _compiled() -> str:
    words = """ByteCross, Llama-3.1-8B bf16, batch 1, captured graphs. The constants above, nothing fitted to steps. RTX A6000 takes
the defaults."""
    return f"## Whole steps in graphs\n\n{words}\n\n{_steps(compiled_steps())}\n"


def _eager() -> str:
    words = """ByteCross again, launched one by one, about 160 tokens a sequence; no mark to pass. The host's floor is one number for
all hosts (the median of four batch-1 steps, two of them in this table). From there the measured steps grow by 0.5 to
0.7 ms a sequence, twenty to forty times what reading its cache takes: a cost of that harness (most likely it copies
the cache in every step) which the model does not have."""
    return f"## Whole eager steps\n\n{words}\n\n{_steps(eager_steps())}\n"


def _steps(steps: pd.DataFrame) -> str:
    lines = [
        [
            str(row["gpu"]),
            str(row["batch"]),
            str(row["context"]),
            f"{row['measured_ms']:.2f}",
            f"{row['predicted_ms']:.2f}",
            f"{row['low_ms']:.1f} to {row['high_ms']:.1f}",
            f"{100 * row['error']:+.1f} %",
        ]
        for _, row in steps.iterrows()
    ]
    return _table(["GPU", "batch", "context", "measured ms", "predicted ms", "interval", "error"], lines)


HEADINGS = {
    "floor_s": "c0 µs",
    "sequence_s": "c1 µs",
    "split_s": "c2 µs",
    "bandwidth_share": "eb",
    "compute_share": "ef",
    "sharpness": "p",
}


def _heading(name: str) -> str:
    return HEADINGS[name]


def _range(name: str, constant: Constant) -> str:
    factor, digits = (1e6, 2) if name.endswith("_s") else (1, 2 if name == "sharpness" else 3)
    value, low, high = (
        f"{factor * each:.{digits}f}" for each in (constant.value, constant.low, constant.high)
    )
    return f"{value} [{low}, {high}]"


def _errors(error: Floats) -> str:
    return f"{100 * np.median(error):.1f} / {100 * np.quantile(error, 0.9):.1f}" if len(error) else "-"


def _table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rows = [header, ["---"] * len(header), *lines]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in rows)
