"""Pinned acceptance through a whole run, short: `tests/benchmarks/pinned_acceptance.py` is the long form."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from runners.run import Runner
from specbench import trace
from specbench.plan import check_plan
from tests.benchmarks.pinned_acceptance import RATES, TOKENS, drafts_of, marginals, plan


@pytest.mark.engine
@pytest.mark.slow
def test_marginals_are_the_pinned_ones_and_drafts_are_cut_at_the_limit(model: str, tmp_path: Path) -> None:
    Runner(check_plan(plan(90, ["qa"]), "test"), tmp_path / "r").run()
    found = trace.load(tmp_path / "r")
    rows = found.requests[~found.requests["warmup"]]
    assert set(rows["output_tokens"]) == {TOKENS}
    assert {record.facts.extra["method"] for record in found.records} == {"draft-simple"}
    drafts = [draft for row in rows.itertuples() for draft in drafts_of(row)]
    whole = [draft for draft in drafts if draft.length == len(RATES)]
    # Lengths reckoned from the rest of the reply are the ones that the server drafted.
    assert len(drafts) == sum(record.steps_with_draft or 0 for record in found.records)
    assert sum(draft.length for draft in drafts) == rows["drafted"].sum()
    # A draft is cut where fewer than k tokens and the bonus token are left: at most the last few of a reply.
    assert 0 <= len(drafts) - len(whole) <= len(RATES) * len(rows)
    for got, rate in zip(marginals(whole), RATES, strict=True):
        assert got == pytest.approx(rate, abs=4 * math.sqrt(rate * (1 - rate) / len(whole)))
    for record in found.records:
        al_all, al_drafted, coverage = (record.metrics[n] for n in ("al_all", "al_drafted", "coverage"))
        assert al_all is not None
        assert al_drafted is not None
        assert coverage is not None
        assert al_all - 1 == pytest.approx(coverage * (al_drafted - 1), abs=1e-9)
