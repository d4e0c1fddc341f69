"""OpenVINO GenAI in a worker of its own: continuous batching, prompt lookup, a draft model, EAGLE3.

It reads a GGUF file, whose weights stay 4-bit, or a folder in its own format. A draft model must be such a folder;
a GGUF draft is written as one, once. It is stepped by the worker, so a batch has per-request counts.

Two things that the engine does not say stay unknown: how much a prompt lookup drafted, and how much a draft model
did below a confidence threshold. By default greedy output depends on how many tokens a pass holds, so that a drafter
changes the text: activations meet 4-bit weights as 8-bit numbers with a scale for several, the KV cache is 8-bit, and
bfloat16 is used where the processor has it. With `precision = "f32"`, `kv_precision = "f32"` and `activation_group = 0`
every method gave its baseline's text, at about twice the time a token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from runners import flags, gguf, in_process, precision, worker
from runners.base import Availability, Counts, Launch, Raw, Request, Stream, Where
from runners.worker import WorkerSession
from specbench import models
from specbench.cell import Config, EngineAsk, Facts, Method
from specbench.errors import SpecbenchError, Unsupported
from specbench.models import ModelFile

DISTRIBUTIONS = ("openvino-genai",)
PRECISIONS = ("f32", "bf16", "f16")
KEPT = ("Q4_0", "Q4_1", "Q4_K", "Q8_0", "F16", "BF16", "F32")
"""Types of a GGUF file that stay what they are; others are turned into the engine's own."""
KV_PRECISIONS = ("u8", "f16", "bf16", "f32")
ARGS = {
    "threads": None,
    "precision": PRECISIONS,
    "kv_precision": KV_PRECISIONS,
    "batched_tokens": None,
    "activation_group": None,
}
"""`batched_tokens`: how many tokens of prompts and steps one pass may hold (the engine's own: 256).
`activation_group`: how many activations share a scale where they meet 4-bit weights as 8-bit numbers; 0: never."""


class OpenVinoEngine:
    """Adapter to `workers/openvino_worker.py`."""

    name = "openvino"
    driver: Literal["sse", "worker"] = "worker"
    path = "generate"
    ids_path: str | None = "ids"

    def probe(self, where: Where) -> Availability:
        """The version of openvino-genai in the interpreter that would run it."""
        return in_process.probe(self.name, where, DISTRIBUTIONS)

    def launch(self, config: Config, version: str) -> Launch:
        """Resolve config to the worker's settings. Raises Unsupported for what the version cannot do."""
        in_process.refuse_url(config)
        in_process.check_args(config.engine, ARGS)
        asked = flags.resolve(self.name, config.method, version)
        _check_draft_length(config.method)
        model = _model(config.model, "model")
        draft = _draft(config.method)
        settings = _settings(config.engine) | dict(asked.config) | {"model": str(model.path)}
        if draft is not None:
            settings |= {"draft": str(draft.path), "draft_sha256": draft.sha256, "ir_cache": str(_ir_cache())}
        argv = worker.command(in_process.interpreter(config.engine), self.name, settings)
        facts = Facts(
            engine=self.name,
            engine_version=version,
            argv=argv,
            threads=settings["properties"]["INFERENCE_NUM_THREADS"],
            model_path=str(model.path),
            model_sha256=model.sha256,
            draft_sha256=draft.sha256 if draft else None,
            extra={"method": asked.method},
        )
        files = {"model": model.path} | ({"draft": draft.path} if draft else {})
        return Launch(argv=argv, files=files, facts=facts, learns=asked.learns)

    @contextmanager
    def start(self, launch: Launch, log: Path) -> Iterator[WorkerSession]:
        """Start the worker; it has compiled the model, and tried whether it speculates, when it is ready.

        The facts then hold what the compiled model says of itself: threads and precision are what it took of what was
        asked, or unknown.
        """
        with in_process.started(launch, log) as session:
            said = session.ready["facts"]
            weights = _weights(Path(str(session.facts.model_path)))
            phrase = precision.phrase(said["precision"], weights) if weights else None
            about = {"threads": said["threads"], "precision": phrase}
            session.facts = session.facts.model_copy(update=about)
            yield session

    def body(self, request: Request) -> bytes:
        """Messages, for the engine's own tokenizer, or ids."""
        return in_process.body(request)

    def counts(self, streams: Sequence[Stream], before: Raw, after: Raw) -> Counts:
        """Steps and accepted tokens of each request, as the pipeline was stepped."""
        return in_process.counts(streams, before, after, "openvino steps")


def _settings(ask: EngineAsk) -> dict[str, Any]:
    """Device, its properties and the scheduler's, from `engine.args`."""
    args = ask.args
    properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": in_process.threads(ask)}
    if "precision" in args:
        properties["INFERENCE_PRECISION_HINT"] = args["precision"]
    if "kv_precision" in args:
        properties["KV_CACHE_PRECISION"] = args["kv_precision"]
    if "activation_group" in args:
        properties["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = _count(ask, "activation_group", 0)
    scheduler = (
        {"max_num_batched_tokens": _count(ask, "batched_tokens", 1)} if "batched_tokens" in args else {}
    )
    return {"device": "CPU", "properties": properties, "scheduler": scheduler}


def _count(ask: EngineAsk, name: str, least: int) -> int:
    value = ask.args[name]
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        why = f"must be a whole number of at least {least}, not {value!r}"
        raise Unsupported(f"engine.args.{name}", why)
    return value


def _check_draft_length(method: Method) -> None:
    if method.k is not None and "p_min" in method.params:
        raise Unsupported("method.p_min", "openvino takes either k or p_min; leave one out")


def _model(name: str, field: str) -> ModelFile:
    """A GGUF with a chat template, or a folder in OpenVINO's format."""
    model = in_process.model_at(name, field)
    if model.path.is_dir():
        if not (model.path / "openvino_model.xml").is_file():
            raise SpecbenchError(
                f"{field}: {name} is no folder in OpenVINO's format (it has no openvino_model.xml); name one, or a "
                "GGUF file."
            )
    elif field == "model" and gguf.has_chat_template(model.path) is False:
        raise SpecbenchError(
            f"model: {name} has no chat template, so it is a base model; name an instruct model."
        )
    return model


def _weights(model: Path) -> str | None:
    """The type of most weights as the engine keeps them; None where it is not known."""
    if model.is_dir():
        return precision.of_ir(model / "openvino_model.xml")
    found = precision.of_gguf(model)
    return found if found in KEPT else None


def _draft(method: Method) -> ModelFile | None:
    if method.draft is None:
        return None
    draft = _model(method.draft, "method.draft")
    if method.name == "eagle3" and not draft.path.is_dir():
        raise Unsupported(
            "method.draft", "eagle3 needs a draft model in OpenVINO's format that was trained for the target"
        )
    return draft


def _ir_cache() -> Path:
    return models.cache_dir() / "openvino"
