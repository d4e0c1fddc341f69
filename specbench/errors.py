"""The errors that a user sees: one sentence that names the field or flag and how to mend it.

The command line turns each into its sentence on stderr and its exit code; nothing else is caught there.
"""

EXIT_OK = 0
EXIT_REGRESSION = 1
EXIT_USAGE = 2
EXIT_INVALID = 3
EXIT_INCONCLUSIVE = 4


class SpecbenchError(Exception):
    """Usage, unreadable input or something missing on this machine (exit 2)."""

    exit_code = EXIT_USAGE


class InvalidMeasurement(SpecbenchError):
    """The run ended, but what it measured must not be used (exit 3)."""

    exit_code = EXIT_INVALID


class EngineFailed(InvalidMeasurement):
    """An engine's server or worker did not start, or ended, or stopped answering: it costs its block (exit 3)."""


class Interrupted(SpecbenchError):
    """Ctrl-C during a run: what had finished is kept (exit 130, as shells say it)."""

    exit_code = 130


class Unsupported(SpecbenchError):
    """An engine cannot do what a config asks: `field` says what, the message says why."""

    def __init__(self, field: str, why: str) -> None:
        super().__init__(f"{field}: {why}")
        self.field = field
        self.why = why
