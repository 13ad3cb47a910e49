"""One order of penalties, in every process and with or without speculation.

SGLang 0.5.23 keeps a batch's penalties in a dict made from a *set of classes*. So plain decoding without
overlap subtracts before it scales, or scales before it subtracts, by where the classes happen to lie in
memory: a greedy request with a frequency and a repetition penalty can be answered differently after a
restart. The speculative verify and the overlap scheduler always subtract first, which is the order here.
"""

from __future__ import annotations

from typing import Any


def subtract_first(result: Any, orchestrator: Any, *_: Any, **__: Any) -> Any:
    """After ``BatchedPenalizerOrchestrator.__init__``: additive penalties by name, then scaling ones."""
    in_order = sorted(orchestrator.penalizers.items(), key=lambda item: _place(item[0]))
    orchestrator.penalizers = dict(in_order)
    return result


def _place(penalty: Any) -> tuple[bool, str]:
    return penalty.is_multiplicative, penalty.__name__
