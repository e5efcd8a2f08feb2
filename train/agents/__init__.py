"""Agents: the sandbox in which code of a model runs."""
