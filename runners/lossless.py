"""Is a method lossless here? Three questions to the arms of a plan, none of them timed.

Greedy texts are compared with the baseline's, which settles it where they are equal. Where they part, the baseline is
asked what it would have said after the method's own beginning: a lossless method then falls short of the baseline's
choice only by numerics. At a temperature above 0, many short continuations of one prompt are drawn from both.

Boundary: starts engines, sends requests, judges with `specbench.equality` and `specbench.losslessness`; shows nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

from runners.base import Request, Session
from runners.continuations import replies, seeds
from runners.rescore import LlamaCppScores, Scores, VllmScores, divergence, rescore
from runners.run import Runner
from runners.tokens import Tokenizer, for_model
from specbench.equality import Divergence
from specbench.errors import SpecbenchError
from specbench.losslessness import Verdict, compare_continuations
from specbench.plan import Arm, Comparison
from workloads import Prompt

TIE_LOGITS = 0.5
"""What numerics explain between two tokens: the same tokens computed together instead of apart moved the logits of a
small 4-bit model by up to 0.47 (docs/measurements.md)."""

TRIED = 6
"""Continuations by which the most open of the prompts is found."""

Ids = tuple[int, ...]


@dataclass(frozen=True)
class Ask:
    """How much to ask: prompts and tokens of greedy text, draws of short continuations."""

    prompts: int = 8
    tokens: int = 64
    draws: int = 200
    temperature: float = 1.0
    compared: int = 3
    """Tokens of a continuation that are compared; one more is drawn, since the last is never drafted."""
    alpha: float = 0.01


@dataclass(frozen=True)
class Greedy:
    """An arm's greedy texts against the baseline's."""

    prompts: int
    equal: int
    divergences: tuple[Divergence, ...]
    beyond: int | None
    """Tokens of differing texts that the baseline ranks lower than a tie allows; None where it gives no
    log-probabilities."""
    largest_shortfall: float | None
    """Logits; None also where a token was not even listed."""

    @property
    def ended_early(self) -> bool:
        """Whether a text ended where the baseline's went on: its end token stands in no text, so it was not rescored."""
        return any(parted.other is None for parted in self.divergences)


@dataclass(frozen=True)
class Checked:
    """What was found of one arm. `baseline` compares the baseline with itself."""

    engine: str
    method: str
    concurrency: int
    baseline: bool
    pinned: bool
    greedy: Greedy
    sampled: Verdict | None

    @property
    def lossless(self) -> bool | None:
        """False where a difference was found that numerics do not explain; None where texts part and the engine
        cannot say why (or one ended early), and sampling found nothing either."""
        if (self.sampled and self.sampled.differs) or self.greedy.beyond:
            return False
        explained = self.greedy.beyond == 0 and not self.greedy.ended_early
        settled = self.greedy.equal == self.greedy.prompts or explained
        return True if settled else None


@dataclass(frozen=True)
class _Said:
    """What one session said: greedy ids by prompt, and continuations."""

    greedy: tuple[Ids, ...]
    drawn: tuple[Ids, ...]


class Check:
    """Checks every arm of a plan. `say` is told what is going on."""

    def __init__(
        self, runner: Runner, ask: Ask, logs: Path, say: Callable[[str], None] = lambda _: None
    ) -> None:
        self._runner, self._ask, self._logs, self._say = runner, ask, logs, say
        workload = runner.plan.workload
        self._tokenizer: Tokenizer = for_model(runner.plan.model, workload.template)
        self._prompts = runner.split.prompts[: ask.prompts]
        self._open = 0

    def run(self) -> list[Checked]:
        """Every comparison's arms, its baseline first. Raises SpecbenchError where a plan has no baseline."""
        return [found for comparison in self._runner.comparisons for found in self._compare(comparison)]

    def _compare(self, comparison: Comparison) -> list[Checked]:
        plain = next((arm for arm in comparison.arms if arm.baseline), None)
        if plain is None:
            raise SpecbenchError(
                "method: no [[method]] says baseline = true, so there is nothing to be equal to."
            )
        # The baseline twice: what differs between its two turns is the engine's own doing.
        arms = [plain, plain, *(arm for arm in comparison.arms if not arm.baseline)]
        self._open = self._openest(plain) if self._ask.draws else 0
        said = [self._listen(arm, number) for number, arm in enumerate(arms)]
        self._say(f"{plain.config.engine.name}: asking the baseline about what differs")
        with self._session(plain, "scores") as session:
            scores = _scores(plain, session)
            return [
                self._judge(arm, said[0], heard, scores)
                for arm, heard in zip(arms[1:], said[1:], strict=True)
            ]

    # --- asking -------------------------------------------------------------------------------------------

    def _session(self, arm: Arm, name: str) -> AbstractContextManager[Session]:
        self._logs.mkdir(parents=True, exist_ok=True)
        log = self._logs / f"{arm.config.config_id}-{name}.log"
        return self._runner.engine(arm).start(self._runner.launch(arm), log)

    def _listen(self, arm: Arm, number: int) -> _Said:
        config, engine, ask = arm.config, self._runner.engine(arm), self._ask
        self._say(f"{config.engine.name}, {config.method.label}: {ask.prompts} texts and {ask.draws} draws")
        with self._session(arm, f"{number}") as session:
            greedy = [self._request(arm, session, index) for index in range(len(self._prompts))]
            texts = replies(engine, session, greedy, config.concurrency)
            drawn = self._draws(greedy[self._open], seeds(ask.draws, number))
            samples = replies(engine, session, drawn, config.concurrency)
        encode = self._tokenizer.encode
        return _Said(tuple(map(encode, texts)), tuple(map(encode, samples)))

    def _openest(self, plain: Arm) -> int:
        """The prompt after which the baseline says the most different things: where only one thing can be said,
        samples tell nothing. Draws of its own, so the choice leans to no arm."""
        with self._session(plain, "open") as session:
            tried = [self._request(plain, session, index) for index in range(len(self._prompts))]
            drawn = [draw for request in tried for draw in self._draws(request, seeds(TRIED, -1))]
            texts = replies(self._runner.engine(plain), session, drawn, plain.config.concurrency)
        kinds = [len(set(texts[i * TRIED : (i + 1) * TRIED])) for i in range(len(tried))]
        return max(range(len(tried)), key=lambda index: (kinds[index], -len(str(tried[index].messages))))

    def _draws(self, request: Request, drawn: Sequence[int]) -> list[Request]:
        short = replace(request, max_tokens=self._ask.compared + 1, temperature=self._ask.temperature)
        return [replace(short, request=index, seed=seed) for index, seed in enumerate(drawn)]

    def _request(self, arm: Arm, session: Session, index: int) -> Request:
        prompt = self._prompts[index]
        messages = opening(prompt)
        takes_ids = self._runner.engine(arm).ids_path is not None
        return Request(
            request=index,
            prompt_id=prompt.id,
            category=prompt.category,
            conversation=index,
            turn=0,
            messages=tuple(messages),
            max_tokens=self._ask.tokens,
            prompt_ids=self._tokenizer.encode_chat(messages) if takes_ids else None,
            model=session.facts.served_model or arm.config.model,
        )

    # --- judging ------------------------------------------------------------------------------------------

    def _judge(self, arm: Arm, plain: _Said, heard: _Said, scores: Scores | None) -> Checked:
        config = arm.config
        return Checked(
            engine=config.engine.name,
            method=config.method.label,
            concurrency=config.concurrency,
            baseline=arm.baseline,
            pinned=config.method.pinned is not None,
            greedy=self._greedy(plain.greedy, heard.greedy, scores),
            sampled=compare_continuations(plain.drawn, heard.drawn, self._ask.compared, self._ask.alpha)
            if plain.drawn
            else None,
        )

    def _greedy(self, plain: Sequence[Ids], heard: Sequence[Ids], scores: Scores | None) -> Greedy:
        found, judged = [], []
        for prompt, a, b in zip(self._prompts, plain, heard, strict=True):
            if a == b:
                continue
            ids = self._tokenizer.encode_chat(opening(prompt))
            parted = divergence(scores, ids, a, b)
            found += [parted] if parted else []
            judged += [rescore(scores, ids, b)] if scores else []
        shortfalls = [r.largest_shortfall for r in judged]
        known = [s for s in shortfalls if s is not None]
        return Greedy(
            prompts=len(plain),
            equal=len(plain) - len(found),
            divergences=tuple(found),
            beyond=sum(r.beyond(TIE_LOGITS) for r in judged) if scores else None,
            largest_shortfall=max(known) if known and len(known) == len(shortfalls) else None,
        )


def opening(prompt: Prompt) -> list[dict[str, str]]:
    """The messages of a prompt's first turn."""
    system = [{"role": "system", "content": prompt.system}] if prompt.system else []
    return [*system, {"role": "user", "content": prompt.turns[0]}]


def _scores(arm: Arm, session: Session) -> Scores | None:
    """What tells log-probabilities of the baseline that runs in a session; None where its engine does not."""
    if arm.config.engine.name == "llamacpp":
        return LlamaCppScores(session.address)
    if arm.config.engine.name == "vllm":
        return VllmScores(session.address, session.facts.served_model or arm.config.model)
    return None
