"""Drafters made from their target: heads, shortened and sparse copies, as architectures of their own.

A drafter is an `Architecture` like any other, so that one ledger prices target and draft alike. Shapes: EAGLE
(arXiv 2401.15077) is one decoder layer behind a 2h → h projection with the target's head; EAGLE-3 (2503.01840)
fuses three hidden states (3h → h), feeds attention twice the width and has a pruned vocabulary; Medusa
(2401.10774) is one residual h × h block and a head for each position; an MTP module (DeepSeek-V3, 2412.19437) is
one of the target's layers behind a 2h → h projection, with the target's head. Added heads are bf16.

Boundary: architectures in, architectures out; what a round costs is `speedup`'s.
"""

from __future__ import annotations

from dataclasses import replace

from models_roofline.architecture import Architecture, Attention, Layer, Matrix, matrix
from models_roofline.errors import RooflineError

EAGLE3_VOCAB = 32_000
"""Output vocabulary of the published EAGLE-3 heads for Llama-3 and Qwen3."""


def eagle_head(target: Architecture) -> Architecture:
    """One decoder layer with the target's head over its whole vocabulary."""
    return _head(target, "eagle", fused=2, vocab=None, attention_inputs=1)


def eagle3_head(target: Architecture, vocab: int | None = None) -> Architecture:
    """One decoder layer on three fused hidden states, with a head over `vocab` tokens (None: 32,000)."""
    pruned = min(vocab or EAGLE3_VOCAB, target.vocab)
    return _head(target, "eagle3", fused=3, vocab=pruned, attention_inputs=2)


def p_eagle_head(target: Architecture, vocab: int | None = None) -> Architecture:
    """An EAGLE-3 head of four layers, as published for gpt-oss (huggingface.co/amazon/gpt-oss-20b-p-eagle)."""
    pruned = min(vocab or EAGLE3_VOCAB, target.vocab)
    return _head(target, "p-eagle", fused=3, vocab=pruned, attention_inputs=2, layers=4)


def dflash_head(target: Architecture, vocab: int | None = None) -> Architecture:
    """Five layers on five fused hidden states behind the target's head (vLLM's speculators: `--num-layers 5`)."""
    pruned = min(vocab, target.vocab) if vocab else None
    return _head(target, "dflash", fused=5, vocab=pruned, attention_inputs=1, layers=5)


def medusa_head(target: Architecture, vocab: int | None = None) -> Architecture:
    """The heads of one position: a residual block and an output projection; no cache."""
    block = Layer(1, (matrix("residual", target.hidden, target.hidden),), target.hidden, 2 * target.hidden)
    return _behind(target, "medusa", (block,), min(vocab or target.vocab, target.vocab))


def mtp_module(target: Architecture) -> Architecture:
    """The multi-token-prediction layer that the checkpoint brings, used again for every drafted token."""
    if not target.mtp:
        raise RooflineError(
            f"--method: mtp needs a model with multi-token-prediction layers and {target.name} has none; "
            "use eagle3, or draft-model with --draft."
        )
    first = replace(target.mtp[0], count=1)
    return _behind(target, "mtp", (first,), None)


def skipped_layers(target: Architecture, keep: float) -> Architecture:
    """The target with a share `keep` of its layers, spread over its kinds of layer (layer-skip, early exit)."""
    kept = tuple(
        replace(layer, count=max(1, round(layer.count * keep))) for layer in target.layers if layer.count
    )
    return replace(target, name=f"{target.name} ({keep:.0%} of the layers)", layers=kept)


def windowed(target: Architecture, budget: int) -> Architecture:
    """The target reading at most `budget` cached tokens a layer (StreamingLLM, a selected cache)."""
    layers = tuple(
        replace(layer, attention=_within(layer.attention, budget)) if layer.attention else layer
        for layer in target.layers
    )
    return replace(target, name=f"{target.name} ({budget} cached tokens)", layers=layers)


def _within(attention: Attention, budget: int) -> Attention:
    return replace(attention, window=min(attention.window or budget, budget))


def _head(
    target: Architecture, kind: str, *, fused: int, vocab: int | None, attention_inputs: int, layers: int = 1
) -> Architecture:
    """`layers` dense layers like the target's; the first reads what is fused and `attention_inputs` states."""
    hidden, layer = target.hidden, _a_layer(target)
    mixer, wide = (
        [_widened(m, inputs) for m in layer.matrices if m.name in _MIXER] for inputs in (1, attention_inputs)
    )
    width = _mlp_width(target)
    mlp = [matrix("gate_up", 2 * width, hidden, split="column"), matrix("down", hidden, width, split="row")]
    fuse = matrix("fuse", hidden, fused * hidden)
    attention = replace(layer.attention, window=None, chunked=False) if layer.attention else None
    first = Layer(1, (fuse, *wide, *mlp), 3 * hidden, 6 * hidden, attention)
    rest = Layer(layers - 1, (*mixer, *mlp), 2 * hidden, 4 * hidden, attention)
    return _behind(target, kind, (first, rest) if rest.count else (first,), vocab)


_MIXER = ("qkv", "o", "q_a", "q_b", "kv_a", "kv_b", "q")


def _widened(found: Matrix, inputs: int) -> Matrix:
    """A mixer's matrix in bf16; those that read the hidden state read `inputs` of them."""
    reads_hidden = found.name in ("qkv", "q_a", "kv_a", "q")
    return matrix(found.name, found.n, found.k * (inputs if reads_hidden else 1), split=found.split)


def _a_layer(target: Architecture) -> Layer:
    for layer in target.layers:
        if layer.attention:
            return layer
    raise RooflineError(
        f"--method: a head with attention cannot be derived from {target.name}, which has none; give --draft."
    )


def _mlp_width(target: Architecture) -> int:
    """Inner width of the head's MLP: the target's; behind experts, as wide as the experts that one token uses.

    Published heads for MoE targets choose their own width, so give --draft where it is known.
    """
    for layer in target.layers:
        width = next((m.k for m in layer.matrices if m.name == "down"), None)
        if width:
            return width
    for layer in target.layers:
        if layer.experts:
            return layer.experts.top_k * layer.experts.matrices[-1].k
    return 4 * target.hidden


def _behind(target: Architecture, kind: str, layers: tuple[Layer, ...], vocab: int | None) -> Architecture:
    """Layers behind the target's input table, with an output projection over `vocab`; None: the target's own, which
    is read again but stands in memory once (as of a tied table, it is not among the drafter's parameters)."""
    own = matrix("head", vocab, target.hidden, split="column") if vocab else None
    return Architecture(
        name=f"{kind} head of {target.name}",
        family=kind,
        hidden=target.hidden,
        vocab=vocab or target.vocab,
        layers=layers,
        embedding=matrix("embedding", 0, target.hidden),
        head=own or target.head,
        tied=own is None,
        final_vectors=target.hidden,
        final_vector_bytes=2 * target.hidden,
        max_context=target.max_context,
    )
