"""What a target's outputs cannot reveal, whatever the verdicts: a row a kind of defect, its reason, when it applies."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from oracle.ops.op import Op
from oracle.ops.table import ops
from properties.checks.model_gate import JUDGED
from properties.record import Record
from reports.content.wording import count
from reports.run.load import finite
from reports.run.summary import dtypes_of, interpreted, returns_lse


@dataclass(frozen=True, slots=True)
class Seen:
    """What was seen of one target: the facts on which its blind spots depend."""

    op: str
    dtypes: frozenset[str]
    devices: frozenset[str]
    properties: frozenset[str]
    contracts: frozenset[str]
    lse: bool
    interpreted: bool
    origin: str
    largest_keys: int
    largest_position: int

    @property
    def narrow(self) -> bool:
        """Whether some dtype has at most 16 bits."""
        return bool(self.dtypes & {"fp16", "bf16", "e4m3", "e5m2"})

    @property
    def row(self) -> Op | None:
        """The op; None where records name none, or one of another version."""
        return ops().get(self.op)

    @property
    def attends(self) -> bool:
        return self.row is not None and self.row.attends

    @property
    def rotates(self) -> bool:
        return self.row is not None and self.row.family == "rope"

    @property
    def turns(self) -> bool:
        """Whether it computes its angles from positions."""
        return self.rotates and self.row is not None and "positions" in self.row.inputs


def seen(records: Iterable[Record]) -> Seen:
    """The facts of one subject's records."""
    rows = list(records)

    def most(name: str) -> int:
        return int(max((finite(r.features.get(name)) or 0 for r in rows), default=0))

    return Seen(
        op=next((r.op for r in rows if r.op), ""),
        dtypes=frozenset(dtypes_of(rows)),
        devices=frozenset(r.device.split(":")[0] for r in rows),
        properties=frozenset(r.property for r in rows if r.verdict != "UNSUPPORTED"),
        contracts=frozenset(r.contract for r in rows if r.contract),
        lse=returns_lse(rows),
        interpreted=interpreted(rows),
        origin=next((r.origin for r in rows), ""),
        largest_keys=most("sk"),
        largest_position=most("position"),
    )


@dataclass(frozen=True, slots=True)
class BlindSpot:
    """``defect`` stays invisible because of ``reason`` where ``applies``."""

    defect: str
    reason: str
    applies: Callable[[Seen], bool]


BLIND_SPOTS: tuple[BlindSpot, ...] = (
    BlindSpot(
        "a wrong digit of log2(e), an inexact exp, q rounded after scaling",
        "no LSE was returned, and in a 16-bit O these stay below the rounding of P and O",
        lambda s: s.attends and not s.lse and s.narrow,
    ),
    BlindSpot(
        "the LSE that a backward pass or a merge of split keys would use",
        "none was returned",
        lambda s: s.attends and not s.lse,
    ),
    BlindSpot(
        "the GPU's exp2, summation order, tf32 and flushing; races, barriers, masks of partial warps",
        "the kernel was interpreted on a CPU in numpy's arithmetic: interpreter figures are not GPU figures",
        lambda s: s.interpreted,
    ),
    BlindSpot(
        "GPU kernels behind the same function",
        "only the CPU was used, where the library takes another implementation",
        lambda s: s.origin == "third_party" and s.devices == {"cpu"} and not s.interpreted,
    ),
    BlindSpot(
        "products in tf32 with 16-bit inputs",
        "these have at most 11 significant bits, which tf32 keeps: the products are the same",
        lambda s: s.narrow and s.attends,
    ),
    BlindSpot(
        "a small systematic error below the worst-case bound: a key lost in a long context, scores stored low, a "
        "low accumulator",
        "G3, the gate that shows these, gives a verdict for attention, mla and their gradients under "
        + " and ".join(JUDGED)
        + " only; elsewhere it reports a ratio",
        lambda s: s.attends and (not s.contracts <= set(JUDGED) or "G3" not in s.properties),
    ),
    BlindSpot(
        "an angle that is wrong by less than the rounding of the result",
        "a 16-bit output hides angle errors below about 2⁻⁹ (bf16) or 2⁻¹² (fp16)",
        lambda s: s.rotates and s.narrow,
    ),
    BlindSpot(
        "the rotation at positions where the contract's own angle error reaches a full turn",
        "a bound that accepts any rotation proves nothing; such cases are VACUOUS",
        lambda s: s.turns and "fp32_angle" in s.contracts and s.largest_position >= 10**6,
    ),
    BlindSpot(
        "rare races, and results that depend on batch mates, padding or the number of splits",
        "each input is called a few times, in one process and one batch",
        lambda s: "P11" not in s.properties,
    ),
    BlindSpot(
        "index arithmetic beyond 2³¹ elements",
        "no case is that large",
        lambda s: "P20" not in s.properties,
    ),
    BlindSpot(
        "everything in a backward pass", "only the forward call is examined", lambda s: "P14" not in s.properties
    ),
)


def spots(facts: Seen) -> tuple[tuple[str, str], ...]:
    """(defect, reason) of all blind spots that apply, and how far the inputs reached."""
    found = [(b.defect, b.reason) for b in BLIND_SPOTS if b.applies(facts)]
    if facts.attends and facts.largest_keys:
        found.append((f"faults that begin beyond {count(facts.largest_keys)} keys", "no longer context was tried"))
    if facts.turns and facts.largest_position:
        found.append(
            (f"faults that begin beyond position {count(facts.largest_position)}", "no larger position was tried")
        )
    return tuple(found)
