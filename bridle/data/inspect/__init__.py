"""`bridle data check` and `bridle data stats`."""
