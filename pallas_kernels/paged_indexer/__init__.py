"""Selection of the best keys of a sequence whose index keys lie in pages."""
