"""An RL agent's policy around the SE-ResNet9: what it sees, what it did, and what it remembers.

As the agents of "Large Batch Simulation" have it: the vision's images are compressed to 2,048
numbers, a linear layer and the embedded action before go into a recurrent memory, and two heads
read it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from plantune.layers import EpisodicLSTM
from plantune.models.se_resnet9 import se_resnet9_fixup

State = tuple[Tensor, Tensor]
IMAGE_SIZE = 64
PIXELS = (IMAGE_SIZE // 32) ** 2  # of the vision's images


@dataclass(frozen=True)
class PolicySizes:
    in_channels: int = 3
    actions: int = 4
    base_planes: int = 64
    seen: int = 2048  # numbers of an image after the compression
    hidden: int = 512
    embedding: int = 32
    layers: int = 2


class Policy(nn.Module):
    """Sequences of T steps of N agents; parts of it are called as one step, without T.

    Where `done` (T, N) holds an episode begins: the memory is zeros before that step, and the
    action before it counts for nothing.
    """

    def __init__(self, sizes: PolicySizes | None = None) -> None:
        super().__init__()
        self.sizes = s = sizes or PolicySizes()
        self.vision = se_resnet9_fixup(s.in_channels, s.base_planes)
        channels = s.seen // PIXELS
        self.compression = nn.Sequential(
            nn.Conv2d(8 * s.base_planes, channels, 3, padding=1, bias=False),
            nn.GroupNorm(1, channels),
            nn.ReLU(),
        )
        self.seen = nn.Sequential(
            nn.Flatten(), nn.Linear(s.seen, s.hidden), nn.LayerNorm(s.hidden), nn.ReLU()
        )
        self.did = nn.Embedding(s.actions + 1, s.embedding)  # the first is that nothing was done
        self.memory = EpisodicLSTM(s.hidden + s.embedding, s.hidden, s.layers)
        self.action, self.value = nn.Linear(s.hidden, s.actions), nn.Linear(s.hidden, 1)

    def forward(
        self, images: Tensor, actions: Tensor, done: Tensor, state: State
    ) -> tuple[Tensor, Tensor, State]:
        """Images (T, N, C, 64, 64), the actions before them (T, N), `done`, and the memory's state
        and cell (layers, N, hidden), to logits (T, N, actions), values (T, N) and the memory after.
        """
        seen = self.seen(self.compression(self.vision(images.flatten(0, 1))))
        did = self.did(torch.where(done, 0, actions + 1))
        x = torch.cat((seen.unflatten(0, done.shape), did), -1)
        x, state = self.memory(x, state, done)
        return self.action(x), self.value(x)[..., 0], state

    def begin(self, agents: int) -> State:
        """The memory of agents that remember nothing."""
        shape = (self.sizes.layers, agents, self.sizes.hidden)
        return tuple(self.action.weight.new_zeros(shape) for _ in range(2))  # type: ignore[return-value]


def policy(sizes: PolicySizes | None = None) -> Policy:
    """With the public network's sizes: 2,048 numbers of an image, a memory of two layers of 512."""
    return Policy(sizes)
