import pathlib
import tempfile

from vllm import LLM, SamplingParams

folder = tempfile.mkdtemp()
llm = LLM(
    model="facebook/opt-125m",
    tensor_parallel_size=1,
    profiler_config={"profiler": "torch", "torch_profiler_dir": folder},
)
llm.start_profile("first")
llm.generate(["Hello, my name is"], SamplingParams(temperature=0.8, max_tokens=3))
llm.stop_profile()
(trace,) = pathlib.Path(folder).iterdir()
assert trace.name.startswith("first-")
assert '"traceEvents"' in trace.read_text()
