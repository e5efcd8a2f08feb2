"""FP8 quantisation with power-of-two scales."""
