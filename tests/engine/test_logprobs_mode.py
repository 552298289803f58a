"""What logprobs hold, by logprobs_mode."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tiny_engine import open_llm

from penstock import BeamSearchParams, SamplingParams
from penstock.protocol.errors import InputError

PROMPT = {"prompt_token_ids": [4, 5, 6, 5, 4]}
BIAS = {7: 3.0, 9: -4.0}
GREEDY = SamplingParams(temperature=0, max_tokens=4, logprobs=-1, logit_bias=BIAS, ignore_eos=True)
RANDOM = SamplingParams(
    temperature=0.5, top_k=5, seed=3, max_tokens=4, logprobs=-1, logit_bias=BIAS, ignore_eos=True
)
NAMED = SamplingParams(temperature=0, max_tokens=2, logprob_token_ids=[9, 7], ignore_eos=True)


def run(model: str, mode: str) -> dict[str, Any]:
    """The tokens and the values of every token at each position, by kind of request."""
    found = {}
    with open_llm(model, logprobs_mode=mode, max_logprobs=-1) as llm:
        outputs = llm.generate([PROMPT] * 3, [GREEDY, RANDOM, NAMED], use_tqdm=False)
        for name, output in zip(("greedy", "random", "named"), outputs, strict=True):
            rows = output.outputs[0].logprobs
            values = [[row[token].logprob for token in sorted(row)] for row in rows or []]
            ids = [sorted(row) for row in rows or []]
            found[name] = (output.outputs[0].token_ids, np.array(values, dtype=np.float64), ids)
        if mode.endswith("logits"):
            with pytest.raises(InputError, match="set it to raw_logprobs"):
                llm.beam_search([PROMPT], BeamSearchParams(beam_width=2, max_tokens=2))
    return found


def log_softmax(logits: Any) -> Any:
    with np.errstate(divide="ignore"):
        shifted = logits - logits.max(-1, keepdims=True)
        return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def test_each_mode_holds_what_its_name_says(tiny_llama: str) -> None:
    modes = ("raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits")
    found = {mode: run(tiny_llama, mode) for mode in modes}
    for kind in ("greedy", "random", "named"):  # no mode changes what is generated
        assert len({tuple(found[mode][kind][0]) for mode in modes}) == 1
    near = {"rtol": 0, "atol": 1e-4}
    for kind, temperature, top_k in (("greedy", 1.0, None), ("random", 0.5, 5)):
        raw = found["raw_logits"][kind][1]
        np.testing.assert_allclose(found["raw_logprobs"][kind][1], log_softmax(raw), **near)
        changed = raw.copy()
        for token, bias in BIAS.items():
            changed[:, token] += bias
        changed /= temperature
        if top_k is not None:
            changed[changed < np.sort(changed)[:, [-top_k]]] = -np.inf
            assert np.isinf(changed).any()
        np.testing.assert_allclose(found["processed_logits"][kind][1], changed, **near)
        processed = found["processed_logprobs"][kind][1]
        np.testing.assert_allclose(processed, log_softmax(changed), **near)
    logits, logprobs = found["raw_logits"]["named"], found["raw_logprobs"]["named"]
    assert logits[2] == logprobs[2]
    gap = logits[1] - logprobs[1]  # the row's normalizer, the same for all of its tokens
    np.testing.assert_allclose(gap, gap[:, :1] * np.ones_like(gap), **near)
