"""Generation: paged cache, chunked prefill, continuous batching, sampling, speculative decoding."""
