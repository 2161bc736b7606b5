"""Recordings: decoding, log-mel features, and the source of samples."""
