"""Reading a Hugging Face `config.json` field by field, so that no count rests on a guess.

`null` means the same as absent. An absent field takes the default that the family's own configuration class
documents, and the default is remembered (`Config.notes`), or it is an error that names the field.

Boundary: types and presence of fields; what they mean is the business of each family.
"""

from __future__ import annotations

from collections.abc import Mapping

from models_roofline.errors import RooflineError

MAX_LAYERS = 10_000
"""More layers than any model has; a larger number is a mistake in the config."""


LARGEST = 2**40
"""More than any size in a config, and with it no product of sizes is too large for a float."""


class Config:
    """The fields of one config, or of a section within it; errors name the model and the field."""

    def __init__(self, fields: Mapping[str, object], name: str, parent: Config | None = None, path: str = ""):
        self.fields = fields
        self.name = name
        self._parent = parent
        self._path = path
        self._defaults: dict[str, str] = parent._defaults if parent else {}
        self._remarks: list[str] = parent._remarks if parent else []

    def error(self, sentence: str) -> RooflineError:
        """The error to raise, with the model's name before the sentence."""
        return RooflineError(f"{self.name}: {sentence}")

    def field(self, key: str) -> str:
        """A field's name as it stands in the file, with the section before it."""
        return f"{self._path}{key}"

    def get(self, *keys: str) -> object:
        """The value of the first of these keys that is there and not null; else None."""
        return next((self.fields[key] for key in keys if self.fields.get(key) is not None), None)

    def inherited(self, *keys: str) -> object:
        """The same, looked for in the enclosing config too: some fields stand at either level."""
        value = self.get(*keys)
        return self._parent.inherited(*keys) if value is None and self._parent else value

    def has(self, *keys: str) -> bool:
        return self.get(*keys) is not None

    def section(self, key: str) -> Config:
        """A nested config such as `text_config`."""
        value = self.fields.get(key)
        if not isinstance(value, Mapping):
            raise self.error(f"{self.field(key)} must be an object of fields, not {value!r}.")
        return Config(value, self.name, self, self.field(key) + ".")

    def with_defaults(self, defaults: Mapping[str, object]) -> Config:
        """The same fields, with a family's constants where they are absent (and remembered as such)."""
        filled = dict(self.fields)
        for key, value in defaults.items():
            if not self.has(key):
                filled[key] = value
                self.assume(key, value)
        return Config(filled, self.name, self, self._path)

    def inherited_section(self, *keys: str) -> Config | None:
        """The first of these sections that is there, here or in the enclosing config; None where none is."""
        key = next((key for key in keys if self.has(key)), None)
        if key is not None:
            return self.section(key)
        return self._parent.inherited_section(*keys) if self._parent else None

    def optional(self, *keys: str, low: int = 1) -> int | None:
        """A whole number of at least `low`, or None where absent."""
        value = self.get(*keys)
        if value is None:
            return None
        found = next(key for key in keys if self.fields.get(key) is not None)
        if isinstance(value, int) and value > LARGEST:
            raise self.error(f"{self.field(found)} is larger than 2^40, which nothing in a model is.")
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise self.error(f"{self.field(found)} must be a whole number of at least {low}, not {value!r}.")
        return value

    def integer(self, *keys: str, default: int | None = None, why: str = "", low: int = 1) -> int:
        """A whole number of at least `low`. The first key is the field's name, the others its aliases.

        `why` says where a default comes from, when it is not a constant of the family.
        """
        value = self.optional(*keys, low=low)
        if value is not None:
            return value
        if default is None:
            others = f" (or {', '.join(keys[1:])})" if keys[1:] else ""
            raise self.error(
                f"{self.field(keys[0])}{others} is missing and has no default; add it to the config."
            )
        self.assume(keys[0], default, why)
        return default

    def layers(self, *keys: str, default: int | None = None, low: int = 1) -> int:
        """Number of layers, within reason."""
        value = self.integer(*(keys or ("num_hidden_layers",)), default=default, low=low)
        if value > MAX_LAYERS:
            raise self.error(
                f"{self.field(keys[0] if keys else 'num_hidden_layers')} is {value}; at most {MAX_LAYERS} make sense."
            )
        return value

    def flag(self, key: str, default: bool) -> bool:
        """True or false; looked for in the enclosing config too."""
        value = self.inherited(key)
        if value is None:
            self.assume(key, default)
            return default
        if not isinstance(value, bool):
            raise self.error(f"{self.field(key)} must be true or false, not {value!r}.")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """A string."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, str):
            what = "is missing" if value is None else f"must be a string, not {value!r}"
            raise self.error(f"{self.field(key)} {what}.")
        return value

    def integers(self, key: str) -> tuple[int, ...]:
        """A list of whole numbers of at least 0; empty where absent."""
        value = self.get(key)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(type(item) is int and item >= 0 for item in value):
            raise self.error(f"{self.field(key)} must be a list of whole numbers, not {value!r}.")
        return tuple(value)

    def layer_types(self, known: tuple[str, ...], count: int) -> tuple[str, ...] | None:
        """The `layer_types` list, one of `known` for each of `count` layers; None where absent."""
        value = self.get("layer_types")
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != count:
            length = len(value) if isinstance(value, list) else repr(value)
            raise self.error(f"{self.field('layer_types')} must list {count} layers, not {length}.")
        for item in value:
            if item not in known:
                raise self.error(
                    f"{self.field('layer_types')} holds {item!r}; this family knows {', '.join(known)}."
                )
        return tuple(value)

    def assume(self, key: str, value: object, why: str = "") -> None:
        """Remember that a documented default stood in for an absent field."""
        shown = str(value).lower() if isinstance(value, bool) else str(value)
        self._defaults[self.field(key)] = shown + (f" ({why})" if why else "")

    def remark(self, sentence: str) -> None:
        """Remember something a reader of the counts should know."""
        if sentence not in self._remarks:
            self._remarks.append(sentence)

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences for `Architecture.notes`."""
        filled = ", ".join(f"{key} = {value}" for key, value in self._defaults.items())
        start = (f"Not in the config, taken from the family's documented defaults: {filled}.",)
        return (start if filled else ()) + tuple(self._remarks)
