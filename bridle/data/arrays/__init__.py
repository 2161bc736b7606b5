"""Arrays: .npy signals, tensors in memory and torch Datasets as samples."""
