"""A Function on a tape has its own backward pass."""

from __future__ import annotations

import copy
import json

import pytest
import torch

from plantune.base.jsonable import from_json, to_json
from plantune.graph.passes.differentiate import differentiate
from plantune.graph.tracing.arguments import Arguments
from plantune.graph.tracing.extract import extract
from plantune.graph.tracing.tape import Tape, tape_of
from plantune.graph.types import TensorType
from plantune.measure.subject import rebuilt

from ...runtime.test_functions import CASES, check_a_pass, of

CPU = torch.device("cpu")
TYPE = TensorType((6, 3), "float64")


@pytest.mark.parametrize("name", CASES)
def test_it_computes_the_same_gradients_and_has_the_same_layers(name: str) -> None:
    module = of(CASES[name]).train()
    tape = tape_of(module, Arguments((TYPE,)), derives=True)
    sent = from_json(Tape, json.loads(json.dumps(to_json(tape))))
    assert sent == tape
    again = rebuilt(sent, CPU).train()
    again.load_state_dict(module.state_dict(), strict=False)
    wanted, got = (differentiate(extract(each, TYPE)) for each in (module, again))
    assert got.digest == wanted.digest
    check_a_pass(copy.deepcopy(again), module)
