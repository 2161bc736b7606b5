"""Tar shards: reading, writing and verifying them."""
