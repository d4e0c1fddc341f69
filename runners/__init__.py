"""Drives engines and leaves traces. The only packages it builds on are `specbench` and the libraries below it."""
