"""Servers that speak as SGLang and TensorRT-LLM do, with a script instead of a model, to test their adapters.

Each takes its engine's own command line, answers its engine's routes and counts as its engine counts. What they do
was read off the engines' sources and documentation (each says of which version) and was never compared with a
running one; they prove that an adapter does what it was meant to, not that the engine does.
"""
