"""Several API processes on one port: the parent has the engines, children speak HTTP."""
