"""A PTX instruction as a Python function: `@instruction` makes one for numba of its PTX line, and leaves its twin to the simulator.

    @instruction("cvt.f32.f16 $0, $1;", returns="f32", takes=["u16"])
    def f16_to_f32(bits):
        return ...  # the same in plain Python

In the PTX line $0, $1, ... are the registers of the result, then those of the arguments, in order. Types are PTX's: u16, u32,
i32, i64, f32; "u32x4" is a tuple of four; "element" is two Python arguments, a C-contiguous array and an element index into it
as it lies in memory, and one register, the element's (generic) address; "immediate" is a number known when the kernel is
compiled (a literal or a closure constant), written into the line at #name. A result type that starts with "&" is written before
the arguments are all read, so it shares no register with them.

`least` is the compute capability from which on the instruction is there, 90 for 9.0: for an older one nothing is written. It has no result.

effect says what the compiler must keep: "pure" nothing (it may drop or merge it), "read" that it is done and in order, "memory"
also the order with other reads and writes, "warp" that all lanes do it together.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from l1_kernels.cuda_api import SIMULATED, intrinsic, types

_CONSTRAINT = {"u16": "h", "i16": "h", "u32": "r", "i32": "r", "u64": "l", "i64": "l", "f32": "f", "element": "l"}
_EFFECTS = ("pure", "read", "memory", "warp")


def instruction(ptx: str, *, returns: str | None = None, takes: Sequence[str] = (), effect: str = "pure", least: int = 0) -> Callable[[Any], Any]:
    """Decorate a twin. On the simulator the result is the twin; otherwise numba's intrinsic, with the twin as `.twin`."""
    if effect not in _EFFECTS:
        raise ValueError(f"effect: {effect!r} is not one of {', '.join(_EFFECTS)}")
    if least and returns is not None:
        raise ValueError("least: an instruction that may be left out can have no result")

    def decorate(twin: Callable[..., Any]) -> Any:
        return twin if SIMULATED else _intrinsic(twin, ptx, returns, list(takes), effect, least)

    return decorate


def _split(kind: str) -> tuple[str, int]:
    """A type's scalar and count: "f32x4" -> ("f32", 4), "f32" -> ("f32", 1)."""
    base, _, count = kind.removeprefix("&").partition("x")
    return base, int(count or 1)


def _numba_type(kind: str) -> Any:
    base, count = _split(kind)
    scalar = getattr(types, {"u": "uint", "i": "int", "f": "float"}[base[0]] + base[1:])
    return types.UniTuple(scalar, count) if count > 1 else scalar


def _intrinsic(twin: Callable[..., Any], ptx: str, returns: str | None, takes: list[str], effect: str, least: int) -> Any:
    """The numba intrinsic. Its parameters are the twin's; an "element" takes two of them."""
    names = list(inspect.signature(twin).parameters)
    result = types.void if returns is None else _numba_type(returns)

    def define(typing_context: Any, *arguments: Any) -> Any:
        left = list(zip(names, arguments, strict=True))
        formal: list[Any] = []
        line = ptx
        for kind in takes:
            name, given = left.pop(0)
            if kind == "element":
                _check_array(twin.__name__, name, given)
                formal += [given, types.int64]
                left.pop(0)
            elif kind == "immediate":
                line = line.replace(f"#{name}", str(_literal(twin.__name__, name, given)))
                formal.append(given)
            else:
                formal.append(_numba_type(kind))

        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            def emit() -> Any:
                return _emit(context, builder, signature, list(values), line, returns, takes, effect)

            if not least:
                return emit()
            with builder.if_then(_is_at_least(builder, least)):
                emit()
            return context.get_dummy_value()

        return result(*formal), generate

    define.__name__ = twin.__name__
    define.__doc__ = twin.__doc__
    parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in ("typing_context", *names)]
    define.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    made = intrinsic(define)
    made.twin = twin
    return made


def _check_array(function: str, name: str, given: Any) -> None:
    from numba.core.errors import TypingError

    if not isinstance(given, types.Array) or given.layout != "C":
        raise TypingError(f"{function}: {name} is {given}, not a C-contiguous array")


def _literal(function: str, name: str, given: Any) -> int:
    from numba.core.errors import TypingError

    if not isinstance(given, types.IntegerLiteral):
        raise TypingError(f"{function}: {name} must be a number known when the kernel is compiled (a literal or a closure constant)")
    return int(given.literal_value)


def _is_at_least(builder: Any, capability: int) -> Any:
    """Whether the compute capability is at least that, as a condition that libNVVM knows when it writes PTX: one lowering serves all."""
    from llvmlite import ir

    word, module, text = ir.IntType(32), builder.module, b"__CUDA_ARCH\0"
    name = module.globals.get("_strata_arch")
    if name is None:
        name = ir.GlobalVariable(module, ir.ArrayType(ir.IntType(8), len(text)), "_strata_arch", addrspace=4)
        name.linkage, name.global_constant, name.initializer = "internal", True, ir.Constant(name.value_type, bytearray(text))
    reflect = module.globals.get("__nvvm_reflect")
    if reflect is None:
        reflect = ir.Function(module, ir.FunctionType(word, [ir.IntType(8).as_pointer()]), "__nvvm_reflect")
    address = builder.bitcast(builder.addrspacecast(name, ir.PointerType(name.value_type)), ir.IntType(8).as_pointer())
    return builder.icmp_signed(">=", builder.call(reflect, [address]), ir.Constant(word, capability * 10))


def _emit(
    context: Any, builder: Any, signature: Any, values: list[Any], ptx: str, returns: str | None, takes: list[str], effect: str
) -> Any:
    """Write the call of the inline assembly; `values` are LLVM values, one a Python argument."""
    from llvmlite import ir
    from numba.core import cgutils

    llvm = {"16": ir.IntType(16), "32": ir.IntType(32), "64": ir.IntType(64)}

    def register(base: str) -> Any:
        return ir.FloatType() if base == "f32" else llvm[base[1:]]

    outputs: list[str] = []
    if returns is not None:
        base, count = _split(returns)
        outputs = [base] * count
    operands: list[Any] = []
    early = "=&" if returns is not None and returns.startswith("&") else "="
    constraints = [early + _CONSTRAINT[base] for base in outputs]
    argument_types = list(signature.args)
    for kind in takes:
        value, numba_type = values.pop(0), argument_types.pop(0)
        base, count = _split(kind)
        if kind == "immediate":
            continue
        if kind == "element":
            array = context.make_array(numba_type)(context, builder, value)
            size = context.get_abi_sizeof(context.get_data_type(numba_type.dtype))
            offset = builder.mul(values.pop(0), ir.Constant(llvm["64"], size))
            argument_types.pop(0)
            operands.append(builder.add(builder.ptrtoint(array.data, llvm["64"]), offset))
        elif count == 1:
            operands.append(value)
        else:
            operands += [builder.extract_value(value, i) for i in range(count)]
        constraints += [_CONSTRAINT[base]] * count
    if effect in ("memory", "warp"):
        constraints.append("~{memory}")

    registers = [register(base) for base in outputs]
    if not registers:
        result_type: Any = ir.VoidType()
    else:
        result_type = registers[0] if len(registers) == 1 else ir.LiteralStructType(registers)
    function_type = ir.FunctionType(result_type, [value.type for value in operands])
    assembly = ir.InlineAsm(function_type, ptx, ",".join(constraints), side_effect=effect != "pure")
    call = builder.call(assembly, operands, attrs=("convergent",) if effect == "warp" else ())
    if not registers:
        return context.get_dummy_value()
    if len(registers) == 1:
        return call
    return cgutils.pack_array(builder, [builder.extract_value(call, i) for i in range(len(registers))])
