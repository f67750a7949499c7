"""CUDA graphs of sharded parameters are refused. Without a GPU: nothing is compiled here, modules are only marked."""

import pytest
import torch
from torch import nn

import zeroamp
from tests.models.small import batch, loss_of
from tests.processes.training import config, wrapped
from zeroamp.hooks._torch.compiled import records_cuda_graphs
from zeroamp.hooks.root_forward import RootForward
from zeroamp.training import step
from zeroamp.wrapping import cuda_graphs, wrap
from zeroamp.wrapping.cuda_graphs import refuse_capture, refuse_cuda_graphs
from zeroamp.wrapping.state import wrap_state

pytestmark = pytest.mark.filterwarnings(r"ignore:`torch\.jit:DeprecationWarning")  # inductor's imports

WITH_GRAPHS = [{"mode": "reduce-overhead"}, {"mode": "max-autotune"}, {"options": {"triton.cudagraphs": True}}]
WITHOUT = [
    {},
    {"mode": "max-autotune-no-cudagraphs"},
    {"backend": "aot_eager"},
    {"options": {"triton.cudagraphs": False}},
]
REMEDY = 'mode="max-autotune-no-cudagraphs"'


def _in_place(options):
    module = nn.Linear(2, 2)
    module.compile(**options)
    return module


def _as_a_whole(options):
    return torch.compile(nn.Linear(2, 2), **options)


def _by_its_forward(options):
    module = nn.Linear(2, 2)
    module.forward = torch.compile(module.forward, **options)
    return module


HOW = [_in_place, _as_a_whole, _by_its_forward]


def _recording(module):
    """Mark a module as compiled with these settings, because compiling it would take seconds."""
    module.get_compiler_config = lambda: {"triton.cudagraphs": True}
    return module


@pytest.mark.slow
@pytest.mark.parametrize("how", HOW)
def test_a_module_that_was_compiled_with_cuda_graphs_is_known(how):
    assert [records_cuda_graphs(how(options)) for options in WITH_GRAPHS] == [True] * len(WITH_GRAPHS)
    assert [records_cuda_graphs(how(options)) for options in WITHOUT] == [False] * len(WITHOUT)
    assert not records_cuda_graphs(nn.Linear(2, 2))


@pytest.mark.slow
def test_inductors_own_setting_counts():
    with torch._inductor.config.patch({"triton.cudagraphs": True}):
        assert records_cuda_graphs(_in_place({}))


def test_the_error_names_the_module_and_the_remedy():
    model = nn.Sequential(nn.Linear(2, 2), _recording(nn.Linear(2, 2)))
    with pytest.raises(zeroamp.WrapError, match=f"^1 was compiled with CUDA graphs .*{REMEDY}"):
        refuse_cuda_graphs(model, "cuda")
    with pytest.raises(zeroamp.WrapError, match="^The model was compiled"):
        refuse_cuda_graphs(_recording(nn.Linear(2, 2)), "cuda")


def test_modules_without_sharded_parameters_may_be_compiled_with_cuda_graphs():
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    _recording(model[1])
    refuse_cuda_graphs(model, "cuda")
    _recording(model[0])
    names = [name for name, _ in model.named_parameters()]
    refuse_cuda_graphs(model, "cuda", ignored=names)
    with pytest.raises(zeroamp.WrapError, match="^0 was compiled"):
        refuse_cuda_graphs(model, "cuda", ignored=names[:1])
    refuse_cuda_graphs(model, "cpu")  # inductor has none there


class _Probe(nn.Linear):
    def __init__(self):
        super().__init__(2, 2)


def _on_cuda(module, monkeypatch, capturing):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    forward = RootForward()
    forward.add("outer autocast", refuse_capture(module, ()))
    forward.attach(module)
    return module


def test_a_forward_that_is_captured_is_refused(monkeypatch):
    capturing = [False]
    probe = _on_cuda(_Probe(), monkeypatch, capturing)
    probe(torch.ones(2))
    capturing[0] = True
    with pytest.raises(zeroamp.WrapError, match="captured by a CUDA graph.*outside of torch.cuda.graph"):
        probe(torch.ones(2))
    capturing[0] = False
    probe(torch.ones(2))


def test_the_first_forward_finds_what_was_compiled_after_wrapping(monkeypatch):
    model = _on_cuda(nn.Sequential(_recording(_Probe())), monkeypatch, [False])
    for _ in range(2):  # the first one did not run, so the second one checks again
        with pytest.raises(zeroamp.WrapError, match="^0 was compiled with CUDA graphs"):
            model(torch.ones(2))


def _on_a_cpu():
    """Return how many modules a forward on a CPU checks, and whether the root's forward refuses captures."""
    asked, original = [], cuda_graphs.records_cuda_graphs
    cuda_graphs.records_cuda_graphs = asked.append
    try:
        model = wrapped("llama_tied", config(3))
        loss_of(model, batch("llama_tied", 0)).backward()
    finally:
        cuda_graphs.records_cuda_graphs = original
    arounds = [around.__qualname__ for around in wrap_state(model).root_forward._arounds]
    return len(asked), any("refuse_capture" in name for name in arounds)


def test_nothing_is_looked_at_on_other_devices(ranks2):
    assert ranks2.run(_on_a_cpu)[0] == (0, False)


def _compiled_as_a_whole_after_wrapping():
    """Return the modules that `wrap_model` and `TrainStep` check."""
    looked, original = [], (wrap.refuse_cuda_graphs, step.refuse_cuda_graphs)
    wrap.refuse_cuda_graphs = step.refuse_cuda_graphs = lambda model, device_type, *_: looked.append(
        (type(model).__name__, device_type)
    )
    try:
        model = torch.compile(wrapped("llama_tied", config(3)), backend="aot_eager")
        zeroamp.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1))
    finally:
        wrap.refuse_cuda_graphs, step.refuse_cuda_graphs = original
    return looked


def test_wrap_model_and_the_step_look_at_what_they_get(ranks2):
    assert ranks2.run(_compiled_as_a_whole_after_wrapping)[0] == [("Llama", "cpu"), ("OptimizedModule", "cpu")]
