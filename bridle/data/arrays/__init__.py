"""Arrays: signals in files, tensors in memory and torch Datasets as samples."""
