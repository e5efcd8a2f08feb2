"""Attention kernels of DeepSeek Sparse Attention: pure functions that know no mesh and no config."""
