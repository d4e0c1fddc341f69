"""A plan: what to measure, read from TOML, checked, and expanded into comparisons, blocks and an order.

Arrays are axes. Nothing is resolved here: no engine is looked for and no model opened; `runners.run` does
that. Every mistake in a plan is one sentence that names the field, what is allowed and the nearest name.
"""

from __future__ import annotations

import itertools
import random
import shlex
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

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

from specbench._plan_words import choices, is_address, nearest, not_json, sentence
from specbench.cell import MAX_K, Config, EngineAsk, Method, Sampling, Workload, comparison_id, digest
from specbench.errors import SpecbenchError

__all__ = ["PLAN_SCHEMA", "Arm", "Comparison", "Plan", "check_plan", "nearest", "read_plan"]

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


def _not_empty(args: dict[str, Any]) -> dict[str, Any]:
    for name, given in args.items():
        if given == []:
            raise ValueError(f"{name} is an empty array; an axis needs at least one value")
    return args


class EngineTable(_Table):
    """One engine; arrays in `args` are axes."""

    name: str
    args: dict[str, Scalar | list[Scalar]] = Field(default_factory=dict)
    python: str | None = Field(default=None, min_length=1)
    url: str | None = None
    baseline_url: str | None = None
    command: str | None = None

    @field_validator("args")
    @classmethod
    def _with_values(cls, value: dict[str, Any]) -> dict[str, Any]:
        return _not_empty(value)

    @field_validator("url", "baseline_url")
    @classmethod
    def _address(cls, value: str | None) -> str | None:
        if value is not None and not is_address(value):
            raise ValueError(
                f"{value!r} is not an address such as http://127.0.0.1:8080; give no user and no query"
            )
        return value

    @field_validator("command")
    @classmethod
    def _words(cls, value: str | None) -> str | None:
        if value is None:
            return None
        try:
            words = shlex.split(value)
        except ValueError as error:
            raise ValueError(f"{value!r} is no command line ({error}); mend its quotes") from None
        if not words or not words[0]:
            raise ValueError("names no program; give one such as 'docker run -i IMAGE', or leave it out")
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
    args: dict[str, Scalar | list[Scalar]] = Field(default_factory=dict)
    """Parameters that only some engines know, in the engine's words; arrays are axes."""
    engines: tuple[str, ...] | None = Field(default=None, min_length=1)
    """Names of the plan's engines that this method is for; None: all of them."""

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

    @field_validator("args")
    @classmethod
    def _new_words(cls, value: dict[str, Any]) -> dict[str, Any]:
        taken = sorted(set(value) & set(cls.model_fields))
        if taken:
            raise ValueError(f"{taken[0]} is a key of [[method]] itself; write it there")
        return _not_empty(value)

    def is_for(self, engine: EngineTable) -> bool:
        """Whether an engine of the plan runs this method."""
        return self.engines is None or engine.name in self.engines

    def expand(self) -> list[Method]:
        """One `Method` per point of the axes."""
        names = ("k", "n", "min_hits", "p_min", "n_min")
        axes = [value if isinstance(value := getattr(self, name), tuple) else (value,) for name in names]
        return [
            self._point(dict(zip(names, point, strict=True)) | args)
            for point in itertools.product(*axes)
            for args in _points(self.args)
        ]

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
    def _engines_meet_methods(self) -> Plan:
        names = {engine.name for engine in self.engine}
        for index, table in enumerate(self.method):
            unknown = next((name for name in table.engines or () if name not in names), None)
            if unknown is not None:
                what = f"method[{index}].engines: {unknown!r} is no [[engine]] of this plan"
                raise ValueError(f"{what}; {choices(unknown, names)}")
        for engine in self.engine:
            if not any(table.is_for(engine) for table in self.method):
                raise ValueError(
                    f"method: no [[method]] is for {engine.name}; add one, or leave the engine out"
                )
        return self

    @model_validator(mode="after")
    def _one_baseline(self) -> Plan:
        for engine in self.engine:
            if sum(table.baseline and table.is_for(engine) for table in self.method) > 1:
                where = f" for {engine.name}" if len(self.engine) > 1 else ""
                raise ValueError(f"method: at most one [[method]] may say baseline = true{where}")
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
        for table in (table for table in self.method if table.is_for(engine)):
            url = engine.baseline_url if table.baseline and engine.baseline_url else engine.url
            ask = EngineAsk(
                name=engine.name, args=args, python=engine.python, url=url, command=engine.command
            )
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
    for field, what in not_json(raw):
        raise SpecbenchError(f"{source}: {field}: {what}.")
    try:
        # Strict, because `max_tokens = true` or `k = "4"` is a slip; as JSON, because a strict tuple takes no list.
        return Plan.model_validate_json(orjson.dumps(raw), strict=True)
    except ValidationError as error:
        raise SpecbenchError(f"{source}: {sentence(error, Plan)}") from None
