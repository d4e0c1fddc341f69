"""The embedded prompts, what they hold, and choosing from them; the command that shows them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from specbench.cli.workloads import app
from workloads import (
    CATEGORIES,
    SPLITS,
    Prompt,
    Split,
    WorkloadError,
    load_split,
    near_duplicates,
    open_split,
    select,
)
from workloads.split import find_duplicates
from workloads.stats import describe

SPEC_BENCH = Path(__file__).parent / "data" / "datasets" / "spec_bench_rows.jsonl"


@pytest.fixture(scope="module")
def qualitative() -> Split:
    return load_split("qualitative")


def made(*prompts: Prompt) -> Split:
    return Split("made", prompts, "test", None, (), find_duplicates(prompts))


def run_cli(*args: str, width: int = 100) -> str:
    result = CliRunner().invoke(app, list(args), env={"COLUMNS": str(width)}, catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


# --- the embedded data ------------------------------------------------------------------------------------


def test_import_needs_the_standard_library_only() -> None:
    code = "import sys, workloads; print(*{name.split('.')[0] for name in sys.modules})"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    foreign = set(loaded) - set(sys.stdlib_module_names) - {"workloads", "__main__", "sitecustomize"}
    assert not {name for name in foreign if not name.startswith(("_", "usercustomize"))}


def test_qualitative_holds_sixteen_prompts_in_each_of_eleven_categories(qualitative: Split) -> None:
    assert qualitative.categories == CATEGORIES
    assert Counter(p.category for p in qualitative.prompts) == dict.fromkeys(CATEGORIES, 16)
    assert Counter(p.category for p in qualitative.prompts if p.multi_turn) == dict.fromkeys(CATEGORIES, 4)
    assert Counter(p.difficulty for p in qualitative.prompts) == {"easy": 44, "medium": 66, "hard": 66}
    assert max(len(p.turns) for p in qualitative.prompts) == 4


def test_multilingual_has_a_language_a_prompt_and_the_rest_is_english(qualitative: Split) -> None:
    multilingual = [p.language for p in qualitative.prompts if p.category == "multilingual"]
    assert sorted(filter(None, multilingual)) == sorted(
        ["ar", "de", "es", "fr", "hi", "it", "ja", "ko", "nl", "pl", "pt", "ru", "sw", "tr", "uk", "zh"]
    )
    assert {p.language for p in qualitative.prompts if p.category != "multilingual"} == {"en"}


@pytest.mark.parametrize("name", SPLITS)
def test_embedded_rows_are_complete_and_well_formed(name: str) -> None:
    split = load_split(name)
    assert (split.name, split.licence, split.duplicates) == (name, "Apache-2.0", ())
    for prompt in split.prompts:
        assert re.fullmatch(r"[a-z]+-[a-z0-9]+", prompt.id), prompt.id
        assert prompt.sub_category is not None
        assert re.fullmatch(r"[a-z]+(_[a-z]+)*(/[a-z]+(_[a-z]+)*)?", prompt.sub_category), prompt.sub_category
        assert prompt.difficulty in ("easy", "medium", "hard")
        assert prompt.expected_tokens is not None
        assert 40 <= prompt.expected_tokens <= 1200
        assert all(turn == turn.strip() for turn in prompt.turns), prompt.id
        assert (prompt.history, prompt.system, prompt.source) == ((), None, None)


def test_no_two_embedded_prompts_are_nearly_alike() -> None:
    prompts = [p for name in SPLITS for p in load_split(name).prompts]
    assert len({p.id for p in prompts}) == len(prompts)
    assert near_duplicates(prompts, 0.2) == []


def test_likeness_finds_a_changed_word_and_survives_layout() -> None:
    base = Prompt(id="a", turns=("Explain to a child why the sky above the harbour is blue in the morning.",))
    varied = replace(base, id="b", turns=(base.turns[0].replace("morning", "evening"),))
    laid_out = replace(base, id="c", turns=("  " + base.turns[0].upper().replace(" ", "\n"),))
    other = replace(base, id="d", turns=("Sort these nine numbers without using a loop.",))
    found = near_duplicates([base, varied, laid_out, other], 0.5)
    assert found[0] == ("a", "c", 1.0)
    assert {pair[:2] for pair in found} == {("a", "b"), ("a", "c"), ("b", "c")}


def test_likeness_is_the_jaccard_index_of_five_grams() -> None:
    # "abcdef" has {abcde, bcdef}, "bcdefg" {bcdef, cdefg}: one shared of three.
    pair = [Prompt(id="a", turns=("abcdef",)), Prompt(id="b", turns=("bcdefg",))]
    assert near_duplicates(pair, 0.3) == [("a", "b", 1 / 3)]
    assert near_duplicates(pair, 0.34) == []


# --- identity ---------------------------------------------------------------------------------------------


def test_prompt_hash_is_of_the_text_alone() -> None:
    prompt = Prompt(id="a", turns=("one", "two"), system="s")
    assert prompt.sha256 == replace(prompt, id="b", category="qa", difficulty="hard").sha256
    assert prompt.sha256 != replace(prompt, turns=("one two",)).sha256
    assert prompt.sha256 != replace(prompt, system=None).sha256
    # What coreutils' sha256sum says of the canonical JSON {"system":null,"turns":["a"]}
    known = "fd41c717295058d092d3b268181ea5cd711c400c2bf01656daf5c62d4f9ad013"
    assert Prompt(id="x", turns=("a",)).sha256 == known


def test_split_hash_covers_content_and_order_but_not_the_place(qualitative: Split) -> None:
    assert replace(qualitative, source="elsewhere", name="copy").sha256 == qualitative.sha256
    assert replace(qualitative, prompts=qualitative.prompts[::-1]).sha256 != qualitative.sha256
    changed = (replace(qualitative.prompts[0], expected_tokens=1), *qualitative.prompts[1:])
    assert replace(qualitative, prompts=changed).sha256 != qualitative.sha256


def test_describe_counts_and_lengths() -> None:
    prompts = [
        Prompt(id="a", category="x", turns=("abcd",), difficulty="easy", expected_tokens=10),
        Prompt(id="b", category="x", turns=("ab", "cd"), system="1234", language="de"),
        Prompt(id="c", category="y", turns=("ab",), difficulty="easy", expected_tokens=5),
    ]
    counts = describe(prompts)
    assert (counts["prompts"], counts["multi_turn"], counts["turns"], counts["expected_tokens"]) == (
        3,
        1,
        4,
        15,
    )
    assert (counts["chars_mean"], counts["chars_median"]) == (4.7, 4)  # (4 + 8 + 2) / 3
    assert (counts["difficulties"], counts["languages"]) == ({"easy": 2}, {"de": 1})
    assert counts["categories"]["y"]["prompts"] == 1
    assert describe([])["chars_mean"] is None


# --- selection --------------------------------------------------------------------------------------------


def ids(split: Split) -> list[str]:
    return [p.id for p in split.prompts]


def test_selection_is_the_same_everywhere(qualitative: Split) -> None:
    chosen = select(qualitative, ["coding", "rag", "writing"], 3, seed=7)
    # Pinned: a change of the rule would silently make new runs incomparable with stored ones.
    assert [i for i in ids(chosen) if i.startswith("coding")] == ["coding-07", "coding-08", "coding-12"]
    assert [i for i in ids(chosen) if i.startswith("writing")] == ["writing-04", "writing-07", "writing-16"]
    assert [i for i in ids(chosen) if i.startswith("rag")] == ["rag-01", "rag-08", "rag-10"]
    assert chosen.name == "qualitative"


@pytest.mark.parametrize("seed", range(5))
def test_three_of_sixteen_hold_one_conversation_and_three_difficulties_apart(
    qualitative: Split, seed: int
) -> None:
    chosen = select(qualitative, prompts_per_category=3, seed=seed)
    assert len(chosen.prompts) == 33
    for category in CATEGORIES:
        group = [p for p in chosen.prompts if p.category == category]
        assert sum(p.multi_turn for p in group) == 1
        single = [p.difficulty for p in group if not p.multi_turn]
        assert len(set(single)) == len(single), "single-turn prompts take turns over difficulties"


@pytest.mark.parametrize("seed", range(5))
def test_more_prompts_keep_the_fewer(qualitative: Split, seed: int) -> None:
    previous: set[str] = set()
    for n in range(1, 17):
        chosen = set(ids(select(qualitative, ["math"], n, seed=seed)))
        assert len(chosen) == n
        assert previous < chosen
        previous = chosen


def test_adding_a_category_leaves_the_others_as_they_were(qualitative: Split) -> None:
    alone = select(qualitative, ["math"], 4, seed=3)
    more = select(qualitative, ["qa", "math", "rag"], 4, seed=3)
    assert [p for p in ids(more) if p.startswith("math")] == ids(alone)
    assert more.sha256 == select(qualitative, ["rag", "math", "qa", "math"], 4, seed=3).sha256
    assert more.sha256 != select(qualitative, ["qa", "math", "rag"], 4, seed=4).sha256


@pytest.mark.parametrize(
    ("multi", "single", "asked", "quota"),
    [
        (4, 12, 1, 0),
        (4, 12, 2, 1),
        (4, 12, 8, 2),
        (15, 1, 1, 1),
        (15, 1, 2, 1),
        (15, 1, 15, 14),
        (3, 0, 2, 2),
    ],
)
def test_multi_turn_share(multi: int, single: int, asked: int, quota: int) -> None:
    prompts = [Prompt(id=f"m{i}", category="c", turns=(f"m{i}", "then")) for i in range(multi)]
    prompts += [Prompt(id=f"s{i}", category="c", turns=(f"s{i}",)) for i in range(single)]
    chosen = select(made(*prompts), prompts_per_category=asked)
    assert sum(p.multi_turn for p in chosen.prompts) == quota
    assert len(chosen.prompts) == asked


def test_max_turns_leaves_conversations_out_whole(qualitative: Split) -> None:
    single = select(qualitative, max_turns=1)
    assert len(single.prompts) == 176 - 44
    assert {p.sha256 for p in single.prompts} <= {p.sha256 for p in qualitative.prompts}
    assert len(select(qualitative, ["qa"], 12, max_turns=1).prompts) == 12


def test_a_repeated_text_is_chosen_once_and_stays_listed() -> None:
    split = made(*(Prompt(id=str(i), category="c", turns=(text,)) for i, text in enumerate(["x", "y", "x"])))
    chosen = select(split)
    assert ids(chosen) == ["0", "1"]
    assert [(d.id, d.same_as) for d in chosen.duplicates] == [("2", "0")]
    with pytest.raises(
        WorkloadError, match=r"has 2 to choose from \(1 repeats left out\); ask for 2 or fewer"
    ):
        select(split, prompts_per_category=3)


@pytest.mark.parametrize(
    ("wish", "says"),
    [
        (
            {"categories": ["codng"]},
            "categories: 'codng' is not in 'qualitative' (did you mean 'coding'?); it has",
        ),
        ({"categories": ["zzz"]}, "categories: 'zzz' is not in 'qualitative'; it has coding, math"),
        ({"categories": []}, "categories: the list is empty"),
        ({"categories": "coding"}, "categories: give a list, such as ['coding']"),
        (
            {"prompts_per_category": 17},
            "prompts_per_category = 17, but category 'coding' of 'qualitative' has 16 to choose from; ask for 16",
        ),
        ({"prompts_per_category": 0}, "prompts_per_category = 0: it must be 1 or more"),
        ({"max_turns": 0}, "max_turns = 0: it must be 1 or more"),
        (
            {"categories": ["qa"], "prompts_per_category": 13, "max_turns": 1},
            "has 12 to choose from (of at most 1 turns); ask for 12 or fewer",
        ),
    ],
)
def test_impossible_wishes_are_one_sentence(qualitative: Split, wish: dict[str, Any], says: str) -> None:
    with pytest.raises(WorkloadError) as caught:
        select(qualitative, **wish)
    assert says in str(caught.value)


def test_nothing_left_is_said() -> None:
    split = made(Prompt(id="a", category="c", turns=("x", "y")), Prompt(id="b", category="d", turns=("z",)))
    assert ids(select(split, max_turns=1)) == ["b"]
    with pytest.raises(
        WorkloadError, match=r"category 'c' of 'made' has no usable prompt \(of at most 1 turns\)"
    ):
        select(split, ["c"], max_turns=1)
    with pytest.raises(WorkloadError, match="every prompt of 'made' is longer"):
        select(made(split.prompts[0]), max_turns=1)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"turns": ()}, "`turns` is empty"),
        ({"turns": ("a",), "id": ""}, "`id` is empty"),
        ({"turns": ("a",), "language": " "}, "`language` is empty"),
        ({"turns": ("a", "\ud800")}, r"`turns[1]` holds half of a surrogate pair"),
        ({"turns": ("a",), "expected_tokens": 0}, "it must be 1 or more"),
    ],
)
def test_a_prompt_that_cannot_be_sent_does_not_exist(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(WorkloadError) as caught:
        Prompt(**{"id": "x"} | fields)
    assert says in str(caught.value)


# --- opening and showing ----------------------------------------------------------------------------------


def test_open_by_name_or_file() -> None:
    assert open_split("warmup").sha256 == load_split("warmup").sha256
    assert len(open_split(str(SPEC_BENCH)).prompts) == 3
    with pytest.raises(
        WorkloadError, match=r"neither an embedded split nor a file \(did you mean 'qualitative'\?\)"
    ):
        open_split("qualitatve")
    with pytest.raises(
        WorkloadError, match="'x' is not an embedded split; embedded are qualitative, demo, warmup"
    ):
        load_split("x")


def test_list_shows_every_split_with_its_hash(qualitative: Split) -> None:
    text = run_cli("list")
    assert re.search(rf"^qualitative +176 +257 +44 +11 .*{qualitative.sha256[:12]}$", text, re.MULTILINE)
    assert "coding 16" in text
    document = json.loads(run_cli("list", "--json"))
    assert [s["name"] for s in document["splits"]] == list(SPLITS)
    assert document["splits"][0]["sha256"] == qualitative.sha256


def test_show_names_what_was_refused_and_why() -> None:
    text = run_cli("show", str(SPEC_BENCH))
    assert "spec_bench_rows: 3 prompts in 3 categories" in text
    assert "Refused: 2 rows" in text
    assert "3: the id '241' is taken by line 2" in text
    document = json.loads(run_cli("show", str(SPEC_BENCH), "--json"))
    assert [p["id"] for p in document["prompts"]] == ["81", "241", "500"]
    assert document["prompts"][0]["turns"] == ["turn one", "turn two refers to turn one"]
    assert [r["line"] for r in document["rejected"]] == [3, 4]


def test_show_takes_categories_and_a_limit() -> None:
    text = run_cli("show", "qualitative", "--category", "qa", "--category", "math", "--limit", "2")
    assert "32 prompts in 2 categories" in text
    assert "math-02" in text
    assert "math-03" not in text
    assert "30 more; --limit 32 shows all." in text
    document = json.loads(run_cli("show", "qualitative", "--category", "qa", "--json"))
    assert len(document["prompts"]) == document["split"]["prompts"] == 16
    with pytest.raises(WorkloadError, match="did you mean 'coding'"):
        run_cli("show", "qualitative", "--category", "codin")


@pytest.mark.parametrize("width", [60, 100, 200])
def test_lines_fit_the_terminal_also_with_wide_characters(width: int) -> None:
    from unicodedata import east_asian_width

    lines = run_cli("show", "qualitative", "--category", "multilingual", width=width).splitlines()
    widths = [sum(2 if east_asian_width(c) in "WF" else 1 for c in line) for line in lines]
    assert max(widths) <= width
    assert any(line.rstrip().endswith("…") for line in lines)


def test_control_characters_of_a_file_do_not_reach_the_terminal(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "clear\u001b[2J me\u0007\nnow"}) + "\n")
    text = run_cli("show", str(path))
    assert "clear [2J me now" in text
    assert not {"\x1b", "\x07"} & set(text)
