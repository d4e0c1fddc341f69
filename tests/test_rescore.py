"""runners.rescore and runners.continuations: on a model made of a table, and on llama.cpp."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from runners import frames
from runners.base import Request, Session
from runners.client import Client
from runners.continuations import continuations, seeds
from runners.llama_cpp import LlamaCppEngine
from runners.loopback import LoopbackEngine
from runners.rescore import LlamaCppScores, divergence, rescore
from runners.tokens import Tokenizer
from specbench.cell import Config, EngineAsk, Method, Workload
from specbench.errors import InvalidMeasurement
from specbench.losslessness import compare_continuations
from tests.test_llama_cpp import config, serving
from tests.test_tokens import folder


@dataclass
class Table:
    """A model of three tokens whose next one depends on the last alone."""

    rows: Mapping[int, Mapping[int, float]]
    asked: list[tuple[int, ...]] = field(default_factory=list)

    def next_logprobs(self, ids: Sequence[int], top: int) -> Mapping[int, float]:
        self.asked.append(tuple(ids))
        return {token: math.log(share) for token, share in self.rows[ids[-1]].items()}


TABLE = {0: {1: 0.6, 2: 0.4}, 1: {2: 0.9, 0: 0.1}, 2: {0: 0.5, 1: 0.5}}


def test_each_token_is_judged_after_its_own_beginning() -> None:
    model = Table(TABLE)
    found = rescore(model, (0,), (2, 1, 0))
    assert model.asked == [(0,), (0, 2), (0, 2, 1)]
    assert [t.best for t in found.tokens] == [1, 1, 2]
    want = [math.log(0.6 / 0.4), 0.0, math.log(0.9 / 0.1)]
    assert [t.shortfall for t in found.tokens] == pytest.approx(want)
    assert found.largest_shortfall == pytest.approx(math.log(9))


def test_where_two_outputs_part_the_baseline_says_by_how_much() -> None:
    model = Table(TABLE)
    found = divergence(model, (0,), (1, 2, 0), (1, 0, 0))
    assert model.asked == [(0,), (0, 1)]
    assert found is not None
    assert (found.index, found.reference, found.other) == (1, 2, 0)
    assert found.margin == pytest.approx(math.log(9))
    assert divergence(model, (0,), (1, 2), (1, 2)) is None
    ended = divergence(model, (0,), (1, 2), (1,))
    assert ended is not None
    assert ended.margin is None
    assert len(model.asked) == 2


def test_an_engine_that_does_not_answer_is_named() -> None:
    with pytest.raises(
        InvalidMeasurement, match=r"^rescoring: http://127\.0\.0\.1:9/completion did not answer"
    ):
        LlamaCppScores("http://127.0.0.1:9").next_logprobs((1,), 5)


def test_seeds_are_many_and_differ_between_samples() -> None:
    first, second = seeds(500, 0), seeds(500, 1)
    assert first == seeds(500, 0)
    assert len(set(first)) == 500
    assert not set(first) & set(second)


def test_continuations_come_in_the_order_of_their_seeds(tmp_path: Path) -> None:
    engine, tokenizer = LoopbackEngine(), Tokenizer.from_model(folder(tmp_path / "m", words="the of and to"))
    asked = Config(
        engine=EngineAsk(name="loopback", args={"step_ms": 0, "prefill_ms": 0}),
        model="m",
        method=Method(name="none"),
        workload=Workload(),
    )
    request = Request(0, "p", None, 0, 0, (), max_tokens=3, prompt_ids=(1, 2))
    with engine.start(engine.launch(asked, "1"), tmp_path / "log") as session:
        drawn = continuations(engine, session, request, seeds(5, 0), tokenizer, concurrency=2)
    # The loopback's text depends on the prompt alone: five equal continuations of three words.
    assert len(drawn) == 5
    assert len(set(drawn)) == 1
    assert len(drawn[0]) == 3


def test_a_request_that_fails_ends_the_draw(tmp_path: Path) -> None:
    engine, tokenizer = LoopbackEngine(), Tokenizer.from_model(folder(tmp_path / "m"))
    asked = Config(
        engine=EngineAsk(name="loopback", args={"faults": "1=503"}),
        model="m",
        method=Method(name="none"),
        workload=Workload(),
    )
    request = Request(0, "p", None, 0, 0, (), max_tokens=3, prompt_ids=(1, 2))
    with (
        engine.start(engine.launch(asked, "1"), tmp_path / "log") as session,
        pytest.raises(InvalidMeasurement, match=r"^continuations: a request failed \(HTTP 503"),
    ):
        continuations(engine, session, request, seeds(3, 0), tokenizer)


# --- llama.cpp --------------------------------------------------------------------------------------------

ENGINE = LlamaCppEngine()
PINNED = (0.8, 0.6, 0.4)


def reply(session: Session, prompt: tuple[int, ...], tokens: int) -> str:
    """The greedy reply to a prompt of ids."""

    async def send() -> str:
        request = Request(0, "p", None, 0, 0, (), max_tokens=tokens, prompt_ids=prompt)
        async with Client(session.address, connections=1) as client:
            stream = frames.parse(await client.post(str(ENGINE.ids_path), ENGINE.body(request)))
        assert (stream.status, stream.prompt_tokens) == ("ok", len(prompt))
        return stream.text

    return asyncio.run(send())


@pytest.mark.engine
def test_greedy_speculation_is_the_baselines_choice_and_a_changed_token_is_not(
    model: str, tmp_path: Path
) -> None:
    tokenizer = Tokenizer.from_gguf(Path(model))
    prompt = tokenizer.encode_chat(
        [{"role": "user", "content": "Name the four seasons and one thing of each."}]
    )
    with serving(tmp_path, config(model, Method(name="draft-simple", k=3, draft=model))) as session:
        output = tokenizer.encode(reply(session, prompt, 32))
    (other,) = tokenizer.encode(" banana")
    changed = (*output[:10], other, *output[11:])
    with serving(tmp_path, config(model, Method(name="none"))) as session:
        scores = LlamaCppScores(session.address)
        plain = tokenizer.encode(reply(session, prompt, 32))
        judged, wrong = (rescore(scores, prompt, ids) for ids in (output, changed))
        parted = divergence(scores, prompt, output, changed, top=len(output) * 100)
    # Verifying several tokens at once may round otherwise than one at a time: not by half a logit.
    assert judged.beyond(0.5) == 0
    assert (judged.agreement or 0) > 0.9
    if plain == output:
        assert judged.largest_shortfall == pytest.approx(0, abs=0.05)
    assert wrong.beyond(0.5) > 0
    assert wrong.tokens[:10] == judged.tokens[:10]
    assert parted is not None
    assert (parted.index, parted.reference, parted.other) == (10, output[10], other)
    assert parted.margin is None or parted.margin > 0.5


@pytest.mark.engine
@pytest.mark.slow
def test_a_draft_model_samples_as_the_baseline_does_and_pinned_acceptance_does_not(
    model: str, tmp_path: Path
) -> None:
    tokenizer = Tokenizer.from_gguf(Path(model))
    prompt = tokenizer.encode("The three primary colours are red,")
    request = Request(0, "p", None, 0, 0, (), max_tokens=4, prompt_ids=prompt, temperature=1.0)
    methods = (
        Method(name="none"),
        Method(name="draft-simple", k=3, draft=model),
        Method(name="draft-simple", draft=model, pinned=PINNED),
    )
    drawn = []
    for number, method in enumerate(methods):
        with serving(tmp_path, config(model, method)) as session:
            before = session.counters()
            drawn.append(continuations(ENGINE, session, request, seeds(120, number), tokenizer))
            after = session.counters()
        name = "llamacpp:spec_decode_num_drafts_total"
        assert (after[name] - before.get(name, 0) > 0) == (method.name != "none")
    plain, lossless, lossy = drawn
    # One run in ten thousand of a lossless drafter would fall below; the seeds are fixed, so it is none.
    assert compare_continuations(plain, lossless).p_value > 1e-4
    assert compare_continuations(plain, lossy).differs
