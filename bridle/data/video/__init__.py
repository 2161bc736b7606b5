"""Video clips: decoding frames, and the source of samples."""
