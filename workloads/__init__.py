"""Workloads: prompts as hashed, categorised splits; loaders for the usual files; reproducible selection.

A library on its own: only the standard library is behind its import, and it knows nothing of engines, runs
or reports. Whatever cannot be used raises `WorkloadError` with one sentence, or is kept as a `Rejection`.
"""

from workloads.catalogue import CATEGORIES, SPLITS, load_split, open_split
from workloads.loaders import FORMATS, load_file
from workloads.prompt import Prompt, WorkloadError
from workloads.select import select
from workloads.split import Duplicate, Rejection, Split
from workloads.stats import near_duplicates

__all__ = [
    "CATEGORIES",
    "FORMATS",
    "SPLITS",
    "Duplicate",
    "Prompt",
    "Rejection",
    "Split",
    "WorkloadError",
    "load_file",
    "load_split",
    "near_duplicates",
    "open_split",
    "select",
]
