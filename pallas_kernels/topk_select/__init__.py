"""Exact top-k selection."""
