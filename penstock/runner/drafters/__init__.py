"""Makes the drafter that a configuration asks for. One table: methods by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.config import SpeculativeSettings
from penstock.runner.drafter import Drafter


def make_drafter(
    settings: SpeculativeSettings, target: Mapping[str, Any], on_gpu: bool = False
) -> Drafter:
    """For the target with this config.json. Only the method that is used is imported.

    Raises `ConfigError`.
    """
    if settings.method == "ngram":
        sizes = (settings.num_tokens, settings.prompt_lookup_min, settings.prompt_lookup_max)
        if on_gpu:
            from penstock.runner.drafters.device_ngram import DeviceNgramDrafter  # needs Triton

            return DeviceNgramDrafter(*sizes)
        from penstock.runner.drafters.ngram import NgramDrafter

        return NgramDrafter(*sizes)
    if settings.method == "suffix":
        depth = settings.suffix_decoding_max_tree_depth
        max_requests = settings.suffix_decoding_max_cached_requests
        if on_gpu:
            from penstock.runner.drafters.device_suffix import DeviceSuffixDrafter  # needs Triton

            return DeviceSuffixDrafter(settings.num_tokens, depth, max_requests)
        from penstock.runner.drafters.suffix import PastOutputs, PathRules, SuffixDrafter

        rules = PathRules(depth, settings.suffix_decoding_max_spec_factor)
        least = settings.suffix_decoding_min_token_prob
        return SuffixDrafter(settings.num_tokens, rules, PastOutputs(max_requests), least)
    if settings.method == "mtp":
        from penstock.runner.drafters.mtp import MtpDrafter, num_layers

        return MtpDrafter(settings.num_speculative_tokens or num_layers(target))
    assert settings.model is not None, "checked by the settings"
    if settings.method == "draft_model":
        from penstock.runner.drafters.draft_model import DraftModelDrafter

        return DraftModelDrafter(settings.model, settings.num_tokens, settings.quantization)
    if settings.method == "eagle":
        from penstock.runner.drafters.eagle import EagleDrafter

        return EagleDrafter(settings.model, settings.num_tokens)
    if settings.method == "eagle3":
        from penstock.runner.drafters.eagle3 import Eagle3Drafter

        return Eagle3Drafter(settings.model, settings.num_tokens)
    if settings.method == "medusa":
        from penstock.runner.drafters.medusa import MedusaDrafter

        return MedusaDrafter(settings.model, settings.num_tokens)
    from penstock.runner.drafters.custom import CustomDrafter

    return CustomDrafter(settings.model, settings.num_tokens, int(target["vocab_size"]))
