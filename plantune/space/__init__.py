"""Arch facts and the configs a search may try, read from `search_spaces/*.toml`."""

from plantune.space.arch import Arch
from plantune.space.search_space import SearchSpace

__all__ = ["Arch", "SearchSpace"]
