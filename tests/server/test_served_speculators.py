"""`penstock serve` with a drafter of the speculators library serves the model it drafts for."""

from __future__ import annotations

from pathlib import Path

from eagle_heads import make_head
from server_process import DUMMY, ServerProcess


def test_the_drafters_name_is_the_models_name(tiny_model: Path, tmp_path: Path) -> None:
    changes = {
        "speculators_config": {"verifier": {"name_or_path": str(tiny_model)}},
        "eagle_aux_hidden_state_layer_ids": [0, 0],  # the model has a single layer
    }
    folder, _ = make_head(tmp_path / "drafter", tiny_model, speculators=True, **changes)
    body = {"prompt": [5, 6, 7], "max_tokens": 12, "temperature": 0.0, "ignore_eos": True}
    with ServerProcess(str(folder), *DUMMY) as process:
        (card,) = process.get("/v1/models").json()["data"]
        assert (card["id"], card["root"]) == (str(folder), str(tiny_model))
        answer = process.post("/v1/completions", {**body, "model": str(folder)}).json()
        assert answer["usage"]["completion_tokens"] == 12
        assert "spec_decode_num_draft_tokens_total" in process.get("/metrics").text
