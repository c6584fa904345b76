"""Judgements of outputs already judged: a function of case, outputs, contract, conventions and the suite's source.

Neither the target nor its name counts, only what it returned, to the last bit; so a second run of the same kernel,
and a second kernel that returns the same bits, need no enclosure. Without an open store everything is judged anew.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import cache
from pathlib import Path

import numpy as np

import properties
from oracle.block import Block, Rows
from oracle.bounds.bounded import Bounded
from oracle.bounds.table import at_once, bounds_of, of_head
from oracle.case import Case
from oracle.contract.contract import Contract
from oracle.evaluate import rows_key
from oracle.formats import Format, StoredArray
from oracle.store.kept import Codec, current
from oracle.store.keys import key_of, version
from properties.judge.verdict import Basis, Judgement, Verdict
from properties.subject import Subject

Outputs = Mapping[str, StoredArray]
AllRows = Mapping[tuple[int, ...], Rows]
"""Rows of those blocks that are not evaluated in full."""


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
        _source(),
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
def _source() -> bytes:
    return version((Path(properties.__file__).parent,))


@cache
def _named(forms: tuple[Contract, ...]) -> str:
    return repr(forms)


def _size(judgement: Judgement) -> int:
    return 4000


def _encode(judgement: Judgement) -> bytes:
    return json.dumps({f.name: getattr(judgement, f.name) for f in fields(judgement)}).encode()


def _decode(data: bytes) -> Judgement:
    held = json.loads(data)
    return Judgement(**{**held, "verdict": Verdict(held["verdict"]), "basis": Basis(held["basis"])})


JUDGEMENTS = Codec(_encode, _decode)


def bounded(
    case: Case, rows: AllRows, blocks: Sequence[Block], forms: Sequence[Contract], formats: Mapping[str, Format]
) -> list[Sequence[Mapping[str, Bounded]]]:
    """Block by block and form by form: the bounds of the outputs in ``formats`` that it is a part of.

    blocks: as `enclose` gives them for these ``rows``. Nobody may change the arrays.
    """
    found: list[Sequence[Mapping[str, Bounded]]] = [()] * len(blocks)
    for whole, places in at_once(case.op, blocks):
        made = _bounded(case, rows, whole, forms, formats)
        for index, place in places:
            found[index] = of_head(made, place)
    return found


def _bounded(
    case: Case, rows: AllRows, block: Block, forms: Sequence[Contract], formats: Mapping[str, Format]
) -> Sequence[Mapping[str, Bounded]]:
    own = {name: fmt for name, fmt in formats.items() if block.holds(name)}
    if not own:
        return ()

    def make() -> Sequence[Mapping[str, Bounded]]:
        return bounds_of(case.op)(case, block, forms, own)

    store = current()
    if store is None:
        return make()
    named = sorted(f"{name} {fmt.name}" for name, fmt in own.items())
    key = key_of(case.identity(), rows_key(rows), repr(block.key), _named(tuple(forms)), tuple(named))
    return store.recall("bounds", key, make, size=_bytes)


def _bytes(found: Sequence[Mapping[str, Bounded]]) -> int:
    return sum(b.bound.nbytes + np.asarray(b.may_overflow).nbytes for form in found for b in form.values())
