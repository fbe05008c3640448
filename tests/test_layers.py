"""Layers that torch has no module for, beside what they are made of."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from plantune.graph.operators.scans import GRU_SCAN, LSTM_SCAN
from plantune.layers import EpisodicGRU, EpisodicLSTM

STEPS, SAMPLES, WIDTH, HIDDEN = 6, 3, 4, 5


def step_by_step(module: nn.Module, x: Tensor, state: Tensor, done: Tensor | None) -> Tensor:
    """torch's own layer, whose state is zeroed between its steps."""
    states, made = (state, -state), []
    for step, of_step in enumerate(x):
        if done is not None:
            kept = ~done[step, None, :, None]
            states = (states[0] * kept, states[1] * kept)
        is_lstm = isinstance(module, nn.LSTM)
        y, last = module(of_step[None], states if is_lstm else states[0])
        states = last if is_lstm else (last, last)
        made.append(y[0])
    return torch.stack(made)


@pytest.mark.parametrize(("kind", "own"), [(nn.GRU, EpisodicGRU), (nn.LSTM, EpisodicLSTM)])
@pytest.mark.parametrize("ends", [False, True])
def test_the_state_is_zeros_where_an_episode_begins(kind, own, ends) -> None:
    layer, reference = own(WIDTH, HIDDEN, 2).double(), kind(WIDTH, HIDDEN, 2).double()
    layer.load_state_dict(reference.state_dict())
    x = torch.randn(STEPS, SAMPLES, WIDTH, dtype=torch.float64, requires_grad=True)
    state = torch.randn(2, SAMPLES, HIDDEN, dtype=torch.float64, requires_grad=True)
    done = torch.rand(STEPS, SAMPLES) < 0.4 if ends else None

    made = layer(x, (state, -state) if kind is nn.LSTM else state, done)[0]
    wanted = step_by_step(reference, x, state, done)

    torch.testing.assert_close(made, wanted)
    seed = torch.randn_like(made)
    got = torch.autograd.grad(made, [x, state, *layer.parameters()], seed)
    exact = torch.autograd.grad(wanted, [x, state, *reference.parameters()], seed)
    torch.testing.assert_close(got, exact)


@pytest.mark.parametrize(("scan", "gates"), [(GRU_SCAN, 3), (LSTM_SCAN, 4)])
@pytest.mark.parametrize("ends", [False, True])
def test_all_gradients_of_a_scan(scan, gates, ends) -> None:
    wide = gates * HIDDEN
    shapes = [(STEPS, SAMPLES, wide), *[(SAMPLES, HIDDEN)] * (gates - 2), (wide, HIDDEN), (wide,)]
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    done = torch.rand(STEPS, SAMPLES) < 0.4 if ends else None
    assert torch.autograd.gradcheck(lambda *given: scan(*given, done), inputs)


@pytest.mark.parametrize("own", [EpisodicGRU, EpisodicLSTM])
def test_the_last_states_continue_a_sequence(own) -> None:
    layer, x = own(WIDTH, HIDDEN, 2), torch.randn(STEPS, SAMPLES, WIDTH)
    state = torch.randn(2, SAMPLES, HIDDEN)
    state = (state, -state) if own is EpisodicLSTM else state
    whole, _ = layer(x, state)
    first, between = layer(x[:2], state)
    torch.testing.assert_close(torch.cat((first, layer(x[2:], between)[0])), whole)


@pytest.mark.parametrize(("kind", "own"), [(nn.GRU, EpisodicGRU), (nn.LSTM, EpisodicLSTM)])
def test_a_layer_takes_the_place_of_torchs(kind, own) -> None:
    reference = kind(WIDTH, HIDDEN, 2).double().eval()
    layer, x = own.of(reference), torch.randn(STEPS, SAMPLES, WIDTH, dtype=torch.float64)
    assert not layer.training
    torch.testing.assert_close(layer(x), reference(x))
    with torch.no_grad():
        reference.weight_hh_l1.mul_(2)
        torch.testing.assert_close(layer(x), reference(x))
    assert dict(layer.named_parameters()) == dict(reference.named_parameters())


@pytest.mark.parametrize(
    "options", [{"bidirectional": True}, {"batch_first": True}, {"bias": False}], ids=str
)
def test_what_has_no_sequences_of_episodes_is_refused(options) -> None:
    with pytest.raises(ValueError, match="with biases and without dropout"):
        EpisodicGRU.of(nn.GRU(WIDTH, HIDDEN, **options))
