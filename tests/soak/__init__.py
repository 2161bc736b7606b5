"""Long grids of faults, and the harness that the quick tests share with them. `make soak` runs everything."""
