"""The layer graph: values, ops, extraction, differentiation, steps and partition."""

from plantune.base.canonical import Attrs
from plantune.graph.graph import Graph, Node
from plantune.graph.step import Step
from plantune.graph.types import TensorType

__all__ = ["Attrs", "Graph", "Node", "Step", "TensorType"]
