"""An architecture as `models show` prints it: one document, and the same as text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from models_roofline.architecture import Architecture, Layer


def document(arch: Architecture, contexts: list[int], value_bytes: float) -> dict[str, Any]:
    """Counts of a model. `active` counts the input embedding; `streamed` is what one token at batch 1 must read."""
    return {
        "name": arch.name,
        "family": arch.family,
        "total_params": arch.total_params,
        "active_params": arch.active_params,
        "streamed_params": arch.streamed_params,
        "embedding_params": arch.embedding.params,
        "head_params": arch.head.params,
        "tied": arch.tied,
        "routed_params": arch.routed_params,
        "mtp_params": arch.mtp_params,
        "vision_params": arch.vision_params,
        "weight_bytes": arch.weight_bytes,
        "streamed_bytes": arch.streamed_bytes,
        "kv_bytes_per_token": _whole(arch.kv_bytes_per_token(value_bytes)),
        "kv_bytes_per_token_beyond_window": _whole(arch.kv_bytes_per_token_beyond_window(value_bytes)),
        "kv_bytes_at_context": {str(n): _whole(arch.kv_bytes(n, value_bytes)) for n in contexts},
        "state_bytes": arch.state_bytes,
        "hidden": arch.hidden,
        "vocab": arch.vocab,
        "n_layers": arch.n_layers,
        "max_context": arch.max_context,
        "layers": [_layer(layer) for layer in arch.layers],
        "notes": list(arch.notes),
    }


def text(found: dict[str, Any]) -> str:
    """The document for people."""
    from specbench.cli._io import table

    tied = "tied to the input table" if found["tied"] else "of its own"
    layers = [
        [str(layer["count"]), layer["mixer"], layer["feed_forward"], f"{layer['params']:,}"]
        for layer in found["layers"]
    ]
    said = [
        f"{found['name']} ({found['family']}): {found['n_layers']} layers, hidden {found['hidden']}, "
        f"vocabulary {found['vocab']}, head {tied}, context {found['max_context'] or 'not stated'}.",
        "",
        table(["", "", "exactly"], _counts(found)),
        "",
        table(["layers", "mixer", "feed-forward", "parameters each"], layers, left=3),
    ]
    if found["mtp_params"]:
        said.append(f"\nApart: {found['mtp_params']:,} parameters of multi-token-prediction layers.")
    if found["vision_params"]:
        said.append(f"\nApart: {found['vision_params']:,} parameters of the vision tower and projector.")
    said += [f"note: {note}" for note in found["notes"]]
    return "\n".join(said)


def _counts(found: dict[str, Any]) -> list[list[str]]:
    """Rows of parameters and bytes: what is counted, rounded, exactly."""
    return [
        ["parameters, all", _billions(found["total_params"]), f"{found['total_params']:,}"],
        ["… one token uses", _billions(found["active_params"]), f"{found['active_params']:,}"],
        [
            "… one token at batch 1 reads",
            _billions(found["streamed_params"]),
            f"{found['streamed_params']:,}",
        ],
        ["weights", _size(found["weight_bytes"]), f"{found['weight_bytes']:,} B"],
        ["… one token at batch 1 reads", _size(found["streamed_bytes"]), f"{found['streamed_bytes']:,} B"],
        ["cache, one more token", _size(found["kv_bytes_per_token"]), f"{found['kv_bytes_per_token']:,} B"],
        *_beyond_window(found),
        *(
            [f"cache at {int(n):,} tokens", _size(size), f"{size:,} B"]
            for n, size in found["kv_bytes_at_context"].items()
        ),
        *(
            [["recurrent state", _size(found["state_bytes"]), f"{found['state_bytes']:,} B"]]
            if found["state_bytes"]
            else []
        ),
    ]


def _layer(layer: Layer) -> dict[str, Any]:
    return {
        "count": layer.count,
        "mixer": _mixer(layer),
        "feed_forward": _feed_forward(layer),
        "params": layer.total_params,
        "active_params": layer.active_params,
        "matrices": {m.name: [m.n, m.k] for m in layer.matrices},
    }


def _mixer(layer: Layer) -> str:
    if attention := layer.attention:
        if attention.latent is not None:
            kind = f"latent attention, {attention.q_heads} heads over {attention.latent} values"
        else:
            kind = f"attention {attention.q_heads}/{attention.kv_heads} heads × {attention.key_dim}"
        window = "chunk" if attention.chunked else "window"
        return kind + (f", {window} {attention.window}" if attention.window else "")
    return f"recurrent state {layer.state.bytes:,} B" if layer.state else "none"


def _feed_forward(layer: Layer) -> str:
    width = next((m.k for m in layer.matrices if m.name == "down"), None)
    dense = f"dense {width}" if width else ""
    if experts := layer.experts:
        shared = next((m.k for m in layer.matrices if m.name == "shared_down"), None)
        routed = f"{experts.top_k} of {experts.number} experts × {experts.matrices[-1].k}"
        return routed + (f" + shared {shared}" if shared else "") + (f" + {dense}" if dense else "")
    return dense or "none"


def _beyond_window(found: dict[str, Any]) -> list[list[str]]:
    size = found["kv_bytes_per_token_beyond_window"]
    return (
        []
        if size == found["kv_bytes_per_token"]
        else [["… once windows are full", _size(size), f"{size:,} B"]]
    )


def _whole(value: float) -> int | float:
    return int(value) if value == int(value) else value


def _billions(count: int) -> str:
    return f"{count / 1e9:.2f} billion" if count >= 1e9 else f"{count / 1e6:.1f} million"


def _size(size: float) -> str:
    """Bytes in the largest binary unit that leaves a whole part."""
    for power, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if size >= 1024**power:
            return f"{size / 1024**power:.2f} {unit}"
    return f"{size:g} B"
