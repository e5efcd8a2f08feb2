"""Attention to listed keys, in absorbed MQA form."""
