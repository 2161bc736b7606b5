"""Similarity search over a collection of files, by features and by codes."""
