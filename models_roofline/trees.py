"""Which drafts to verify: the best tree for a budget, the best widths over a batch, the best length of a chain.

A tree's node is accepted when its parent was and it is the sibling that the target takes; with p_{l,b} the chance
that sibling b of level l is the one, a tree emits 1 + Σ_nodes Π_path p tokens a step. The best tree for a budget
follows by dynamic programming over depth, sibling and nodes (Sequoia, Chen et al. 2402.12374): what a sibling gets is
not left for those after it. Over a batch, the drafts with the largest survival are the best (TETRIS, Wu et al.
2502.15197); over lengths, the largest tokens per time (SmartSpec, Liu et al. 2406.14066).

Conventions: nodes and k are drafts, the root (the token the target already gave) not counted; some papers count it
("k = 21" for 20 drafts). Boundary: expected counts; times come in as arrays and are not modelled here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike

from models_roofline.acceptance import Acceptance
from models_roofline.arrays import Counts, Floats
from models_roofline.errors import RooflineError

ROOT = -1


@dataclass(frozen=True)
class Tree:
    """A draft tree. `parents[i]` is the parent of node i, ROOT (−1) for the first level; parents come first, and
    siblings stand in the order in which they are tried."""

    parents: tuple[int, ...]

    def __post_init__(self) -> None:
        for node, parent in enumerate(self.parents):
            if not ROOT <= parent < node:
                raise RooflineError(f"tree: the parent of node {node} is {parent}; it must come before it.")

    @classmethod
    def chain(cls, k: int) -> Tree:
        """k drafts one after another."""
        return cls(tuple(range(-1, k - 1)))

    @cached_property
    def levels(self) -> tuple[int, ...]:
        """Level of each node, 1 below the root."""
        levels: list[int] = []
        for parent in self.parents:
            levels.append(1 if parent == ROOT else levels[parent] + 1)
        return tuple(levels)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Place of each node among its siblings, from 0."""
        return tuple(self.parents[:node].count(parent) for node, parent in enumerate(self.parents))

    @property
    def depth(self) -> int:
        """Longest path in drafts; what drafting level by level takes in draft steps."""
        return max(self.levels, default=0)

    def children(self, node: int = ROOT) -> tuple[int, ...]:
        """Children of a node in the order in which they are tried."""
        return tuple(child for child, parent in enumerate(self.parents) if parent == node)

    def expected_tokens(self, siblings: ArrayLike) -> float:
        """Tokens a step, bonus included; `siblings` as in `best_tokens`."""
        chances = _chances(siblings, self.depth)
        if max(self.ranks, default=0) >= chances.shape[1]:
            raise RooflineError(
                f"tree: a node has {max(self.ranks) + 1} children, but chances of {chances.shape[1]} are given."
            )
        reached: list[float] = []
        for parent, level, rank in zip(self.parents, self.levels, self.ranks, strict=True):
            reached.append((1.0 if parent == ROOT else reached[parent]) * float(chances[level - 1, rank]))
        return 1.0 + sum(reached)


def sibling_chances(conditional: ArrayLike) -> Floats:
    """p_b = a_b Π_{i<b} (1 − a_i), the chance that candidate b is the one taken, from a_b = P(candidate b accepted |
    those before it rejected). The last axis runs over candidates; their sum is the chance that any is accepted."""
    rates = np.asarray(conditional, dtype=float)
    if not np.all((rates >= 0) & (rates <= 1)):
        raise RooflineError("candidates: each conditional acceptance lies in [0, 1].")
    rejected = np.cumprod(1 - rates, axis=-1)
    return np.asarray(rates * np.concatenate([np.ones_like(rates[..., :1]), rejected[..., :-1]], axis=-1))


def independent_candidates(rate: ArrayLike, width: ArrayLike) -> Floats:
    """1 − (1 − a)^w: some of w candidates is accepted if each were, independently, with chance a. An estimate and
    no bound: after a rejection later candidates are usually weaker, but in a small vocabulary nothing else is left."""
    return np.asarray(1 - (1 - np.asarray(rate, dtype=float)) ** np.asarray(width))


def candidate_chances(target: ArrayLike, draft: ArrayLike, width: int) -> Floats:
    """Exact p_1 … p_width of recursive rejection when candidates are drawn from `draft` without replacement.

    A candidate x is accepted with chance min(1, p(x)/q(x)); after a rejection p becomes the normalised (p − q)⁺ and q
    loses x (SpecInfer, Miao et al. 2305.09781; Sequoia). p_1 = Σ min(p, q). `target` and `draft` are distributions
    over one vocabulary. All sequences of candidates are visited: for small vocabularies and widths.
    """
    p, q = np.asarray(target, dtype=float), np.asarray(draft, dtype=float)
    if (
        p.shape != q.shape
        or p.ndim != 1
        or np.any(p < 0)
        or np.any(q < 0)
        or not np.allclose([p.sum(), q.sum()], 1)
    ):
        raise RooflineError("candidates: target and draft must be distributions over one vocabulary.")
    return _recursive_rejection(p, q, width)


def _recursive_rejection(p: Floats, q: Floats, width: int) -> Floats:
    chances = np.zeros(width)
    if width == 0 or q.sum() <= 0:
        return chances
    q = q / q.sum()
    chances[0] = np.minimum(p, q).sum()
    residual = np.maximum(p - q, 0)
    for token in np.flatnonzero((q > p) & (residual.sum() > 0)):
        left = np.where(np.arange(len(q)) == token, 0, q)
        chances[1:] += (q - p)[token] * _recursive_rejection(residual / residual.sum(), left, width - 1)
    return chances


def best_tokens(siblings: ArrayLike, nodes: int, depth: int | None = None) -> Floats:
    """Expected tokens a step (bonus included) of the best tree for every depth limit and node budget.

    `siblings`: chance that candidate b is the one taken given that its parent was, of shape (branch,) for all levels
    or (levels, branch). Returns shape (levels + 1, nodes + 1); row d allows d levels, up to `depth` or what nodes and
    chances allow.
    """
    limit = _depth_limit(siblings, nodes, depth)
    chances = _chances(siblings, limit)
    if np.ndim(siblings) == 1:  # levels are alike, so the last d levels are a tree of d levels
        return 1.0 + _solve(chances, nodes)[0][::-1, 0]
    rows = [np.zeros(nodes + 1), *(_solve(chances[:d], nodes)[0][0, 0] for d in range(1, limit + 1))]
    return 1.0 + np.stack(rows)


def best_tree(siblings: ArrayLike, nodes: int, depth: int | None = None) -> Tree:
    """The tree of at most `nodes` drafts and `depth` levels that emits most tokens; `siblings` as in `best_tokens`."""
    limit = _depth_limit(siblings, nodes, depth)
    if limit == 0:
        return Tree(())
    _, share = _solve(_chances(siblings, limit), nodes)
    parents: list[int] = []
    _grow(parents, share, ROOT, 0, nodes)
    return Tree(tuple(parents))


def fastest_tree(
    siblings: ArrayLike, draft_s: float, verify_s: ArrayLike, depth: int | None = None
) -> tuple[Tree, float]:
    """The tree with the least time per token, and that time: min (depth · draft_s + verify_s[nodes]) / tokens.

    `draft_s` is the time to draft one level, `verify_s[n]` that of a target pass over n drafts and the root,
    n = 0 … nodes; the empty tree is among the choices. Any unit of time.
    """
    verify = np.asarray(verify_s, dtype=float)
    tokens = best_tokens(siblings, len(verify) - 1, depth)
    time = (draft_s * np.arange(len(tokens))[:, np.newaxis] + verify) / tokens
    levels, nodes = np.unravel_index(int(np.argmin(time)), time.shape)
    return best_tree(siblings, int(nodes), int(levels)), float(time[levels, nodes])


def best_widths(survival: Sequence[ArrayLike], capacity: int) -> Counts:
    """Drafts to verify of each request when the batch may verify `capacity` drafts: those with the largest survival.

    `survival[r]` holds p_1 … of request r. Since survival never rises with position, the choice takes a prefix of
    each request's drafts. Drafts that cannot be accepted (0) are left out.
    """
    if capacity < 0:
        raise RooflineError(f"capacity: {capacity} drafts cannot be verified; 0 is none.")
    rows = [np.asarray(row, dtype=float) for row in survival]
    if any(np.any(np.diff(row) > 0) for row in rows):
        raise RooflineError(
            "survival: it must not rise with position; give marginals, not conditional rates."
        )
    values = np.concatenate([np.zeros(0), *rows])
    request = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
    # A stable sort keeps the drafts of one request in order where their survival is equal.
    chosen = np.argsort(-values, kind="stable")[:capacity]
    return np.bincount(request[chosen[values[chosen] > 0]], minlength=len(rows))


def best_k(acceptance: Acceptance, round_s: ArrayLike) -> Counts:
    """The k with most tokens per time; the smallest of equals.

    `round_s[…, k]` is the time of a round that drafts and verifies k tokens, k = 0 …; the result has its leading
    shape. With coverage c, the other steps take round_s[…, 0]. At the optimum the next draft's survival over its
    added time is below the tokens per time so far (SMART 2604.09731), where times grow steadily.
    """
    times = np.asarray(round_s, dtype=float)
    if not np.all(times > 0):
        raise RooflineError("round_s: the time of a round must be positive.")
    mean = acceptance.coverage * times + (1 - acceptance.coverage) * times[..., :1]
    tokens = acceptance.al_all(np.arange(times.shape[-1]))
    return np.asarray(np.argmax(tokens / mean, axis=-1))


def _depth_limit(siblings: ArrayLike, nodes: int, depth: int | None) -> int:
    """Levels a tree can have: no more than nodes, than asked, than there are chances for."""
    if nodes < 0 or (depth is not None and depth < 0):
        raise RooflineError("tree: nodes and depth cannot be negative.")
    known = np.shape(siblings)[0] if np.ndim(siblings) == 2 else nodes
    return min(nodes, known, nodes if depth is None else depth)


def _chances(siblings: ArrayLike, levels: int) -> Floats:
    """`siblings` as (levels, branch), checked."""
    given = np.asarray(siblings, dtype=float)
    if given.ndim not in (1, 2) or given.shape[-1] == 0:
        raise RooflineError("siblings: give chances of shape (branch,) or (levels, branch).")
    if not np.all(given >= 0) or np.any(given.sum(axis=-1) > 1 + 1e-9):
        raise RooflineError("siblings: chances are not negative and those of one level add up to at most 1.")
    if given.ndim == 2 and len(given) < levels:
        raise RooflineError(f"siblings: chances of {len(given)} levels are given and the tree has {levels}.")
    return np.broadcast_to(given, (levels, given.shape[-1])) if given.ndim == 1 else given[:levels]


def _solve(chances: Floats, nodes: int) -> tuple[Floats, Counts]:
    """Best expected accepted drafts and how many nodes the sibling takes, both [level, sibling, nodes left].

    value[l, b, m]: siblings b, b+1, … of level l and all below them, with m nodes. Sibling b, if it is used, takes
    share ≥ 1 nodes: itself and share − 1 below it.
    """
    levels, branch = chances.shape
    value = np.zeros((levels + 1, branch + 1, nodes + 1))
    share = np.zeros((levels, branch, nodes + 1), dtype=np.int64)
    left = np.subtract.outer(np.arange(nodes + 1), np.arange(1, nodes + 1))
    for level in reversed(range(levels)):
        for rank in reversed(range(branch)):
            own = chances[level, rank] * (1 + value[level + 1, 0, :nodes])
            split = np.where(left >= 0, own + value[level, rank + 1][np.maximum(left, 0)], 0.0)
            value[level, rank] = split.max(axis=1)
            share[level, rank] = np.where(value[level, rank] > 0, split.argmax(axis=1) + 1, 0)
    return value, share


def _grow(parents: list[int], share: Counts, parent: int, level: int, nodes: int) -> None:
    """Append the children of `parent` that `share` gives, each with what is below it."""
    levels, branch, _ = share.shape
    if level == levels:
        return
    for rank in range(branch):
        own = int(share[level, rank, nodes])
        if own == 0:
            return
        parents.append(parent)
        _grow(parents, share, len(parents) - 1, level + 1, own - 1)
        nodes -= own
