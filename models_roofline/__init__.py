"""Analytic cost models of decoding: bytes, FLOPs, time, speedup and crossovers.

Boundary: a library on its own; it imports no engine, no torch and no command line.
"""

__all__: list[str] = []
