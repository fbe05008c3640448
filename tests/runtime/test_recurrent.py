"""Recurrent networks from plans: torch's own layers and cells, and sequences of episodes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from plantune import TunedModule, optimize
from plantune.devices.machine import environment_of
from plantune.errors import UnsupportedModule
from plantune.layers import EpisodicGRU, EpisodicLSTM
from plantune.models.gru_translator import Sizes, greedy, gru_translator
from plantune.plans.database.proofs import remember_proof
from plantune.plans.guess import FALLBACK, compose
from plantune.runtime.calls import call_table
from plantune.space.search_space import load_search_space


def planned(module: nn.Module, *example: Any, mode: str = "infer") -> TunedModule:
    """From a plan of the framework's kernels, op by op."""
    module.train(mode == "train")
    found = optimize(module, *example, mode=mode, fallback="silent")
    graph, space = found._calls.expected_graph(), load_search_space("cpu")
    plan = compose(graph, space, network="by hand", preferences=FALLBACK)
    remember_proof(plan, environment_of(torch.device("cpu")))
    return optimize(module, *example, mode=mode, plan=plan)


def flat(made: Any) -> list[Tensor]:
    return [made] if isinstance(made, Tensor) else [t for part in made for t in flat(part)]


def assert_alike(module: nn.Module, *inputs: Any) -> None:
    """Outputs in inference, and all gradients in training, are eager's."""
    tuned = planned(module, *inputs)
    with torch.no_grad():
        torch.testing.assert_close(flat(tuned(*inputs)), flat(module(*inputs)))
    assert tuned.last_call().how == "planned"
    trained = planned(module, *inputs, mode="train")
    for each in (module, trained):
        made = flat(each(*inputs))
        seeds = [torch.linspace(-1, 2, t.numel()).view(t.shape) for t in made]
        torch.autograd.backward(made, seeds)
    assert trained.last_call().how == "planned"
    wanted = {name: parameter.grad for name, parameter in module.named_parameters()}
    for name, parameter in trained.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[name], rtol=1e-4, atol=1e-4)


OF_A_TRANSLATOR = [
    *((256, 512, 1, 1), (256, 512, 1, 7), (256, 512, 1, 25), (768, 512, 1, 1), (45, 128, 2, 11))
]


@pytest.mark.parametrize("samples", [1, 8, 64])
@pytest.mark.parametrize(("width", "hidden", "layers", "steps"), OF_A_TRANSLATOR)
def test_grus_of_a_translator_are_torchs(
    width: int, hidden: int, layers: int, steps: int, samples: int
) -> None:
    gru = nn.GRU(width, hidden, layers).eval()
    x = torch.randn(steps, samples, width)
    tuned = planned(gru, x)
    with torch.no_grad():
        torch.testing.assert_close(flat(tuned(x)), flat(gru(x)))
    assert tuned.last_call().how == "planned"


@pytest.mark.gpu
@pytest.mark.parametrize("samples", [1, 8, 64])
@pytest.mark.parametrize(("width", "hidden", "layers", "steps"), OF_A_TRANSLATOR)
def test_grus_of_a_translator_are_torchs_on_a_gpu(
    width: int, hidden: int, layers: int, steps: int, samples: int
) -> None:
    """As far from float64."""
    torch.manual_seed(0)
    gru = nn.GRU(width, hidden, layers).cuda().eval()
    x = torch.randn(steps, samples, width, device="cuda")
    tuned = optimize(gru, x, fallback="silent")
    with torch.no_grad():
        ours, theirs, right = flat(tuned(x)), flat(gru(x)), flat(deepcopy(gru).double()(x.double()))
    assert tuned.last_call().how == "captured"
    for own, other, exact in zip(ours, theirs, right, strict=True):
        errors = [float((made - exact).abs().max()) for made in (own, other)]
        assert errors[0] <= 2 * errors[1] + 1e-6


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM])
@pytest.mark.parametrize(
    "options", [{}, {"num_layers": 2, "batch_first": True}, {"bidirectional": True}], ids=str
)
@pytest.mark.parametrize("with_state", [False, True])
def test_layers_are_torchs(kind: type[nn.RNNBase], options: Any, with_state: bool) -> None:
    module = kind(6, 5, **options)
    layers = options.get("num_layers", 1) * (2 if "bidirectional" in options else 1)
    x = torch.randn((3, 7, 6) if "batch_first" in options else (7, 3, 6))
    state = torch.randn(layers, 3, 5)
    pair = (state, -state) if kind is nn.LSTM else state
    assert_alike(module, *((x, pair) if with_state else (x,)))


@pytest.fixture
def as_scans(monkeypatch):
    """Layers are read as they are for a GPU whose kernels run them faster."""
    monkeypatch.setattr(call_table, "scans_on", lambda arch: lambda layers: True)


@pytest.mark.usefixtures("as_scans")
@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM])
@pytest.mark.parametrize(
    "options", [{}, {"num_layers": 2, "batch_first": True, "bidirectional": True}], ids=str
)
def test_layers_that_are_read_as_scans_are_torchs(kind: type[nn.RNNBase], options: Any) -> None:
    module = kind(6, 5, **options)
    x, state = (
        torch.randn((3, 7, 6) if options else (7, 3, 6)),
        torch.randn(4 if options else 1, 3, 5),
    )
    assert_alike(module, x, (state, -state) if kind is nn.LSTM else state)
    ops = [node.op for node in planned(module, x)._calls.expected_graph().nodes]
    assert any(op.endswith("_scan") for op in ops)
    assert not any(op.startswith(("aten.gru", "aten.lstm")) for op in ops)


@pytest.mark.usefixtures("as_scans")
@pytest.mark.parametrize(("kind", "states"), [(nn.GRU, 1), (nn.LSTM, 2)])
@pytest.mark.parametrize("given", [False, True])
def test_a_single_layer_is_little_more_than_its_scan(
    kind: type[nn.RNNBase], states: int, given: bool
) -> None:
    """For each state a launch for its end, and one for its zeros where none is given."""
    first = [torch.randn(1, 3, 5)] * states
    state = (tuple(first) if states > 1 else first[0],) if given else ()
    graph = planned(kind(6, 5), torch.randn(7, 3, 6), *state)._calls.expected_graph()
    beside = [node.op for node in graph.nodes if node.op.startswith("aten.")]
    ends = ["aten.slice.Tensor"] * states
    assert beside == (ends if given else ["aten.full.default"] * states + ends)


@pytest.mark.usefixtures("as_scans")
@pytest.mark.parametrize(
    "options",
    [
        {"bias": False},
        {"proj_size": 2},
        {"num_layers": 2, "dropout": 0.5},
    ],
    ids=str,
)
def test_other_layers_stay_torchs(options: Any) -> None:
    layer = nn.LSTM(6, 5, **options)
    tuned = optimize(layer, torch.randn(7, 3, 6), mode="train", fallback="silent")
    ops = [node.op for node in tuned._calls.expected_graph().nodes]
    assert "aten.lstm.input" in ops


@pytest.mark.gpu
@pytest.mark.usefixtures("as_scans")
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM])
def test_layers_run_as_scans_on_a_gpu(kind: type[nn.RNNBase], dtype: torch.dtype) -> None:
    """A pass and its gradients are as far from float64 as torch's own."""
    torch.manual_seed(0)
    layer = kind(96, 256, 2, bidirectional=True).cuda().to(dtype)
    x = torch.randn(17, 20, 96, device="cuda", dtype=dtype)
    tuned = optimize(layer, x, mode="train", fallback="silent")
    seed, found = torch.randn(17, 20, 512, device="cuda", dtype=torch.float64), []
    exact = deepcopy(layer).double()
    for each, given in ((tuned, x), (layer, x), (exact, x.double())):
        y = each(given)[0]
        (y * seed.to(y.dtype)).sum().backward()
        found.append([y.detach(), *(p.grad.clone() for p in each.parameters())])
        each.zero_grad(set_to_none=True)
    assert tuned.last_call().how == "captured"
    families = {choice.candidate.family for choice in tuned.plan.choices}
    name = "gru_scan" if kind is nn.GRU else "lstm_scan"
    assert {name, f"{name}_grad"} <= families
    for ours, theirs, right in zip(*found, strict=True):
        scale = right.abs().max()
        errors = [float((t.double() - right).abs().max() / scale) for t in (ours, theirs)]
        assert errors[0] <= 2 * errors[1] + 2 * torch.finfo(dtype).eps, errors


@pytest.mark.parametrize("kind", [nn.GRUCell, nn.LSTMCell])
def test_cells_are_torchs(kind: type[nn.RNNCellBase]) -> None:
    state = torch.randn(4, 5)
    pair = (state, -state) if kind is nn.LSTMCell else state
    assert_alike(kind(6, 5), torch.randn(4, 6), pair)


def test_a_packed_sequence_is_refused_by_name() -> None:
    packed = pack_padded_sequence(torch.randn(5, 2, 6), torch.tensor([5, 3]))
    with pytest.raises(UnsupportedModule, match="PackedSequence"):
        optimize(nn.GRU(6, 5), packed)


@pytest.mark.parametrize("kind", [EpisodicGRU, EpisodicLSTM])
@pytest.mark.parametrize("ends", [False, True])
def test_episodes_that_end_inside_of_a_sequence(kind: type[nn.RNNBase], ends: bool) -> None:
    state = torch.randn(2, 3, 5)
    pair = (state, -state) if kind is EpisodicLSTM else state
    done = torch.rand(7, 3) < 0.3
    assert_alike(kind(6, 5, 2), torch.randn(7, 3, 6), pair, *([done] if ends else []))


@pytest.mark.gpu
@pytest.mark.parametrize("agents", [128, 512])
@pytest.mark.parametrize("kind", [EpisodicGRU, EpisodicLSTM])
def test_an_actors_memory_goes_from_call_to_call(kind: type[nn.RNNBase], agents: int) -> None:
    """What a call returned is what the next one begins with, where it is."""
    torch.manual_seed(0)
    memory = kind(96, 512, 2).cuda().half().eval()
    x, done = torch.randn(20, 1, agents, 96).cuda().half(), torch.rand(20, 1, agents).cuda() < 0.1
    first = torch.zeros(2, agents, 512, dtype=torch.half, device="cuda")
    states = [(first, first) if kind is EpisodicLSTM else first] * 2
    exact = deepcopy(memory).double()
    states.append((first.double(),) * 2 if kind is EpisodicLSTM else first.double())
    tuned = optimize(memory, x[0], states[0], done[0], fallback="silent")
    with torch.no_grad():
        for of_step, ends in zip(x, done, strict=True):
            inputs = (of_step, of_step, of_step.double())
            runs = zip((tuned, memory, exact), inputs, states, strict=True)
            made = [each(given, state, ends) for each, given, state in runs]
            states = [state for _, state in made]
    assert tuned.last_call().how == "captured"
    ours, theirs, right = (torch.cat(flat(part)).double() for part in made)
    assert (ours - right).abs().max() <= 2 * (theirs - right).abs().max() + 2e-3


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")  # torch's, of both streams
@pytest.mark.parametrize("kind", [EpisodicGRU, EpisodicLSTM])
def test_sequences_of_two_threads_do_not_hear_each_other(kind: type[nn.RNNBase]) -> None:
    """Blocks of a launch wait for each other, and on one GPU there is room for one launch."""
    layer = kind(64, 512).cuda().half()
    given = [torch.randn(32, 64, 64, device="cuda").half() for _ in range(10)]
    dy = torch.randn(32, 64, 512, device="cuda").half()
    tuned = optimize(layer, given[0], mode="train", fallback="silent")

    def passes(x: Tensor) -> list[Tensor]:
        y = tuned(x)[0]
        return [y.detach(), *torch.autograd.grad(y, [*tuned.parameters()], dy)]

    wanted = [passes(x) for x in given]
    torch.cuda.synchronize()

    def wrong(_: int) -> int:
        with torch.cuda.stream(torch.cuda.Stream()):
            made = [passes(x) for _ in range(10) for x in given]
            pairs = zip(made, wanted * 10, strict=True)
            return sum(not all(map(torch.equal, *pair)) for pair in pairs)

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(wrong, range(2))) == [0, 0]


@pytest.mark.parametrize("mode", ["infer", "train"])
@pytest.mark.parametrize("kind", [EpisodicGRU, EpisodicLSTM])
def test_under_autocast_scans_run_in_its_dtype(kind: type[nn.RNNBase], mode: str) -> None:
    state = torch.randn(1, 3, 5)
    given = (torch.randn(7, 3, 6), (state, -state) if kind is EpisodicLSTM else state)
    module = kind(6, 5).train(mode == "train")
    tuned, found = optimize(module, *given, mode=mode, fallback="silent"), []
    for each in (module, tuned):
        with torch.autocast("cpu"), torch.set_grad_enabled(mode == "train"):
            made = flat(each(*given))
        assert made[0].dtype == torch.bfloat16
        if mode == "train":
            made[0].float().square().sum().backward()
            made += [parameter.grad for parameter in each.parameters()]
        found.append(made)
    exact = flat(module(*given))
    torch.testing.assert_close(found[0][:2], [t.bfloat16() for t in exact[:2]], rtol=0.1, atol=0.02)
    torch.testing.assert_close(found[1], found[0], rtol=0.1, atol=0.02)


def test_a_translator_from_a_plan_follows_its_weights() -> None:
    sizes = Sizes(source_words=60, target_words=45, embedding=8, hidden=16)
    source, lengths = torch.randint(60, (9, 8)), torch.randint(1, 10, (8,))
    tuned = planned(gru_translator(sizes), source, lengths)
    for _ in range(3):
        model = gru_translator(sizes)
        tuned.load_state_dict(model.state_dict())
        assert all(map(torch.equal, tuned(source, lengths), greedy(model, source, lengths)))
        assert tuned.last_call().how == "planned"
