"""Stops: ends of requests that depend on gates."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ferrohook.gates.state import Stopped, UnreadError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ferrohook.gates.conditions import Condition
    from ferrohook.gates.gate import Gate
    from ferrohook.gates.state import GateStates, GateTokens


class StopCheck:
    """Checks at which tokens a plan ends its request.

    Args:
        gates: the plan's gates by name.
        when: the condition.
    """

    def __init__(self, gates: Mapping[str, Gate], when: Condition) -> None:
        self._gates, self._when = gates, when
        self._name = ", ".join(dict.fromkeys(when.gates()))

    def __call__(self, states: GateStates, tokens: GateTokens) -> None:
        """Notes the first token of each sequence at which the condition is true.

        The last token of the prompt and generated ones count. Called after each of the gates has
        read some tokens: the last one of a forward decides.
        """
        own = tokens.from_last_prompt()
        if not own.rows:
            return
        try:
            truths = self._when.at(lambda name: states.values(self._gates[name], own))
        except UnreadError:
            return
        for row, position, truth in zip(own.rows, own.positions, truths, strict=True):
            if truth:
                stopped = Stopped(self._name, position, row)
                states.stop(own.sequences, stopped, own.prompt(row))
