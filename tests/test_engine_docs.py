"""The pages on engines and plans say what the code takes: arguments, methods and their parameters, keys, words, protocol."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel

from runners import base, environments, flags, registry
from specbench.cell import Config, EngineAsk, Method, Sampling, Workload
from specbench.errors import Unsupported
from specbench.plan import EngineTable, LoadTable, MethodTable, Plan, RepeatTable, check_plan
from specbench.vocabulary import IDEAS, own_word

DOCS = Path(__file__).parent.parent / "docs"
ENGINES = (DOCS / "engines.md").read_text(encoding="utf-8")
PLAN = (DOCS / "plan.md").read_text(encoding="utf-8")
ADDING = (DOCS / "adding-an-engine.md").read_text(encoding="utf-8")
VERSIONS = {
    "llamacpp": "2026.10", "vllm": "0.32.0", "openvino": "2026.4.1", "transformers": "5.24.0",
    "sglang": "0.5.23", "tensorrt_llm": "1.2.0", "loopback": "1",
}  # fmt: skip


def rows(page: str, header: str) -> list[list[str]]:
    """Cells of the table under this header line."""
    lines = page.partition(f"{header}\n")[2].splitlines()[1:]
    end = next(number for number, line in enumerate(lines) if not line.startswith("|"))
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[:end]]


def names(cell: str) -> set[str]:
    """What stands in backticks, but not in brackets."""
    return set(re.findall(r"`([\w.-]+)`", re.sub(r"\([^)]*\)", "", cell)))


# --- arguments of an engine -------------------------------------------------------------------------------

ARGUMENTS = {
    next(iter(names(engine))): names(args)
    for engine, _, args in rows(ENGINES, "| engine | `model` and `method.draft` | `engine.args` |")
}


@pytest.mark.parametrize("engine", VERSIONS)
def test_arguments_of_an_engine(engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each adapter names what it takes where it refuses what it does not."""
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path))
    environments._found_at.cache_clear()
    ask = EngineAsk(name=engine, args={"no_such_thing": 1})
    config = Config(engine=ask, model="org/name", method=Method(name="none"), workload=Workload())
    with pytest.raises(Unsupported, match=r"^engine\.args\.no_such_thing: ") as refused:
        registry.get(engine).launch(config, VERSIONS[engine])
    takes = re.split(r"allowed: |use one of ", refused.value.why)[1].split(", ")
    assert ARGUMENTS[engine] == set(takes)


# --- what a method takes ----------------------------------------------------------------------------------


def listed() -> Iterator[tuple[str, set[str], set[str], set[str], set[str]]]:
    """Engine, methods, keys of a method's table, keys of its args, and which of all are needed."""
    engine = ""
    for first, methods, takes in rows(ENGINES, "| engine | method | takes |"):
        engine = first.strip("`") or engine
        keys, _, args = takes.partition("args ")
        yield engine, names(methods), names(keys), names(args), set(re.findall(r"\*\*`(\w+)`\*\*", takes))


def test_what_each_method_takes() -> None:
    said = {(engine, name): tuple(map(sorted, of)) for engine, methods, *of in listed() for name in methods}
    want = {}
    for engine in VERSIONS:
        for row in flags.table(engine) if engine != "loopback" else ():
            takes = {"k"} if row.takes_k else set()
            takes |= ({"draft"} if row.takes_draft else set()) | set(row.params)
            keys = takes & set(MethodTable.model_fields)
            of = (sorted(keys), sorted(takes - keys), sorted(row.requires))
            want |= {(engine, name): of for name in row.names if name != "none"}
    assert said == want


# --- keys and words of a plan -----------------------------------------------------------------------------

TABLES: dict[str, type[BaseModel]] = {
    "workload": Workload, "sampling": Sampling, "load": LoadTable, "repeat": RepeatTable,
    "engine": EngineTable, "method": MethodTable,
}  # fmt: skip


def test_every_key_of_a_plan() -> None:
    said = []
    for keys, _, _ in rows(PLAN, "| key | default | meaning |"):
        found = re.findall(r"`([\w.]+)`", keys)
        table = found[0].partition(".")[0]
        said += [f"{table}{key}" if key.startswith(".") else key for key in found]
    plain = [field.alias or name for name, field in Plan.model_fields.items() if name not in TABLES]
    tables = [f"{table}.{name}" for table, model in TABLES.items() for name in model.model_fields]
    assert sorted(said) == sorted([*plain, *tables])


def test_words_for_methods() -> None:
    header = "| word | llamacpp | vllm | openvino | transformers | sglang | tensorrt_llm |"
    engines = [cell.strip() for cell in header.strip("|").split("|")][1:]
    said = {cells[0].strip("`"): cells[1:] for cells in rows(PLAN, header)}
    offered = [flags.methods_of(engine, None) for engine in engines]
    want = {}
    for word in IDEAS:
        own = [own_word(word, methods) for methods in offered]
        want[word] = [name if name in has else "" for name, has in zip(own, offered, strict=True)]
    assert said == want


def test_the_plan_of_several_engines_is_one() -> None:
    part = PLAN.partition("## Several engines")[2]
    block = "\n".join(line for line in part.partition("\n## ")[0].splitlines() if line.startswith("    "))
    plan = check_plan({"name": "p", "model": "m"} | tomllib.loads(textwrap.dedent(block)), "docs/plan.md")
    assert [len(comparison.arms) for comparison in plan.comparisons()] == [2, 3]


# --- the protocol -----------------------------------------------------------------------------------------


def test_the_page_shows_the_protocol() -> None:
    code = ADDING.partition("```python\n")[2].partition("```")[0]
    shown, real = (ast.parse(text).body[0] for text in (code, inspect.getsource(base.Engine)))
    assert isinstance(shown, ast.ClassDef)
    assert isinstance(real, ast.ClassDef)
    methods = [
        {f.name: [a.arg for a in f.args.args] for f in of.body if isinstance(f, ast.FunctionDef)}
        for of in (shown, real)
    ]
    fields = [
        [ast.unparse(f.target) for f in of.body if isinstance(f, ast.AnnAssign)] for of in (shown, real)
    ]
    assert methods[0] == methods[1]
    assert fields[0] == fields[1]


@pytest.mark.parametrize("page", ["engines.md", "plan.md", "lossless.md", "adding-an-engine.md", "trace.md"])
def test_files_that_a_page_names_are_there(page: str) -> None:
    root, text = DOCS.parent, (DOCS / page).read_text(encoding="utf-8")
    named = re.findall(r"`((?:docs|examples|runners|specbench|tests)/[\w./-]+)`", text)
    placeholders = ("ENGINE", "NAME")
    missing = [n for n in named if not any(p in n for p in placeholders) and not (root / n).exists()]
    assert not missing
