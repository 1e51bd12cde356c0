"""The axes of the equivalence harness. A new mechanism adds a field with its default, and lines to SETTINGS."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields

DECODERS = (
    "bloom gpt2 gpt2_inverse_layer_gelu gpt2_outliers gpt_neo gpt_neox_parallel gpt_neox_sequential gptj llama_gqa llama_gqa_tied "
    "llama_rope_dynamic llama_rope_linear llama_rope_llama3 llama_rope_yarn mistral_window mixtral olmoe opt opt_embed_proj qwen2 qwen2_moe qwen3"
).split()
ENCODERS = "bert distilbert roberta".split()

# Largest error allowed, as a share of the largest logit (docs/notation.md, "Numbers"). fp32 is compared with the golden
# logits, whose case may name a tighter bar; the others with float64 on the rounded weights. int8 rounds only the weights,
# which the float64 run shares, so its bar is that of the 16-bit keys and values (and, on a GPU, 16-bit activations).
#
# w8a8 rounds activations too, to a step of 1/127 of a token's largest. What differs elsewhere by a 16-bit key's rounding flips some of
# these roundings, and a flip moves a number by a step, twice what rounding itself moves it by at most. Rounding itself moves these
# logits by 1.5 to 5.7 % of their maximum (float64 with it against float64 without), so a bar below that would measure chance;
# that the kernels round and multiply rightly is for the tests of l1_kernels to show.
BARS = {"fp32": 1e-3, "fp16": 3e-3, "bf16": 2e-2, "int8": 3e-3, "w8a8": 5e-2}

# bf16 has 8 bits. A float64 run whose activations and keys are rounded as the GPU rounds them (and nothing else) errs by
# this much of the maximum on these random weights; the bar leaves a fifth of room.
WIDER = {("bf16", "llama_rope_yarn"): 3.1e-2, ("bf16", "llama_rope_dynamic"): 2.6e-2, ("bf16", "mistral_window"): 2.6e-2}

# int8 weights on a GPU: the same run with x rounded to fp16 errs by 4.2e-3 on llama_gqa_tied; with x in two planes of int8, as passes of 17 to 256
# tokens have it (l1_kernels/quantize), by 4.9e-3 on gpt2_outliers, whose outliers set a token's scale.
WIDER |= {("int8", "llama_gqa_tied"): 5e-3, ("int8", "gpt2_outliers"): 6e-3}

# In the same run a router's two best experts change places at some positions, and the logits of those and of later ones,
# which attend to them, are others: 9 of mixtral's 24, 3 of olmoe's 16. This share of an array's positions may differ; the
# rest, and the NLL, must hold the bar. Rounding activations to int8 does the same to 1 of qwen2_moe's 24.
ROUTING_FLIPS = {("bf16", "mixtral"): 0.5, ("bf16", "olmoe"): 0.25}
ROUTING_FLIPS |= {("w8a8", "mixtral"): 0.5, ("w8a8", "olmoe"): 0.25, ("w8a8", "qwen2_moe"): 0.25}


@dataclass(frozen=True, slots=True)
class Setting:
    """One way to run every case.

    batch   "together": both sequences in one pass; "alone": each by itself; "staggered": the second prompt joins the
            pass in which the first generates its first token, in rows that are not in order
    int8    of dtype int8: "w8a16", or "w8a8": activations rounded too
    tp, pp  ranks of tensor parallelism, stages of a pipeline
    ep, dp  owners of experts (0: every rank has a slice of each), data-parallel groups, of which the first is judged and the others have tokens
            in every second pass; all_to_all: how rows go to the owners
    kv      where keys and values live; parity: odd ranks move odd layers' alone, even ranks even ones'
    layers  0: the whole model; n: cut to its first n layers, compared with a float64 run of the cut
    graph   steps in which no prompt starts are replays of a graph (on the host: repeated calls) whose slots move on by themselves;
            an encoder's passes are replays
    fused   fused regions, or a launch an operation (None: as the device does by itself); gemm: who multiplies inside them
    overlap launches may begin before the last one ended
    all_reduce  how ranks with a GPU each sum small messages
    short   only a few tokens of each input (the simulator is slow)
    """

    device: str = "cpu"
    dtype: str = "fp32"
    int8: str = "w8a16"
    tp: int = 1
    pp: int = 1
    ep: int = 0
    dp: int = 1
    all_to_all: str = "pcc"
    kv: str = "gpu"
    parity: bool = False
    batch: str = "together"
    layers: int = 0
    graph: bool = False
    fused: bool | None = None
    gemm: str = "sbi"
    overlap: bool = True
    all_reduce: str = "auto"
    short: bool = False
    cases: tuple[str, ...] = ()

    def __str__(self) -> str:
        shown = [f"{f.name}={getattr(self, f.name)}" for f in fields(self) if f.name != "cases" and getattr(self, f.name) != f.default]
        return ",".join(shown) or "plain"

    def to_json(self) -> dict[str, object]:
        return asdict(self)

    @property
    def ranks(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def slices(self) -> tuple[int, int]:
        """How many slices dense matrices are cut into, and each expert."""
        return self.tp, self.tp * self.dp // self.ep if self.ep else self.tp

    @property
    def numbers(self) -> str:
        """What BARS and the other tables of this file go by."""
        return self.int8 if self.int8 != "w8a16" else self.dtype

    def case_names(self) -> tuple[str, ...]:
        return self.cases or (*DECODERS, *ENCODERS)


# A graph holds no step that needs the host: for its tables (dynamic), or, on the host itself, to gather experts' tokens.
GRAPHED = tuple(name for name in (*DECODERS, *ENCODERS) if name not in ("llama_rope_dynamic", "mixtral", "olmoe", "qwen2_moe"))
SPARSE = ("mixtral", "olmoe", "qwen2_moe")
SIM_CASES = ("gpt2", "gptj", "llama_gqa")
# On two GPUs both ranks compile the kernels of each family anew, 5 s a case in fp32 and 15 in 16 bits: a layer of each shape will do.
TWO_GPU_CASES = ("gpt2", "gptj", "llama_gqa")

CPU_SETTINGS = [
    Setting(),
    Setting(batch="alone"),
    Setting(batch="staggered"),
    Setting(dtype="fp16"),
    Setting(dtype="bf16", batch="staggered"),
    Setting(dtype="int8"),
    Setting(dtype="int8", int8="w8a8"),
    Setting(dtype="int8", int8="w8a8", batch="staggered"),
    Setting(tp=2),
    Setting(tp=2, dtype="int8"),
    Setting(tp=4),
    Setting(kv="cpu", cases=tuple(DECODERS)),
    Setting(kv="cpu", dtype="fp16", batch="staggered", cases=tuple(DECODERS)),
    Setting(tp=2, kv="cpu", parity=True, dtype="fp16", batch="staggered", cases=tuple(DECODERS)),
    Setting(pp=2, kv="cpu", batch="staggered", cases=tuple(DECODERS)),
    Setting(pp=2, cases=tuple(DECODERS)),
    Setting(pp=2, dtype="fp16", batch="staggered", cases=tuple(DECODERS)),
    Setting(pp=2, dtype="int8", int8="w8a8", cases=tuple(DECODERS)),
    Setting(tp=2, pp=2, cases=tuple(DECODERS)),
    Setting(tp=2, pp=2, dtype="bf16", batch="staggered", cases=tuple(DECODERS)),
    Setting(tp=2, dtype="bf16", batch="staggered"),
    Setting(tp=2, ep=2, cases=SPARSE),
    Setting(tp=2, ep=2, all_to_all="flat", dtype="fp16", batch="staggered", cases=SPARSE),
    Setting(tp=4, ep=2, cases=SPARSE),
    Setting(tp=2, pp=2, ep=2, cases=SPARSE),
    Setting(dp=2, ep=2, batch="staggered", cases=SPARSE),
    Setting(dp=2, ep=1, dtype="fp16", cases=SPARSE),
    Setting(dp=2, ep=2, dtype="int8", batch="alone", cases=SPARSE),
    Setting(tp=2, dp=2, ep=4, batch="staggered", cases=SPARSE),
    Setting(tp=2, dp=2, ep=4, all_to_all="flat", cases=SPARSE),
    Setting(tp=2, dp=2, ep=2, all_to_all="hierarchical", dtype="bf16", batch="staggered", cases=SPARSE),
    Setting(tp=2, dp=2, ep=2, dtype="int8", int8="w8a8", cases=SPARSE),
    Setting(dp=4, ep=4, all_to_all="hierarchical", cases=SPARSE),
    Setting(graph=True, cases=GRAPHED),
    Setting(graph=True, dtype="fp16", batch="staggered", cases=GRAPHED),
    Setting(graph=True, tp=2, cases=GRAPHED),
]
SIM_SETTINGS = [
    Setting(device="sim", layers=1, short=True, cases=SIM_CASES),
    Setting(device="sim", layers=1, short=True, cases=SIM_CASES, dtype="fp16", batch="staggered"),
    Setting(device="sim", layers=1, short=True, cases=("gptj",), graph=True),
    Setting(device="sim", layers=1, short=True, cases=("gptj",), dtype="fp16", fused=True),
    Setting(device="sim", layers=1, short=True, cases=("gpt2",), dtype="int8", int8="w8a8", fused=True),
    Setting(device="sim", layers=1, short=True, cases=("gptj",), dtype="fp16", fused=True, graph=True),
]
GPU_SETTINGS = [
    Setting(device="cuda"),
    Setting(device="cuda", batch="alone"),
    Setting(device="cuda", batch="staggered"),
    Setting(device="cuda", dtype="fp16"),
    Setting(device="cuda", dtype="fp16", batch="staggered"),
    Setting(device="cuda", dtype="bf16"),
    Setting(device="cuda", dtype="int8"),
    Setting(device="cuda", dtype="int8", int8="w8a8"),
    Setting(device="cuda", dtype="int8", int8="w8a8", batch="staggered"),
    Setting(device="cuda", dtype="fp16", fused=False),
    Setting(device="cuda", kv="cpu", cases=tuple(DECODERS)),
    Setting(device="cuda", kv="cpu", dtype="fp16", batch="staggered", cases=tuple(DECODERS)),
    Setting(device="cuda", dtype="fp16", gemm="cublas"),
    Setting(device="cuda", graph=True, cases=GRAPHED),
    Setting(device="cuda", graph=True, batch="alone", dtype="fp16", cases=GRAPHED),
    Setting(device="cuda", graph=True, batch="staggered", dtype="fp16", cases=GRAPHED),
    Setting(device="cuda", graph=True, overlap=False, dtype="fp16", cases=GRAPHED),
    Setting(device="cuda", graph=True, batch="staggered", dtype="int8", cases=GRAPHED),
    Setting(device="cuda", graph=True, batch="staggered", dtype="fp16", cases=SPARSE),
    Setting(device="cuda", graph=True, batch="alone", dtype="int8", cases=SPARSE),
]
TWO_GPU_SETTINGS = [
    Setting(device="cuda", tp=2, cases=(*TWO_GPU_CASES, "bloom")),
    Setting(device="cuda", tp=2, dtype="fp16", batch="staggered", cases=TWO_GPU_CASES),
    Setting(device="cuda", tp=2, graph=True, cases=TWO_GPU_CASES),
    Setting(device="cuda", tp=2, dtype="fp16", batch="staggered", all_reduce="one-shot", cases=("gptj", "llama_gqa")),
    Setting(device="cuda", tp=2, graph=True, all_reduce="one-shot", cases=TWO_GPU_CASES),
    Setting(device="cuda", tp=2, graph=True, dtype="fp16", batch="staggered", all_reduce="one-shot", cases=("gpt2", "gptj")),
    Setting(device="cuda", tp=2, graph=True, dtype="int8", all_reduce="one-shot", cases=("gpt2", "llama_gqa")),
    Setting(device="cuda", tp=2, graph=True, dtype="fp16", all_reduce="nccl", cases=("gptj", "llama_gqa")),
    Setting(device="cuda", pp=2, cases=(*TWO_GPU_CASES, "bloom")),
    Setting(device="cuda", pp=2, dtype="fp16", batch="staggered", cases=TWO_GPU_CASES),
    Setting(device="cuda", pp=2, kv="cpu", dtype="fp16", batch="staggered", cases=("gptj", "llama_gqa")),
    Setting(device="cuda", tp=2, kv="cpu", parity=True, dtype="fp16", batch="staggered", cases=("gpt2", "llama_gqa")),
    Setting(device="cuda", tp=2, ep=2, cases=SPARSE),
    Setting(device="cuda", tp=2, ep=2, graph=True, dtype="fp16", batch="staggered", cases=SPARSE),
    Setting(device="cuda", tp=2, ep=2, all_to_all="flat", dtype="fp16", batch="staggered", cases=SPARSE),
    Setting(device="cuda", dp=2, ep=2, batch="staggered", cases=SPARSE),
    Setting(device="cuda", dp=2, ep=2, graph=True, dtype="fp16", cases=SPARSE),
    Setting(device="cuda", dp=2, ep=1, dtype="fp16", cases=SPARSE),
]
