"""The sampler's tests run with each implementation of its op."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import sampler_oracle

from penstock.ops import sampling
from penstock.ops.cpu.library import load


@pytest.fixture(scope="module", params=["reference", "torch", "c++"])
def implementation(request: pytest.FixtureRequest) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "reference":
            patch.setattr(sampler_oracle, "choose_tokens", sampling.choose_tokens)
        elif request.param == "c++":
            assert load() is not None, "build the C++ library first: pip install -e ."
            from penstock.ops.cpu.sampling import choose_tokens

            patch.setattr(sampler_oracle, "choose_tokens", choose_tokens)
        yield request.param
