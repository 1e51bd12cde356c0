from __future__ import annotations

from benchmarks.step_profile import by_name, short_name


def test_kernels_by_name() -> None:
    records = [("a", 0.0, 3.0), ("b", 3.0, 4.0), ("a", 10.0, 12.0), ("b", 12.0, 14.0)]
    assert by_name(records, 2) == (7.0, [("a", 1.0, 2.5), ("b", 1.0, 1.5)])


def test_names() -> None:
    mangled = "_ZN6cudapy10l1_kernels8sbi_gemm6tensor11make_tensor12_3clocals_3e6tensorB2v1B94cw51cXTLSUwv1sCUt9Uw1VEw0NRRQPKiLTj0gIGIFp_2b2oLQFEYYkHSQB1OQAk0Bynm21OiwU1a0UoLGhDpQE8oxrNQE_3dE"
    assert short_name(mangled) == "tensor"
    assert short_name("void cutlass::Kernel2<cutlass_80>(Params)") == "Kernel2"
    assert short_name("memset") == "memset"
