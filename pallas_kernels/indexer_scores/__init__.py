"""Lightning indexer scores."""
