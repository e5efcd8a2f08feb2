"""Attention over a range of keys, in MHA form."""
