"""Classifiers trained on frozen features."""
