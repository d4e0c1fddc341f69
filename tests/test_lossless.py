"""runners.lossless and `specbench lossless`: on the loopback engine, and on llama.cpp with a lossy method beside."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from runners.lossless import Ask, Check, Checked, Greedy
from runners.run import Runner
from specbench.equality import Divergence
from specbench.errors import SpecbenchError
from specbench.losslessness import compare_continuations
from specbench.plan import check_plan
from tests.conftest import Call
from tests.test_tokens import folder

WORDS = "the of and to in is that it was for"


def plan(model: str, engine: str, *methods: dict[str, Any], concurrency: int = 1) -> dict[str, Any]:
    return {
        "name": "lossless",
        "model": model,
        "workload": {"split": "demo"},
        "load": {"concurrency": [concurrency]},
        "engine": [{"name": engine}],
        "method": [{"name": "none", "baseline": True}, *methods],
    }


def check(tmp_path: Path, raw: dict[str, Any], ask: Ask) -> list[Checked]:
    return Check(Runner(check_plan(raw, "test"), tmp_path / "run"), ask, tmp_path / "logs").run()


def test_equal_texts_settle_it(tmp_path: Path) -> None:
    raw = plan(
        str(folder(tmp_path / "m", words=WORDS)), "loopback", {"name": "draft-simple", "k": 2}, concurrency=2
    )
    itself, arm = check(tmp_path, raw, Ask(prompts=3, tokens=12, draws=6))
    assert (itself.baseline, arm.baseline, arm.method, arm.concurrency) == (
        True,
        False,
        "draft-simple k=2",
        2,
    )
    for found in (itself, arm):
        assert (found.greedy.prompts, found.greedy.equal, found.greedy.divergences) == (3, 3, ())
        # The loopback's text knows no temperature: one continuation, so sampling tells nothing against it.
        assert found.sampled is not None
        assert found.sampled.p_value == 1
        assert found.lossless is True
    assert len(list((tmp_path / "logs").glob("*.log"))) == 5
    assert not (tmp_path / "run").exists()


def test_without_a_baseline_there_is_nothing_to_be_equal_to(tmp_path: Path) -> None:
    raw = plan(str(folder(tmp_path / "m")), "loopback", {"name": "draft-simple"})
    raw["method"][0]["baseline"] = False
    with pytest.raises(SpecbenchError, match=r"^method: no \[\[method\]\] says baseline = true"):
        check(tmp_path, raw, Ask())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--temperature", "inf"], "--temperature"),
        (["--tokens", "99999999999999999999"], "--tokens"),
        (["--draws", "5000000000"], "--draws"),
        (["--logs", __file__], "--logs"),
    ],
)
def test_options_that_no_check_can_have(tmp_path: Path, call: Call, words: list[str], said: str) -> None:
    path = write_plan(tmp_path / "plan.toml", "smollm2-135m", "loopback")
    code, _, err = call("lossless", str(path), *words)
    assert code == 2
    assert said in err
    assert err.count("\n") == 1


def checked(equal: int, beyond: int | None, lossy: bool | None) -> Checked:
    parted = (Divergence(3, 1, 2),) * (4 - equal)
    same, other = [("a",)] * 60 + [("b",)] * 60, [("a",)] * 20 + [("b",)] * 100
    sampled = None if lossy is None else compare_continuations(same, other if lossy else same, tokens=1)
    return Checked("e", "m", 1, False, False, Greedy(4, equal, parted, beyond, None), sampled)


@pytest.mark.parametrize(
    ("equal", "beyond", "lossy", "want"),
    [
        (4, None, None, True),
        (4, None, False, True),
        (4, 0, True, False),  # a sampler can be wrong where greedy text is right
        (3, 0, False, True),  # parted at ties alone
        (3, 2, False, False),
        (3, None, False, None),  # parted, and nobody can say why
        (3, None, True, False),
    ],
)
def test_the_verdict(equal: int, beyond: int | None, lossy: bool | None, want: bool | None) -> None:
    assert checked(equal, beyond, lossy).lossless is want


def test_a_text_that_ended_early_stays_open() -> None:
    """Its end token stands in no text: what the baseline thinks of it was not asked."""
    ended, went_on = Divergence(3, 1, None), Divergence(3, None, 2)
    for parted, want in ((ended, None), (went_on, True)):
        assert Checked("e", "m", 1, False, False, Greedy(4, 3, (parted,), 0, 0.0), None).lossless is want
    assert Checked("e", "m", 1, False, False, Greedy(4, 3, (ended,), 1, 2.0), None).lossless is False


def write_plan(path: Path, model: str, engine: str, *methods: str) -> Path:
    lines = ['name = "lossless"', f"model = {json.dumps(model)}", "[workload]", 'split = "demo"']
    lines += ["[[engine]]", f'name = "{engine}"', "[[method]]", 'name = "none"', "baseline = true"]
    path.write_text("\n".join([*lines, *methods]) + "\n")
    return path


def test_the_command(tmp_path: Path, call: Call) -> None:
    path = write_plan(
        tmp_path / "p.toml", str(folder(tmp_path / "m")), "loopback", "[[method]]", 'name = "draft-simple"'
    )
    options = ("--prompts", 2, "--tokens", 8, "--draws", 0)
    code, out, err = call("lossless", path, *options, "--json")
    assert code == 0
    documents = json.loads(out)
    assert [(d["method"], d["baseline"], d["lossless"]) for d in documents] == [
        ("none", True, True),
        ("draft-simple", False, True),
    ]
    assert "draft-simple: 2 texts" in err
    code, out, _ = call("lossless", path, *options)
    assert code == 0
    assert "none again" in out
    assert "2 of 2" in out


@pytest.mark.engine
@pytest.mark.slow
def test_a_draft_model_is_lossless_on_llama_cpp(model: str, tmp_path: Path, call: Call) -> None:
    draft = ["[[method]]", 'name = "draft-model"', f"draft = {json.dumps(model)}", "k = 3"]
    path = write_plan(tmp_path / "p.toml", model, "llamacpp", *draft)
    code, out, _ = call("lossless", path, "--prompts", 4, "--tokens", 24, "--draws", 40, "--json")
    itself, arm = json.loads(out)
    assert code == 0
    assert (itself["greedy"]["equal"], itself["lossless"]) == (4, True)
    assert arm["lossless"] is True
    assert arm["sampled"]["prefixes"][0]["outcomes"] > 1
