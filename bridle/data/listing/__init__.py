"""Which files make up a data set, and which labels they have."""
