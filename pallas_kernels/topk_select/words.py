"""32-bit values of a GPU thread that turn Python operators into MLIR."""

# ruff: noqa: D105 (the operators mean what the class says)

from typing import Any

from jax.experimental.mosaic.gpu import utils as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

_CMP = arith.CmpIPredicate


def i32() -> ir.Type:
    """Return the type of all values."""
    return ir.IntegerType.get_signless(32)


def constant(value: int) -> ir.Value:
    """Emit a constant; the top bit is a sign to MLIR."""
    return mgpu.c(value - 2**32 if value >= 2**31 else value, i32())


def raw(x: Any) -> ir.Value:
    """Return the MLIR value of a word or an integer."""
    return constant(x) if isinstance(x, int) else x.value


class Word:
    """A 32-bit value of each thread; arithmetic wraps, shifts and comparisons are unsigned."""

    def __init__(self, value: ir.Value):
        """Wrap an MLIR value."""
        self.value = value

    def __add__(self, other: Any) -> "Word":
        return Word(arith.addi(self.value, raw(other)))

    def __sub__(self, other: Any) -> "Word":
        return Word(arith.subi(self.value, raw(other)))

    def __rsub__(self, other: int) -> "Word":
        return Word(arith.subi(raw(other), self.value))

    def __mul__(self, other: Any) -> "Word":
        return Word(arith.muli(self.value, raw(other)))

    def __and__(self, other: Any) -> "Word":
        return Word(arith.andi(self.value, raw(other)))

    def __or__(self, other: Any) -> "Word":
        return Word(arith.ori(self.value, raw(other)))

    def __xor__(self, other: Any) -> "Word":
        return Word(arith.xori(self.value, raw(other)))

    def __lshift__(self, other: Any) -> "Word":
        return Word(arith.shli(self.value, raw(other)))

    def __rshift__(self, other: Any) -> "Word":
        return Word(arith.shrui(self.value, raw(other)))

    def _compare(self, kind: Any, other: Any) -> "Pred":
        return Pred(arith.cmpi(kind, self.value, raw(other)))

    def __lt__(self, other: Any) -> "Pred":
        return self._compare(_CMP.ult, other)

    def __le__(self, other: Any) -> "Pred":
        return self._compare(_CMP.ule, other)

    def __gt__(self, other: Any) -> "Pred":
        return self._compare(_CMP.ugt, other)

    def __ge__(self, other: Any) -> "Pred":
        return self._compare(_CMP.uge, other)

    def __eq__(self, other: Any) -> "Pred":  # type: ignore[override]
        return self._compare(_CMP.eq, other)

    def __ne__(self, other: Any) -> "Pred":  # type: ignore[override]
        return self._compare(_CMP.ne, other)

    __hash__ = None  # type: ignore[assignment]


class Pred:
    """A condition of each thread."""

    def __init__(self, value: ir.Value):
        """Wrap an MLIR value."""
        self.value = value

    def __and__(self, other: "Pred") -> "Pred":
        return Pred(arith.andi(self.value, other.value))

    def __or__(self, other: "Pred") -> "Pred":
        return Pred(arith.ori(self.value, other.value))

    def __invert__(self) -> "Pred":
        true = mgpu.c(1, ir.IntegerType.get_signless(1))
        return Pred(arith.xori(self.value, true))
