"""Several processes as one command: ablations, the demo, `bridle launch`."""
