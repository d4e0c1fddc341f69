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
        ("baseline = true", "baselin = true", "method[0].baselin: unknown key; allowed: acceptance, args, baseline, draft, engines, k, min_hits, n, n_min, name, p_min; did you mean baseline?"),
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
        ('name = "llamacpp"', 'name = "llamacpp"\ncommand = "docker run \'image"', "engine[0].command"),
        ('name = "llamacpp"', 'name = "llamacpp"\ncommand = " "', "engine[0].command"),
        ('name = "llamacpp"', 'name = "llamacpp"\ncommand = "\'\'"', "engine[0].command"),
        ('name = "llamacpp"', 'name = "llamacpp"\npython = ""', "engine[0].python"),
        ("max_tokens = 64", "max_tokens = 64\nprompts = 'ids'\ntemplate = { messages = 1 }", "workload"),
        ('name = "llamacpp"', 'name = "openai"\nurl = "http://me:word@127.0.0.1:1"', "engine[0].url"),
        ('name = "llamacpp"', 'name = "openai"\nurl = "http://127.0.0.1:1/v1?key=1"', "engine[0].url"),
        ("baseline = true", "baseline = true\nk = [2, 3]", "method"),
    ],
)
def test_a_wrong_value_names_its_field(old: str, new: str, field: str) -> None:
    assert sentence(old, new).startswith(f"{field}:")


# --- several engines --------------------------------------------------------------------------------------

TWO = """
schema = 1
name = "two"
model = "smollm2-135m"
[[engine]]
name = "llamacpp"
[[engine]]
name = "vllm"
[[method]]
name = "none"
baseline = true
[[method]]
name = "ngram"
k = 4
[[method]]
name = "suffix"
engines = ["vllm"]
args = { max_tree_depth = [8, 16] }
"""


def two(old: str = "", new: str = "") -> dict[str, Any]:
    assert old in TWO
    return tomllib.loads(TWO.replace(old, new, 1) if old else TWO)


def test_a_method_can_be_for_some_engines_only() -> None:
    llamacpp, vllm = check_plan(two(), "plan").comparisons()
    assert [arm.config.method.label for arm in llamacpp.arms] == ["none", "ngram k=4"]
    assert [arm.config.method.label for arm in vllm.arms] == [
        "none",
        "ngram k=4",
        "suffix max_tree_depth=8",
        "suffix max_tree_depth=16",
    ]
    assert {arm.config.engine.name for arm in vllm.arms} == {"vllm"}


def test_each_engine_may_have_its_own_baseline() -> None:
    raw = two("baseline = true", 'baseline = true\nengines = ["vllm"]')
    raw["method"].append({"name": "none", "baseline": True, "engines": ["llamacpp"], "n": 3})
    assert [c.arms[0].baseline or c.arms[-1].baseline for c in check_plan(raw, "p").comparisons()] == [
        True
    ] * 2


def test_which_methods_an_engine_runs_is_part_of_the_plans_identity() -> None:
    narrowed = two('name = "ngram"', 'name = "ngram"\nengines = ["vllm"]')
    assert check_plan(narrowed, "p").plan_id != check_plan(two(), "p").plan_id


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ('["vllm"]', '["vlm"]', "method[2].engines: 'vlm' is no [[engine]] of this plan; allowed: llamacpp, vllm; did you mean vllm?"),
        ('["vllm"]', "[]", "method[2].engines: "),
        ('["vllm"]', '"vllm"', "method[2].engines: Input should be a valid array"),
        ("[8, 16]", "[]", "method[2].args: max_tree_depth is an empty array; an axis needs at least one value."),
        ("max_tree_depth = [8, 16]", "k = 4", "method[2].args: k is a key of [[method]] itself; write it there."),
        ('engines = ["vllm"]', "baseline = true", "method: at most one [[method]] may say baseline = true for llamacpp."),
    ],
)  # fmt: skip
def test_a_mistake_about_engines_names_its_field(old: str, new: str, expected: str) -> None:
    with pytest.raises(SpecbenchError) as caught:
        check_plan(two(old, new), "plan")
    assert str(caught.value).removeprefix("plan: ").startswith(expected)


def test_an_engine_without_a_method_is_refused() -> None:
    raw = two()
    for table in raw["method"]:
        table["engines"] = ["vllm"]
    with pytest.raises(SpecbenchError, match=r"method: no \[\[method\]\] is for llamacpp; add one"):
        check_plan(raw, "plan")


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
