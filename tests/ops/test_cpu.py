"""What holds for every compiled kernel: how it is found, called, and what becomes of it in odd processes."""

import subprocess
import sys

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from trivium.ops import cpu
from trivium.ops.attnres.native import _attnres
from trivium.ops.linear import linear
from trivium.ops.rows import Rows

from ..tiny import tiny_config

pytestmark = pytest.mark.skipif(cpu.missing is not None, reason=str(cpu.missing))


def run(program):
    """A program in a process of its own; its last line."""
    done = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]


def test_memory_that_a_kernel_cannot_read_is_refused():
    with pytest.raises(ValueError, match=r"^linear: wanted contiguous memory of the CPU, got \(2, 3\) .* \(6, 2\)$"):
        cpu.call("linear", torch.ones(2, 6)[:, ::2])
    with pytest.raises(ValueError, match=r"got \(2,\) on meta"):
        cpu.call("linear", torch.ones(2, device="meta"))


@pytest.mark.skipif(sys.platform != "linux", reason="limits the address space")
def test_no_memory_is_an_error_and_not_the_end():
    """Keys and values of all heads are 34 GB here."""
    program = """
import resource, torch
from trivium.ops.attention.native import latent_attention_native
H, U = 64, 2**20
inputs = (torch.zeros(1, H, 64), torch.zeros(1, H, 1), torch.zeros(U, 1), torch.zeros(U, 1), torch.zeros(H, 128, 1))
resource.setrlimit(resource.RLIMIT_AS, (2**34, 2**34))
try:
    latent_attention_native(*inputs, [0, 1], [U - 1], False)
except MemoryError as error:
    print(error)
"""
    assert run(program) == "latent_expanded: no memory for what it computes in between"


def test_freed_memory_can_stay():
    program = """
import torch
from trivium.ops import cpu
kept = cpu.keep_memory()
def resident():
    return 4096 * int(open("/proc/self/statm").read().split()[1])
x = torch.ones(2**26)
del x
print(kept, resident() > 2**28)
"""
    if sys.platform != "linux":
        pytest.skip("looks into /proc")
    assert run(program) in ("True True", "False False")


def test_torch_default_device_is_no_matter():
    from trivium.model.init import initialise_
    from trivium.model.kimi_k3 import KimiK3
    from trivium.model.step import DecodeState, Stepper

    network = KimiK3(tiny_config(300))
    initialise_(network, seed=0)
    rows = Rows.of([5, 3])
    ids_T = torch.arange(8)

    def found():
        for parameter in network.parameters():
            parameter.grad = None
        hidden_TD, _ = network(ids_T, rows)
        hidden_TD.sum().backward()
        with torch.no_grad():
            _, state = network(ids_T, Rows.one(8), network.empty_state(1))
            logits_W = Stepper(network)(4, DecodeState.of(network.config, state))
        return [hidden_TD, logits_W, *(p.grad for p in network.parameters() if p.grad is not None)]

    want = found()
    torch.set_default_device("meta")
    try:
        got = found()
    finally:
        torch.set_default_device(None)
    assert all(a.equal(b) for a, b in zip(got, want, strict=True))


def test_why_there_are_no_kernels(tmp_path, monkeypatch):
    monkeypatch.setattr(cpu, "_FOLDER", tmp_path)
    with pytest.raises(cpu._Missing, match="^no compiled kernels in this installation: they were not built$"):
        cpu._open("plain")
    (tmp_path / "not_built.txt").write_text("the C++ compiler failed: simd.h:3:1: error: no such thing\n")
    with pytest.raises(
        cpu._Missing, match="this installation: the C\\+\\+ compiler failed: simd.h:3:1: error: no such thing$"
    ):
        cpu._open("plain")
    (tmp_path / "libtrivium_plain.so").write_bytes(b"no library")
    with pytest.raises(cpu._Missing, match="libtrivium_plain.so cannot be loaded: "):
        cpu._open("plain")


# --- Operations, registered and short --------------------------------------------------------------------------------


def attnres_case(grad=True):
    generator = torch.Generator().manual_seed(0)
    *sources, query_D = (torch.randn(size, generator=generator) for size in ((5, 8), (5, 8), (5, 8), (8,)))
    for x in (*sources, query_D):
        x.requires_grad_(grad)
    return sources, query_D


def test_short_and_registered_are_one_operation():
    """Of a list of tensors a list of gradients, also where one of them asks for none."""
    sources, query_D = attnres_case()
    sources[1].requires_grad_(False)
    leaves = [sources[0], sources[2], query_D]
    found = []
    for run in (_attnres, _attnres.registered):
        x_TD = run(sources, query_D, 1e-5)
        found.append([x_TD, *torch.autograd.grad(x_TD.square().sum(), leaves)])
    assert all(a.equal(b) for a, b in zip(*found, strict=True))
    with torch.no_grad():
        assert _attnres(sources, query_D, 1e-5).grad_fn is None


def test_who_looks_on_sees_the_registered_operation():
    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names.append(str(func))
            return func(*args, **(kwargs or {}))

    sources, query_D = attnres_case(grad=False)
    names = []
    with Seen():
        _attnres(sources, query_D, 1e-5)
    assert "trivium.attnres.default" in names
    mode = FakeTensorMode()
    fake = [mode.from_tensor(x) for x in (*sources, query_D)]  # without memory: a kernel would end the process
    assert _attnres(fake[:3], fake[3], 1e-5).shape == (5, 8)


def test_a_second_derivative_of_every_operation_raises():
    sources, query_D = attnres_case()
    x_TD = _attnres(sources, query_D, 1e-5)
    (grad,) = torch.autograd.grad(x_TD.sum(), query_D, create_graph=True)
    with pytest.raises(RuntimeError):
        (grad.square().sum() + query_D.sum()).backward()


def test_a_whole_number_is_the_same_number():
    from trivium.ops.kda import kda
    from trivium.ops.situ import situ

    generator = torch.Generator().manual_seed(0)
    q, k, v, decay, beta, A_log, dt_bias = (
        torch.randn(size, generator=generator) for size in (*[(9, 2, 8)] * 4, (9, 2), (2,), (2, 8))
    )
    for grad in (False, True):
        q.requires_grad_(grad)
        whole, real = (
            kda(q, k, v, decay, beta, A_log, dt_bias, Rows.one(9), lower_bound=bound)[0] for bound in (-5, -5.0)
        )
        assert whole.equal(real)
    assert situ(A_log, A_log, bound=4, up_bound=25).equal(situ(A_log, A_log, bound=4.0, up_bound=25.0))


def test_what_is_no_plain_memory_is_resolved_or_refused():
    x, w = torch.randn(3, 8, generator=torch.Generator().manual_seed(0)), torch.ones(5, 8)
    assert linear(torch._neg_view(x), w).equal(linear(-x, w))
    assert not linear(torch._efficientzerotensor((3, 8)), w).any()
    gone = torch.ones(3, 8)
    gone.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match=r"linear: wanted memory, got a tensor \(3, 8\) whose storage is gone"):
        linear(gone, w)


def test_forward_mode_raises():
    x, w = torch.ones(3, 8), torch.ones(5, 8)
    with pytest.raises(RuntimeError, match="linear: has no forward-mode derivative"):
        torch.func.jvp(lambda x: linear(x, w), (x,), (x,))
    with forward_ad.dual_level():
        assert linear(x, w).equal(torch.full((3, 5), 8.0))
        with pytest.raises(RuntimeError, match="linear: has no forward-mode derivative"):
            linear(forward_ad.make_dual(x, x), w)


def test_a_trace_and_a_profile_name_the_operation():
    x, w = torch.randn(3, 8, generator=torch.Generator().manual_seed(0)), torch.ones(5, 8)
    traced = torch.jit.trace(lambda x: linear(x, w), (x,), check_trace=False)
    assert traced(x).equal(linear(x, w)) and "trivium::linear" in str(traced.graph)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        linear(x, w)
    assert "trivium::linear" in {event.key for event in profile.key_averages()}
