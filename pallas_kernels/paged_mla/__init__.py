"""Attention to listed rows of a paged cache, in absorbed MQA form."""
