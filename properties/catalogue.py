"""The catalogue: what each property asks, in one question. An op's table says how it is asked of that op.

`docs/properties.md` is generated from this table and from the tables of the ops (`as_markdown`); a
test compares the two.
"""

from __future__ import annotations

from oracle.ops.table import ops
from properties.ops.table import properties_for

QUESTIONS: dict[str, str] = {
    "P1": "Is every element within the bound that the contract gives?",
    "P2": "Does what is masked, padded or unused stay without influence, and does a NaN that is used reach the output?",
    "P3": "Do rows without a key follow the stated convention, and do the others not notice?",
    "P4": "Does a change of one key change exactly the rows that may attend to it?",
    "P5": "Are weights convex: V = 1 gives 1, O stays in the hull of V?",
    "P6": "Does a row with one visible key return that key's V row?",
    "P7": "Do parts of the keys, merged by their log-sum-exps, give the whole?",
    "P8": "Is the log-sum-exp within its bound, in the stated base?",
    "P9": "Does the range hold: huge and tiny scores, common offsets, values near the dtype's limits?",
    "P10": "Does decoding give what prefill gives, token by token and in chunks?",
    "P11": "Is a result independent of what is computed beside it?",
    "P12": "Is a result independent of how inputs lie in memory?",
    "P13": "Are heads independent, and grouped heads those of repeated keys and values?",
    "P14": "Are gradients within the bound that the contract gives?",
    "P15": "Is a call pure: inputs unchanged, memory around unread, no trace of earlier calls?",
    "P16": "Does the algebra of rotations hold: identity, length, inverse, composition, relative positions, layouts?",
    "P17": "Does every option matter, and match the oracle away from its default?",
    "P18": "Do all shapes work: around tile borders, odd, unequal, of size 1?",
    "P19": "Do errors have no direction?",
    "P20": "Are elements beyond 2^31 found?",
    "P21": "Do scaled frequencies and magnitudes follow their parameters?",
    "P22": "Does dropout keep the mean, follow its seed, and stay off where it should?",
    "P23": "Do outputs have the dtype, shape and device of their op?",
    "P25": "Do exact symmetries hold: permutation, duplication, powers of two, linearity?",
    "P26": "Do absorbed and materialised latent attention agree?",
    "P27": "Do attention sinks and needles come out right?",
    "P28": "Are exactly representable inputs given exact results?",
    "G3": "Is the rms error that of an honest kernel of the contract, or is a stage rounded more than it says?",
}

_HEAD = """# The properties

Generated from the tables (`properties.catalogue.as_markdown`); a test compares. Each property asks one thing; the
rows say in which words it is asked of which ops. Every row has a mutant that it kills.
"""


def as_markdown() -> str:
    """The page `docs/properties.md`."""
    lines = [_HEAD]
    for id, question in QUESTIONS.items():
        asked: dict[str, list[str]] = {}
        for op in ops():
            for row in properties_for(op):
                if row.id == id:
                    asked.setdefault(row.title, []).append(op)
        lines += [f"## {id}", "", question, "", "| asked as | of |", "|---|---|"]
        lines += [f"| {title} | {', '.join(f'`{op}`' for op in of)} |" for title, of in asked.items()]
        lines.append("")
    return "\n".join(lines)
