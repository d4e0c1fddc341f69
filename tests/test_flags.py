"""runners.flags: templates filled in, what a table does not offer, and the tables held to the engines' help texts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from runners import flags, llama_cpp_child
from specbench.cell import Method
from specbench.errors import Unsupported
from tests.help_texts import HELP, assert_flags_known, emitted_settings, settings

TABLES = sorted(path.stem for path in flags.HERE.glob("*.toml") if path.stem != "recipes")

TOY = """
[[method]]
name = "none"
argv = ["--plain"]

[[method]]
name = "ngram"
versions = ">=1,<2"
argv = ["--old-ngram", "{k}"]
requires = ["k"]

[[method]]
name = "ngram"
versions = ">=2"
argv = ["--steps", "{k}", "--tokens={k+1}", ["--window", "{n}", "--hits", "{hits}"], ["--mode", "{mode}"]]
requires = ["k"]
params = { n = { type = "int", min = 2, max = 8 }, hits = { type = "int", default = 1 }, \
mode = { type = "str", choices = ["wide", "deep"] }, fast = { type = "bool" }, p = { type = "float", min = 0, max = 1 } }
json = { "--spec" = { method = "{method}", fast = "{fast}", p = "{p}", deep = { n = "{n}", list = ["{n}", "x{k}"] } } }
env = { TOY_K = "{k}", TOY_N = "{n}" }
learns = true
pinned = { argv = ["--rates", "{rates}"], json = { "--spec" = { rates = "{rates}" } } }

[[method]]
name = ["draft-a", "draft-b"]
argv = ["--draft={draft}"]
config = { kind = "{method}", k = "{k}" }
requires = ["draft"]

[[method]]
name = "eight"
fixed_k = 8
k_from = { width = 10 }
argv = [["--width", "{width}"]]
params = { width = { type = "int" } }
pinned = { argv = ["--rates", "{rates}"] }
"""


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The toy table under the name `toy`; it can be written anew before it is first read."""
    monkeypatch.setattr(flags, "HERE", tmp_path)
    flags.table.cache_clear()
    path = tmp_path / "toy.toml"
    path.write_text(TOY)
    return path


def asked(name: str, **fields: Any) -> Method:
    return Method(name=name, **fields)


# --- filling in -------------------------------------------------------------------------------------------


def test_a_row_filled_in(toy: Path) -> None:
    method = asked("ngram", k=3, params={"n": 4, "fast": True, "p": 0.5})
    found = flags.resolve("toy", method, "2.1")
    spec = {"method": "ngram", "fast": True, "p": 0.5, "deep": {"n": 4, "list": [4, "x3"]}}
    assert found.argv[:-2] == ("--steps", "3", "--tokens=4", "--window", "4", "--hits", "1")
    assert (found.argv[-2], json.loads(found.argv[-1])) == ("--spec", spec)
    assert (found.env, found.learns, found.k, found.method) == (
        {"TOY_K": "3", "TOY_N": "4"},
        True,
        3,
        "ngram",
    )
    assert flags.flags_for("toy", method, "2.1") == found.argv


def test_what_has_no_value_drops_out_with_its_group_or_key(toy: Path) -> None:
    found = flags.resolve("toy", asked("ngram", k=3), "2")
    assert found.argv[:3] == ("--steps", "3", "--tokens=4")
    assert json.loads(found.argv[-1]) == {"method": "ngram", "deep": {}}
    assert found.env == {"TOY_K": "3"}


def test_pinned_rates_give_k_and_join_the_json(toy: Path) -> None:
    found = flags.resolve("toy", asked("ngram", pinned=(0.8, 0.5)), "2")
    assert found.k == 2
    assert found.argv[found.argv.index("--rates") + 1] == "0.8,0.5"
    assert json.loads(found.argv[-1])["rates"] == [0.8, 0.5]
    assert found.argv.count("--spec") == 1


def test_the_range_of_versions_chooses_the_row(toy: Path) -> None:
    for version in ("1.0", "1.9.post1", "1.5.dev3+g1234"):
        assert flags.flags_for("toy", asked("ngram", k=3), version) == ("--old-ngram", "3")
    assert (
        flags.flags_for("toy", asked("ngram", k=3), "2.0rc1")[0] == "--steps"
    )  # a candidate has what 2.0 has
    assert flags.flags_for("toy", asked("ngram", k=3), None) == ("--old-ngram", "3")
    assert flags.methods_of("toy", "0.9") == ("none", "draft-a", "draft-b", "eight")
    assert flags.methods_of("toy", None) == ("none", "ngram", "draft-a", "draft-b", "eight")


def test_one_row_for_several_methods(toy: Path) -> None:
    for name in ("draft-a", "draft-b"):
        found = flags.resolve("toy", asked(name, draft="/m/draft", k=2), "1")
        assert (found.argv, found.config) == (("--draft=/m/draft",), {"kind": name, "k": 2})
    assert flags.resolve("toy", asked("draft-a", draft="d"), "1").config == {"kind": "draft-a"}


def test_the_suites_word_is_understood() -> None:
    assert flags.resolve("llamacpp", asked("draft-model", draft="d"), "1").method == "draft-simple"
    assert flags.resolve("llamacpp", asked("ngram_map_k"), "1").method == "ngram-map-k"


# --- what is refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "version", "sentence"),
    [
        (asked("eagle"), "2", r"method\.name: toy has no eagle; use one of none, ngram, draft-a, draft-b, eight$"),
        (asked("ngram", k=1), "0.5", r"method\.name: toy 0\.5 has no ngram; .* versions >=1,<2 or >=2$"),
        (asked("ngram", k=1), "b0-unknown", r"engine\.name: the version of toy here \(b0-unknown\) cannot be read"),
        (asked("ngram"), "2", r"method\.k: ngram of toy needs it; give k$"),
        (asked("ngram", k=1, params={"n": 1}), "2", r"method\.n: must be .* of at least 2 and at most 8, not 1$"),
        (asked("ngram", k=1, params={"n": 2.0}), "2", r"method\.n: must be a whole number"),
        (asked("ngram", k=1, params={"n": True}), "2", r"method\.n: must be a whole number"),
        (asked("ngram", k=1, params={"p": 2}), "2", r"method\.p: must be a number of at least 0 and at most 1"),
        (asked("ngram", k=1, params={"mode": "fast"}), "2", r"method\.mode: must be one of wide, deep, not 'fast'$"),
        (asked("ngram", k=1, params={"n": 2}), "1", r"method\.n: ngram does not take it; allowed: none$"),
        (asked("ngram", k=1, draft="d"), "2", r"method\.draft: ngram uses no draft model; leave draft out$"),
        (asked("ngram", k=3, pinned=(0.5,)), "2", r"method\.acceptance: give one pinned rate for each of k = 3"),
        (asked("ngram", pinned=(0.5,)), "1", r"method\.acceptance: ngram of toy cannot be told its acceptance"),
        (asked("draft-a"), "2", r"method\.draft: draft-a needs a draft model"),
        (asked("none", k=2), "2", r"method\.k: none drafts nothing in toy; leave k out$"),
        (asked("none", pinned=(0.5,)), "2", r"method\.acceptance: none drafts nothing"),
        (asked("eight", k=4), "2", r"method\.k: eight always drafts up to 8 in toy; leave k out$"),
        (asked("eight"), "2", r"method\.k: eight drafts nothing when k \(8\) is below width \(10\)"),
    ],
    ids=lambda value: value.label if isinstance(value, Method) else None,
)  # fmt: skip
def test_what_the_table_does_not_offer(toy: Path, method: Method, version: str, sentence: str) -> None:
    with pytest.raises(Unsupported, match=rf"^{sentence}"):
        flags.resolve("toy", method, version)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", r"toy\.toml: has no \[\[method\]\]"),
        ('[[method]]\nname = "a"\n[other]\n', r"toy\.toml: has other"),
        (
            '[[method]]\nname = "a"\nargv = ["--k", "{k}"]',
            r"a: \{k\} may have no value; put its flag and it in",
        ),
        ('[[method]]\nname = "a"\nargv = [["{m}"]]', r"a: \{m\} stands for nothing"),
        ('[[method]]\nname = "a"\nparams = { n = { type = "int" } }', r"a: the parameter n goes nowhere"),
        ('[[method]]\nname = "a"\nversions = "new"', r"new"),
    ],
)
def test_a_table_with_a_mistake_is_not_read(toy: Path, text: str, sentence: str) -> None:
    toy.write_text(text)
    with pytest.raises(ValueError, match=sentence):
        flags.table("toy")


def test_an_unknown_key_of_a_row_is_a_mistake(toy: Path) -> None:
    toy.write_text('[[method]]\nname = "a"\nlearn = true')
    with pytest.raises(TypeError, match="learn"):
        flags.table("toy")


# --- the tables that come with it -------------------------------------------------------------------------


@pytest.mark.parametrize("engine", TABLES)
def test_every_table_is_whole(engine: str) -> None:
    rows = flags.table(engine)
    assert rows[0].names == ("none",), "a baseline comes first"
    assert not rows[0].learns
    for row in rows:
        assert set(row.requires) <= {"k", "draft", *row.params}
        assert all(param.default is None or param.takes(param.default) for param in row.params.values())


@pytest.mark.parametrize("path", sorted(HELP.glob("*.txt")), ids=lambda path: path.stem)
def test_flags_stand_in_the_captured_help_text(path: Path) -> None:
    engine, _, version = path.stem.rpartition("-")
    if engine in TABLES:
        assert_flags_known(engine, path.read_text(), version)


def test_flags_of_llamacpp_are_those_of_our_child() -> None:
    assert_flags_known("llamacpp", llama_cpp_child.parser().format_help())


def test_a_flag_that_is_not_there_is_found() -> None:
    with pytest.raises(AssertionError, match=r"does not know --synth-rates$"):
        assert_flags_known(
            "llamacpp", llama_cpp_child.parser().format_help().replace("--synth-rates", "--synth")
        )


# --- settings that are no flags ---------------------------------------------------------------------------

OURS = {"draft", "universal"}
"""Settings of a worker's own, which are handed to the engine as objects."""
PLACES = {
    "openvino": {"pipeline": "pipeline", "generation": "GenerationConfig"},
    "transformers": {"generate": "GenerationConfig", "assistant": "GenerationConfig"},
}
"""Where a worker puts each table of settings."""


@pytest.mark.parametrize("engine", PLACES)
def test_settings_of_a_worker_are_the_engines_own(engine: str) -> None:
    known = settings(engine)
    for place, given in emitted_settings(engine):
        names = known[PLACES[engine][place]] if place else OURS
        assert set(given) <= set(names), f"{engine} knows no {set(given) - set(names)}"


def test_settings_of_tensorrt_llm_are_its_own() -> None:
    """Which are those of its `decoding_type`, of which each has its own."""
    known = settings("tensorrt_llm")
    for place, given in emitted_settings("tensorrt_llm"):
        names = known["settings"]
        if place:
            assert place == "speculative_config"
            names = [*known[place]["every"], *known[place][given["decoding_type"]]]
        assert set(given) <= set(names), f"{given.get('decoding_type')} knows no {set(given) - set(names)}"


def test_a_setting_that_is_not_there_is_found(toy: Path) -> None:
    toy.write_text('[[method]]\nname = "a"\nconfig = { generation = { num_tokens = 4 }, kind = 2 }')
    found = dict(emitted_settings("toy"))
    assert found == {"": {"kind": 2}, "generation": {"num_tokens": 4}}
    assert not set(found["generation"]) <= set(settings("openvino")["GenerationConfig"])


def test_tables_without_flags_are_held_to_settings() -> None:
    """So that every table is held to something."""
    held = {path.stem.rpartition("-")[0] for path in HELP.iterdir() if path.suffix in (".txt", ".json")}
    assert held | {"llamacpp"} >= set(TABLES)
    for engine in TABLES:
        emits = any(given for _, given in emitted_settings(engine))
        assert emits == (engine in (*PLACES, "tensorrt_llm"))
        assert bool(flags.flags_in(flags.table(engine))) == (not emits)
