"""What every layer needs to know when it is constructed."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from penstock.distributed.mesh import Mesh, RankGroup
from penstock.layers.quantization import DenseMethod, LinearMethod
from penstock.ops.registry import Ops


@dataclass(frozen=True)
class Build:
    """Passed down through a model's constructors. It never changes afterwards."""

    dtype: torch.dtype
    device: torch.device
    max_model_len: int
    ops: Ops
    mesh: Mesh = field(default_factory=Mesh)
    linear_method: LinearMethod = field(default_factory=DenseMethod)
    tower_method: LinearMethod = field(default_factory=DenseMethod)  # of vision: never quantized
    embeds_drafts: bool = False  # a drafter reads the embedding: the last stage has it, too
    generates: bool = True  # False: hidden states are pooled, without logits
    shards_towers: bool = False  # of vision: over tensor-parallel ranks, by heads
    takes_media: tuple[str, ...] = ()  # modalities that requests may have
    num_redundant_experts: int = 0  # second copies, over all ranks that experts are spread over
    gathers_tokens: bool = False  # for experts that are spread over replicas: on all ranks

    def in_float32(self) -> Build:
        """For layers after pooling, which compute in float32 whatever the model's type."""
        return replace(self, dtype=torch.float32, linear_method=DenseMethod())

    @property
    def tp(self) -> RankGroup:
        """The ranks that share every layer with this one."""
        return self.mesh.tp

    def empty(self, *shape: int) -> torch.nn.Parameter:
        """A parameter to be filled by the loader."""
        data = torch.empty(*shape, dtype=self.dtype, device=self.device)
        return torch.nn.Parameter(data, requires_grad=False)
