"""Judging a run: metrics, probes on frozen features, and the health of its codebooks."""
