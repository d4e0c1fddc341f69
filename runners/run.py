"""A plan from start to end: resolve, order, start servers, measure cells, store them, resume what was cut off.

The order of work is fixed by the plan and its seed, so a run that was killed and resumed leaves the same
cells as one that was not. A block is the unit: what is left of an interrupted one is set aside and the block
is run again whole, because a ratio is only read inside one session.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import orjson

from runners import registry
from runners.base import Engine, Launch, Session, Where
from runners.history import frozen_history
from runners.load import conversations, known_messages, warmups
from runners.measure import Job, Surroundings, measure
from runners.server import telling
from specbench import failures, host, trace
from specbench.cell import Config, digest, make_cell_id
from specbench.errors import EngineFailed, SpecbenchError, Unsupported
from specbench.plan import Arm, Comparison, Plan
from specbench.vocabulary import own_word
from workloads import Split, load_file, load_split, select

if TYPE_CHECKING:
    from runners.tokens import Tokenizer


GIVE_UP = 3
"""Failed blocks in a row after which a comparison is left: a server that cannot load would be waited for forever."""


@dataclass(frozen=True)
class Progress:
    """Where a run stands; `left_s` is None until the first cell has ended."""

    done: int
    total: int
    label: str
    left_s: float | None


@dataclass
class Runner:
    """Runs one plan into one directory. `report` is called before each cell, `say` where something went wrong.

    An engine that fails (does not start, ends, stops answering) costs the block that it failed in: what the block
    had measured stays, its reason is kept, and the run goes on with the next one.
    """

    plan: Plan
    run_dir: Path
    report: Callable[[Progress], None] = lambda progress: None
    ceiling: Callable[[], float | None] = lambda: None
    say: Callable[[str], None] = lambda words: None
    timeout_s: float = 600.0
    """How long one request may take."""
    session_id: str = field(default_factory=lambda: uuid.uuid4().hex[:12])

    def __post_init__(self) -> None:
        self.split = resolve_split(self.plan)
        self.comparisons = self.plan.comparisons()
        self._engines: dict[str, Engine] = {}
        self._launches: dict[str, Launch] = {}
        self._replies: dict[str, tuple[str, ...]] | None = None
        self._seconds: list[float] = []
        self._tokenizer: Tokenizer | None = None

    # --- resolving ----------------------------------------------------------------------------------------

    def engine(self, arm: Arm) -> Engine:
        """The adapter of an arm."""
        name = arm.config.engine.name
        if name not in self._engines:
            self._engines[name] = registry.get(name)
        return self._engines[name]

    def launch(self, arm: Arm) -> Launch:
        """How an arm is started. Raises SpecbenchError where its engine is not usable here."""
        key = arm.config.config_id
        if key not in self._launches:
            ask, engine = arm.config.engine, self.engine(arm)
            found = engine.probe(Where(ask.python, ask.url, ask.command))
            if self.plan.workload.prompts == "ids" and engine.ids_path is None:
                why = f'{ask.name} takes no token ids for a prompt; use prompts = "messages"'
                raise Unsupported("workload.prompts", why)
            if not found.ok or found.version is None:
                how = f" {found.install}" if found.install else ""
                raise SpecbenchError(f"engine.name: {ask.name} is not usable here: {found.why_not}.{how}")
            launch = engine.launch(_in_its_words(arm.config, found.methods), found.version)
            facts = launch.facts.model_copy(update={"split_sha256": self.split.sha256})
            self._launches[key] = Launch(launch.argv, launch.env, launch.files, facts, launch.learns)
        return self._launches[key]

    def jobs(self, comparison: Comparison, block: int) -> list[Job]:
        """The cells of one block, in the order they run."""
        return [
            self._job(comparison, block, position, arm)
            for position, arm in enumerate(comparison.order(self.plan.seed, block))
        ]

    def _job(self, comparison: Comparison, block: int, position: int, arm: Arm) -> Job:
        launch = self.launch(arm)
        cell_id = make_cell_id(arm.config, block, position, launch.facts)
        return Job(self.plan.name, cell_id, comparison.id, block, position, arm, launch, self.plan.seed)

    def all_jobs(self) -> Iterator[Job]:
        """Every cell of the plan, in order, without regard to a budget."""
        for comparison in self.comparisons:
            for block in range(self.plan.repeat.blocks):
                yield from self.jobs(comparison, block)

    # --- running ------------------------------------------------------------------------------------------

    def run(self, resume: bool = False) -> None:
        """Run the plan to its end or its budget. Every finished cell is on disk before the next starts."""
        started = time.monotonic()
        with self._opened("resume" if resume else "new"), Sessions(self) as sessions:
            for comparison in self.comparisons:
                self._run_comparison(comparison, sessions, started)
                sessions.end_comparison()
            trace.write_index(self.run_dir)

    def run_cell(self, cell_id: str) -> None:
        """Run one cell by its id, so that any scheduler can fan a plan out; a finished one is left alone."""
        known = {job.cell_id: job for job in self.all_jobs()}
        if cell_id not in known:
            raise SpecbenchError(
                f"--cell: {cell_id} is not a cell of this plan; `--dry-run` lists the {len(known)} it has."
            )
        with self._opened("join"), Sessions(self) as sessions:
            if (self.run_dir / "cells" / cell_id).exists():
                return
            self._run_job(known[cell_id], sessions)
            trace.write_index(self.run_dir)

    def _run_comparison(self, comparison: Comparison, sessions: Sessions, started: float) -> None:
        lost = 0
        for block in range(self.plan.repeat.blocks):
            jobs = self.jobs(comparison, block)
            finished = [job for job in jobs if (self.run_dir / "cells" / job.cell_id).exists()]
            if len(finished) == len(jobs):
                continue
            if not self._affords(len(jobs), started):
                return
            for job in finished:
                trace.supersede(self.run_dir, job.cell_id)
            lost = 0 if self._run_block(jobs, sessions, started) else lost + 1
            sessions.end_block()
            trace.write_index(self.run_dir)
            if lost == GIVE_UP and block + 1 < self.plan.repeat.blocks:
                self.say(f"{lost} blocks in a row failed; the other blocks of this comparison are not tried.")
                return

    def _run_block(self, jobs: Sequence[Job], sessions: Sessions, started: float) -> bool:
        """Run the cells of a block. False where an engine failed; the rest of the block is then left out."""
        for job in jobs:
            self._report(job, started)
            opened = time.monotonic()
            try:
                self._run_job(job, sessions)
            except EngineFailed as error:
                sessions.drop()
                self._keep_failure(job, str(error))
                return False
            self._seconds.append(time.monotonic() - opened)
        failures.clear(self.run_dir, jobs[0].comparison, jobs[0].block)
        return True

    def _keep_failure(self, job: Job, reason: str) -> None:
        config = job.arm.config
        failure = failures.BlockFailure(
            comparison=job.comparison,
            block=job.block,
            position=job.position,
            engine=config.engine.name,
            method=config.method.label,
            concurrency=config.concurrency,
            cell_id=job.cell_id,
            session_id=self.session_id,
            reason=reason,
        )
        failures.write(self.run_dir, failure)
        self.say(failure.sentence)

    def _run_job(self, job: Job, sessions: Sessions) -> None:
        seed = f"requests/{job.seed}/{job.comparison}/{job.block}"
        played = conversations(self.split.prompts, self._replies, seed)
        warm = warmups(load_split("warmup").prompts, job.arm.config.concurrency)
        with sessions.get(job) as session:
            measured = measure(job, self.engine(job.arm), session, played, warm, self._around)
        trace.write_cell(self.run_dir, measured.record, measured.requests, measured.texts, measured.telemetry)

    def _history(self) -> dict[str, tuple[str, ...]] | None:
        """The baseline's answers to earlier turns, asked for once per run; None where turns keep their own."""
        if self.plan.workload.history == "own" or all(
            len(prompt.turns) == 1 for prompt in self.split.prompts
        ):
            return None
        arms = self.comparisons[0].arms
        arm = next((arm for arm in arms if arm.baseline), arms[0])
        encode = self._tokenizer.encode_chat if self._tokenizer else None
        return frozen_history(
            self.run_dir, arm.config, self.engine(arm), self.launch(arm), self.split, encode
        )

    @contextmanager
    def _opened(self, mode: Literal["new", "resume", "join"]) -> Iterator[None]:
        """Make the run directory, or take up the one that is there, and hold it."""
        if self.run_dir.exists() and not self.run_dir.is_dir():
            raise SpecbenchError(f"--out: {self.run_dir} is a file; give a directory for the run.")
        if mode == "resume" and not (self.run_dir / "run.json").exists():
            raise SpecbenchError(f"--resume: {self.run_dir} holds no run yet; leave --resume out.")
        self._resolve()
        self.run_dir.mkdir(parents=True, exist_ok=True)
        with trace.writing(self.run_dir, alone=mode != "join"), telling(self.say):
            self._open(mode)
            yield

    def _resolve(self) -> None:
        """What can be refused is refused before anything is written."""
        for comparison in self.comparisons:
            for arm in comparison.arms:
                self.launch(arm)
        if self.plan.workload.prompts == "ids":
            self._tokenizer = self._tokenise()

    def _tokenise(self) -> Tokenizer:
        """The model's tokenizer, after it has made the ids of every prompt's first turn."""
        from runners.tokens import for_model

        tokenizer = for_model(self.plan.model, self.plan.workload.template)
        for conversation in conversations(self.split.prompts, None, "tokens"):
            for messages in known_messages(conversation):
                tokenizer.encode_chat(messages)
        return tokenizer

    def _open(self, mode: Literal["new", "resume", "join"]) -> None:
        plan = self.plan.model_dump(mode="json", by_alias=True)
        manifest = {"schema": self.plan.schema_, "plan_id": self.plan.plan_id, "plan": plan}
        path = self.run_dir / "run.json"
        begun = bool(trace.cell_dirs(self.run_dir))
        if mode == "new" and not begun and _plan_id(path):  # after a run that ended before its first cell
            for left in (path, self.run_dir / "history.json"):
                left.unlink(missing_ok=True)
            failures.forget(self.run_dir)
        if path.exists():
            self._take_up(path, manifest, mode)
        elif begun:
            raise SpecbenchError(
                f"{self.run_dir}: holds cells but no run.json; restore it, or give --out another place."
            )
        if not path.exists() or mode == "resume":  # how many blocks are wanted may have changed
            trace.write_atomic(path, orjson.dumps(manifest, option=orjson.OPT_INDENT_2))
        self._replies = self._history()
        history_sha256 = digest(self._replies, 64) if self._replies else None
        self._around = Surroundings(
            self.session_id,
            host.machine(),
            self.ceiling(),
            history_sha256,
            self.timeout_s,
            self._tokenizer,
        )

    def _take_up(self, path: Path, manifest: dict[str, Any], mode: str) -> None:
        if mode == "new":
            raise SpecbenchError(
                f"{self.run_dir}: already holds a run; add --resume to finish it or --out for another place."
            )
        kept = _plan_id(path)
        if kept is None:
            raise SpecbenchError(f"{path}: cannot be read as a run; restore it, or give --out another place.")
        if kept != manifest["plan_id"]:
            raise SpecbenchError(
                f"{self.run_dir}: holds a run of a different plan; give --out another place."
            )
        if mode == "resume":  # with `join` another writer may be at work here
            trace.sweep(self.run_dir)
            self._check_cells()

    def _check_cells(self) -> None:
        """Cells of another engine version, model or set of flags must not share a run with new ones."""
        facts = {arm.config.config_id: self.launch(arm).facts for c in self.comparisons for arm in c.arms}
        for record in trace.read_cells(self.run_dir):
            now = facts.get(record.config_id)
            if now and make_cell_id(record.config, record.block, record.position, now) != record.cell_id:
                was, is_now = record.facts.identity(), now.identity()
                changed = ", ".join(name for name in is_now if was[name] != is_now[name]) or "facts"
                raise SpecbenchError(
                    f"--resume: cells in {self.run_dir} were measured with another {changed} than now; "
                    "give --out another place."
                )

    # --- time ---------------------------------------------------------------------------------------------

    def _affords(self, cells: int, started: float) -> bool:
        """Whether a block still fits the budget. The first block always runs, or there is nothing to say."""
        budget_s = self.plan.repeat.budget_s
        if budget_s is None or not self._seconds:
            return True
        mean_s = sum(self._seconds[-cells:]) / len(self._seconds[-cells:])
        return time.monotonic() - started + cells * mean_s <= budget_s

    def _report(self, job: Job, started: float) -> None:
        total = sum(len(c.arms) * 2 * self.plan.repeat.blocks for c in self.comparisons)
        done = len(trace.cell_dirs(self.run_dir))
        left_s = None
        if self._seconds:
            left_s = (total - done) * sum(self._seconds) / len(self._seconds)
            if self.plan.repeat.budget_s is not None:
                left_s = max(0.0, min(left_s, self.plan.repeat.budget_s - (time.monotonic() - started)))
        config = job.arm.config
        engine = f"{config.engine.name} · " if len(self.plan.engine) > 1 else ""
        label = f"{engine}block {job.block + 1} · {config.method.label} · concurrency {config.concurrency}"
        self.report(Progress(done, total, label, left_s))


class Sessions:
    """Starts engines and keeps them as long as the plan's `restart` allows.

    A drafter that learns from earlier requests gets a fresh server for every run whatever the plan says. One that
    is kept forgets between runs what the last one left, or is started afresh where it cannot; a server that someone
    else started is neither cleared nor restarted.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._kept: dict[str, tuple[Session, ExitStack]] = {}
        self._stack = ExitStack()
        self._told: set[str] = set()

    def __enter__(self) -> Sessions:
        return self

    def __exit__(self, *exc: object) -> None:
        self._close()

    @contextmanager
    def get(self, job: Job) -> Iterator[Session]:
        """A session for one run of a cell."""
        rule, key = self._runner.plan.repeat.restart, job.arm.config.config_id
        if rule == "run" or job.launch.learns:
            with self._start(job) as session:
                yield session
            return
        if key in self._kept and job.arm.config.engine.url is None:
            self._clear(key, job.arm.config.engine.name)
        if key not in self._kept:
            own = self._stack.enter_context(ExitStack())
            self._kept[key] = own.enter_context(self._start(job)), own
        yield self._kept[key][0]

    def _clear(self, key: str, engine: str) -> None:
        """Have a kept server forget its last run, or stop it."""
        session, own = self._kept[key]
        if session.reset():
            return
        del self._kept[key]
        own.close()
        if engine not in self._told:
            self._told.add(engine)
            self._runner.say(f"{engine} cannot forget what a run left, so it is started afresh for each run.")

    def drop(self) -> None:
        """Stop everything after an engine failed: what was kept may be the one that did."""
        self._close()

    def end_block(self) -> None:
        """Stop what a block-wise restart does not keep."""
        if self._runner.plan.repeat.restart == "block":
            self._close()

    def end_comparison(self) -> None:
        """Stop what was kept: no later comparison has an arm that would use it, but it holds memory."""
        self._close()

    def _close(self) -> None:
        self._kept.clear()
        self._stack.close()

    @contextmanager
    def _start(self, job: Job) -> Iterator[Session]:
        logs = self._runner.run_dir / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        with self._runner.engine(job.arm).start(job.launch, logs / f"{job.cell_id}.log") as session:
            yield session


def _in_its_words(config: Config, offered: Sequence[str]) -> Config:
    """The config with the method named as the engine names it; what was asked stays what identifies the cell."""
    word = own_word(config.method.name, offered)
    return config.model_copy(update={"method": config.method.model_copy(update={"name": word})})


def _plan_id(path: Path) -> str | None:
    """The plan that a run.json stands for; None where it is absent or not one that specbench wrote."""
    try:
        return str(orjson.loads(path.read_bytes())["plan_id"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def resolve_split(plan: Plan) -> Split:
    """The prompts that a plan asks for."""
    ask = plan.workload
    split = load_file(Path(ask.file)) if ask.file else load_split(ask.split)
    return select(
        split, categories=ask.categories, prompts_per_category=ask.prompts_per_category, seed=plan.seed
    )
