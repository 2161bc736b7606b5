"""Network parts that know shapes and nothing else: patches, positions, blocks, windows, masks.

Everything works on grids of any rank and takes plain keyword arguments. Layers draw no random numbers: masks and
drop-path are drawn by the caller and passed in.
"""
