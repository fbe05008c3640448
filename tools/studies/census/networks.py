"""The networks of the census: those that torchvision and timm list for classification; by their
names also two policies, as policies/nature.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache
from itertools import zip_longest
from pathlib import Path

import policies
import torch
from torch import Tensor, nn

MOST_PARAMETERS = 30_000_000
BATCH = 32
SAMPLE = Path(__file__).with_name("sample.txt")
# torchvision's wheel is compiled for CUDA, and its import asks for these of its operators.
DETECTION = ("nms", "qnms")
CLASSES = 1000
# Sizes to try where a network is too deep for smaller images, before its own size.
LARGER = (96, 128, 160)
OWN_SIZE = 224
OWN_SIZES = {"inception_v3": 299}


@cache
def _import_torchvision() -> None:
    """Also beside torch's CPU build, for which its wheel brings no operators."""
    library = torch.library.Library("torchvision", "FRAGMENT")
    _KEPT.append(library)
    schema = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
    if torch.version.cuda is None:
        for name in DETECTION:
            library.define(name + schema)
    import torchvision.models  # noqa: F401


# Operators live as long as the library that defined them.
_KEPT: list[torch.library.Library] = []


def all_names() -> list[str]:
    """Every network of both collections, whatever its size, as `torchvision/resnet18`."""
    _import_torchvision()
    import timm
    import torchvision.models

    theirs = torchvision.models.list_models(module=torchvision.models)
    return [*(f"torchvision/{n}" for n in theirs), *(f"timm/{n}" for n in timm.list_models())]


def family(name: str) -> str:
    """Of networks with the same building blocks."""
    collection, _, own = name.partition("/")
    if collection == "policies":
        return name
    if collection == "torchvision":
        return name.rstrip("0123456789").partition("_")[0]
    _import_torchvision()
    from timm.models import _registry

    return f"timm/{_registry._model_to_module[own]}"


def in_turns(names: Iterable[str], size_of: Callable[[str], int]) -> list[str]:
    """One of each family first, the smaller ones before the larger, so that a census that is not
    finished says something of all.
    """
    families = defaultdict(list)
    for name in names:
        families[family(name)].append(name)
    ordered = [sorted(members, key=size_of) for members in families.values()]
    return [name for turn in zip_longest(*ordered) for name in turn if name]


def sample(count: int) -> list[str]:
    """The first of the fixed list: one of each architecture family first."""
    names = [line for line in SAMPLE.read_text().splitlines() if line and line[0] != "#"]
    return names[:count]


def build(name: str, image_size: int | None = None) -> nn.Module:
    """The network with random weights, for images of that size if it asks for it."""
    collection, _, own = name.partition("/")
    torch.manual_seed(0)
    if collection == "policies":
        return policies.POLICIES[own]()
    _import_torchvision()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _timm(own, image_size) if collection == "timm" else _torchvision(own, image_size)


def _timm(name: str, image_size: int | None) -> nn.Module:
    import timm

    if image_size is not None:
        try:
            return timm.create_model(name, img_size=image_size)
        except TypeError:
            pass  # any size will do for it
    return timm.create_model(name)


def _torchvision(name: str, image_size: int | None) -> nn.Module:
    from torchvision.models import get_model

    given = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
    if image_size is not None:
        for size in ({"image_size": image_size}, {"input_size": (image_size, image_size)}):
            try:
                return get_model(name, weights=None, **given, **size)
            except TypeError:
                pass  # any size will do for it
    return get_model(name, weights=None, **given)


def parameters(name: str) -> int:
    """How many it has, counted without their memory if it can be built so."""
    try:
        with torch.device("meta"):
            module = build(name)
    except NotImplementedError:  # some draw their weights from a distribution
        module = build(name)
    return sum(parameter.numel() for parameter in module.parameters())


def fitting(name: str, image_size: int, batch: int) -> tuple[nn.Module, Tensor]:
    """The network and images of the first size that it can be built for and runs on in training:
    the given one, larger ones, or its own. Its running statistics have seen some images.
    """
    for size in (image_size, *(larger for larger in LARGER if larger > image_size)):
        with suppress(Exception):  # whatever a network says of a size that is not for it
            return _run(build(name, size), size, batch)
    return _run(build(name), own_size(name), batch)


def _run(module: nn.Module, size: int, batch: int) -> tuple[nn.Module, Tensor]:
    images = torch.randn(batch, 3, size, size)
    with torch.no_grad():
        module.train()(images)
    return module, images


def settle(module: nn.Module, images: Tensor) -> None:
    """Gives its norms the statistics of these images: with those of the beginning, values of a deep
    network vanish in float16, and its outputs say nothing.
    """
    norms = [m for m in module.modules() if isinstance(m, nn.modules.batchnorm._NormBase)]
    before, trained = [norm.momentum for norm in norms], module.training
    for norm in norms:
        norm.momentum = 1.0
    with torch.no_grad():
        module.train()(images)
    for norm, momentum in zip(norms, before, strict=True):
        norm.momentum = momentum
    module.train(trained)


def own_size(name: str) -> int:
    """The side of the images that it was made for."""
    collection, _, own = name.partition("/")
    if collection == "torchvision":
        return OWN_SIZES.get(own, OWN_SIZE)
    _import_torchvision()
    import timm

    config = timm.get_pretrained_cfg(own)
    return OWN_SIZE if config is None else int(config.input_size[-1])


def call_of(name: str) -> Tensor:
    """Images of its own size, as many as a batch of a server or of actors has."""
    collection, _, own = name.partition("/")
    if collection == "policies":
        return policies.images(own)
    side = own_size(name)
    return torch.randn(BATCH, 3, side, side)
