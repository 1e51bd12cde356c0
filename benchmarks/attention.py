"""The GPU's attention kernels (l1_kernels/attention) beside the card's limits.

    python -m benchmarks.attention [--out FILE] [--quick] [--kinds region,decode,simple] [--peer]

Decode: one token for each of `batch` rows that hold `context` keys. The bound is the bytes of keys and values over the
bandwidth of a read-only sum, measured in the same run; microseconds a launch from CUDA graphs of many launches, each on
caches of its own, over 1 GB of them in turn, so that the L2 cache does not help. An empty kernel in such a graph says what a
launch costs by itself. Prompt: causal, TFLOP/s of the operations inside the mask (4 * pairs * d); --peer times torch's flash
attention on the same shapes where torch is installed.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from benchmarks.record import circumstances, write
from l1_kernels.device import Device, open_device, prepare
from l1_kernels.regions import CacheArgs

ROTATED_BYTES = 1.2e9
REPEATS = 11
NUM_LAUNCHES = 600  # at most, a graph


@dataclass(frozen=True)
class Decode:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context: int
    batch: int
    capacity: int = 0  # keys a row has room for; 0: context

    @property
    def num_bytes(self) -> int:
        """Keys and values that a launch must read, fp16."""
        return 2 * self.batch * self.num_kv_heads * self.context * self.head_dim * 2


@dataclass(frozen=True)
class Prompt:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    length: int
    batch: int
    causal: bool = True

    @property
    def operations(self) -> float:
        pairs = self.length * (self.length + 1) / 2 if self.causal else self.length**2
        return 4 * self.batch * self.num_heads * self.head_dim * pairs


DECODES = [
    *(Decode(32, 32, 128, context, batch) for context in (128, 1024, 8192, 32768) for batch in (1, 4, 16) if context * batch <= 1 << 18),
    *(Decode(32, 8, 128, context, batch) for context in (1024, 8192, 32768) for batch in (1, 4, 16)),
    Decode(32, 4, 128, 8192, 4),
    Decode(16, 16, 256, 136, 1), Decode(16, 16, 256, 136, 1, 2048), Decode(16, 16, 256, 136, 16),  # GPT-J
    Decode(25, 25, 64, 136, 1), Decode(25, 25, 64, 136, 16),  # GPT-2 XL
]  # fmt: skip
PROMPTS = [
    Prompt(16, 16, 256, 128, 1), Prompt(12, 12, 64, 128, 1, False), Prompt(32, 32, 128, 128, 1), Prompt(32, 32, 128, 2048, 1),
    Prompt(32, 32, 128, 2048, 8), Prompt(32, 8, 128, 8192, 1), Prompt(16, 16, 64, 4096, 4), Prompt(16, 16, 256, 2048, 4),
]  # fmt: skip


def main() -> None:
    options = arguments()
    prepare("cuda")
    device = open_device("cuda")
    from models.speeds import read_bandwidth

    document = circumstances(("strata-inference", "numpy", "numba", "numba-cuda", "cupy-cuda13x", "cupy-cuda12x", "torch"))
    document["machine"]["gpu"] = device.description
    bandwidth = read_bandwidth(device)
    launch_us = time_of(device, [empty_launch(device)] * 500)
    document |= {"read_gb_s": bandwidth / 1e9, "empty_launch_us": launch_us}
    print(f"{device.description}: read-only sum {bandwidth / 1e9:.0f} GB/s, an empty launch in a graph {launch_us:.2f} us")
    decodes, prompts = (DECODES[::4], PROMPTS[::3]) if options.quick else (DECODES, PROMPTS)
    memory = random_numbers(device, decodes, prompts)
    document["decode"] = [row for shape in decodes for row in measure_decode(device, memory, shape, options.kinds, bandwidth)]
    document["prompt"] = [measure_prompt(device, memory, shape, options.peer) for shape in prompts]
    if options.out:
        with open(options.out, "w", encoding="utf-8") as file:
            json.dump(document, file, indent=1)
    else:
        write("attention", document, [])


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", help="the result file; default results/attention.json")
    parser.add_argument("--quick", action="store_true", help="a few of the shapes")
    parser.add_argument("--kinds", type=lambda text: text.split(","), default=["region"], help="kernels of a decode step: region, with the cache's write; decode; simple")
    parser.add_argument("--peer", action="store_true", help="torch's flash attention beside the prompts")
    return parser.parse_args()


def random_numbers(device: Device, decodes: list[Decode], prompts: list[Prompt]) -> Any:
    """The bits of normal fp16 numbers, as many as the largest shape needs for two caches and 1.2 GB: all caches are parts of it."""
    largest = max(2 * 2 * s.batch * s.num_kv_heads * max(s.context, s.capacity) * s.head_dim for s in decodes)
    size = max(int(ROTATED_BYTES / 2 * 1.2), largest)
    few = np.random.default_rng(0).standard_normal(1 << 22).astype(np.float16).view(np.uint16)
    memory = device.empty(-(-size // few.size) * few.size, np.uint16)
    memory.reshape(-1, few.size)[...] = device.to_device(few)
    return memory


def time_of(device: Device, launches: list[Any]) -> float:
    """Microseconds a launch: median over replays of one graph of them all."""

    def step() -> None:
        for launch in launches:
            launch()

    graph = device.capture(step)
    start, end = device.event(), device.event()
    times = []
    with device.stream() as stream:
        for _ in range(REPEATS + 1):
            start.record(stream)
            graph.replay()
            end.record(stream)
            times.append(device.elapsed_ms(start, end) * 1e3 / len(launches))
    return median(times[1:])


def empty_launch(device: Device) -> Any:
    """The add kernel, of one number."""
    x, y = device.zeros(1), device.zeros(1)
    return lambda: device.kernels.add(x, y)


def measure_decode(device: Device, memory: Any, shape: Decode, kinds: list[str], bandwidth: float) -> list[dict[str, Any]]:
    room = max(shape.context, shape.capacity)
    size = shape.batch * shape.num_kv_heads * room * shape.head_dim
    sets = int(min(NUM_LAUNCHES, memory.size // (2 * size), max(2, ROTATED_BYTES // (4 * size) + 1)))
    caches = memory[: sets * 2 * size].reshape(sets, 2, shape.batch, shape.num_kv_heads, room, shape.head_dim)
    qkv = device.to_device(np.random.default_rng(1).standard_normal((shape.batch, shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim), np.float32))
    rows, ends = device.to_device(np.arange(shape.batch, dtype=np.int32)), device.to_device(np.full(shape.batch, shape.context, np.int32))
    places = device.to_device(np.full(shape.batch, shape.context - 1, np.int32))
    out = device.empty((shape.batch, shape.num_heads * shape.head_dim))
    kernels: Any = device.kernels
    found = []
    for kind in kinds:

        def launch(one: int, kind: str = kind) -> Any:
            if kind == "region":
                cache = CacheArgs(caches[one, 0], caches[one, 1], "fp16", rows, places, ends, distinct=True)
                return lambda: device.regions.attend(qkv, shape.num_heads, None, cache, 0, shape.head_dim**-0.5, None)
            common = (qkv, shape.num_heads, caches[one, 0], caches[one, 1], "fp16", rows, ends, 0, shape.head_dim**-0.5, None, out)
            return lambda: kernels.attend(kind, *common)

        us = time_of(device, [launch(i) for i in range(sets)])
        bound = shape.num_bytes / bandwidth * 1e6
        rate = shape.num_bytes / us / 1e3
        found.append(shape.__dict__ | {"kind": kind, "us": us, "gb_s": rate, "bound_us": bound, "percent_of_bound": 100 * bound / us})
        name = f"{shape.num_heads}/{shape.num_kv_heads}x{shape.head_dim} keys {shape.context}{f' of {room}' if room > shape.context else ''} batch {shape.batch}"
        print(f"{kind:7} {name:36} {us:9.2f} us {rate:7.0f} GB/s {100 * bound / us:6.1f} % of bound", flush=True)
    return found


def measure_prompt(device: Device, memory: Any, shape: Prompt, peer: bool) -> dict[str, Any]:
    size = shape.batch * shape.num_kv_heads * shape.length * shape.head_dim
    caches = memory[: 2 * size].reshape(2, shape.batch, shape.num_kv_heads, shape.length, shape.head_dim)
    num_tokens = shape.batch * shape.length
    rng = np.random.default_rng(1)
    qkv = device.to_device(rng.standard_normal((num_tokens, shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim), np.float32))
    rows = device.to_device(np.repeat(np.arange(shape.batch, dtype=np.int32), shape.length))
    ends = np.tile(np.arange(1, shape.length + 1), shape.batch) if shape.causal else np.full(num_tokens, shape.length)
    on_device = device.to_device(ends.astype(np.int32))
    out = device.empty((num_tokens, shape.num_heads * shape.head_dim))
    kernels: Any = device.kernels
    common = (qkv, shape.num_heads, caches[0], caches[1], "fp16", rows, on_device, 0, shape.head_dim**-0.5, None, out)
    us = time_of(device, [lambda: kernels.attend("prompt", *common)] * 8)
    rate = shape.operations / us / 1e6
    found = shape.__dict__ | {"us": us, "tflop_s": rate}
    text = f"prompt  {shape.num_heads}/{shape.num_kv_heads}x{shape.head_dim} length {shape.length} batch {shape.batch} "
    text += f"{'causal ' if shape.causal else 'encoder'} {us:9.2f} us {rate:7.1f} TFLOP/s"
    if peer:
        found["torch_us"] = peer_us(shape)
        text += f"   torch {found['torch_us']:9.2f} us {shape.operations / found['torch_us'] / 1e6:7.1f} TFLOP/s"
    print(text, flush=True)
    return found


def peer_us(shape: Prompt) -> float:
    """torch's scaled_dot_product_attention, which takes 16-bit queries in their own layout and repeats nothing."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention as attend

    def numbers(heads: int) -> Any:
        return torch.randn(shape.batch, heads, shape.length, shape.head_dim, dtype=torch.float16, device="cuda")

    q, k, v = numbers(shape.num_heads), numbers(shape.num_kv_heads), numbers(shape.num_kv_heads)
    grouped = shape.num_heads != shape.num_kv_heads
    attend(q, k, v, is_causal=shape.causal, enable_gqa=grouped)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(8):
            attend(q, k, v, is_causal=shape.causal, enable_gqa=grouped)
    times = []
    for _ in range(REPEATS + 1):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / 8)
    return median(times[1:])


if __name__ == "__main__":
    main()
