"""The constants come back from the published tables, and hold where they were held out."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from models_roofline.fit import FREE, Fit, Set, default_kernels, device_kernels, fit, seconds, sets, solve
from models_roofline.hardware import find_device
from models_roofline.profile import Kernel, profile_for
from models_roofline.published import EXCLUSIONS, excluded, read_table, usable

PAGE = Path(__file__).parents[1] / "docs" / "constants.md"

WANTED = {
    ("A100-SXM4-80GB", "gemm", "bf16"): (6.3, 17.7),
    ("H100-SXM5-80GB", "gemm", "bf16"): (5.1, 11.9),
    ("H100-SXM5-80GB", "gemm", "fp8"): (8.7, 17.2),
    ("L40S", "gemm", "bf16"): (6.3, 12.9),
    ("L40S", "gemm", "fp8"): (5.5, 14.9),
    ("A100-SXM4-80GB", "attention", "bf16"): (3.9, 14.3),
    ("H100-SXM5-80GB", "attention", "bf16"): (5.4, 11.2),
    ("H100-SXM5-80GB", "attention", "fp8"): (3.6, 12.7),
    ("L40S", "attention", "bf16"): (4.0, 14.4),
    ("L40S", "attention", "fp8"): (4.0, 9.7),
    ("A100-SXM4-80GB", "experts", "bf16"): (11.3, 18.4),
    ("H100-SXM5-80GB", "experts", "bf16"): (2.4, 13.2),
    ("H100-SXM5-80GB", "experts", "fp8_block"): (6.4, 20),
    ("H100-SXM5-80GB", "experts", "mxfp4"): (7.5, 27),
    ("L40S", "experts", "bf16"): (4.6, 21),
    ("L40S", "experts", "fp8"): (2.0, 12.9),
    ("L40S", "experts", "fp8_block"): (3.4, 16),
    ("L40S", "experts", "mxfp4"): (1.6, 9.6),
}
"""Held-out errors in per cent, median and 90th percentile, that an independent fit of the same tables reached."""


@cache
def fits() -> dict[tuple[str, str, str], Fit]:
    return {(each.device, each.kind, each.variant): fit(each) for each in sets()}


def test_every_published_set_is_fitted() -> None:
    assert set(fits()) == set(WANTED)


@pytest.mark.parametrize("key", WANTED, ids="-".join)
def test_held_out_errors_are_no_worse_than_a_tenth_above(key: tuple[str, str, str]) -> None:
    found = fits()[key].held_out
    median, p90 = WANTED[key]
    assert 100 * np.median(found) <= 1.1 * median
    assert 100 * np.quantile(found, 0.9) <= 1.1 * p90


@pytest.mark.parametrize("device", sorted({key[0] for key in WANTED}))
def test_shipped_constants_are_the_fitted_ones(device: str) -> None:
    shipped = profile_for(find_device(device)).kernels
    for kind, variants in device_kernels(list(fits().values()), device).items():
        for variant, kernel in variants.items():
            assert_same(kernel, shipped[kind][variant])


def test_shipped_defaults_are_the_medians() -> None:
    shipped = profile_for(find_device("RTX-A6000")).kernels
    for kind, variants in default_kernels(list(fits().values())).items():
        for variant, kernel in variants.items():
            assert_same(kernel, shipped[kind][variant])


def test_a_device_takes_the_fit_of_its_architecture_with_the_error_of_travelling() -> None:
    """Same chip, same constants: H200 and H800 are H100's, A800 and the 40 GB card are A100's."""
    own, default = profile_for(find_device("H100-SXM5-80GB")), profile_for(find_device("RTX-A6000"))
    for name in ("H200-SXM5-141GB", "H800-SXM5-80GB"):
        other = profile_for(find_device(name))
        assert other.basis == "fitted on H100-SXM5-80GB, of the same architecture (Hopper sm90)"
        assert other.kernels["gemm"]["bf16"].constants == own.kernels["gemm"]["bf16"].constants
        assert other.kernels["gemm"]["bf16"].error_p90 == default.kernels["gemm"]["bf16"].error_p90
    same = [
        profile_for(find_device(name)).kernels["attention"]["bf16"]
        for name in ("A100-SXM4-40GB", "A800-SXM4-80GB")
    ]
    assert same[0] == same[1]
    assert "architecture (Ampere sm80)" in profile_for(find_device("A100-SXM4-40GB")).basis


def assert_same(found: Kernel, shipped: Kernel) -> None:
    """To what another version of the solver may change; a floor to a tenth of a microsecond."""
    for name, constant in found.constants.items():
        if name not in ("small_tile", "tile"):
            assert constant.value == pytest.approx(shipped[name], rel=0.02, abs=1e-7)
    assert found.error_median == pytest.approx(shipped.error_median, rel=0.05)
    assert found.error_p90 == pytest.approx(shipped.error_p90, rel=0.05)


@pytest.mark.parametrize("each", sets(), ids=lambda each: f"{each.device}-{each.kind}-{each.variant}")
def test_known_constants_come_back_from_times_made_with_them(each: Set) -> None:
    truth = {name: free.starts[0] * 1.1 for name, free in FREE[each.kind].items()}
    made = replace(each, seconds=seconds(each, truth))
    assert solve(made) == pytest.approx(truth, rel=1e-3)


def test_exclusions_and_their_rows() -> None:
    rows = {name: [hit for _, hit in excluded(name)] for name in EXCLUSIONS}
    assert rows == {
        "aiconfigurator_gemm_ms": [26],
        "aiconfigurator_decode_attention_ms": [40, 115],
        "aiconfigurator_moe_layer_ms": [34, 15, 13, 168],
    }
    for name, hits in rows.items():
        assert len(usable(name)) == len(read_table(name)) - sum(hits)


def test_the_page_lists_every_exclusion_and_error() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for name in EXCLUSIONS:
        for exclusion, hit in excluded(name):
            assert f"| {hit} | {exclusion.reason} |" in page
    for each in fits().values():
        assert f"| {100 * np.median(each.held_out):.1f} / " in page


def test_tables_keep_their_source() -> None:
    folder = Path(__file__).parents[1] / "models_roofline" / "published"
    for path in folder.glob("*.csv"):
        assert path.read_text(encoding="utf-8").startswith("# ")
    assert "NVIDIA" in (folder / "NOTICE").read_text(encoding="utf-8")
