"""Synthesis: environments, tools, tasks and verifiers that are made, checked and kept without a person."""
