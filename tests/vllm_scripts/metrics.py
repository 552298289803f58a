from vllm import LLM, SamplingParams
from vllm.v1.metrics.reader import Counter, Gauge, Histogram, Vector

llm = LLM(model="facebook/opt-125m", disable_log_stats=False)
llm.generate(["Hello", "The capital of France is"], SamplingParams(max_tokens=6, ignore_eos=True))
counts = {}
for metric in llm.get_metrics():
    if isinstance(metric, Gauge):
        print(f"{metric.name} (gauge) = {metric.value}")
    elif isinstance(metric, Counter):
        print(f"{metric.name} (counter) = {metric.value}")
        counts[metric.name.partition(":")[2]] = metric.value
    elif isinstance(metric, Vector):
        print(f"{metric.name} (vector) = {metric.values}")
    elif isinstance(metric, Histogram):
        print(f"{metric.name} (histogram): sum = {metric.sum}, count = {metric.count}")
        counts[metric.name.partition(":")[2]] = metric.count
        assert list(metric.buckets.values()) == sorted(metric.buckets.values())
assert counts["generation_tokens"] == 12
assert counts["time_to_first_token_seconds"] == counts["e2e_request_latency_seconds"] == 2
