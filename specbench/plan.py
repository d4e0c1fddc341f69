"""A plan: what to measure, read from TOML, checked, and expanded into comparisons, blocks and an order.

Arrays are axes. Nothing is resolved here: no engine is looked for and no model opened; `runners.run` does
that. Every mistake in a plan is one sentence that names the field, what is allowed and the nearest name.
"""

from __future__ import annotations

import difflib
import itertools
import math
import random
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import orjson
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from specbench.cell import MAX_K, Config, EngineAsk, Method, Sampling, Workload, comparison_id, digest
from specbench.errors import SpecbenchError

PLAN_SCHEMA = 1
MAX_BLOCKS = 10_000
MAX_CONCURRENCY = 10_000
"""Far above what one client process can time; a longer number is a slip of the hand."""
Scalar = int | float | str | bool


class _Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class LoadTable(_Table):
    """How many requests are kept in flight (closed loop): an axis."""

    concurrency: tuple[int, ...] = (1,)

    @field_validator("concurrency", mode="before")
    @classmethod
    def _listed(cls, value: Any) -> Any:
        return tuple(value) if isinstance(value, list | tuple) else (value,)

    @field_validator("concurrency")
    @classmethod
    def _positive(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if not value or min(value) < 1:
            raise ValueError("give at least one concurrency, each 1 or more")
        if max(value) > MAX_CONCURRENCY:
            raise ValueError(f"at most {MAX_CONCURRENCY} requests can be in flight")
        return tuple(dict.fromkeys(value))


class RepeatTable(_Table):
    """How often: `blocks` pairs of runs, and when a server is started afresh."""

    blocks: int = Field(default=10, ge=1, le=MAX_BLOCKS)
    restart: Literal["run", "block", "never"] = "run"
    budget_s: float | None = Field(default=None, gt=0)


class EngineTable(_Table):
    """One engine; arrays in `args` are axes."""

    name: str
    args: dict[str, Scalar | list[Scalar]] = Field(default_factory=dict)
    python: str | None = None
    url: str | None = None
    baseline_url: str | None = None

    @field_validator("args")
    @classmethod
    def _not_empty(cls, value: dict[str, Any]) -> dict[str, Any]:
        for name, given in value.items():
            if given == []:
                raise ValueError(f"{name} is an empty array; an axis needs at least one value")
        return value

    @field_validator("url", "baseline_url")
    @classmethod
    def _address(cls, value: str | None) -> str | None:
        if value is not None and not _is_address(value):
            raise ValueError(f"{value!r} is not an address such as http://127.0.0.1:8080")
        return value


class Pinned(_Table):
    """The engine is told which marginal acceptance to produce (its own synthetic mode)."""

    pinned: tuple[float, ...]

    @field_validator("pinned")
    @classmethod
    def _marginals(cls, value: tuple[float, ...]) -> tuple[float, ...]:
        if not value or any(not 0 <= p <= 1 for p in value) or list(value) != sorted(value, reverse=True):
            raise ValueError(
                "marginal acceptance rates lie between 0 and 1 and never rise, such as [0.8, 0.6, 0.4]"
            )
        return value


class MethodTable(_Table):
    """One way to draft; `k` and the parameters may be arrays (axes)."""

    name: str
    baseline: bool = False
    k: int | tuple[int, ...] | None = None
    draft: str | None = None
    acceptance: Pinned | None = None
    n: int | tuple[int, ...] | None = None
    """n-gram methods: tokens that must match."""
    min_hits: int | tuple[int, ...] | None = None
    p_min: float | tuple[float, ...] | None = None
    """Draft-model methods: stop drafting below this probability."""
    n_min: int | tuple[int, ...] | None = None
    """Shortest draft worth verifying."""

    @field_validator("k", "n", "min_hits", "n_min", "p_min")
    @classmethod
    def _in_range(cls, value: Any, info: ValidationInfo) -> Any:
        points = value if isinstance(value, tuple) else (value,)
        if not points:
            raise ValueError("an axis needs at least one value")
        if info.field_name == "p_min" and any(p is not None and not 0 <= p <= 1 for p in points):
            raise ValueError("a probability lies between 0 and 1")
        if info.field_name != "p_min" and any(p is not None and p < 1 for p in points):
            raise ValueError("must be 1 or more")
        if info.field_name != "p_min" and any(p is not None and p > MAX_K for p in points):
            raise ValueError(f"must be {MAX_K} or less")
        return value

    def expand(self) -> list[Method]:
        """One `Method` per point of the axes."""
        names = ("k", "n", "min_hits", "p_min", "n_min")
        axes = [value if isinstance(value := getattr(self, name), tuple) else (value,) for name in names]
        return [self._point(dict(zip(names, point, strict=True))) for point in itertools.product(*axes)]

    def _point(self, values: dict[str, Any]) -> Method:
        k = values.pop("k")
        pinned = self.acceptance.pinned if self.acceptance else None
        params = {name: value for name, value in values.items() if value is not None}
        return Method(name=self.name, k=k, draft=self.draft, params=params, pinned=pinned)


class Plan(_Table):
    """The content of a plan file."""

    schema_: int = Field(default=PLAN_SCHEMA, alias="schema")
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)
    seed: int = 0
    model: str = Field(min_length=1)
    workload: Workload = Workload()
    sampling: Sampling = Sampling()
    load: LoadTable = LoadTable()
    repeat: RepeatTable = RepeatTable()
    engine: tuple[EngineTable, ...] = Field(min_length=1)
    method: tuple[MethodTable, ...] = Field(min_length=1)

    @field_validator("schema_")
    @classmethod
    def _known(cls, value: int) -> int:
        if value != PLAN_SCHEMA:
            raise ValueError(
                f"this specbench reads plan schema {PLAN_SCHEMA}; upgrade specbench or write that number"
            )
        return value

    @model_validator(mode="after")
    def _one_baseline(self) -> Plan:
        if sum(table.baseline for table in self.method) > 1:
            raise ValueError("method: at most one [[method]] may say baseline = true")
        for table in self.method:
            if table.baseline and len(table.expand()) > 1:
                raise ValueError("method: the baseline takes no arrays; give it one value each")
        return self

    @model_validator(mode="after")
    def _no_twins(self) -> Plan:
        comparisons = self.comparisons()
        for comparison in comparisons:
            labels = [(arm.config.config_id, arm.config.method.label) for arm in comparison.arms]
            twice = next((label for key, label in labels if labels.count((key, label)) > 1), None)
            if twice is not None:
                raise ValueError(f"method: {twice} stands twice in the plan; leave one of the two out")
        if len({comparison.id for comparison in comparisons}) < len(comparisons):
            raise ValueError(
                "engine: two [[engine]] tables differ in nothing but url; give each a plan of its own"
            )
        return self

    @property
    def plan_id(self) -> str:
        """Hash of what is measured. How many blocks, and for how long, may change when a run is resumed."""
        asked = self.model_dump(mode="json", by_alias=True)
        asked["repeat"] = {"restart": self.repeat.restart}
        return digest(asked)

    def comparisons(self) -> list[Comparison]:
        """Every set of arms that is compared: one per engine (with each of its args) and concurrency."""
        return [
            self._comparison(engine, args, concurrency)
            for engine in self.engine
            for args in _points(engine.args)
            for concurrency in self.load.concurrency
        ]

    def _comparison(self, engine: EngineTable, args: dict[str, Scalar], concurrency: int) -> Comparison:
        arms = []
        for table in self.method:
            url = engine.baseline_url if table.baseline and engine.baseline_url else engine.url
            ask = EngineAsk(name=engine.name, args=args, python=engine.python, url=url)
            for method in table.expand():
                config = Config(
                    engine=ask,
                    model=self.model,
                    method=method,
                    workload=self.workload,
                    sampling=self.sampling,
                    concurrency=concurrency,
                )
                arms.append(Arm(config, table.baseline))
        return Comparison(tuple(arms))


@dataclass(frozen=True)
class Arm:
    """One config of a comparison."""

    config: Config
    baseline: bool


@dataclass(frozen=True)
class Comparison:
    """The arms that are run side by side in every block."""

    arms: tuple[Arm, ...]

    @property
    def id(self) -> str:
        """Shared by all cells of this comparison."""
        return comparison_id(self.arms[0].config)

    @property
    def concurrency(self) -> int:
        """Requests in flight, the same for every arm."""
        return self.arms[0].config.concurrency

    def order(self, seed: int, block: int) -> list[Arm]:
        """Every arm once in seeded random order, then in reverse (ABBA or BAAB with two arms)."""
        arms = list(self.arms)
        random.Random(f"order/{seed}/{self.id}/{block}").shuffle(arms)
        return arms + arms[::-1]


def _points(args: dict[str, Scalar | list[Scalar]]) -> Iterable[dict[str, Scalar]]:
    axes = [value if isinstance(value, list) else [value] for value in args.values()]
    for point in itertools.product(*axes):
        yield dict(zip(args, point, strict=True))


# --- reading, and saying what is wrong --------------------------------------------------------------------


def read_plan(path: Path) -> Plan:
    """Read and check a plan file. Raises SpecbenchError with one sentence that names the field."""
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise SpecbenchError(
            f"{path}: cannot be read ({error.strerror}); give the path of a plan in TOML."
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SpecbenchError(f"{path}: not valid TOML ({error}).") from None
    return check_plan(raw, str(path))


def check_plan(raw: dict[str, Any], source: str) -> Plan:
    """Check a plan that was already read; `source` opens the sentence of an error."""
    for field, what in _not_json(raw):
        raise SpecbenchError(f"{source}: {field}: {what}.")
    try:
        # Strict, because `max_tokens = true` or `k = "4"` is a slip; as JSON, because a strict tuple takes no list.
        return Plan.model_validate_json(orjson.dumps(raw), strict=True)
    except ValidationError as error:
        raise SpecbenchError(f"{source}: {_sentence(error)}") from None


def _not_json(value: Any, field: str = "") -> Iterator[tuple[str, str]]:
    """What TOML can say and a record cannot hold, with its field: infinity, dates, NUL, numbers beyond 64 bits."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _not_json(inner, f"{field}.{key}" if field else str(key))
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from _not_json(inner, f"{field}[{index}]")
    elif isinstance(value, float) and not math.isfinite(value):
        yield field, f"must be a finite number, not {value}"
    elif isinstance(value, int) and not -(2**63) <= value < 2**63:
        yield field, "the number is too large"
    elif isinstance(value, str) and "\0" in value:
        yield field, "holds a NUL character; take it out"
    elif not isinstance(value, str | int | float | None):
        yield field, f"must be text or a number, not {value}"


def _is_address(text: str) -> bool:
    try:
        url = urlsplit(text)
        return url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError:
        return False


def _sentence(error: ValidationError) -> str:
    """The first mistake as `field: what is wrong; allowed values; nearest one`."""
    # An unknown key first: a misspelt name usually also leaves its field missing.
    first = min(error.errors(), key=lambda found: found["type"] != "extra_forbidden")
    location = [
        part for part in first["loc"] if part not in ("int", "float", "str", "bool") and "[" not in str(part)
    ]
    field = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)[1:]
    kind = first["type"]
    if kind == "extra_forbidden":
        return f"{field}: unknown key; {_choices(str(location[-1]), _keys_at(location[:-1]))}"
    if kind == "literal_error":
        allowed = [part.strip(" '") for part in str(first["ctx"]["expected"]).replace(" or ", ",").split(",")]
        return f"{field}: {first['input']!r} is not allowed; {_choices(str(first['input']), allowed)}"
    if kind == "missing":
        return f"{field}: missing; add it to the plan."
    message = str(first["msg"]).removeprefix("Value error, ")
    given = "" if kind == "value_error" else f", not {first['input']!r}"
    return f"{field}: {message}{given}." if field else f"{message}."


def _choices(given: str, allowed: Iterable[str]) -> str:
    names = sorted(allowed)
    near = nearest(given, names)
    return f"allowed: {', '.join(names)}" + (f"; did you mean {near}?" if near else ".")


def nearest(given: str, names: Iterable[str]) -> str | None:
    """The name that was probably meant, or None where nothing is close."""
    found = difflib.get_close_matches(given, list(names), n=1, cutoff=0.5)
    return found[0] if found else None


def _keys_at(location: list[Any]) -> list[str]:
    """The keys that are allowed in the table at a location of the plan."""
    table: Any = Plan
    for part in location:
        if isinstance(part, str) and isinstance(table, type) and issubclass(table, BaseModel):
            table = _table_of(table.model_fields[part].annotation)
    return [field.alias or name for name, field in table.model_fields.items()]


def _table_of(annotation: Any) -> Any:
    """The table class inside an annotation such as `tuple[MethodTable, ...]` or `Pinned | None`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    inner = [_table_of(part) for part in getattr(annotation, "__args__", ())]
    return next((part for part in inner if part is not None), None)
