"""Distinct experts: published values, exact ends, measured tables."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models_roofline.errors import RooflineError
from models_roofline.experts import MeasuredRouting, distinct_experts, independent_tokens
from models_roofline.published import read_table

ROUTERS = st.integers(1, 512).flatmap(lambda number: st.tuples(st.just(number), st.integers(1, number)))


@pytest.mark.parametrize(
    ("number", "top_k", "tokens", "expected"),
    [
        (8, 2, 1, 2.0),
        (8, 2, 32, 7.999196380594235),
        (128, 8, 4, 29.123046875),  # 29.1 experts a layer of Qwen3-30B-A3B when four tokens are verified
        (256, 8, 1, 8.0),
        (256, 8, 64, 222.4424876855104),
    ],
)
def test_uniform_routing(number: int, top_k: int, tokens: int, expected: float) -> None:
    assert distinct_experts(number, top_k, tokens) == pytest.approx(expected, rel=1e-13)


@given(ROUTERS)
def test_one_token_wakes_exactly_k(router: tuple[int, int]) -> None:
    number, top_k = router
    for routing in ("independent", "balanced"):
        assert distinct_experts(number, top_k, 1, routing) == top_k


@given(ROUTERS, st.floats(1, 4096), st.floats(1, 4096))
def test_never_falls_and_never_passes_balanced(router: tuple[int, int], a: float, b: float) -> None:
    fewer, more = distinct_experts(*router, np.sort([a, b]))
    assert router[1] <= fewer <= more * (1 + 1e-12)
    assert more <= distinct_experts(*router, max(a, b), "balanced") <= router[0]


def test_agrees_with_the_table_that_ships_with_the_timings() -> None:
    table = read_table("aiconfigurator_distinct_experts")
    for row in table.to_dict("records"):
        found = distinct_experts(row["num_experts"], row["top_k"], row["num_tokens"])
        assert found == pytest.approx(row["distinct_experts_uniform"], abs=0.006)
        found = distinct_experts(row["num_experts"], row["top_k"], row["num_tokens"], "balanced")
        assert found == row["distinct_experts_balanced"]


def test_drafts_of_one_request_route_alike() -> None:
    assert independent_tokens(4, 5, 0.0) == 20
    assert independent_tokens(4, 5, 1.0) == 4
    assert independent_tokens(4, 5, 0.25) == 16
    assert independent_tokens(4, 1, 0.7) == 4  # plain decoding has no drafts to overlap
    assert independent_tokens(np.ones((3, 1)), np.ones(2)).shape == (3, 2)


def test_a_measured_router() -> None:
    routing = MeasuredRouting(128, 8, (1, 4, 16), (8, 20, 50))
    found = distinct_experts(128, 8, np.array([1, 2, 4, 16, 64]), routing)
    np.testing.assert_allclose(found, [8, 14, 20, 50, 50])
    with pytest.raises(RooflineError, match="8 of 128 experts, the model routes 4 of 32"):
        distinct_experts(32, 4, 2, routing)


@pytest.mark.parametrize(
    ("tokens", "distinct"), [((), ()), ((1, 2), (8,)), ((2, 4), (8, 9)), ((1, 1), (8, 9)), ((1, 2), (9, 8))]
)
def test_a_measured_table_must_make_sense(tokens: tuple[float, ...], distinct: tuple[float, ...]) -> None:
    with pytest.raises(RooflineError, match="measured routing"):
        MeasuredRouting(128, 8, tokens, distinct)


def test_an_unknown_routing() -> None:
    with pytest.raises(RooflineError, match="--routing: 'skewed'"):
        distinct_experts(8, 2, 4, "skewed")  # type: ignore[arg-type]
