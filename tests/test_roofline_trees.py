"""Trees against enumeration of all trees, widths and lengths against trying all of them."""

from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models_roofline.acceptance import Acceptance
from models_roofline.errors import RooflineError
from models_roofline.trees import (
    ROOT,
    Tree,
    best_k,
    best_tokens,
    best_tree,
    best_widths,
    candidate_chances,
    fastest_tree,
    independent_candidates,
    sibling_chances,
)

chances = st.lists(st.floats(0.01, 1), min_size=1, max_size=3).map(lambda p: [x / max(1, sum(p)) for x in p])


def all_trees(nodes: int, depth: int, branch: int) -> Iterator[Tree]:
    """Every tree of at most `nodes` nodes, children appended in order of their parent."""

    def extend(parents: tuple[int, ...], oldest: int) -> Iterator[tuple[int, ...]]:
        yield parents
        if len(parents) == nodes:
            return
        for parent in range(oldest, len(parents)):
            if parents.count(parent) < branch and (parent == ROOT or Tree(parents).levels[parent] < depth):
                yield from extend((*parents, parent), parent)

    if depth == 0 or nodes == 0:
        yield Tree(())
    else:
        yield from (Tree(parents) for parents in extend((), ROOT))


def test_enumeration_counts_ordered_trees() -> None:
    """Ordered trees of n edges are the Catalan numbers 1, 1, 2, 5, 14, 42."""
    sizes = [len(tree.parents) for tree in all_trees(5, 5, 5)]
    assert [sizes.count(n) for n in range(6)] == [1, 1, 2, 5, 14, 42]


@settings(deadline=None, max_examples=40)
@given(chances, st.integers(0, 6), st.integers(0, 4))
def test_no_tree_is_better(p: list[float], nodes: int, depth: int) -> None:
    best = max(tree.expected_tokens(p) for tree in all_trees(nodes, depth, len(p)))
    tree = best_tree(p, nodes, depth)
    assert best_tokens(p, nodes, depth)[-1, -1] == pytest.approx(best)
    assert tree.expected_tokens(p) == pytest.approx(best)
    assert len(tree.parents) <= nodes
    assert tree.depth <= depth


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(*[st.floats(0, 0.5)] * 2), min_size=1, max_size=4), st.integers(1, 6))
def test_no_tree_is_better_where_levels_differ(rows: list[tuple[float, float]], nodes: int) -> None:
    best = max(tree.expected_tokens(rows) for tree in all_trees(nodes, len(rows), 2))
    assert best_tokens(rows, nodes)[-1, -1] == pytest.approx(best)
    assert best_tree(rows, nodes).expected_tokens(rows) == pytest.approx(best)


def test_levels_that_are_alike_are_those_given_one_by_one() -> None:
    p = [0.6, 0.2, 0.1]
    assert best_tokens([p] * 5, 12) == pytest.approx(best_tokens(p, 12, 5))


@given(st.floats(0, 1), st.integers(0, 20))
def test_a_chain_is_a_tree_without_siblings(a: float, k: int) -> None:
    tokens = Acceptance.from_rate(a).al_drafted(k)
    assert Tree.chain(k).expected_tokens([a]) == pytest.approx(tokens)
    assert best_tokens([a], k)[-1, -1] == pytest.approx(tokens)
    assert Tree.chain(k).depth == k


@pytest.mark.parametrize("given_by_level", [False, True])
def test_more_nodes_and_more_depth_never_lose(given_by_level: bool) -> None:
    p = [0.6, 0.15, 0.08, 0.05, 0.03, 0.02, 0.01, 0.01]
    tokens = best_tokens([p] * 16 if given_by_level else p, 64, 16)
    assert tokens.shape == (17, 65)
    assert np.all(np.diff(tokens, axis=0) >= 0)
    assert np.all(np.diff(tokens, axis=1) >= 0)
    assert np.all(tokens[:, 0] == 1)
    assert best_tree(p, 64, 16).expected_tokens(p) == pytest.approx(tokens[16, 64])
    # One draft a level of certain success is the most that a depth allows.
    assert np.all(tokens <= np.arange(17)[:, np.newaxis] + 1)


def test_wide_beats_deep_where_a_sibling_is_likelier_than_the_next_level() -> None:
    assert best_tree([0.5, 0.4], 2).parents == (ROOT, ROOT)
    assert best_tree([0.5, 0.1], 2).parents == (ROOT, 0)
    assert best_tree([0.5, 0.1], 0).parents == ()


def test_fastest_tree_on_the_costs_of_sequoias_demo() -> None:
    """Target times 10, 10, 10, 12, 14, 18 at 1, 2, 4, 8, 16, 32 tokens, taken as a staircase."""
    budgets, times = np.array([1, 2, 4, 8, 16, 32]), np.array([10, 10, 10, 12, 14, 18])
    verify = times[np.searchsorted(budgets, np.arange(1, 33))]
    p = [0.7, 0.12, 0.06, 0.03]
    tree, time = fastest_tree(p, 1.0, verify)
    assert (tree.depth + verify[len(tree.parents)]) / tree.expected_tokens(p) == pytest.approx(time)
    for nodes in range(32):
        for depth in range(nodes + 1):
            other = best_tree(p, nodes, depth)
            assert time <= (other.depth + verify[nodes]) / other.expected_tokens(p) * (1 + 1e-12)
    # Dear drafts or dear verification leave plain decoding; free ones use all of the budget.
    assert fastest_tree(p, 100.0, verify)[0].parents == ()
    assert fastest_tree(p, 0.0, np.arange(1.0, 33.0))[0].parents == ()
    assert len(fastest_tree(p, 0.0, np.full(32, 10.0))[0].parents) == 31


def test_candidates_of_a_known_toy() -> None:
    """p = (.5, .3, .2), q = (.2, .5, .3): Σ min = 0.7; with every token of the vocabulary drawn one is accepted."""
    exact = candidate_chances([0.5, 0.3, 0.2], [0.2, 0.5, 0.3], 3)
    assert exact[0] == pytest.approx(0.7)
    assert exact.sum() == pytest.approx(1)
    # Taking candidates for independent overstates the second and understates the last of a small vocabulary.
    assert exact[:2].sum() < independent_candidates(0.7, 2)
    assert exact.sum() > independent_candidates(0.7, 3)
    # A draft like the target is accepted at once.
    assert candidate_chances([1 / 6, 1 / 3, 1 / 2], [1 / 6, 1 / 3, 1 / 2], 2) == pytest.approx([1, 0])
    # A deterministic draft of token i is accepted with p_i, and has no second candidate.
    assert candidate_chances([0.5, 0.3, 0.2], [0, 1, 0], 2) == pytest.approx([0.3, 0])


@settings(deadline=None)
@given(*[st.lists(st.floats(0.05, 1), min_size=4, max_size=4)] * 2)
def test_drawing_the_whole_vocabulary_always_covers_it(target: list[float], draft: list[float]) -> None:
    p, q = np.array(target) / sum(target), np.array(draft) / sum(draft)
    exact = candidate_chances(p, q, 4)
    assert exact.sum() == pytest.approx(1)
    assert exact[0] == pytest.approx(np.minimum(p, q).sum())


@given(st.lists(st.floats(0, 1), min_size=1, max_size=6))
def test_sibling_chances_add_up_to_any_accepted(rates: list[float]) -> None:
    shares = sibling_chances(rates)
    assert shares.sum() == pytest.approx(1 - np.prod(1 - np.array(rates)))
    assert shares[0] == rates[0]


@settings(deadline=None)
@given(
    st.lists(
        st.lists(st.floats(0, 1), max_size=3).map(lambda p: sorted(p, reverse=True)), min_size=1, max_size=3
    ),
    st.integers(0, 8),
)
def test_no_other_widths_emit_more(survival: list[list[float]], capacity: int) -> None:
    widths = best_widths(survival, capacity)
    ours = sum(sum(row[:width]) for row, width in zip(survival, widths, strict=True))
    choices = product(*(range(len(row) + 1) for row in survival))
    best = max(
        sum(sum(row[:width]) for row, width in zip(survival, choice, strict=True))
        for choice in choices
        if sum(choice) <= capacity
    )
    assert widths.sum() <= capacity
    assert ours == pytest.approx(best)


def test_widths_follow_survival() -> None:
    assert best_widths([[0.9, 0.5, 0.1], [0.8, 0.8, 0.8], [0, 0]], 4).tolist() == [1, 3, 0]
    assert best_widths([], 4).tolist() == []


@given(st.floats(0, 1), st.floats(0, 1), st.lists(st.floats(0.01, 3), min_size=1, max_size=12))
def test_no_other_k_emits_more_per_time(rate: float, coverage: float, steps: list[float]) -> None:
    acceptance = Acceptance.from_rate(rate).with_coverage(coverage)
    times = 1 + np.concatenate([[0], np.cumsum(steps)])
    per_time = acceptance.al_all(np.arange(len(times))) / (coverage * times + (1 - coverage) * times[0])
    k = int(best_k(acceptance, times))
    assert per_time[k] == per_time.max()


def test_the_next_draft_pays_until_its_survival_over_its_cost_is_below_tokens_per_time() -> None:
    """Leviathan et al.: with a draft cost c of a target pass, drafting pays if and only if the rate exceeds c."""
    times = 1 + 0.3 * np.arange(20)
    assert best_k(Acceptance.from_rate(0.29), times) == 0
    assert best_k(Acceptance.from_rate(0.31), times) >= 1
    acceptance = Acceptance.from_rate(0.8)
    k = int(best_k(acceptance, times))
    per_time = acceptance.al_all(k) / times[k]
    assert acceptance.survival(k) / 0.3 >= per_time >= acceptance.survival(k + 1) / 0.3
    assert best_k(acceptance, np.stack([times, times[:1] + 0 * times])).tolist() == [k, 19]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: Tree((0,)), "parent of node 0"),
        (lambda: Tree((-1, -1)).expected_tokens([0.5]), "2 children"),
        (lambda: Tree.chain(3).expected_tokens([[0.5], [0.4]]), "2 levels are given and the tree has 3"),
        (lambda: best_tree([0.7, 0.4], 3), "at most 1"),
        (lambda: best_tree([0.7, -0.1], 3), "not negative"),
        (lambda: best_tree([], 3), "shape"),
        (lambda: best_tree([0.5], -1), "negative"),
        (lambda: best_tree([0.5], 3, -1), "negative"),
        (lambda: sibling_chances([1.5]), "lies in"),
        (lambda: candidate_chances([0.5, 0.4], [0.5, 0.5], 1), "distributions"),
        (lambda: best_widths([[0.5, 0.6]], 3), "not rise"),
        (lambda: best_widths([[0.5]], -3), "capacity"),
        (lambda: best_k(Acceptance.from_rate(0.5), [0.0, 1.0]), "positive"),
    ],
)
def test_wrong_use_is_refused(call, words: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(RooflineError, match=words):
        call()
