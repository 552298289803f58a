"""vLLM's place for what `LLM.get_metrics` returns."""

from penstock.engine.offline_metrics import Counter, Gauge, Histogram, Metric, Vector

__all__ = ["Counter", "Gauge", "Histogram", "Metric", "Vector"]
