"""The nouns of a measurement as records: what was asked (`Config`), what it met (`Facts`), what it left.

`CellRecord` is the content of `cell.json`. pydantic is used here and in `plan` only, at the file
boundary; everything in between passes plain dataclasses. This module knows no engine and reads no file.
"""

from __future__ import annotations

import hashlib
from typing import Any, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field, model_validator

SCHEMA_VERSION = 1
MAX_K = 1024
"""No engine verifies a draft that is longer."""


def digest(value: object, length: int = 12) -> str:
    """Hex digest of a JSON-able value, independent of key order."""
    return hashlib.sha256(orjson.dumps(value, option=orjson.OPT_SORT_KEYS)).hexdigest()[:length]


class Record(BaseModel):
    """Base of the file records: immutable, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


# --- what was asked ---------------------------------------------------------------------------------------


class Method(Record):
    """How tokens are drafted. `k` is the number of drafted tokens, without the bonus token."""

    name: str
    k: int | None = Field(default=None, ge=1, le=MAX_K)
    draft: str | None = None
    params: dict[str, int | float | str | bool] = Field(default_factory=dict)
    pinned: tuple[float, ...] | None = None
    """Marginal acceptance that the engine is told to produce; the text is then invalid by design."""

    @property
    def label(self) -> str:
        """Short name for tables, such as `ngram-simple k=8`."""
        parts = [self.name]
        if self.k is not None:
            parts.append(f"k={self.k}")
        parts += [f"{key}={value}" for key, value in sorted(self.params.items())]
        if self.pinned is not None:
            parts.append("pinned=" + ",".join(f"{p:g}" for p in self.pinned))
        return " ".join(parts)


class EngineAsk(Record):
    """Which engine, and how it is reached: installed here, another interpreter, or a URL."""

    name: str
    args: dict[str, int | float | str | bool] = Field(default_factory=dict)
    python: str | None = None
    url: str | None = None
    command: str | None = None
    """A command that the engine's own is appended to (a container)."""


class Sampling(Record):
    """Always sent with the request, so that no server default decides (temperature 0 is greedy)."""

    temperature: float = Field(default=0.0, ge=0, le=100)
    top_p: float = Field(default=1.0, gt=0, le=1)
    seed: int | None = Field(default=None, ge=0, lt=2**32 - 1)
    """The last 32-bit number means "random" to llama.cpp."""


class Workload(Record):
    """Which prompts, how many tokens each may produce, and what earlier turns are replayed."""

    split: str = "qualitative"
    file: str | None = Field(default=None, min_length=1)
    categories: tuple[str, ...] | None = None
    prompts_per_category: int | None = Field(default=None, ge=1)
    history: Literal["frozen", "own"] = "frozen"
    max_tokens: int = Field(default=128, ge=1, le=2**20)
    stop: Literal["natural", "fixed"] = "natural"
    prompts: Literal["messages", "ids"] = "messages"
    """`ids`: template applied and tokenised once outside the engines, so that all get the same token ids."""
    template: dict[str, int | float | str | bool] = Field(default_factory=dict)
    """With `ids`: arguments of the chat template beside the messages, such as `enable_thinking`."""

    @model_validator(mode="after")
    def _template_is_ours(self) -> Workload:
        if self.template and self.prompts != "ids":
            raise ValueError(
                'template needs prompts = "ids": the engine applies its own template to messages'
            )
        taken = sorted({"messages", "tools", "documents", "self"} & set(self.template))
        if taken:
            raise ValueError(f"template.{taken[0]} is given by the prompts themselves; leave it out")
        return self


class Config(Record):
    """What one cell was asked to do, nothing resolved. `config_id` joins arms, runs and gates."""

    engine: EngineAsk
    model: str
    method: Method
    workload: Workload
    sampling: Sampling = Sampling()
    concurrency: int = Field(default=1, ge=1)

    @property
    def config_id(self) -> str:
        """Hash of everything asked."""
        return digest(self.model_dump(mode="json"))


# --- what it met ------------------------------------------------------------------------------------------


class Facts(Record):
    """What the config resolved to. Every field may be unknown (None); secrets never enter."""

    engine: str
    engine_version: str | None = None
    argv: tuple[str, ...] = ()
    url: str | None = None
    slots: int | None = None
    context_tokens: int | None = None
    threads: int | None = None
    precision: str | None = None
    model_path: str | None = None
    served_model: str | None = None
    """The name that requests must carry, where a running server says so."""
    model_sha256: str | None = None
    draft_sha256: str | None = None
    template_sha256: str | None = None
    tokenizer_sha256: str | None = None
    split_sha256: str | None = None
    history_sha256: str | None = None
    speculative: bool | None = None
    """Whether the server itself says that speculation is on."""
    extra: dict[str, Any] = Field(default_factory=dict)

    def identity(self) -> dict[str, Any]:
        """The facts that tell one cell from another: stable between runs on one machine."""
        ports = {"argv": [a for a in self.argv if not a.startswith("--port")]}
        kept = (
            "engine",
            "engine_version",
            "model_sha256",
            "draft_sha256",
            "split_sha256",
            "slots",
            "threads",
        )
        return {name: getattr(self, name) for name in kept} | ports


class Machine(Record):
    """The host of a run, read once per session."""

    hostname: str
    cpu: str
    cores: int
    memory_bytes: int
    os: str
    python: str
    gpus: tuple[str, ...] = ()
    driver: str | None = None
    boot_id: str | None = None


# --- what it left -----------------------------------------------------------------------------------------


class HostBusy(Record):
    """Evidence of other work on the machine during the window; shares are of wall time, 0 to 1."""

    window_s: float
    cpu_pressure_share: float | None = None
    steal_share: float | None = None
    involuntary_switches_per_s: float | None = None
    other_cpu_share: float | None = None
    """CPU time of processes that are neither the client nor the engine, as a share of all cores."""


class ClientUse(Record):
    """What the client itself spent, beside the ceiling that `specbench selftest` found on this machine."""

    frames: int
    cpu_s: float
    ceiling_frames_per_cpu_s: float | None = None
    """Of the paced load, in which each frame costs a wake-up, as from a real engine."""
    frames_per_s: float | None = None


class Acceptance(Record):
    """One row of the acceptance table: of `drafts` drafts, `accepted` had position `position` accepted.

    `position` counts from 1. `request` is None at cell scope, where only the server counts.
    """

    scope: Literal["cell", "request"]
    request: int | None = None
    position: int
    drafts: int
    accepted: int
    source: str


class Note(Record):
    """One validity finding: a closed code, how grave it is, and what to do about it."""

    code: str
    severity: Literal["invalid", "warning", "note"]
    advice: str


class CellRecord(Record):
    """The content of `cell.json`: one run of one config inside a block."""

    schema_version: int = SCHEMA_VERSION
    cell_id: str
    config_id: str
    run: str
    comparison: str
    """Hash shared by the arms that are compared: everything asked but the method."""
    block: int
    position: int
    """Place in the block's order, from 0; the second half repeats the first in reverse."""
    baseline: bool
    session_id: str
    wall_time_utc: str
    """The one wall-clock anchor: when `start_ns` was read."""
    start_ns: int
    window_s: float
    seed: int
    config: Config
    facts: Facts
    machine: Machine
    host: HostBusy
    client: ClientUse
    counters_before: dict[str, float] = Field(default_factory=dict)
    counters_after: dict[str, float] = Field(default_factory=dict)
    acceptance: tuple[Acceptance, ...] = ()
    steps_with_draft: int | None = None
    """Counted by the server over the window; None where it does not say."""
    drafted: int | None = None
    accepted_verified: int | None = None
    metrics: dict[str, float | None] = Field(default_factory=dict)
    reasons: dict[str, str] = Field(default_factory=dict)
    """Why a metric is null, or where it is from if not from where one would expect it; the same of a figure of
    `telemetry`, under `telemetry.<name>`."""
    telemetry: dict[str, float | None] = Field(default_factory=dict)
    """What the devices' meters showed over the window, unit in the name (`specbench.telemetry`); empty where
    nothing could be read."""
    validity: tuple[Note, ...] = ()


def make_cell_id(config: Config, block: int, position: int, facts: Facts) -> str:
    """Hash of config, block, position and resolved facts."""
    return digest([config.config_id, block, position, facts.identity()], 16)


def comparison_id(config: Config) -> str:
    """Hash of everything asked but the method: the arms of one comparison share it."""
    asked = config.model_dump(mode="json")
    del asked["method"]
    asked["engine"].pop("url")
    return digest(asked)
