"""One word for each idea of drafting, whatever an engine calls it: a plan says `ngram` and every engine knows.

Boundary: names only. Nothing here knows which engine has what; an adapter lists its own words
(`Availability.methods`), and `own_word` finds among them the one that a plan means. An engine's own word is
always understood too, so a plan can ask for exactly one of several variants (`ngram-map-k`, `ngram-gpu`).
Variants that draft in another way than the idea's plain form are ideas of their own and not listed here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

IDEAS: Mapping[str, tuple[str, ...]] = {
    "none": (),
    "ngram": ("ngram-simple", "prompt-lookup"),
    "draft-model": ("draft-simple", "assisted", "standalone", "draft-target"),
    "layer-skip": ("early-exit",),
    "suffix": ("suffix-decoding",),
    "eagle": ("draft-eagle",),
    "eagle3": ("draft-eagle3",),
    "mtp": ("draft-mtp", "nextn"),
    "dflash": ("draft-dflash",),
    "dspark": ("draft-dspark",),
    "medusa": (),
}
"""The word of the suite, and what engines call the same idea. `-`, `_` and capitals make no difference."""


def plain(word: str) -> str:
    """A word without what does not tell two methods apart."""
    return word.replace("_", "-").casefold()


_IDEA = {word: idea for idea, words in IDEAS.items() for word in (idea, *words)}


def idea(word: str) -> str:
    """The idea that a method's name stands for: the suite's word, or the name itself where it is its own."""
    return _IDEA.get(plain(word), plain(word))


def own_word(asked: str, offered: Iterable[str]) -> str:
    """What the engine that offers these methods calls the one that was asked for.

    The engine's own word wins, then its spelling of that word, then its word for the same idea. What the
    engine does not have is returned as it was asked, for the adapter to refuse by that name.
    """
    words = tuple(offered)
    if asked in words:
        return asked
    spelt = (word for word in words if plain(word) == plain(asked))
    # Only the suite's word means "whatever you call it": `prompt-lookup` is not asked of an engine without it.
    meant = (word for word in words if idea(word) == plain(asked) and plain(asked) in IDEAS)
    return next(spelt, None) or next(meant, asked)
