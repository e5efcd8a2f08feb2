"""Environments: tasks with tools and verifiers; `catalogue.make` gives one by its name."""
