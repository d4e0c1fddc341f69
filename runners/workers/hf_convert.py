"""Writes the weights of a GGUF file, dequantised, as a Hugging Face folder; run by path in an engine's interpreter.

It imports only that interpreter's transformers and torch (which need gguf and accelerate beside them), and leaves
config.json and safetensors. The tokenizer is not its business: transformers rebuilds one that splits some numerals
(½, ٣) in another way than the file says, so `hf_model` writes the one that agrees with llama.cpp.
"""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any


def main(source: str, folder: str, dtype: str) -> None:
    """Convert `source` into the existing directory `folder`; one JSON line on stdout says what was written."""
    import torch
    import transformers

    path = Path(source)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        str(path.parent), gguf_file=path.name, dtype=torch.float32
    )
    whole = _plain(loaded, torch).to(getattr(torch, dtype))
    whole.save_pretrained(folder)
    said = {"parameters": whole.num_parameters(), "dtype": dtype, "transformers": transformers.__version__}
    print(json.dumps(said), flush=True)


def _plain(loaded: Any, torch: Any) -> Any:
    """The same weights in a model that does not remember being quantised, which could not be saved."""
    config = copy.deepcopy(loaded.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        whole = type(loaded)(config)
    whole.load_state_dict(loaded.state_dict(), assign=True)
    whole.tie_weights()
    return whole


if __name__ == "__main__":
    main(*sys.argv[1:4])
