"""Files that run in an engine's own interpreter: `main.py` speaks the protocol, one file an engine drives it.

Boundary: nothing here is imported by the suite, and nothing of the suite is imported here; each file needs the
standard library and its engine only. They are started by path (`runners.worker.command`).
"""
