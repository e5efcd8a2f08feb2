"""The DeepSeek-V3.2 model in JAX/Flax and what runs it."""
