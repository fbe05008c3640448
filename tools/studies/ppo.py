"""Trains stable-baselines3's PPO on images, its feature extractor by eager and from plans.

    pip install "plantune[rl]"
    python tools/studies/ppo.py --small  # a minute on two cores

Both ways have the same seed, environments and network; one line puts plantune into the policy.
Prints for each frames a second of acting and learning together, the first update left out, and the
mean reward in each tenth of the run. Without a plan a CPU runs eager; `--hand` picks plans there.
"""

from __future__ import annotations

import argparse
import json
import time
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import gymnasium
import numpy as np
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor, NatureCNN
from torch import Tensor, nn

from plantune import optimize
from plantune.models.se_resnet9 import SEResNet9Fixup
from plantune.plans.guess import COMPILED, hand_plan

PIXELS, CELLS, PARTS = 64, 8, 10
SIZE = PIXELS // CELLS


class Catch(gymnasium.Env[Any, Any]):
    """A ball falls in one of eight columns; a paddle at the bottom is to be below it in the end."""

    observation_space = gymnasium.spaces.Box(0, 255, (PIXELS, PIXELS, 3), np.uint8)
    action_space = gymnasium.spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._ball, self._paddle = (int(at) for at in self.np_random.integers(0, CELLS, 2))
        self._row = 0
        return self._image(), {}

    def step(self, action: Any) -> Any:
        self._paddle = min(max(self._paddle + int(action) - 1, 0), CELLS - 1)
        self._row += 1
        ends = self._row == CELLS - 1
        reward = (1.0 if self._ball == self._paddle else -1.0) if ends else 0.0
        return self._image(), reward, ends, False, {}

    def _image(self) -> Any:
        image = np.zeros((CELLS, CELLS, 3), np.uint8)
        image[self._row, self._ball] = (255, 64, 64)
        image[-1, self._paddle] = (64, 255, 64)
        return image.repeat(SIZE, 0).repeat(SIZE, 1)


class ResNetFeatures(BaseFeaturesExtractor):
    def __init__(self, planes: int, space: Any) -> None:
        super().__init__(space, features_dim=256)
        self.network = SEResNet9Fixup(3, planes)
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(planes * 32, 256), nn.ReLU())

    def forward(self, images: Tensor) -> Tensor:
        features: Tensor = self.head(self.network(images))
        return features


@dataclass(frozen=True)
class Settings:
    device: str
    network: str
    planes: int
    envs: int
    steps: int  # of each environment between updates
    batch: int
    frames: int

    @property
    def extractor(self) -> Any:
        return NatureCNN if self.network == "nature" else partial(ResNetFeatures, self.planes)


class Watch(BaseCallback):
    """Of each episode when it ended, and its reward; and when each rollout began."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[int, float]] = []
        self.began: list[tuple[int, float]] = []

    def _on_rollout_start(self) -> None:
        self.began.append((self.num_timesteps, time.perf_counter()))

    def _on_step(self) -> bool:
        ended = (info["episode"] for info in self.locals["infos"] if "episode" in info)
        self.found += [(self.num_timesteps, float(episode["r"])) for episode in ended]
        return True


def trained(settings: Settings, seed: int, *, tuned: bool) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = PPO(
        "CnnPolicy",
        make_vec_env(Catch, settings.envs, seed=seed),
        n_steps=settings.steps,
        batch_size=settings.batch,
        learning_rate=5e-4,
        policy_kwargs={"features_extractor_class": settings.extractor},
        seed=seed,
        device=settings.device,
    )
    policy = model.policy
    if tuned:
        example = torch.zeros(settings.batch, 3, PIXELS, PIXELS, device=settings.device)
        policy.features_extractor = optimize(
            policy.features_extractor, example, mode="train", share=True
        )
    watch = Watch()
    model.learn(settings.frames, callback=watch)
    (skipped, began), part = watch.began[1], settings.frames // PARTS
    curve = [[r for at, r in watch.found if (at - 1) // part == which] for which in range(PARTS)]
    return {
        "frames_a_second": round((model.num_timesteps - skipped) / (time.perf_counter() - began)),
        "rewards": [round(float(np.mean(each)), 3) if each else None for each in curve],
        "calls": str(policy.features_extractor.stats()) if tuned else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--network", default="nature", choices=["nature", "se_resnet9_fixup"])
    parser.add_argument("--frames", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--small", action="store_true", help="what a CPU trains in a minute")
    parser.add_argument("--hand", action="store_true", help="plans picked by hand on a CPU")
    ways = ["eager", "plantune"]
    parser.add_argument("--ways", nargs="+", default=ways, choices=ways)
    given = parser.parse_args()
    settings = Settings(given.device, given.network, 64, 64, 128, 1024, given.frames or 400_000)
    if given.small:
        settings = Settings(given.device, given.network, 16, 16, 32, 64, given.frames or 4096)
    by_hand = partial(hand_plan, without=COMPILED)
    plans = (
        patch("plantune.runtime.calls.choose.guessed_plan", by_hand)
        if given.hand
        else nullcontext()
    )
    with plans:
        for seed in range(given.seeds):
            for way in given.ways:
                found = trained(settings, seed, tuned=way == "plantune")
                print(json.dumps({"way": way, "seed": seed, **found}), flush=True)


if __name__ == "__main__":
    main()
