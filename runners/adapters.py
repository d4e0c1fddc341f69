"""What adapters have in common whatever their engine: finding it installed, threads, slots, speculation as asked.

Boundary: no engine is started or asked here. Servers are `attached`'s business, workers `in_process`'.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence

from runners import flags
from runners.base import Availability, Where
from runners.environments import can_install, how_to_install, interpreter_for, version_at
from specbench import host
from specbench.cell import Config
from specbench.errors import Unsupported

Scalar = int | float | str | bool


def installed(
    engine: str, where: Where, distributions: Sequence[str], install: str | None = None
) -> Availability:
    """The engine's version in the interpreter or container that would run it.

    `install` says how to get it where `specbench engines install` has no recipe for this machine.
    """
    interpreter = interpreter_for(engine, where.python, where.command)
    version = version_at(interpreter, distributions)
    if version is None and shutil.which(interpreter[0]) is None:
        why = f"{interpreter[0]} is no program that can be run here"
        return Availability(
            ok=False, why_not=why, install=f"Mend {'engine.command' if where.command else 'engine.python'}."
        )
    if version is None:
        place = " ".join(interpreter) if where.python or where.command else "this environment"
        why = f"{place} has no package {' or '.join(distributions)}"
        if install is None or can_install(engine):
            install = how_to_install(engine)
        return Availability(ok=False, why_not=why, install=install)
    return Availability(ok=True, version=version, methods=flags.methods_of(engine, version))


def threads(args: Mapping[str, Scalar], most: int) -> int:
    """`engine.args.threads`, at most `most`. One core is left to the client unless the plan says otherwise."""
    cores = host.cores()
    value = args.get("threads", "cores-1")
    named = {"cores": cores, "cores-1": max(cores - 1, 1)}
    if isinstance(value, str) and value in named:
        return named[value]
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        why = f'must be a number from 1 to {most}, "cores" or "cores-1", not {value!r}'
        raise Unsupported("engine.args.threads", why)
    return value


def slots(config: Config) -> int:
    """`engine.args.slots`, raised to the plan's concurrency."""
    given = config.engine.args.get("slots", 1)
    return max(config.concurrency, given if isinstance(given, int) else 1)


def other_than_asked(asked: str, speculative: bool | None, who: str) -> str | None:
    """Half a sentence where the engine speculates and the plan does not, or the other way round; else None.

    An engine that does not say whether it speculates (`speculative` None) is not doubted.
    """
    if speculative is None or speculative == (asked != "none"):
        return None
    does = "speculates" if speculative else "does not speculate"
    return f"method.name: {asked} was asked for, but {who} {does}"
