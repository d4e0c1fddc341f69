"""One word per idea: what a plan says, and what each engine's own list of methods makes of it."""

import itertools

import pytest

from runners import registry
from runners.base import Where
from specbench.vocabulary import IDEAS, idea, own_word, plain

LLAMACPP = ("none", "ngram-simple", "ngram-map-k", "draft-simple", "draft-eagle3")
VLLM = ("none", "ngram", "ngram_gpu", "draft_model", "eagle3")
OPENVINO = ("none", "prompt-lookup", "draft-model")
TRANSFORMERS = ("none", "prompt-lookup", "assisted", "early-exit")


@pytest.mark.parametrize(
    ("asked", "offered", "own"),
    [
        ("ngram", LLAMACPP, "ngram-simple"),
        ("ngram", VLLM, "ngram"),
        ("ngram", OPENVINO, "prompt-lookup"),
        ("draft-model", LLAMACPP, "draft-simple"),
        ("draft-model", VLLM, "draft_model"),
        ("draft_model", OPENVINO, "draft-model"),
        ("draft-model", TRANSFORMERS, "assisted"),
        ("layer-skip", TRANSFORMERS, "early-exit"),
        ("eagle3", LLAMACPP, "draft-eagle3"),
        ("none", OPENVINO, "none"),
        # An engine's own word asks for exactly that, and means nothing to another engine.
        ("ngram-simple", LLAMACPP, "ngram-simple"),
        ("ngram-map-k", LLAMACPP, "ngram-map-k"),
        ("NGRAM-GPU", VLLM, "ngram_gpu"),
        ("ngram-simple", VLLM, "ngram-simple"),
        ("prompt-lookup", LLAMACPP, "prompt-lookup"),
        # What an engine lacks stays as it was asked, to be refused by that name.
        ("layer-skip", VLLM, "layer-skip"),
        ("suffix", (), "suffix"),
    ],
)
def test_a_plans_word_becomes_the_engines(asked: str, offered: tuple[str, ...], own: str) -> None:
    assert own_word(asked, offered) == own


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("ngram-simple", "ngram"),
        ("prompt_lookup", "ngram"),
        ("NGRAM", "ngram"),
        ("draft_model", "draft-model"),
        ("assisted", "draft-model"),
        ("ngram-map-k", "ngram-map-k"),
        ("as-served", "as-served"),
    ],
)
def test_the_idea_behind_a_name(word: str, expected: str) -> None:
    assert idea(word) == expected


def test_no_word_stands_for_two_ideas() -> None:
    words = [plain(word) for name, others in IDEAS.items() for word in (name, *others)]
    assert len(words) == len(set(words))


@pytest.mark.parametrize("name", ["llamacpp", "loopback"])
def test_engines_that_are_here_know_the_suites_words(name: str) -> None:
    found = registry.get(name).probe(Where())
    if not found.ok:
        pytest.skip(f"{name} is not usable here: {found.why_not}")
    for asked in ("none", "ngram", "draft-model"):
        assert own_word(asked, found.methods) in found.methods


@pytest.mark.parametrize("name", sorted(registry.ENGINES))
def test_no_engine_offers_two_words_for_one_idea(name: str) -> None:
    """Else the first of them would be taken, and the plan would not say which."""
    try:
        offered = registry.get(name).probe(Where()).methods
    except ImportError as error:
        pytest.skip(f"{name}: {error}")
    for one, other in itertools.combinations(offered, 2):
        assert idea(one) != idea(other)
