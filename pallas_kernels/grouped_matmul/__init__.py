"""Matrix products of row groups, each with its own weight."""
