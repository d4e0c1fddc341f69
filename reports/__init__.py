"""Turns results into pages: HTML, Markdown and JSON. Computes nothing; every number comes from `specbench`."""
