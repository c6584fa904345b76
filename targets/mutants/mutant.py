"""What a mutant's module says of it, where it stands: `mutant(...)` above a kernel, or around one."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from targets.honest.describe import UP_TO_32_BITS, describe

Function = TypeVar("Function", bound=Callable[..., object])
Arguments = dict[str, Any]
Builder = Callable[[Any], Arguments]
Row = Sequence[float]


def mutant(
    op: str,
    killed_by: str,
    defect: str,
    *,
    smallest: Builder | str,
    reports: str = "",
    dtypes: tuple[str, ...] = UP_TO_32_BITS,
) -> Callable[[Function], Function]:
    """Mark a kernel as broken on purpose. `table.mutants` reads all but ``smallest`` without import: literals.

    killed_by: the one property of the catalogue whose proof of being able to fail the mutant is; others may kill it
    too. defect: one sentence. smallest: from a dtype of torch the smallest arguments on which it differs from its
    honest counterpart, or, where no single output shows that, what does, in words. reports: the public ones as
    `owner/repo#number`; "Confirmed" means that the cause was stated by a maintainer or stands in a merged fix,
    "reported" that it is the reporter's analysis. dtypes: those that it takes and in which ``killed_by`` must kill it.

    A kernel that is not described yet declares no contract and the honest conventions of its op.
    """

    def attach(function: Function) -> Function:
        described = function if hasattr(function, "__attn_oracle__") else describe(op)(function)
        described.__attn_oracle__["dtypes"] = dtypes  # type: ignore[attr-defined]
        setattr(described, "__smallest__", smallest)  # noqa: B010 - mypy knows no attributes of functions
        return described

    return attach
