"""Training commands and their parts."""
