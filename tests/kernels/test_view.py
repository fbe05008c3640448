from __future__ import annotations

import torch

from plantune.canonical import Attrs
from plantune.kernels.families.view import FAMILY
from plantune.kernels.family import Frame


def test_only_a_reshape_is_a_view(step_of, refusal):
    reason = "only a reshape is a view"
    assert refusal(step_of(lambda b: b("relu", b.x(2, 3))), "view") == reason
    assert refusal(step_of(lambda b: b("permute", b.x(2, 3), dims=(1, 0))), "view") == reason
    two = step_of(lambda b: b("relu", b("reshape", b.x(2, 3), shape=(6,))))
    assert refusal(two, "view") == reason
    assert refusal(step_of(lambda b: b("reshape", b.x(2, 3), shape=(6,))), "view") is None


def test_it_has_one_config(step_of, refusal):
    step = step_of(lambda b: b("reshape", b.x(2, 3), shape=(6,)))
    assert "is not in the search space" in refusal(step, "view", layout="nchw")


def test_it_is_a_view_of_whatever_its_input_is_in_each_launch(step_of):
    step = step_of(lambda b: b("reshape", b.x(2, 3, 1, 1), shape=(2, 3)))
    assert FAMILY.aliases(FAMILY.parts(step), Attrs()) == {"reshape": "x0"}
    assert FAMILY.layouts(FAMILY.parts(step), Attrs()) == {"x0": "nchw", "reshape": "nchw"}
    values = {}
    binding = FAMILY.bind(FAMILY.parts(step), Attrs(), Frame(values))
    for _ in range(2):
        values["x0"] = torch.randn(2, 3, 1, 1)
        binding.launch(0)
        assert values["reshape"].data_ptr() == values["x0"].data_ptr()
        assert torch.equal(values["reshape"], values["x0"].flatten(1))
