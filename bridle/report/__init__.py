"""One page about one or several runs, and the figures on it."""
