"""For operators and load balancers: health, load, metrics and the throughput log."""
