"""Measuring policies on tasks: attempts, statistics, reports, and a page to look through them."""
