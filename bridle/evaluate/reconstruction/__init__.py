"""What a detokenizer loses, at which rate, beside codecs that everybody knows."""
