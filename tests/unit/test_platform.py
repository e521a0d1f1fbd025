"""The CPU platform answers for CUDA, and leaves everything else as it is."""

import random
import subprocess
import sys
import threading
import time

import numpy
import pytest
import torch
from torch.overrides import TorchFunctionMode

from megatron_edit.platform import CpuPlatform, PlatformError, get_platform
from megatron_edit.platform.cuda import peak_bf16_flops


@pytest.fixture(autouse=True)
def platform():
    platform = get_platform("cpu")
    platform.initialize()
    return platform


def run_python(source, *arguments):
    """Runs `source` in a fresh interpreter, where nothing is initialised yet; returns its output."""
    command = [sys.executable, "-c", source, *map(str, arguments)]
    process = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stderr
    return process.stdout + process.stderr


class TestGetPlatform:
    def test_names(self):
        assert isinstance(get_platform("cpu"), CpuPlatform)
        assert isinstance(get_platform("auto"), CpuPlatform)  # initialised for the CPU: there is no CUDA any more
        assert get_platform("cpu").device == torch.device("cpu")
        assert (get_platform("cpu").name, get_platform("cpu").backend) == ("cpu", "gloo")

    def test_unknown_name(self):
        with pytest.raises(PlatformError, match="'tpu' is unknown: use auto, cpu or cuda"):
            get_platform("tpu")

    def test_cuda_without_a_gpu_says_what_to_do(self):
        with pytest.raises(ValueError, match=r"finds no GPU.*--device cpu.*nvidia-smi") as caught:
            get_platform("cuda")
        assert isinstance(caught.value, PlatformError)

    def test_importing_replaces_nothing(self):
        run_python(
            "import torch; before = {**vars(torch), **vars(torch.cuda), **vars(torch.Tensor)}\n"
            "from megatron_edit.platform import get_platform; get_platform('cpu')\n"
            "after = {**vars(torch), **vars(torch.cuda), **vars(torch.Tensor)}\n"
            "assert [k for k in before if before[k] is not after[k]] == []"
        )

    def test_initialize_is_idempotent(self, platform):
        before = torch.tensor, torch.Tensor.type, torch.cuda.Stream, torch.cuda.get_rng_state
        platform.initialize()
        get_platform("cpu").initialize()
        assert (torch.tensor, torch.Tensor.type, torch.cuda.Stream, torch.cuda.get_rng_state) == before


FACTORY_CALLS = {
    "zeros": lambda device: torch.zeros(2, 3, device=device),
    "ones": lambda device: torch.ones((2, 3), dtype=torch.int, device=device),
    "empty": lambda device: torch.empty(2, 3, dtype=torch.bfloat16, device=device).fill_(1),
    "empty_strided": lambda device: torch.empty_strided((2, 3), (1, 2), device=device).fill_(1),
    "full": lambda device: torch.full((2,), 3.5, device=device),
    "arange": lambda device: torch.arange(1, 7, 2, device=device),
    "linspace": lambda device: torch.linspace(0, 1, 5, device=device),
    "eye": lambda device: torch.eye(3, device=device),
    "tensor": lambda device: torch.tensor([1, 2], dtype=torch.float64, device=device),
    "scalar": lambda device: torch.tensor(3.0, device=device, requires_grad=True),
    "zeros_like": lambda device: torch.zeros_like(torch.ones(2, dtype=torch.half), device=device),
    "full_like": lambda device: torch.full_like(torch.ones(2), 7, device=device),
    "new_zeros": lambda device: torch.ones(2).new_zeros(3, device=device),
    "rand": lambda device: torch.rand(4, device=device),
    "randn": lambda device: torch.randn(4, device=device),
    "randint": lambda device: torch.randint(0, 99, (4,), device=device),
    "randperm": lambda device: torch.randperm(9, device=device),
    "linear": lambda device: torch.nn.Linear(3, 2, device=device).weight,
}


class TestFactories:
    @pytest.mark.parametrize("device", ["cuda", "cuda:0", torch.device("cuda"), torch.device("cuda", 0)], ids=str)
    @pytest.mark.parametrize("name", FACTORY_CALLS)
    def test_cuda_means_cpu(self, name, device):
        torch.manual_seed(1)
        expected = FACTORY_CALLS[name]("cpu")
        torch.manual_seed(1)
        actual = FACTORY_CALLS[name](device)
        assert actual.device == torch.device("cpu")
        assert (actual.dtype, actual.stride()) == (expected.dtype, expected.stride())
        assert actual.requires_grad == expected.requires_grad
        assert torch.equal(actual, expected)

    def test_current_device_is_a_device(self):
        assert torch.empty(2, device=torch.cuda.current_device()).device.type == "cpu"
        assert torch.zeros(2).to(torch.cuda.current_device()).device.type == "cpu"

    def test_other_threads(self):
        made = []
        thread = threading.Thread(
            target=lambda: made.extend([torch.zeros(2, device="cuda"), torch.tensor([1.0], device="cuda")])
        )
        thread.start()
        thread.join()
        assert [tensor.device.type for tensor in made] == ["cpu", "cpu"]

    def test_in_backward(self):
        x = torch.ones(3, requires_grad=True)
        x.register_hook(lambda gradient: gradient + torch.ones(3, device="cuda"))
        x.sum().backward()
        assert torch.equal(x.grad, torch.full((3,), 2.0))

    def test_modules_and_tensors_stay(self):
        linear, x = torch.nn.Linear(2, 2), torch.ones(2)
        assert linear.cuda() is linear and x.cuda() is x and x.cuda(torch.cuda.current_device()) is x


class TestUntouched:
    """Calls that name no CUDA device keep their meaning wherever torch treats its own functions specially."""

    def test_factories_are_the_builtin_functions(self):
        factories = [torch.zeros, torch.ones, torch.empty, torch.full, torch.arange, torch.rand, torch.randn]
        factories += [torch.randint, torch.zeros_like, torch.empty_like, torch.as_tensor, torch.Tensor.to]
        assert {type(factory) for factory in factories} == {type(len), type(str.join)}

    def test_default_device_context(self):
        with torch.device("meta"):
            made = [torch.tensor([1.0]), torch.zeros(2), torch.arange(3), torch.nn.Linear(2, 2).weight]
        assert {tensor.device.type for tensor in made} == {"meta"}

    def test_function_modes_see_the_original(self):
        seen = []

        class Record(TorchFunctionMode):
            def __torch_function__(self, function, types, args=(), kwargs=None):
                seen.append(function)
                return function(*args, **(kwargs or {}))

        with Record():
            torch.tensor([1.0])
            torch.tensor([1.0], device="cuda")
        assert seen[0] is torch.tensor.__wrapped__ and torch.tensor.__wrapped__ in seen[1:]

    def test_torchscript(self):
        @torch.jit.script
        def scripted(x: torch.Tensor) -> torch.Tensor:
            return torch.zeros(2) + torch.tensor(1.0) + x

        assert torch.equal(scripted(torch.ones(2)), torch.full((2,), 2.0))

    def test_compile(self):
        torch._dynamo.trace_rules.get_torch_obj_rule_map()  # refuses functions that stand under several rules

        @torch.compile(backend="eager", fullgraph=True)
        def compiled(x):
            return torch.tensor([1.0, 2.0]) + torch.zeros(2, device="cpu") + x

        assert torch.equal(compiled(torch.ones(2)), torch.tensor([2.0, 3.0]))

    def test_tensor_arguments(self):
        assert torch.tensor([1, 2]).dtype == torch.int64
        assert torch.tensor(numpy.ones(2)).dtype == torch.float64
        assert torch.tensor([1.0], device="meta").device.type == "meta"
        assert torch.tensor([1.0], device=None, requires_grad=True).requires_grad

    def test_availability(self):
        assert not torch.cuda.is_available()

    def test_transformers_from_pretrained(self, tmp_path):
        """Rotary frequencies lie in no file: a model made on the meta device has to compute them.

        The interpreter has not used a default-device context before the platform is initialised.
        """
        output = run_python(
            """
import sys, torch
from transformers import LlamaConfig, LlamaForCausalLM
from torch.utils._device import _device_constructors
folder = sys.argv[1]
torch.manual_seed(0)
config = LlamaConfig(vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                     num_attention_heads=4, num_key_value_heads=2, rope_theta=500000.0)
outside, ids = LlamaForCausalLM(config).eval(), torch.arange(40).reshape(2, 20)
outside.save_pretrained(folder)
with torch.no_grad():
    expected = outside(ids).logits
assert _device_constructors.cache_info().currsize == 0, "a default device was used before"
from megatron_edit.platform import get_platform
get_platform("cpu").initialize()
inside = LlamaForCausalLM.from_pretrained(folder).eval()
for (name, buffer), (_, other) in zip(outside.named_buffers(), inside.named_buffers(), strict=True):
    assert torch.equal(buffer, other), name
with torch.no_grad():
    assert torch.equal(inside(ids).logits, expected)
print("equal", tuple(expected.shape))
""",
            tmp_path,
        )
        assert "equal (2, 20, 97)" in output


class TestTensorTypes:
    def test_name(self):
        assert torch.ones(1).type() == "torch.cuda.FloatTensor"
        assert torch.nn.Parameter(torch.ones(1).bfloat16()).type() == "torch.cuda.BFloat16Tensor"
        assert "cuda" not in torch.ones(1, device="meta").type()

    def test_cast(self):
        x = torch.ones(2)
        assert x.type(torch.bfloat16).dtype == torch.bfloat16
        for dtype in ("torch.cuda.HalfTensor", "torch.HalfTensor", torch.cuda.HalfTensor, torch.HalfTensor):
            assert x.type(dtype).dtype == torch.half

    def test_isinstance(self):
        x = torch.nn.Parameter(torch.ones(1))
        assert isinstance(x, torch.cuda.FloatTensor) and not isinstance(x, torch.cuda.HalfTensor)
        assert isinstance(x.bfloat16(), torch.cuda.BFloat16Tensor)
        assert isinstance(torch.ones(1).long(), (torch.cuda.IntTensor, torch.cuda.LongTensor))

    def test_constructor(self):
        assert torch.equal(torch.cuda.LongTensor([3, 4]), torch.tensor([3, 4]))
        assert torch.cuda.FloatTensor(2, 3).shape == (2, 3)


class TestRandomState:
    def test_one_generator_behind_every_name(self):
        import megatron.core.tensor_parallel.random as megatron_random

        pairs = [
            (torch.cuda.get_rng_state, torch.cuda.set_rng_state),
            (torch.cuda.random.get_rng_state, torch.cuda.random.set_rng_state),
            (megatron_random._get_cuda_rng_state, megatron_random._set_cuda_rng_state),
        ]
        for get_state, set_state in pairs:
            state = get_state()
            drawn = torch.rand(3, device="cuda")
            set_state(state)
            assert torch.equal(torch.rand(3), drawn)

    def test_seed(self):
        torch.cuda.manual_seed(5)
        drawn = torch.rand(3)
        torch.cuda.manual_seed_all(5)
        assert torch.equal(torch.rand(3), drawn)
        torch.manual_seed(5)
        assert torch.equal(torch.rand(3), drawn)
        assert torch.cuda.initial_seed() == 5

    def test_a_fork_of_the_tracker_is_no_news(self, caplog):
        """megatron-core finds the CPU's generator changed, which is the device's here: once a layer with dropout."""
        from megatron.core.tensor_parallel import get_cuda_rng_tracker, model_parallel_cuda_manual_seed

        model_parallel_cuda_manual_seed(1, tp_rank=0, ep_rank=0, etp_rank=0, force_reset_rng=True)
        with get_cuda_rng_tracker().fork():
            torch.rand(1)
        assert caplog.records == []

    def test_fork_rng(self):
        state = torch.get_rng_state()
        with torch.random.fork_rng():
            torch.manual_seed(random.getrandbits(20))
            torch.rand(3)
        assert torch.equal(torch.get_rng_state(), state)

    def test_tracker_of_megatron(self):
        from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

        torch.manual_seed(1)
        tracker = CudaRNGStatesTracker()
        tracker.add("a", 7)
        state = torch.get_rng_state()
        with tracker.fork("a"):
            first = torch.rand(3)
        assert torch.equal(torch.get_rng_state(), state)
        with tracker.fork("a"):
            second = torch.rand(3)
        torch.manual_seed(7)
        assert torch.equal(torch.rand(6), torch.cat([first, second]))


class TestStreamsAndMemory:
    def test_events_measure_time(self, platform):
        start, end = platform.record_event(), torch.cuda.Event(enable_timing=True)
        time.sleep(0.02)
        end.record()
        assert 20 <= start.elapsed_time(end) < 2000
        with pytest.raises(ValueError, match="recorded"):
            start.elapsed_time(torch.cuda.Event())

    def test_streams(self, platform):
        stream = torch.cuda.Stream(device="cuda")
        assert isinstance(stream.record_event(), torch.cuda.Event)
        event = torch.cuda.Event()
        assert stream.record_event(event) is event and event.query()
        assert isinstance(torch.cuda.current_stream(), torch.cuda.Stream)
        torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
        torch.cuda.current_stream().wait_event(event)
        with torch.cuda.stream(stream), torch.cuda.stream(None), torch.cuda.device(0):
            torch.cuda.synchronize()
        assert platform.sync_stream() is platform.sync_stream()
        with platform.stream(platform.sync_stream()):
            platform.wait_event(platform.record_event(), platform.sync_stream())
        platform.synchronize()
        assert not torch.cuda.is_current_stream_capturing()

    def test_memory_is_the_resident_set(self, platform):
        before = platform.memory_allocated()
        buffer = platform.empty_pinned(2**24, torch.float32).fill_(1)  # 64 MiB
        now = torch.cuda.memory_allocated()
        assert now - before > 2**25
        assert platform.max_memory_allocated() >= now - 2**23
        stats = torch.cuda.memory_stats()
        assert stats["allocated_bytes.all.peak"] >= stats["allocated_bytes.all.current"] > 2**25
        assert buffer.shape == (2**24,)

    def test_device(self):
        assert torch.cuda.device_count() == 1 and torch.cuda.get_device_name() == "cpu"
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        assert properties.total_memory > 2**28 and (properties.major, properties.minor) == (0, 0)
        assert torch.cuda.is_bf16_supported()
        torch.cuda.set_device(0)
        torch.cuda._lazy_init()


def test_megatron_is_imported_without_warnings():
    output = run_python(
        "import megatron_edit.platform\n"
        "import megatron.core.models.gpt.gpt_layer_specs, megatron.core.models.backends\n"
        "import megatron.core.optimizer, megatron.core.distributed, megatron.core.pipeline_parallel.schedules"
    )
    assert "Apex" not in output and "Warning" not in output, output


@pytest.mark.parametrize(
    ("device_name", "teraflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H200", 989),
        ("NVIDIA H20", 148),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A10G", None),
        ("NVIDIA RTX A4000", None),
        ("NVIDIA L40S", 362),
        ("NVIDIA GeForce RTX 4090", 165),
        ("cpu", None),
    ],
)
def test_peak_flops(device_name, teraflops):
    assert peak_bf16_flops(device_name) == (None if teraflops is None else teraflops * 1e12)
