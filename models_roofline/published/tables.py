"""Reading the published tables, and which of their rows are not truth.

A row is left out where it contradicts physics or measures something else than its label says: caches in place of
memory, an untuned kernel, experts that were not loaded. Each exclusion carries its reason and is listed, with the rows
it hit, on docs/constants.md.

Boundary: tables and masks; nothing is fitted or predicted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources

import pandas as pd

from models_roofline.hardware import find_device

SYSTEMS = {"a100_sxm": "A100-SXM4-80GB", "h100_sxm": "H100-SXM5-80GB", "l40s": "L40S"}
"""aiconfigurator's systems by their names in the device catalogue."""

Mask = Callable[[pd.DataFrame], "pd.Series[bool]"]


@dataclass(frozen=True)
class Exclusion:
    """Rows of one table that are not truth, and why."""

    rows: Mask
    reason: str


def read_table(name: str) -> pd.DataFrame:
    """The table of that name, as published. Lines that start with # are its source."""
    path = resources.files("models_roofline.published") / f"{name}.csv"
    with path.open(encoding="utf-8") as lines:
        table = pd.read_csv(lines, comment="#")
    derive = DERIVED.get(name)
    return derive(table) if derive else table


def usable(name: str) -> pd.DataFrame:
    """The table without its exclusions, numbered anew."""
    table = read_table(name)
    for exclusion in EXCLUSIONS.get(name, ()):
        table = table[~exclusion.rows(table)]
    return table.reset_index(drop=True)


def excluded(name: str) -> list[tuple[Exclusion, int]]:
    """Each exclusion of a table with the number of rows that it takes, in order."""
    table, found = read_table(name), []
    for exclusion in EXCLUSIONS.get(name, ()):
        hit = exclusion.rows(table)
        found.append((exclusion, int(hit.sum())))
        table = table[~hit]
    return found


# --- what is derived from the columns -----------------------------------------------------------------------


def _attention(table: pd.DataFrame) -> pd.DataFrame:
    """`kv_bytes` read by a call, and `dram_share`: that read at the peak of the memory, over the measured time."""
    value_bytes = table.kv_dtype.map({"bfloat16": 2, "fp8": 1})
    kv_bytes = table.batch_size * table.context_tokens * 2 * table.kv_heads * table.head_dim * value_bytes
    return table.assign(kv_bytes=kv_bytes, dram_share=_share_of_peak(kv_bytes, table))


def _experts(table: pd.DataFrame) -> pd.DataFrame:
    """`distinct` experts of the routing that was timed, and `dram_share` of reading them."""
    table = table.merge(
        read_table("aiconfigurator_distinct_experts"), on=["num_experts", "top_k", "num_tokens"], how="left"
    )
    balanced = table.distribution == "balanced"
    distinct = table.distinct_experts_balanced.where(balanced, table.distinct_experts_count_generator)
    weight_bytes = table.dtype.map({"bfloat16": 2, "fp8": 1, "fp8_block": 1, "w4a16_mxfp4": 4.25 / 8})
    read = distinct * 3 * table.hidden * table.moe_inter * weight_bytes
    return table.assign(distinct=distinct, dram_share=_share_of_peak(read, table))


def _share_of_peak(read_bytes: pd.Series[float], table: pd.DataFrame) -> pd.Series[float]:
    peaks = {system: find_device(device).bandwidth_bytes_per_s for system, device in SYSTEMS.items()}
    return read_bytes / (table.latency_ms * 1e-3) / table.system.map(peaks)


DERIVED: dict[str, Callable[[pd.DataFrame], pd.DataFrame]] = {
    "aiconfigurator_decode_attention_ms": _attention,
    "aiconfigurator_moe_layer_ms": _experts,
}


# --- what is left out ---------------------------------------------------------------------------------------


def _kv_above_peak(table: pd.DataFrame) -> pd.Series[bool]:
    return table.dram_share > 1


def _cached_kv(table: pd.DataFrame) -> pd.Series[bool]:
    cache = table.system.map({"l40s": 67.2e6, "h100_sxm": 34e6}).fillna(0)
    return (table.kv_bytes <= cache) & (table.dram_share > 1 / 8)


def _cached_weights(table: pd.DataFrame) -> pd.Series[bool]:
    return (table.system == "l40s") & (table.dtype == "fp8") & (table.n == 4096) & (table.k == 4096)


def _experts_not_loaded(table: pd.DataFrame) -> pd.Series[bool]:
    deepseek = table.model == "DeepSeek-V3/R1"
    return deepseek & (table.distribution == "balanced") & (table.num_tokens >= 16)


def _balanced_above_peak(table: pd.DataFrame) -> pd.Series[bool]:
    return _experts_above_peak(table) & (table.distribution == "balanced")


def _experts_above_peak(table: pd.DataFrame) -> pd.Series[bool]:
    return (table.system == "l40s") & (table.dram_share > 1)


def _untuned(table: pd.DataFrame) -> pd.Series[bool]:
    return (table.system == "h100_sxm") & (table.dtype == "fp8")


EXCLUSIONS: dict[str, tuple[Exclusion, ...]] = {
    "aiconfigurator_gemm_ms": (
        Exclusion(_cached_weights, "L40S fp8 4096 × 4096: the 17 MB of weights loop inside a 96 MB L2."),
    ),
    "aiconfigurator_decode_attention_ms": (
        Exclusion(_kv_above_peak, "Above the memory's peak: KV of at most 67 MB in the L2 of L40S."),
        Exclusion(
            _cached_kv,
            "KV of at most 67 MB on L40S or 34 MB on H100 sits in L2, and reading it from memory would take more than an "
            "eighth of the measured time. In a step the weights pass through L2 in between.",
        ),
    ),
    "aiconfigurator_moe_layer_ms": (
        Exclusion(
            _experts_not_loaded,
            "DeepSeek-V3, balanced, 16 tokens and more: less was read than the label says.",
        ),
        Exclusion(_balanced_above_peak, "L40S, balanced, above the memory's peak: experts sit in L2."),
        Exclusion(_experts_above_peak, "L40S, skewed, above the memory's peak: the same few experts in L2."),
        Exclusion(_untuned, "H100 per-tensor fp8: an untuned kernel at 15 to 18 % of peak."),
    ),
}
"""By table. Skewed rows (power_law_1.2) draw counts, not random routing: their experts come from
aiconfigurator_distinct_experts, never from N(t)."""
