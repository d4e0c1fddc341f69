"""A model's chat template: messages in, the prompt's text out, as the Hugging Face conventions render it.

Templates are Jinja programs that come with a model, so they run in Jinja's sandbox. Which names they find
(`bos_token`, `eos_token`, `add_generation_prompt`, `raise_exception`, `strftime_now`, `tojson`, loop controls and
the `generation` block, with blocks trimmed) is written down at huggingface.co/docs/transformers/chat_templating_writing.

Boundary: text. Token ids are `tokens`' business.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from specbench.errors import SpecbenchError

Messages = Sequence[Mapping[str, str]]
Scalar = int | float | str | bool


class _Generation(Extension):
    """`{% generation %}` marks what the model wrote, for training; here its content is simply rendered."""

    tags = {"generation"}  # noqa: RUF012 - the name and the type are Jinja's

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise(message: str) -> str:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """JSON as templates expect it: not escaped for HTML, which Jinja's own filter does."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


@dataclass(frozen=True)
class ChatTemplate:
    """A template with everything that decides its output.

    `now` is the clock of the template, held still so that all prompts of a run agree; `kwargs` are passed to the
    template beside the messages (such as `enable_thinking`).
    """

    text: str
    bos: str = ""
    eos: str = ""
    kwargs: Mapping[str, Scalar] = field(default_factory=dict)
    now: datetime = field(default_factory=datetime.now)

    @property
    def sha256(self) -> str:
        """SHA-256 of the template's text."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    @property
    def arguments(self) -> dict[str, Scalar]:
        """What the output depends on beside text and messages, for the record of a cell."""
        dated = {"date": self.now.date().isoformat()} if "strftime_now" in self.text else {}
        return {"add_generation_prompt": True} | dict(self.kwargs) | dated

    def render(self, messages: Messages) -> str:
        """The prompt that asks for the next answer. Raises SpecbenchError where the template refuses the messages."""
        names = {"bos_token": self.bos, "eos_token": self.eos, "add_generation_prompt": True}
        try:
            return self._program.render(
                messages=[dict(message) for message in messages],
                tools=None,
                documents=None,
                **names | dict(self.kwargs),
            )
        except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as error:
            roles = ", ".join(message.get("role", "?") for message in messages)
            raise SpecbenchError(
                f"workload: the model's chat template cannot write these messages ({roles}): {error or 'it fails'}; "
                "leave out the prompts that it refuses."
            ) from None

    @cached_property
    def _program(self) -> jinja2.Template:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
        )
        environment.filters["tojson"] = _to_json
        environment.globals |= {"raise_exception": _raise, "strftime_now": self.now.strftime}
        try:
            return environment.from_string(self.text)
        except jinja2.TemplateError as error:
            raise SpecbenchError(
                f"model: its chat template is no Jinja that can be read here ({error}); "
                'set workload.prompts = "messages" and let the engine apply it.'
            ) from None
