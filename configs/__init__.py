"""One Python file a run: get_config() returns the frozen RunConfig."""
