"""Using a trained model: load, encode, tokenize; files in, codes and features out."""
