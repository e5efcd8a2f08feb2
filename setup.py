"""Package entry for tools that call setup.py; the metadata stands in pyproject.toml."""

from setuptools import setup

setup()
