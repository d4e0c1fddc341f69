"""Prints the tables of docs/prediction.md: `python -m models_roofline.published`."""

from models_roofline.published import specdecode_bench, speed_bench

print(speed_bench.markdown())
print(specdecode_bench.markdown())
