"""Measurements that others published, as tables, with the rows that cannot be truth named and left out.

`read_table` gives a table as it was published, `usable` without its exclusions. Every CSV keeps its source, licence
and units in its first lines; NOTICE says what of it is NVIDIA's.
"""

from models_roofline.published.tables import EXCLUSIONS, SYSTEMS, Exclusion, excluded, read_table, usable

__all__ = ["EXCLUSIONS", "SYSTEMS", "Exclusion", "excluded", "read_table", "usable"]
