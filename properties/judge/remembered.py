"""Judgements of outputs already judged: a function of case, outputs, contract, conventions and the suite's source.

Neither the target nor its name counts, only what it returned, to the last bit; so a second run of the same kernel,
and a second kernel that returns the same bits, need no enclosure. Without an open store everything is judged anew.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import properties
from oracle.bounds.bounded import Bounded
from oracle.bounds.table import bounds_of
from oracle.case import Case
from oracle.contract.contract import Contract
from oracle.evaluate import enclose, rows_key
from oracle.formats import Format
from oracle.store.kept import Codec, current
from oracle.store.keys import key_of, version
from properties.judge.verdict import Basis, Judgement, Verdict
from properties.subject import Subject

Outputs = Mapping[str, NDArray[Any]]


def judged(
    kind: str,
    subject: Subject,
    seen: Sequence[tuple[Case, Outputs]],
    make: Callable[[], Judgement],
    *,
    words: Sequence[str] = (),
    forms: Sequence[Contract] = (),
) -> Judgement:
    """What ``make`` says of these cases and outputs, which with ``words`` are all that it depends on."""
    store = current()
    if store is None:
        return make()
    about = (subject.op, subject.dtype, json.dumps(sorted(subject.conventions.items())))
    key = key_of(
        version((Path(properties.__file__).parent,)),
        kind,
        about,
        _named(tuple(forms) or subject.forms),
        *(part for case, outputs in seen for part in (case.identity(), digest_of(outputs))),
        tuple(words),
    )
    return store.recall("judgements", key, make, size=_size, codec=JUDGEMENTS)


def digest_of(outputs: Outputs) -> bytes:
    """Every bit of named arrays."""
    h = hashlib.sha256()
    for name in sorted(outputs):
        array = outputs[name]
        h.update(f"{name} {array.dtype} {array.shape};".encode())
        h.update(array.tobytes())
    return h.digest()


@cache
def _named(forms: tuple[Contract, ...]) -> str:
    return repr(forms)


def _size(judgement: Judgement) -> int:
    return 4000


def _encode(judgement: Judgement) -> bytes:
    return json.dumps(asdict(judgement)).encode()


def _decode(data: bytes) -> Judgement:
    held = json.loads(data)
    return Judgement(**{**held, "verdict": Verdict(held["verdict"]), "basis": Basis(held["basis"])})


JUDGEMENTS = Codec(_encode, _decode)


def bounded(
    case: Case, rows: Mapping[tuple[int, ...], Any], forms: Sequence[Contract], formats: Mapping[str, Format]
) -> Sequence[list[dict[str, Bounded]]]:
    """Bounds of all outputs in ``formats``, of every block of `enclose` on ``rows``, in its order.

    A block that is no part of any of them has none. Arrays are not to be changed.
    """

    def make() -> Sequence[list[dict[str, Bounded]]]:
        found = []
        for block in enclose(case, rows=rows):
            own = {name: fmt for name, fmt in formats.items() if block.holds(name)}
            found.append(bounds_of(case.op)(case, block, forms, own) if own else [])
        return tuple(found)

    store = current()
    if store is None:
        return make()
    named = sorted(f"{name} {fmt.name}" for name, fmt in formats.items())
    key = key_of(case.identity(), rows_key(rows), _named(tuple(forms)), tuple(named))
    return store.recall("bounds", key, make, size=_bytes)


def _bytes(found: Sequence[list[dict[str, Bounded]]]) -> int:
    return sum(
        b.bound.nbytes + np.asarray(b.may_overflow).nbytes for block in found for form in block for b in form.values()
    )
