"""Inputs and outputs in the caller's memory, or copied."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import c_void_p
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from plantune.graph.types import TensorType
from plantune.runtime.captured.claims import Claim, claimed
from plantune.runtime.captured.io_binding import IoBinding

SHAPE = (2, 3, 1, 4)
TYPE = TensorType(SHAPE, "float32", "nchw")
STEPS = {"y": lambda x: x + 1, "z": lambda x: x * 2}


class Program:
    """Makes y and z of x; its kernels touch the values in `touched`, the framework the others."""

    device = torch.device("cpu")

    def __init__(
        self,
        outputs: Sequence[str],
        touched: str,
        updates: tuple[tuple[str, str], ...] = (),
        saved: tuple[str, ...] = (),
    ) -> None:
        self.graph = SimpleNamespace(
            inputs=(("x", TYPE),),
            output_gradients=(("x", TYPE),),
            outputs=tuple(outputs),
            types=dict.fromkeys("xyz", TYPE),
            updates=updates,
            saved=saved,
        )
        self.values = {name: torch.zeros(SHAPE) for name in "xyz"}
        self.ran: list[tuple[str, dict[str, int]]] = []
        self.fails = False
        self._touched = touched

    def touching(self, value: str, phase: str = "forward") -> tuple[str, ...]:
        self.phase = phase
        return (f"of {value}",) if value in self._touched else ()

    def change_of(self, value: str, strides: tuple[int, ...]) -> None:
        """No kernel here copies images."""

    def run_step(self, name: str) -> None:
        self.ran.append((name, {key: value.data_ptr() for key, value in self.values.items()}))
        if self.fails:
            raise RuntimeError("the step failed")


class Executable:
    """Its kernels find a value where they were told last."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._told: dict[str, int] = {}

    def patches(self, elsewhere: Any, places: tuple[int, int], labels: Sequence[str]) -> Any:
        name = labels[0].removeprefix("of ")
        self._graph.places[name] = places
        return None if name in self._graph.refuses else [SimpleNamespace(move=self._telling(name))]

    def _telling(self, name: str) -> Any:
        def move(address: int) -> None:
            if self._graph.fails:
                raise RuntimeError("the driver refused")
            self._told[name] = address
            self._graph.told.setdefault(name, []).append(address)

        return move

    def launch(self, tensors: Any) -> None:
        values = self._graph.program.values
        by_address = {t.data_ptr(): t for t in (*values.values(), *tensors)}
        at = {n: by_address[self._told.get(n, values[n].data_ptr())] for n in "xyz"}
        for name, step in STEPS.items():
            at[name].copy_(step(at["x"]))


class Graph:
    """A captured pass, and what its executable was told."""

    def __init__(self, program: Program, *, refuses: str = "") -> None:
        self.program, self.refuses = program, refuses
        self.told: dict[str, list[int]] = {}
        self.places: dict[str, tuple[int, int]] = {}
        self.fails = False
        self.executable = Executable(self)

    def launch(self, tensors: Any) -> None:
        self.executable.launch(tensors)


class Followed(IoBinding):
    """Remembers what memory it made for the last call: a fake graph needs the tensors."""

    is_direct = True

    def _maker(self, type_: TensorType, layout: str) -> Callable[[], Tensor]:
        make, seen = super()._maker(type_, layout), self.__dict__.setdefault("seen", [])

        def new() -> Tensor:
            seen.append(make())
            return seen[-1]

        return new


@pytest.fixture(autouse=True, params=[True, False], ids=["direct", "met"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one input and one output a pass is one function, which gives what the long way gives."""
    monkeypatch.setattr(Followed, "is_direct", request.param)


def call(binding: Any, graph: Graph, x: Tensor) -> tuple[Tensor, ...]:
    binding.seen[:] = [x]
    made: tuple[Tensor, ...] | None = (
        binding.direct([x], binding.seen) if binding.is_direct else None
    )
    if made is not None:
        return made
    launch, outputs = binding.bind([x])
    launch([x, *outputs])  # type: ignore[arg-type]
    binding.copy_out(outputs, graph.program.values, c_void_p())
    return outputs


def made(outputs: str = "y", touched: str = "xyz", **options: Any) -> tuple[IoBinding, Graph]:
    refuses = options.pop("refuses", "")
    program = Program(outputs, touched, **options)
    binding = Followed(program, [program.values["x"]])  # type: ignore[arg-type]
    graph = Graph(program, refuses=refuses)
    binding.serve(graph)  # type: ignore[arg-type]
    return binding, graph


def assert_right(found: Sequence[Tensor], names: str, x: Tensor) -> None:
    wanted = {"x": x, **{name: step(x) for name, step in STEPS.items()}}
    assert len(found) == len(names)
    for name, tensor in zip(names, found, strict=True):
        assert torch.equal(tensor, wanted[name]), name


def misaligned() -> Tensor:
    return torch.randn(25)[1:].view(SHAPE)


def permuted() -> Tensor:
    return torch.randn(2, 4, 1, 3).permute(0, 3, 2, 1)


class TestInTheCallersMemory:
    def test_nothing_is_copied(self) -> None:
        binding, graph = made()
        x = torch.randn(SHAPE)
        (y,) = call(binding, graph, x)
        assert_right([y], "y", x)
        assert graph.told == {"x": [x.data_ptr()], "y": [y.data_ptr()]}
        assert not graph.program.values["x"].any()
        assert not graph.program.values["y"].any()

    def test_in_training_too_if_no_gradient_reads_it(self) -> None:
        """What one reads stays in the program's memory: a caller may change its own."""
        binding, graph = made("yz", saved=("y",))
        x = torch.randn(SHAPE)
        assert_right(call(binding, graph, x), "yz", x)
        assert graph.told.keys() == {"x", "z"}
        assert_right([graph.program.values["y"]], "y", x)

    def test_kernels_are_told_of_another_address_only(self) -> None:
        binding, graph = made()
        x = torch.randn(SHAPE)
        for _ in range(3):
            assert_right(call(binding, graph, x), "y", x)
        assert graph.told["x"] == [x.data_ptr()]

    def test_inputs_in_turns(self) -> None:
        binding, graph = made()
        inputs = [torch.randn(SHAPE) for _ in range(64)]
        for x in [*inputs, *inputs]:
            assert_right(call(binding, graph, x), "y", x)
        assert graph.told["x"] == [x.data_ptr() for x in inputs] * 2

    def test_what_stays_in_its_place_is_not_told_again(self) -> None:
        binding, graph = made()
        inputs, room = [torch.randn(SHAPE) for _ in range(3)], torch.empty(SHAPE)
        binding._new = [lambda: binding.seen.append(room) or room]  # type: ignore[attr-defined]
        binding.direct = binding._direct_pass()
        for turn in (0, 1, 1, 2, 0):
            assert_right(call(binding, graph, inputs[turn]), "y", inputs[turn])
        assert graph.told["x"] == [inputs[turn].data_ptr() for turn in (0, 1, 2, 0)]
        assert graph.told["y"] == [room.data_ptr()]

    @pytest.mark.parametrize(
        ("others", "is_direct"),
        [({}, 1), ({"outputs": "yz"}, 0), ({"refuses": "x"}, 0), ({"refuses": "y"}, 0)],
    )
    def test_one_input_and_one_output_go_directly(self, others: Any, is_direct: int) -> None:
        binding, _ = made(**others)
        x = torch.randn(SHAPE)
        binding.seen[:] = [x]  # type: ignore[attr-defined]
        found = binding.direct([x], binding.seen)  # type: ignore[attr-defined]
        assert (found is not None) == is_direct

    def test_strides_of_one_element_mean_nothing(self) -> None:
        binding, graph = made()
        x = torch.randn(24).as_strided(SHAPE, (12, 4, 999, 1))
        assert_right(call(binding, graph, x), "y", x)
        assert graph.told["x"] == [x.data_ptr()]

    def test_an_output_is_the_callers_alone(self) -> None:
        binding, graph = made()
        x = torch.randn(SHAPE)
        (first,) = call(binding, graph, x)
        kept = first.clone()
        call(binding, graph, first)
        assert torch.equal(first, kept)

    def test_after_a_refusal_each_kernel_is_told_again(self) -> None:
        """Nobody knows which address they have."""
        binding, graph = made()
        first, second = torch.randn(SHAPE), torch.randn(SHAPE)
        call(binding, graph, first)
        graph.fails = True
        with pytest.raises(RuntimeError, match="the driver refused"):
            call(binding, graph, second)
        graph.fails = False
        for x in (first, second):
            assert_right(call(binding, graph, x), "y", x)
        assert graph.told["x"] == [t.data_ptr() for t in (first, first, second)]


class TestCopied:
    @pytest.mark.parametrize("awkward", [misaligned, permuted])
    def test_an_input_that_kernels_cannot_read(self, awkward: Any) -> None:
        binding, graph = made()
        for x in (torch.randn(SHAPE), awkward(), awkward(), torch.randn(SHAPE)):
            assert_right(call(binding, graph, x), "y", x)
        own = graph.program.values["x"].data_ptr()
        assert [address == own for address in graph.told["x"]] == [False, True, False]

    @pytest.mark.parametrize("options", [{"touched": ""}, {"refuses": "xy"}, {"refuses": "x"}])
    def test_where_kernels_cannot_be_told(self, options: dict[str, str]) -> None:
        binding, graph = made(**options)
        for x in (torch.randn(SHAPE), torch.randn(SHAPE)):
            assert_right(call(binding, graph, x), "y", x)
        assert "x" not in graph.told

    def test_an_input_that_records_gradients(self) -> None:
        binding, graph = made(touched="")
        x = torch.randn(SHAPE, requires_grad=True)
        (y,) = call(binding, graph, x)
        assert_right([y], "y", x.detach())
        assert not y.requires_grad

    @pytest.mark.parametrize("refuses", ["", "y", "z", "yz"])
    @pytest.mark.parametrize("outputs", ["yz", "zy", "yzy", "yyz", "zz"])
    def test_outputs_come_in_order(self, outputs: str, refuses: str) -> None:
        """Some are written in place, some copied, and one that is named twice is there twice."""
        binding, graph = made(outputs, refuses=refuses)
        for x in (torch.randn(SHAPE), torch.randn(SHAPE)):
            found = call(binding, graph, x)
            assert_right(found, outputs, x)
            assert len({tensor.data_ptr() for tensor in found}) == len(outputs)

    def test_an_output_that_is_stored_otherwise_than_kernels_write(self) -> None:
        binding, graph = made()
        binding.follow([torch.empty(2, 3, 4, 4).to(memory_format=torch.channels_last)])
        x = torch.randn(SHAPE)
        (y,) = call(binding, graph, x)
        assert_right([y], "y", x)
        assert y.stride() == (12, 1, 12, 3)
        assert "y" not in graph.told

    @pytest.mark.parametrize("outputs", ["yx", "xy", "xyx"])
    def test_an_input_that_is_an_output(self, outputs: str) -> None:
        """It is copied when the steps are over, from where they read it."""
        binding, graph = made(outputs)
        for x in (torch.randn(SHAPE), misaligned()):
            assert_right(call(binding, graph, x), outputs, x)

    def test_an_output_that_a_buffer_becomes(self) -> None:
        """It is copied when the steps are over, from where they write it."""
        binding, graph = made("yz", updates=(("buffer", "y"),))
        x = torch.randn(SHAPE)
        assert_right(call(binding, graph, x), "yz", x)
        assert torch.equal(graph.program.values["y"], x + 1)


class TestPatches:
    def test_each_end_is_looked_for_at_two_places(self) -> None:
        _, graph = made("yz")
        values = graph.program.values
        assert [name for name, _ in graph.program.ran] == ["of x", "of y", "of z"]
        for name, at in graph.program.ran:
            end = name[-1]
            assert graph.places[end] == (values[end].data_ptr(), at[end])
            moved = [key for key, value in values.items() if at[key] != value.data_ptr()]
            assert moved == [end]

    def test_a_step_that_fails_leaves_the_program_as_it_was(self) -> None:
        program = Program("y", "xy")
        binding = IoBinding(program, [program.values["x"]])  # type: ignore[arg-type]
        before = dict(program.values)
        program.fails = True
        with pytest.raises(RuntimeError, match="the step failed"):
            binding.serve(Graph(program))  # type: ignore[arg-type]
        assert all(program.values[name] is value for name, value in before.items())

    def test_those_of_an_earlier_graph_are_forgotten(self) -> None:
        binding, first = made()
        x = torch.randn(SHAPE)
        call(binding, first, x)
        second = Graph(first.program, refuses="x")
        binding.serve(second)  # type: ignore[arg-type]
        assert_right(call(binding, second, x), "y", x)
        assert first.told["x"] == [x.data_ptr()]


class TestInsideOfACapture:
    @pytest.mark.parametrize("touched", ["xyz", "y", ""])
    @pytest.mark.parametrize("outputs", ["yz", "zyz", "xy"])
    @pytest.mark.parametrize("given", [lambda: torch.randn(SHAPE), misaligned, permuted])
    def test_it_is_right(self, touched: str, outputs: str, given: Any) -> None:
        binding, graph = made(outputs, touched)
        x, values = given(), graph.program.values
        before = dict(values)

        def run() -> None:
            for name, step in STEPS.items():
                values[name].copy_(step(values["x"]))

        assert_right(binding.inside_a_capture([x], run), outputs, x)
        assert all(values[name] is value for name, value in before.items())

    def test_kernels_get_the_callers_tensors(self) -> None:
        binding, graph = made()
        x, seen = torch.randn(SHAPE), {}
        (y,) = binding.inside_a_capture([x], lambda: seen.update(graph.program.values))
        assert seen["x"] is x
        assert seen["y"] is y

    @pytest.mark.parametrize(
        ("touched", "given", "counts"),
        [("xyz", lambda: torch.randn(SHAPE), 1), ("xyz", misaligned, 0), ("y", permuted, 0)],
    )
    def test_it_says_what_kernels_read_in_place(
        self, touched: str, given: Any, counts: int
    ) -> None:
        binding, graph = made("y", touched)
        x, claims = given(), list[Claim]()
        with claimed(claims):
            binding.inside_a_capture([x], list)
        assert [each.tensor is x for each in claims] == [True] * counts
        for each in claims:
            (patch,) = each.find(graph.executable)  # type: ignore[arg-type]
            patch.move(16)
            assert graph.places["x"][0] == x.data_ptr()
            assert graph.told["x"] == [16]

    def test_a_pass_that_fails_leaves_the_program_as_it_was(self) -> None:
        binding, graph = made()
        before = dict(graph.program.values)

        def run() -> None:
            raise RuntimeError("the pass failed")

        with pytest.raises(RuntimeError, match="the pass failed"):
            binding.inside_a_capture([torch.randn(SHAPE)], run)
        assert all(graph.program.values[name] is value for name, value in before.items())


def test_a_backward_pass_reads_gradients_of_outputs_where_they_are() -> None:
    program = Program("", "xyz")
    seeds = IoBinding(program, [program.values["x"]], "backward")  # type: ignore[arg-type]
    graph = Graph(program)
    seeds.serve(graph)  # type: ignore[arg-type]
    assert program.phase == "backward"
    dy, other = torch.randn(SHAPE), misaligned()
    for tensor in (dy, other):
        launch, outputs = seeds.bind([tensor])
        launch([dy, other])  # type: ignore[arg-type]
        assert outputs == ()
        assert torch.equal(program.values["y"], tensor + 1)
    assert graph.told["x"] == [dy.data_ptr(), program.values["x"].data_ptr()]
