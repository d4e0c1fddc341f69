"""Parameter counts of vision towers and what joins them to the text model, for the families known to the digit.

They take no part in decoding; the count tells how much of a checkpoint is not the text model. Each formula is that of
the tower's class in transformers and gives the published total of a checkpoint less its text model: SigLIP in
Gemma-3-4b (4,300,079,472), Qwen2.5-VL-7B (8,292,166,656), Qwen3-VL-8B (8,767,123,696), Qwen3.5-9B
(9,653,104,368, prediction module included) and Llama-4-Scout (108,641,793,536).

Boundary: counts only; images, their tokens and the cost of encoding them are no part of this library.
"""

from __future__ import annotations

from collections.abc import Callable

from models_roofline.errors import RooflineError
from models_roofline.families._config import Config

COLOURS = 3
"""Channels of an image; the default of every class here."""

FRAMES = 2
"""Frames in a patch of the Qwen towers (`temporal_patch_size`), likewise."""


def vision_params(config: Config) -> int | None:
    """Parameters of the vision tower and projector of a whole config; None where its kind is not known.

    A field of the tower that is missing or wrong is a remark and not an error: the text model does not need it.
    """
    tower, count = config.section("vision_config"), _TOWERS.get(config.text("model_type"))
    if count is None or tower.get("vision_use_head") is True:
        return None
    try:
        return count(tower, _text_hidden(config))
    except RooflineError as error:
        config.remark(str(error))
        return None


def _text_hidden(config: Config) -> int:
    """Hidden size of the text model, which some families keep at the top level."""
    return (config.section("text_config") if config.has("text_config") else config).integer("hidden_size")


def _linear(outputs: int, inputs: int) -> int:
    """A product with biases."""
    return outputs * (inputs + 1)


def _encoder_layer(hidden: int, inner: int) -> int:
    """Two norms with biases, attention of four square products, an MLP of two products."""
    return 4 * hidden + 4 * _linear(hidden, hidden) + _linear(inner, hidden) + _linear(hidden, inner)


def _patches(tower: Config) -> int:
    """Patches of an image of full size."""
    side = tower.integer("image_size") // tower.integer("patch_size")
    return side * side


def _patch_inputs(tower: Config, frames: int = 1) -> int:
    """Values in one patch, all colours and frames."""
    colours = tower.integer("num_channels", "in_channels", "in_chans", default=COLOURS)
    return colours * frames * tower.integer("patch_size") ** 2


def _siglip(tower: Config, text_hidden: int) -> int:
    """SigLIP without its pooling head; then a norm without bias and one matrix to the text model (Gemma 3)."""
    hidden, inner = tower.integer("hidden_size"), tower.integer("intermediate_size")
    embedding = _linear(hidden, _patch_inputs(tower)) + _patches(tower) * hidden
    body = tower.integer("num_hidden_layers") * _encoder_layer(hidden, inner)
    return embedding + body + 2 * hidden + hidden + hidden * text_hidden


def _llama4(tower: Config, text_hidden: int) -> int:
    """A class token, positions, norms before and after; pixel shuffle, two matrices, one to the text model."""
    hidden, inner = tower.integer("hidden_size"), tower.integer("intermediate_size")
    width, output = tower.integer("projector_input_dim"), tower.integer("projector_output_dim")
    embedding = hidden * _patch_inputs(tower) + hidden + (_patches(tower) + 1) * hidden + 4 * hidden
    body = tower.integer("num_hidden_layers") * _encoder_layer(hidden, inner)
    adapter = inner * width + output * output + tower.integer("vision_output_dim") * text_hidden
    return embedding + body + adapter


def _frames(tower: Config) -> int:
    return tower.integer("temporal_patch_size", default=FRAMES)


def _merged(tower: Config, hidden: int) -> int:
    """Width of a square of patches taken together."""
    return hidden * tower.integer("spatial_merge_size", default=2) ** 2


def _merger(norm: int, merged: int, outputs: int) -> int:
    """A norm and an MLP of two products over merged patches."""
    return norm + _linear(merged, merged) + _linear(outputs, merged)


def _qwen2_5(tower: Config, text_hidden: int) -> int:
    """Norms without bias, a gated MLP, rotary positions; a merger to the text model."""
    hidden, inner = tower.integer("hidden_size"), tower.integer("intermediate_size")
    attention = _linear(3 * hidden, hidden) + _linear(hidden, hidden)
    layer = 2 * hidden + attention + 2 * _linear(inner, hidden) + _linear(hidden, inner)
    embedding = hidden * _patch_inputs(tower, _frames(tower))
    outputs = tower.integer("out_hidden_size", default=text_hidden, why="as the text model's hidden_size")
    return embedding + tower.integer("depth") * layer + _merger(hidden, _merged(tower, hidden), outputs)


def _qwen3(tower: Config, text_hidden: int) -> int:
    """Learned positions, a merger, and one more merger for each layer that feeds the text model (Qwen3-VL)."""
    hidden, inner = tower.integer("hidden_size"), tower.integer("intermediate_size")
    embedding = _linear(hidden, _patch_inputs(tower, _frames(tower)))
    embedding += tower.integer("num_position_embeddings") * hidden
    outputs = tower.integer("out_hidden_size", default=text_hidden, why="as the text model's hidden_size")
    merged = _merged(tower, hidden)
    deep = len(tower.integers("deepstack_visual_indexes")) * _merger(2 * merged, merged, outputs)
    return (
        embedding
        + tower.integer("depth") * _encoder_layer(hidden, inner)
        + _merger(2 * hidden, merged, outputs)
        + deep
    )


_TOWERS: dict[str, Callable[[Config, int], int]] = {
    "gemma3": _siglip,
    "llama4": _llama4,
    "qwen2_5_vl": _qwen2_5,
    "qwen3_vl": _qwen3,
    "qwen3_vl_moe": _qwen3,
    "qwen3_5": _qwen3,
    "qwen3_5_moe": _qwen3,
}
"""By `model_type` of the whole model."""
