"""The indexer's training loss."""
