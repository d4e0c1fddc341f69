"""From a method to an engine's own flags: tables of data, one TOML an engine, a row per method and version range.

A row holds templates. `{k}`, `{k+1}`, `{draft}`, `{method}`, `{rates}` and the row's parameters are filled in; what
has no value drops out with the group or key that it stands in. What a row does not offer is refused by name before
anything starts. docs/engines.md describes the keys; the tests hold every flag to the engine's own `--help`.

Boundary: words in, words out. Nothing is started, no model is looked for, no version is found out here.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any

import orjson
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from specbench.cell import Method
from specbench.errors import Unsupported
from specbench.vocabulary import own_word

HERE = Path(__file__).parent
_PLACE = re.compile(r"\{([a-z0-9_]+(?:\+1)?)\}")
_OWN = ("k", "k+1", "draft", "method", "rates")
_TYPES: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "str": (str,), "bool": (bool,)}
_WORDS = {"int": "a whole number", "float": "a number", "str": "text", "bool": "true or false"}


@dataclass(frozen=True)
class Param:
    """What one parameter of a method may be. `default` is sent where the plan says nothing."""

    type: str
    min: Any = None
    max: Any = None
    choices: tuple[Any, ...] = ()
    default: Any = None

    def takes(self, value: Any) -> bool:
        """Whether the value is of the type and within the limits."""
        if type(value) not in _TYPES[self.type]:  # a bool is an int to isinstance
            return False
        low, high = self.min is None or value >= self.min, self.max is None or value <= self.max
        return bool(low and high and (not self.choices or value in self.choices))

    @property
    def allowed(self) -> str:
        """The type and limits in words."""
        if self.choices:
            return "one of " + ", ".join(map(str, self.choices))
        least = f" of at least {self.min:g}" if self.min is not None else ""
        most = f"{' and' if least else ' of'} at most {self.max:g}" if self.max is not None else ""
        return _WORDS[self.type] + least + most


@dataclass(frozen=True)
class Template:
    """What a row adds to a command; strings in it may hold placeholders."""

    argv: tuple[Any, ...] = ()
    """Arguments; a nested list is a group that drops out whole where one of its placeholders has no value."""
    json: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Flags whose value is one JSON object."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """For an engine that takes a file or keyword arguments."""
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Row:
    """One entry of a table: the methods it serves, the versions it holds for, and what it adds to the command."""

    engine: str
    names: tuple[str, ...]
    adds: Template
    versions: str = ""
    params: Mapping[str, Param] = field(default_factory=dict)
    requires: tuple[str, ...] = ()
    pinned: Template | None = None
    learns: bool = False
    fixed_k: int | None = None
    k_from: Mapping[str, int] = field(default_factory=dict)
    """A parameter, and the engine's default for it, below which k drafts nothing at all."""

    def holds(self, version: Version | None) -> bool:
        """Whether the version is in the row's range; a candidate or a development build counts as its release."""
        return version is None or SpecifierSet(self.versions).contains(version.base_version)

    @property
    def places(self) -> frozenset[str]:
        """Every placeholder of the row."""
        return frozenset(_placeholders([self.adds, self.pinned]))

    @property
    def takes_k(self) -> bool:
        """Whether the drafted tokens can be chosen."""
        return bool(self.places & {"k", "k+1"})

    @property
    def takes_draft(self) -> bool:
        """Whether a draft model can be named."""
        return "draft" in self.places


@dataclass(frozen=True)
class Flags:
    """What one method adds to an engine's command."""

    method: str
    """The engine's own word for the method."""
    argv: tuple[str, ...]
    config: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    learns: bool = False
    k: int | None = None
    """Drafted tokens where they are known: asked for, one for each pinned rate, or fixed by the engine."""


def flags_for(engine: str, method: Method, version: str | None) -> tuple[str, ...]:
    """The arguments of a method. Raises Unsupported(field, why) where the engine has nothing of the kind."""
    return resolve(engine, method, version).argv


def resolve(engine: str, method: Method, version: str | None) -> Flags:
    """All that a method adds: arguments, settings and environment. `method.draft` is put in as it stands.

    The method's name may be the engine's own or the suite's (`specbench.vocabulary`). Raises Unsupported(field, why)
    for a method, parameter, draft length, draft model or pinned acceptance that the version does not have. Version
    None is a running server that does not say its own: every row holds.
    """
    row = row_for(engine, method, version)
    _check(row, method)
    values = _values(row, method)
    parts = [row.adds] if method.pinned is None or row.pinned is None else [row.adds, row.pinned]
    argv = [word for part in parts for word in _arguments(part.argv, values)]
    for flag, value in _merged([part.json for part in parts], values).items():
        argv += [flag, orjson.dumps(value).decode()]
    env = {name: _word(value) for part in parts for name, value in _filled(part.env, values).items()}
    config = _merged([part.config for part in parts], values)
    return Flags(values["method"], tuple(argv), config, env, row.learns, values["k"])


def row_for(engine: str, method: Method, version: str | None) -> Row:
    """The row of a method in a version. Raises Unsupported where there is none."""
    found = _version(engine, version)
    every = table(engine)
    rows = [row for row in every if row.holds(found) and _own_name(row, method.name)]
    if rows:
        return rows[0]
    others = [row.versions for row in every if _own_name(row, method.name)]
    if others:
        why = f"{engine} {version} has no {method.name}; it is known for versions {' or '.join(others)}"
        raise Unsupported("method.name", why)
    has = ", ".join(methods_of(engine, version))
    raise Unsupported("method.name", f"{engine} has no {method.name}; use one of {has}")


def _own_name(row: Row, asked: str) -> str | None:
    """What the row calls the method that was asked for; None where it is another's row."""
    name = own_word(asked, [name for other in table(row.engine) for name in other.names])
    return name if name in row.names else None


def methods_of(engine: str, version: str | None) -> tuple[str, ...]:
    """The methods of a version, in the order of the table. Raises Unsupported where the version cannot be read."""
    found = _version(engine, version)
    return tuple(dict.fromkeys(name for row in table(engine) if row.holds(found) for name in row.names))


def flags_in(rows: Sequence[Row]) -> frozenset[str]:
    """Every flag (`--name`) that the rows can emit, for the tests against an engine's help text."""
    parts = [part for row in rows for part in (row.adds, row.pinned) if part is not None]
    words = [word for part in parts for word in _strings(part.argv)]
    flags = {word.partition("=")[0] for word in words if word.startswith("-")}
    return frozenset(flags | {flag for part in parts for flag in part.json})


# --- reading a table --------------------------------------------------------------------------------------


@cache
def table(engine: str) -> tuple[Row, ...]:
    """The rows of an engine, as its file lists them."""
    return read_table(HERE / f"{engine}.toml")


def read_table(path: Path) -> tuple[Row, ...]:
    """The rows of a file. Raises ValueError that names file and row where the file is not a table of methods."""
    with path.open("rb") as file:
        document = tomllib.load(file)
    extra = set(document) - {"method"}
    if extra or not document.get("method"):
        raise ValueError(f"{path.name}: has {', '.join(sorted(extra)) or 'no [[method]]'}.")
    return tuple(_read_row(path, entry) for entry in document["method"])


def _read_row(path: Path, entry: dict[str, Any]) -> Row:
    name = entry.get("name")
    names = tuple(name) if isinstance(name, list) else (str(name),)
    adds = {key: entry[key] for key in _keys(Template) if key in entry}
    rest = {key: value for key, value in entry.items() if key not in adds and key != "name"}
    rest["params"] = {key: Param(**_tupled(given)) for key, given in entry.get("params", {}).items()}
    if "pinned" in rest:
        rest["pinned"] = Template(**_tupled(rest["pinned"]))
    row = Row(path.stem, names, Template(**_tupled(adds)), **_tupled(rest))
    SpecifierSet(row.versions)
    if wrong := _wrong(row):
        raise ValueError(f"{path.name}: {', '.join(names)}: {wrong}.")
    return row


def _wrong(row: Row) -> str | None:
    """What is wrong with a row, if anything."""
    if unknown := row.places - set(_OWN) - set(row.params):
        return f"{{{min(unknown)}}} stands for nothing"
    if idle := set(row.params) - row.places:
        return f"the parameter {min(idle)} goes nowhere"
    sure = {"method", "rates", *row.requires} | {n for n, p in row.params.items() if p.default is not None}
    sure |= {"k+1"} & {f"{name}+1" for name in row.requires}
    flat = [word for word in row.adds.argv if isinstance(word, str)]
    if loose := set(_placeholders(flat)) - sure:
        return f"{{{min(loose)}}} may have no value; put its flag and it in a list of their own"
    return None


def _keys(record: type) -> tuple[str, ...]:
    return tuple(entry.name for entry in fields(record))


def _tupled(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in entry.items()}


def _version(engine: str, version: str | None) -> Version | None:
    try:
        return None if version is None else Version(version)
    except InvalidVersion:
        raise Unsupported(
            "engine.name",
            f"the version of {engine} here ({version}) cannot be read, so its flags are not known",
        ) from None


# --- what a row allows ------------------------------------------------------------------------------------


def _check(row: Row, method: Method) -> None:
    for name, value in method.params.items():
        if name not in row.params:
            allowed = ", ".join(row.params) or "none"
            raise Unsupported(f"method.{name}", f"{method.name} does not take it; allowed: {allowed}")
        if not row.params[name].takes(value):
            raise Unsupported(f"method.{name}", f"must be {row.params[name].allowed}, not {value!r}")
    _check_required(row, method)
    _check_k(row, method)
    _check_draft(row, method)
    _check_pinned(row, method)


def _check_required(row: Row, method: Method) -> None:
    given = {"k": _k(row, method), "draft": method.draft} | method.params
    for name in row.requires:
        if given.get(name) is None and name != "draft":
            raise Unsupported(f"method.{name}", f"{method.name} of {row.engine} needs it; give {name}")


def _check_k(row: Row, method: Method) -> None:
    if method.k is not None and not row.takes_k and method.k != row.fixed_k:
        raise Unsupported(
            "method.k", f"{method.name} {_own_length(row, method)} in {row.engine}; leave k out"
        )
    k = _k(row, method)
    for name, default in row.k_from.items():
        least = method.params.get(name, default)
        if k is not None and isinstance(least, int) and k < least:
            raise Unsupported(
                "method.k",
                f"{method.name} drafts nothing when k ({k}) is below {name} ({least}); raise k or lower {name}",
            )


def _own_length(row: Row, method: Method) -> str:
    if row.fixed_k:
        return f"always drafts up to {row.fixed_k}"
    return "drafts nothing" if method.name == "none" else "decides its own draft length"


def _check_draft(row: Row, method: Method) -> None:
    if method.draft is not None and not row.takes_draft:
        raise Unsupported("method.draft", f"{method.name} uses no draft model; leave draft out")
    if method.draft is None and "draft" in row.requires:
        raise Unsupported("method.draft", f"{method.name} needs a draft model; name it as you name model")


def _check_pinned(row: Row, method: Method) -> None:
    rates = method.pinned
    if rates is None:
        return
    if row.pinned is None:
        why = f"{method.name} of {row.engine} cannot be told its acceptance; leave acceptance out"
        if method.name == "none":
            why = f"{method.name} drafts nothing, so no acceptance can be pinned"
        raise Unsupported("method.acceptance", why)
    want = method.k or row.fixed_k or len(rates)
    if len(rates) != want:
        raise Unsupported(
            "method.acceptance", f"give one pinned rate for each of k = {want} positions, not {len(rates)}"
        )


# --- filling in -------------------------------------------------------------------------------------------


def _k(row: Row, method: Method) -> int | None:
    """Drafted tokens; pinned acceptance has one rate for each. None leaves the engine's default."""
    return method.k or (len(method.pinned) if method.pinned else None) or row.fixed_k


def _values(row: Row, method: Method) -> dict[str, Any]:
    k = _k(row, method)
    given = {key: method.params.get(key, param.default) for key, param in row.params.items()}
    own = {"k": k, "k+1": None if k is None else k + 1, "draft": method.draft}
    own["method"] = _own_name(row, method.name)
    return given | own | {"rates": list(method.pinned) if method.pinned else None}


def _arguments(argv: Sequence[Any], values: Mapping[str, Any]) -> Iterator[str]:
    for entry in argv:
        words = [_fill(word, values) for word in ([entry] if isinstance(entry, str) else entry)]
        if None not in words:
            yield from map(_word, words)


def _word(value: Any) -> str:
    """A value as a command line has it: numbers short, lists with commas."""
    if isinstance(value, list):
        return ",".join(map(_word, value))
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:.15g}" if isinstance(value, float) else str(value)


def _merged(parts: Sequence[Mapping[str, Any]], values: Mapping[str, Any]) -> dict[str, Any]:
    """The parts filled in, later keys over earlier ones, tables inside tables joined."""
    whole: dict[str, Any] = {}
    for part in parts:
        for key, value in _filled(part, values).items():
            joined = isinstance(value, dict) and isinstance(whole.get(key), dict)
            whole[key] = whole[key] | value if joined else value
    return whole


def _filled(part: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    filled = {key: _fill(value, values) for key, value in part.items()}
    return {key: value for key, value in filled.items() if value is not None}


def _fill(value: Any, values: Mapping[str, Any]) -> Any:
    """A template with its placeholders filled in, a lone one keeping its type; None where one has no value."""
    if isinstance(value, Mapping):
        return _filled(value, values)
    if isinstance(value, list | tuple):
        entries = [_fill(entry, values) for entry in value]
        return None if None in entries else entries
    names = _PLACE.findall(value) if isinstance(value, str) else []
    if not names:
        return value
    if any(values[name] is None for name in names):
        return None
    if _PLACE.fullmatch(value):
        return values[names[0]]
    return _PLACE.sub(lambda match: _word(values[match[1]]), value)


def _strings(value: Any) -> Iterator[str]:
    """Every string inside a template."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Template):
        yield from _strings([value.argv, value.json, value.config, value.env])
    elif isinstance(value, Mapping):
        yield from _strings(list(value.values()))
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _strings(entry)


def _placeholders(value: Any) -> Iterator[str]:
    for text in _strings(value):
        yield from _PLACE.findall(text)
