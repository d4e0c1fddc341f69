"""speculation_profile.json: round trip, published figures, and files whose parts disagree."""

import json
from pathlib import Path
from typing import Any

import pytest

from models_roofline.acceptance import Acceptance, parse_acceptance
from models_roofline.errors import RooflineError
from models_roofline.speculation_profile import (
    as_document,
    profile_from,
    profile_of,
    read_profile,
    write_profile,
)


def document(**changes: Any) -> dict[str, Any]:
    """A valid profile of an EAGLE-3 head; figures as in a test of NVIDIA Model-Optimizer's exporter."""
    return {
        "schema_version": "1.0",
        "measured": True,
        "method": "eagle3",
        "draft_checkpoint": {"id": "someone/head"},
        "target_model": None,
        "num_speculative_tokens": 3,
        "block_size": None,
        "max_supported_k": 3,
        "verification_method": "longest_prefix",
        "conditional_accept_rates": [0.816082, 0.776577, 0.749591],
        "marginal_accept_rates": [0.816082, 0.63375, 0.475054],
        "mean_accept_length": 2.924887,
        "mean_accept_length_per_request": 2.99,
        "accept_length_model": "chain_analytic",
        "accept_length_by_k": {"3": 2.924887},
        "acceptance_length_histogram": None,
        "per_category": {"coding": {"mean_accept_length": 3.1}},
        **changes,
    }


def without(*names: str) -> dict[str, Any]:
    return {name: value for name, value in document().items() if name not in names}


def test_a_profile_is_read() -> None:
    acceptance = profile_of(document()).acceptance()
    assert acceptance.al_drafted(3) == pytest.approx(2.924887, abs=1e-5)
    assert acceptance.conditional == pytest.approx((0.816082, 0.776577, 0.749591), abs=1e-5)
    assert acceptance.al_drafted(1) == pytest.approx(1.816082)


@pytest.mark.parametrize("missing", ["marginal_accept_rates", "conditional_accept_rates"])
def test_one_of_the_two_vectors_is_enough(missing: str) -> None:
    assert profile_of(without(missing)).acceptance().al_drafted(3) == pytest.approx(2.924887, abs=1e-5)


def test_written_and_read_again(tmp_path: Path) -> None:
    path = tmp_path / "speculation_profile.json"
    profile = profile_of(document())
    write_profile(profile, path)
    assert read_profile(path) == profile
    written = json.loads(path.read_text(encoding="utf-8"))
    assert written["per_category"] == {"coding": {"mean_accept_length": 3.1}}
    assert written["mean_accept_length_per_request"] == 2.99
    assert written["validation"]["mean_consistency"]["passed"]


def test_the_written_keys_are_those_of_the_format() -> None:
    assert document().keys() <= as_document(profile_of(document())).keys()
    assert as_document(profile_from(Acceptance.from_rate(0.5), 2)).keys() <= {*document(), "validation"}


@pytest.mark.parametrize("rate", [0.0, 1 / 3, 1.0])
def test_an_acceptance_survives_the_file(tmp_path: Path, rate: float) -> None:
    path = tmp_path / "speculation_profile.json"
    write_profile(profile_from(Acceptance.from_rate(rate), 5, "eagle3", target_model="org/target"), path)
    acceptance = parse_acceptance(str(path), k=[1, 5])
    assert acceptance.al_drafted([1, 5]) == pytest.approx(
        Acceptance.from_rate(rate).al_drafted([1, 5]), abs=1e-5
    )
    assert read_profile(path).details["target_model"] == "org/target"


def test_lengths_without_a_step_do_not_make_marginals_rise() -> None:
    """40 steps of one token and 60 of four: all of the first three drafts were accepted in 60 %."""
    broken = document(
        conditional_accept_rates=[0.0, 0.0, 0.6],
        marginal_accept_rates=[0.0, 0.0, 0.6],
        acceptance_length_histogram={"1": 40, "4": 60},
        mean_accept_length=2.8,
        accept_length_by_k={"3": 2.8},
    )
    profile = profile_of(broken)
    assert profile.marginal == (0.6, 0.6, 0.6)
    assert "position 1: 0 against 0.6" in profile.notes[0]
    assert profile_of(as_document(profile)).notes == ()


def test_mean_per_step_and_per_request() -> None:
    """MiniMax-M2.7 with DFlash, counts of a Model-Optimizer test: 2.4733 a step, 2.5467 a request."""
    given = document(
        method="dflash",
        accept_length_model="measured_per_k",
        conditional_accept_rates=None,
        marginal_accept_rates=None,
        acceptance_length_histogram={"1": 8611, "2": 7814, "3": 5337, "4": 8891},
        mean_accept_length=2.473283,
        accept_length_by_k={"3": 2.473283, "7": 2.9},
    )
    profile = profile_of(given)
    assert profile.acceptance().al_drafted(3) == pytest.approx(2.4733, abs=5e-5)
    # A block drafter says nothing about another k, unless it was measured there.
    assert profile.acceptance(7).al_drafted(7) == pytest.approx(2.9)
    with pytest.raises(RooflineError, match=r"k = 3, 7 and does not hold for k = 5"):
        profile.acceptance(5)
    with pytest.raises(RooflineError, match="blocks of 3 drafts"):
        profile.acceptance().al_drafted([2, 3])
    with pytest.raises(RooflineError, match="over requests"):
        profile_of({**given, "mean_accept_length": 2.54671})


def test_block_verification_holds_at_its_own_length() -> None:
    with pytest.raises(RooflineError, match="blocks of 3"):
        profile_of(document(verification_method="block")).acceptance().al_drafted(2)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"schema_version": "2.0"}, "newer than 1.0.*update"),
        ({"schema_version": None}, "schema_version is missing"),
        ({"schema_version": "new"}, "schema_version"),
        ({"measured": False}, "placeholder"),
        ({"num_speculative_tokens": None}, "num_speculative_tokens"),
        ({"num_speculative_tokens": True}, "num_speculative_tokens"),
        ({"num_speculative_tokens": 2}, "has 3 entries and num_speculative_tokens is 2"),
        ({"schema_version": "9" * 5000}, "no version number like"),
        ({"max_supported_k": 2}, "max_supported_k must be a whole number of at least 3"),
        ({"verification_method": "typical"}, "'typical' is unknown"),
        ({"marginal_accept_rates": [0.8, 0.6, 0.7], "conditional_accept_rates": None}, "0.7 at position 3"),
        ({"marginal_accept_rates": [80, 60, 40], "conditional_accept_rates": None}, "80 at position 1"),
        ({"marginal_accept_rates": "0.8"}, "list of numbers"),
        ({"marginal_accept_rates": [0.8, "0.6", 0.4]}, "list of numbers"),
        ({"conditional_accept_rates": [0.9, 0.9, 0.9]}, "products"),
        ({"marginal_accept_rates": None, "conditional_accept_rates": None}, "neither"),
        ({"mean_accept_length": 3.1}, r"3\.1 but the rates imply 2\.9249"),
        ({"mean_accept_length": "2.92"}, "mean_accept_length"),
        ({"mean_accept_length": 10**400}, "mean_accept_length"),
        ({"acceptance_length_histogram": {"1": 10, "5": 10}}, "accept length 5, outside 1 … 4"),
        ({"acceptance_length_histogram": {"1": -1}}, "none negative"),
        ({"acceptance_length_histogram": {"one": 1}}, "must map"),
        ({"acceptance_length_histogram": [1, 2]}, "must map"),
        ({"accept_length_by_k": {"3": 4.5}}, "accept_length_by_k"),
    ],
)
def test_a_wrong_profile_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(RooflineError, match=words):
        profile_of(document(**changes))


def test_a_newer_minor_version_is_read() -> None:
    profile = profile_of(document(schema_version="1.3", novelty=1))
    assert profile.details["novelty"] == 1


@pytest.mark.parametrize("content", [b"", b"[1]", b"{", b"\xff\xfe", b"null", b"[" * 100_000])
def test_a_file_that_is_no_profile_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "acceptance.json"
    path.write_bytes(content)
    with pytest.raises(RooflineError, match=r"^--acceptance: .*acceptance\.json: is no") as caught:
        parse_acceptance(str(path), k=3)
    assert "\n" not in str(caught.value)


def test_nan_is_neither_read_nor_written(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(document(marginal_accept_rates=[float("nan")] * 3)), encoding="utf-8")
    with pytest.raises(RooflineError, match="list of numbers"):
        read_profile(path)
    with pytest.raises(RooflineError, match="finite"):
        write_profile(profile_from(Acceptance.from_rate(0.5), 2, note=float("nan")), path)


def test_places_that_cannot_be_read_or_written(tmp_path: Path) -> None:
    with pytest.raises(RooflineError, match="cannot be read"):
        read_profile(tmp_path)
    with pytest.raises(RooflineError, match="cannot be written"):
        write_profile(profile_from(Acceptance.from_rate(0.5), 2), tmp_path / "none" / "profile.json")
    with pytest.raises(RooflineError, match="at least one draft"):
        profile_from(Acceptance.from_rate(0.5), 0)


def test_the_example_of_the_docs_is_a_profile() -> None:
    page = (Path(__file__).parent.parent / "docs" / "acceptance.md").read_text()
    example = json.loads(
        page[page.index('{"schema_version"') : page.index("}", page.index('{"schema_version"')) + 1]
    )
    assert profile_of(example).acceptance(2).al_drafted(2) == pytest.approx(1 + 0.82 + 0.66)
