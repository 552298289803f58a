"""Running out of memory inside the library is an error of the call, not the end of the process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tiny_models import make_checkpoint

# A process that may grow by so many more bytes; what the tests ask for is a multiple, or far less.
LIMIT = """
import resource

def limit_growth(size):
    pages = int(open("/proc/self/statm").read().split()[0])
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + size, hard))

def lift_limit():
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
"""

# Each function that computes in memory of its own: of the call, of the list of pieces, of threads.
CALLS = """
import torch
from penstock.ops.attention import AttentionMetadata
from penstock.ops.cpu import ops
from penstock.ops.cpu.library import load
from penstock.ops.cpu.packed import PackedLinear, PackedMatrix, quantize_int8
from penstock.protocol.errors import OutOfMemory

linear = PackedLinear([PackedMatrix(quantize_int8(torch.randn(1, 256)))])

def attend(rows, head_dim):
    metadata = AttentionMetadata(
        query_starts=torch.arange(rows + 1, dtype=torch.int32),
        seq_lens=torch.ones(rows, dtype=torch.int32),
        block_table=torch.zeros(rows, 1, dtype=torch.int32),
        slot_mapping=torch.zeros(rows, dtype=torch.int64),
        num_decodes=rows, max_query_len=1, max_seq_len=1,
    )
    query, cache = torch.ones(rows, 1, head_dim), torch.ones(1, 2, 1, 1, head_dim)
    return lambda: ops.paged_attention(query, cache, metadata, 1.0)

def choose(rows, vocab):
    logits = torch.zeros(rows, vocab).index_fill_(1, torch.tensor([vocab // 2]), 9.0)
    slots = torch.zeros(rows, dtype=torch.int64)
    floats, ints = torch.tensor([[0.001, -99.0, 0.5]]), torch.tensor([[9, 7]])
    return lambda: ops.choose_tokens(logits, slots, slots, floats, ints)[0]

many, few = torch.ones(2**17, 256), torch.ones(8, 256)
calls = {
    "linear": (lambda: linear(many, None), lambda: linear(few, None)),
    "attention": (attend(1, 2**18), attend(1, 64)),
    "attention in threads": (attend(20, 2**16), attend(20, 64)),
    "choose_tokens in threads": (choose(8, 2**20), choose(8, 256)),
}
load().penstock_set_threads(4)
expected = {name: small() for name, (_, small) in calls.items()}
limit_growth(2**24)
for name, (large, small) in calls.items():
    try:
        large()
    except OutOfMemory as error:
        assert torch.equal(small(), expected[name]), name
        print(f"{name}: {error}")
lift_limit()
for large, _ in calls.values():
    large()
"""

# 128 rows of the MLP's wide middle take 96 MiB, 64 take 48.
ENGINE = """
import sys
from penstock import LLM, SamplingParams

params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
options = dict(max_model_len=256, max_num_batched_tokens=256, enable_prefix_caching=False)
with LLM(sys.argv[1], cpu_threads=2, skip_tokenizer_init=True, **options) as llm:
    prompt = {"prompt_token_ids": [7 * i % 256 for i in range(200)]}
    def tokens(prompt):
        (output,) = llm.generate(prompt, params, use_tqdm=False)
        assert output.error is None, output.error
        return output.outputs[0].token_ids
    tokens({"prompt_token_ids": [1, 2, 3]})
    limit_growth(80 * 2**20)
    limited = tokens(prompt)
    lift_limit()
    assert limited == tokens(prompt)
"""


def run(script: str, *arguments: str) -> tuple[str, str]:
    command = [sys.executable, "-c", LIMIT + script, *arguments]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout, result.stderr


def test_functions_raise_for_want_of_memory_and_work_on_with_less() -> None:
    output, _ = run(CALLS)
    assert output.splitlines() == [
        "linear: penstock_linear could not allocate working memory",
        "attention: penstock_attend could not allocate working memory",
        "attention in threads: penstock_attend could not allocate working memory",
        "choose_tokens in threads: penstock_choose_tokens could not allocate working memory",
    ]


def test_a_step_that_a_layer_has_no_memory_for_is_made_smaller(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama", intermediate_size=2**16, num_hidden_layers=1)
    _, log = run(ENGINE, str(folder))
    assert "penstock_decoder_layer could not allocate working memory" in log
