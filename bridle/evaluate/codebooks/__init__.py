"""Codebook health: how codes are used, what is wrong, and what to try."""
