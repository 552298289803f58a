"""What operators and load balancers use: health, load, metrics, the throughput log."""
