"""Plans: what they expand to, and that every mistake is one sentence with the field and what is allowed."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

from specbench.errors import SpecbenchError
from specbench.plan import check_plan, nearest, read_plan

EXAMPLES = Path(__file__).parent.parent / "examples"
PLAN = (EXAMPLES / "ngram-on-smollm2.toml").read_text()


def changed(old: str, new: str) -> dict[str, Any]:
    assert old in PLAN
    return tomllib.loads(PLAN.replace(old, new, 1))


def sentence(old: str, new: str) -> str:
    with pytest.raises(SpecbenchError) as caught:
        check_plan(changed(old, new), "plan.toml")
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("plan.toml: ")
    return str(caught.value).removeprefix("plan.toml: ")


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.toml")), ids=lambda p: p.stem)
def test_every_example_is_a_valid_plan(path: Path) -> None:
    plan = read_plan(path)
    assert plan.name == path.stem
    assert any(arm.baseline for comparison in plan.comparisons() for arm in comparison.arms)


def test_arrays_are_axes() -> None:
    comparisons = check_plan(tomllib.loads(PLAN), "plan").comparisons()
    assert [c.concurrency for c in comparisons] == [1, 4]
    assert [arm.config.method.label for arm in comparisons[0].arms] == [
        "none",
        "ngram-simple k=4 n=4",
        "ngram-simple k=8 n=4",
    ]
    assert len({arm.config.config_id for c in comparisons for arm in c.arms}) == 6


def test_engine_arguments_are_axes_too() -> None:
    raw = changed("slots = 4", "slots = [4, 8]")
    assert len(check_plan(raw, "plan").comparisons()) == 4


def test_a_block_holds_every_arm_once_each_way() -> None:
    comparison = check_plan(tomllib.loads(PLAN), "plan").comparisons()[0]
    orders = []
    for block in range(20):
        labels = [arm.config.method.label for arm in comparison.order(7, block)]
        assert labels[:3] == labels[3:][::-1]
        assert len(set(labels[:3])) == 3
        orders.append(tuple(labels))
    assert len(set(orders)) > 3, "the order must be random over blocks"
    assert orders[0] == tuple(arm.config.method.label for arm in comparison.order(7, 0)), "and seeded"


def test_the_two_urls_of_an_engine_belong_to_one_comparison() -> None:
    raw = changed('name = "llamacpp"', 'name = "openai"\nurl = "http://b"\nbaseline_url = "http://a"')
    (first, _) = check_plan(raw, "plan").comparisons()
    assert [arm.config.engine.url for arm in first.arms] == ["http://a", "http://b", "http://b"]


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("concurrency", "concurency", "load.concurency: unknown key; allowed: concurrency; did you mean concurrency?"),
        ('"frozen"', '"frosen"', "workload.history: 'frosen' is not allowed; allowed: frozen, own; did you mean frozen?"),
        ("restart", "restrat", "repeat.restrat: unknown key; allowed: blocks, budget_s, restart; did you mean restart?"),
        ("seed = 7", "sede = 7", "sede: unknown key; allowed: engine, load, method, model, name, repeat, sampling, schema, seed, workload; did you mean seed?"),
        ("baseline = true", "baselin = true", "method[0].baselin: unknown key; allowed: acceptance, baseline, draft, k, min_hits, n, n_min, name, p_min; did you mean baseline?"),
    ],
)  # fmt: skip
def test_a_typo_names_the_field_the_allowed_and_the_nearest(old: str, new: str, expected: str) -> None:
    assert sentence(old, new) == expected


@pytest.mark.parametrize(
    ("old", "new", "field"),
    [
        ("blocks = 10", "blocks = 0", "repeat.blocks"),
        ("max_tokens = 64", "max_tokens = -1", "workload.max_tokens"),
        ("max_tokens = 64", "max_tokens = 'many'", "workload.max_tokens"),
        ("concurrency = [1, 4]", "concurrency = []", "load.concurrency"),
        ("concurrency = [1, 4]", "concurrency = [0]", "load.concurrency"),
        ("k = [4, 8]", "k = ['x']", "method[1].k"),
        ("k = [4, 8]", "k = [0]", "method[1].k"),
        ("k = [4, 8]", "acceptance = { pinned = [0.4, 0.8] }", "method[1].acceptance.pinned"),
        ("k = [4, 8]", "acceptance = { pined = [0.8] }", "method[1].acceptance.pined"),
        ("schema = 1", "schema = 9", "schema"),
        ('name = "ngram-on-smollm2"', 'name = "../up"', "name"),
        ('model = "smollm2-135m"', "", "model"),
        ("baseline = true", "baseline = true\nk = [2, 3]", "method"),
    ],
)
def test_a_wrong_value_names_its_field(old: str, new: str, field: str) -> None:
    assert sentence(old, new).startswith(f"{field}:")


def test_two_baselines_are_refused() -> None:
    assert "at most one" in sentence("n = 4 ", "baseline = true\nn = 4 ")


@pytest.mark.parametrize("text", [b"", b"not toml [", b"\xff\xfe\x00"])
def test_unreadable_files_are_one_sentence(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "plan.toml"
    path.write_bytes(text)
    with pytest.raises(SpecbenchError, match=r"plan\.toml"):
        read_plan(path)


def test_a_missing_file_and_a_directory(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.toml", tmp_path):
        with pytest.raises(SpecbenchError, match="cannot be read"):
            read_plan(path)


def test_nearest_gives_nothing_where_nothing_is_close() -> None:
    assert nearest("xyzzy", ["frozen", "own"]) is None
