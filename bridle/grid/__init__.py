"""Many runs as one command: ablations, the demo, child processes."""
