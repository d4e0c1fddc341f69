"""Hugging Face transformers in a worker of its own: assisted generation in all its forms, one request at a time.

It reads a GGUF file, whose weights are dequantised to `args.dtype`, or a Hugging Face folder. Assisted generation
takes a batch of one, so a higher concurrency is refused rather than queued.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal

from runners import flags, gguf, in_process, worker
from runners.base import Availability, Counts, Launch, Raw, Request, Stream, Where
from runners.worker import WorkerSession
from specbench.cell import Config, Facts
from specbench.errors import SpecbenchError, Unsupported
from specbench.models import ModelFile

DISTRIBUTIONS = ("transformers",)
ARGS = {"threads": None, "dtype": ("float32", "bfloat16", "float16")}


class TransformersEngine:
    """Adapter to `workers/transformers_worker.py`."""

    name = "transformers"
    driver: Literal["sse", "worker"] = "worker"
    path = "generate"
    ids_path: str | None = "ids"

    def probe(self, where: Where) -> Availability:
        """The version of transformers in the interpreter that would run it."""
        return in_process.probe(self.name, where, DISTRIBUTIONS)

    def launch(self, config: Config, version: str) -> Launch:
        """Resolve config to the worker's settings. Raises Unsupported for what the version cannot do."""
        in_process.refuse_url(config)
        in_process.check_args(config.engine, ARGS)
        if config.concurrency > 1:
            raise Unsupported("load.concurrency", "transformers answers one request at a time; set it to 1")
        asked = flags.resolve(self.name, config.method, version)
        model = _model(config.model, "model")
        draft = _model(config.method.draft, "method.draft") if config.method.draft else None
        if config.method.name == "universal" and draft and draft.sha256 == model.sha256:
            why = "universal is for a draft model with another vocabulary; use assisted for this one"
            raise Unsupported("method.draft", why)
        threads = in_process.threads(config.engine)
        settings: dict[str, Any] = {"threads": threads, "dtype": config.engine.args.get("dtype", "float32")}
        settings |= dict(asked.config) | {"model": str(model.path)}
        if draft is not None:
            settings["draft"] = str(draft.path)
        argv = worker.command(in_process.interpreter(config.engine), self.name, settings)
        facts = Facts(
            engine=self.name,
            engine_version=version,
            argv=argv,
            slots=1,
            threads=threads,
            model_path=str(model.path),
            model_sha256=model.sha256,
            draft_sha256=draft.sha256 if draft else None,
            extra={"method": asked.method},
        )
        files = {"model": model.path} | ({"draft": draft.path} if draft else {})
        return Launch(argv=argv, env=_ENV, files=files, facts=facts, learns=asked.learns)

    def start(self, launch: Launch, log: Path) -> AbstractContextManager[WorkerSession]:
        """Start the worker; it has loaded the model, and tried whether it speculates, when it is ready."""
        return in_process.started(launch, log)

    def body(self, request: Request) -> bytes:
        """Messages, for the engine's own tokenizer, or ids."""
        return in_process.body(request)

    def counts(self, streams: Sequence[Stream], before: Raw, after: Raw) -> Counts:
        """Steps from the streamer's calls, drafts from the candidate generator."""
        return in_process.counts(streams, before, after, "transformers steps")


_ENV = {"TQDM_DISABLE": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
"""No progress bars in the log, nothing fetched at run time, no threads beside those that were asked for."""


def _model(name: str, field: str) -> ModelFile:
    """A GGUF, or a Hugging Face folder. A target needs a chat template."""
    model = in_process.model_at(name, field)
    if model.path.is_dir():
        if not (model.path / "config.json").is_file():
            raise SpecbenchError(
                f"{field}: {name} is no Hugging Face folder (it has no config.json); name one, or a GGUF file."
            )
    elif field == "model" and gguf.has_chat_template(model.path) is False:
        raise SpecbenchError(
            f"model: {name} has no chat template, so it is a base model; name an instruct model."
        )
    return model
